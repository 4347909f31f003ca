"""The report page: what it says for which run, and that nothing of a run gets out of its place."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from draftsmith.artifacts import Plan, Stage
from draftsmith.errors import UserError
from draftsmith.progress import Progress
from draftsmith.recipe import ReportSettings
from draftsmith.report.compare import compare_page
from draftsmith.report.page import build
from toy_run import make_draft, make_measure, make_run, make_traces, make_vocab

SCRIPT = re.compile(r"<script[^>]*>.*?</script>|<style>.*?</style>", re.DOTALL)


def report(run: Path) -> str:
    """The page without plotly and styles."""
    return SCRIPT.sub("", whole_report(run))


def whole_report(run: Path) -> str:
    work = run / "report.partial"
    work.mkdir()
    build(Stage(run, Plan("report", {}, {}), work), ReportSettings(), Progress(quiet=True))
    return (work / "report.html").read_text()


def test_a_whole_run_shows_result_funnel_coverage_curves_traces_and_checks(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", traces=40)
    page = report(run)
    assert "1.21 times as fast" in page and "61.4" in page and ">1.93<" in page
    assert "40 questions gave 40 traces" in page
    assert "http_500" in page and "too_short" in page
    assert "4,000 of the target&#39;s 49,152 ids" in page
    assert page.count('class="trace"') == 5
    for chart in ("length-reasoning", "length-answer", "loss", "acceptance-curve", "positions"):
        assert f'id="chart-{chart}"' in page
    assert "rope" in page and "Not measured" not in page
    assert "Conditional" in page


def test_counts_tell_how_much_is_on_the_page(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", traces=12)
    work = run / "report.partial"
    work.mkdir()
    counts = build(Stage(run, Plan("report", {}, {}), work), ReportSettings(), Progress(quiet=True))
    assert counts == {"bytes": (work / "report.html").stat().st_size, "charts": 5, "traces": 5}
    assert [path.name for path in work.iterdir()] == ["report.html"]


def test_a_script_in_a_trace_stays_text(tmp_path: Path) -> None:
    make_traces(tmp_path, 3, text='</script><script>alert(1)</script><b a="">&amp;')
    page = whole_report(tmp_path)
    assert "alert(1)" in page
    assert "<script>alert" not in page and '<b a="">' not in page
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in page


def test_hostile_names_of_runs_and_tokenizers_stay_text(tmp_path: Path) -> None:
    run = tmp_path / "<img src=x>"
    make_vocab(run)
    manifest = json.loads((run / "vocab" / "manifest.json").read_text())
    manifest["settings"]["size"] = "</pre><script>alert(2)</script>"
    (run / "vocab" / "manifest.json").write_text(json.dumps(manifest))
    page = whole_report(run)
    assert "<img src=x>" not in page and "<script>alert" not in page


def test_each_missing_stage_says_so_with_the_command_that_makes_it(tmp_path: Path) -> None:
    make_vocab(tmp_path)
    page = report(tmp_path)
    for command in ("capture", "train", "measure", "export"):
        assert f"draftsmith {command} --run {tmp_path}" in page
    assert "Not measured yet" in page
    assert "draftsmith vocab" not in page


def test_before_measuring_acceptance_comes_from_training_and_says_so(tmp_path: Path) -> None:
    make_draft(tmp_path)
    page = report(tmp_path)
    assert 'id="chart-positions"' in page
    assert "Simulated on held-out traces while training" in page


def test_a_page_without_charts_carries_no_plotly(tmp_path: Path) -> None:
    make_vocab(tmp_path)
    assert len(whole_report(tmp_path)) < 100_000


def test_a_run_without_a_finished_stage_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="at least one finished stage"):
        build(Stage(tmp_path, Plan("report", {}, {}), tmp_path), ReportSettings(), Progress(quiet=True))


def test_traces_whose_tokenizer_is_gone_are_shown_as_text(tmp_path: Path) -> None:
    make_traces(tmp_path, 3)
    for file in (tmp_path / "tokenizer").iterdir():
        file.unlink()
    page = report(tmp_path)
    assert "tokenizer cannot be loaded" in page
    assert "pens are left" in page


def test_a_broken_curve_names_file_and_line(tmp_path: Path) -> None:
    make_draft(tmp_path, steps=8)
    with open(tmp_path / "draft" / "curve.jsonl", "a") as file:
        file.write('{"kind": "st\n')
    with pytest.raises(UserError, match=r"curve\.jsonl:17"):
        report(tmp_path)


def make_arm(folder: Path, length: float, tokens: int = 100_000, **changes: object) -> None:
    make_traces(folder, 10, source_kind="static" if folder.name == "static" else "capture")
    make_draft(folder, steps=8, supervised_tokens=tokens)
    make_measure(folder, acceptance_length=length, **changes)


def test_a_comparison_names_the_leader_and_what_each_learned_from(tmp_path: Path) -> None:
    make_arm(tmp_path / "static", 1.31)
    make_arm(tmp_path / "captured", 1.82)
    path = compare_page(tmp_path, ["static", "captured"])
    assert path == tmp_path / "report" / "report.html"
    page = SCRIPT.sub("", path.read_text())
    assert "captured leads: 1.82 tokens per target forward against 1.31 for static." in page
    assert "dataset&#39;s own answers" in page and "target&#39;s own generations" in page
    assert "caution" not in page


def test_a_comparison_of_equals_names_no_leader(tmp_path: Path) -> None:
    make_arm(tmp_path / "a", 1.82)
    make_arm(tmp_path / "b", 1.83)
    assert "No difference" in compare_page(tmp_path, ["a", "b"]).read_text()


# P42: what was measured differently is not compared silently
def test_a_comparison_warns_where_arms_were_not_measured_or_trained_alike(tmp_path: Path) -> None:
    make_arm(tmp_path / "a", 1.31, questions=30)
    make_arm(tmp_path / "b", 1.82, tokens=200_000, sampling={"temperature": 1.0, "max_tokens": 160})
    page = compare_page(tmp_path, ["a", "b"]).read_text()
    assert "not measured alike (questions: 30, 32)" in page
    assert "not measured alike (temperature: 0.0, 1.0)" in page
    assert "100,000, 200,000 supervised tokens" in page


def test_a_comparison_with_an_arm_still_to_come_says_so(tmp_path: Path) -> None:
    make_arm(tmp_path / "a", 1.31)
    page = compare_page(tmp_path, ["a", "b"]).read_text()
    assert "Nothing to compare yet" in page and "b is not measured yet" in page
