from __future__ import annotations

from pathlib import Path
from typing import Any

from draftsmith.artifacts import read_json, write_json
from draftsmith.measure.links import Link, Suspect, concluded, skipped
from draftsmith.progress import Progress
from draftsmith.report.diagnosis import diagnosis
from draftsmith.report.findings import read_findings
from draftsmith.report.page import render_report
from toy_run import make_run

WRONG = Suspect(
    name="layer ids off by one",
    link="export",
    found="ids [3, 16, 28] are one too high <b>",
    change="write ids [2, 15, 27]",
    before=1.59,
    after=1.71,
    restored=1.0,
    certain=True,
)


def result(**changes: Any) -> dict[str, Any]:
    links = [
        Link(name="live", value=1.71, questions=8, noise=0.07, loss=None),
        Link(name="export", value=1.59, questions=8, noise=0.08, loss=None, suspects=(WRONG,)),
        skipped("engine", "no --server given"),
    ]
    return {**concluded(links, 4, 8, "vllm").to_json(), "draft": "abc", "of": None, **changes}


def test_the_chain_is_shown_link_by_link_with_the_guilty_one_marked() -> None:
    section = diagnosis(result(), "abc")
    assert section is not None and section.cautions == []
    assert section.says.startswith("the fault is at `export` (exported files, as the engine reads them): layer ids off")
    assert [row[:4] for row in section.links] == [
        ["live", "1.71", "±0.07", "8"],
        ["export", "1.59", "±0.08", "8"],
        ["engine", "-", "-", "-"],
    ]
    assert section.fallen == [False, True, False]
    assert section.links[1][4].startswith("the fault is here; exported files")
    assert section.suspects == [["layer ids off by one", "export", "1.59", "1.71", WRONG.found]]
    assert section.advice == ["write ids [2, 15, 27]"]


def test_a_diagnosis_of_another_draft_says_so() -> None:
    earlier, others = diagnosis(result(), "new"), diagnosis(result(of="drafts/theirs"), "abc")
    assert earlier is not None and "made again since" in earlier.cautions[0]
    assert others is not None and "drafts/theirs" in others.cautions[0]


def test_the_report_has_the_section_also_where_nobody_has_asked(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", traces=4)
    _, without = render_report(read_findings(run), Progress(quiet=True))
    assert "Not asked yet" in without
    draft = read_json(run / "draft" / "manifest.json")["fingerprint"]
    write_json(run / "measure" / "diagnosis.json", result(draft=draft))
    _, page = render_report(read_findings(run), Progress(quiet=True))
    assert "one too high &lt;b&gt;" in page and "made again since" not in page
    assert page.count('<tr class="marked">') == 1
