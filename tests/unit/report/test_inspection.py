from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

from rich.console import Console

from draftsmith.__main__ import main
from draftsmith.data.inspect import Inspection, inspect
from draftsmith.progress import Progress
from draftsmith.recipe import InspectSettings
from draftsmith.report.inspection import print_inspection, write_inspection_page
from toy_run import make_traces

EVIL = "<script>alert(1)</script>[bold]\x1b]0;owned\x07\u202e"


def look(path: Path, **settings: Any) -> Inspection:
    return inspect(path, InspectSettings(**settings), Progress(quiet=True))


def printed(inspection: Inspection, *, terminal: bool = False) -> str:
    file = io.StringIO()
    print_inspection(inspection, Console(file=file, force_terminal=terminal, width=100, highlight=False))
    return file.getvalue()


def evil(tmp_path: Path) -> Path:
    turns = [{"role": "user", "content": EVIL}, {"role": "assistant", "content": EVIL}]
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"id": EVIL, "conversations": turns}) + "\n")
    return path


def test_the_verdict_stands_last_with_the_counts_above_it(tmp_path: Path) -> None:
    make_traces(tmp_path, 40)
    text = printed(look(tmp_path))
    assert text.splitlines()[-1].startswith("verdict: ")
    assert "traces, 40 rows, 36 replies" in text and "cut_in_reasoning 4 (10.0%)" in text
    assert "[first] <think>" in text and "[reasoning] Tom has" in text and "[prompt] " in text


def test_on_a_terminal_the_colours_tell_what_the_draft_learns(tmp_path: Path) -> None:
    make_traces(tmp_path, 12)
    text = printed(look(tmp_path), terminal=True)
    assert "[reasoning]" not in text and "\x1b[35m" in text
    assert "first generated id, never a label" in text


def test_text_of_a_dataset_does_nothing_to_a_terminal_or_a_page(tmp_path: Path) -> None:
    found = look(evil(tmp_path))
    for terminal in (False, True):
        text = printed(found, terminal=terminal)
        assert "\x1b]" not in text and "\x07" not in text and "\u202e" not in text and "[bold]" in text
    write_inspection_page(tmp_path / "page.html", found)
    page = (tmp_path / "page.html").read_text()
    assert "<script" not in page and "&lt;script&gt;alert(1)" in page


def test_the_page_is_complete_in_itself_and_small(tmp_path: Path) -> None:
    make_traces(tmp_path, 40)
    size = write_inspection_page(tmp_path / "new" / "page.html", look(tmp_path, examples=2))
    page = (tmp_path / "new" / "page.html").read_text()
    assert size < 100_000 and "http" not in page.replace("http_500", "").replace("http-equiv", "")
    assert page.count('<article class="trace"') == 2 and '<mark class="reasoning">' in page


def test_ids_that_nothing_can_decode_are_shown_as_numbers(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"input_ids": [11, 12, 13, 14], "loss_mask": [0, 0, 1, 1]}) + "\n")
    text = printed(look(path))
    assert "[prompt] 11 12" in text and "[first] 13" in text and "[answer] 14" in text


def test_the_command_prints_json_and_writes_the_page(tmp_path: Path, capsys: Any) -> None:
    make_traces(tmp_path, 12)
    page = tmp_path / "page.html"
    assert main(["inspect", str(tmp_path), "--json", "--html", str(page), "--examples", "1"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["rows"] == 12 and len(found["examples"]) == 1 and found["verdict"]
    assert page.exists()


def test_the_command_reports_what_is_wrong_with_exit_code_0_and_what_is_unreadable_with_2(
    tmp_path: Path, capsys: Any
) -> None:
    assert main(["inspect", str(evil(tmp_path))]) == 0
    assert "not fit to train on" in capsys.readouterr().out
    assert main(["inspect", str(tmp_path / "nowhere")]) == 2
    assert "expected a file or folder to inspect" in capsys.readouterr().err


def test_a_dataset_is_exported_from_the_command_line(tmp_path: Path, capsys: Any) -> None:
    make_traces(tmp_path, 12)
    arguments = ["export-dataset", "--run", str(tmp_path), "--format", "speculators", "--out", str(tmp_path / "out")]
    assert main([*arguments, "--json"]) == 0
    counts = json.loads(capsys.readouterr().out)
    assert counts["train"] + counts["test"] + counts["left_out"] == 12
    assert main(arguments) == 2
    assert "--force replaces it" in capsys.readouterr().err
