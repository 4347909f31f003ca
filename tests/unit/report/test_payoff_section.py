from __future__ import annotations

from pathlib import Path
from typing import Any

from draftsmith.artifacts import read_json, write_json
from draftsmith.measure.payoff import StepTimes
from draftsmith.measure.payoff import payoff as table
from draftsmith.progress import Progress
from draftsmith.report.findings import read_findings
from draftsmith.report.page import render_report
from draftsmith.report.payoff import payoff
from toy_run import make_run


def result(*concurrency: int, **changes: Any) -> dict[str, Any]:
    times = [StepTimes(concurrency=n, target=1.0, with_draft={4: 1.2 + n / 4}) for n in concurrency]
    return {
        **table([0.6, 0.5], times, [1, 2, 3]).to_json(),
        "acceptance_from": "the reference decoder",
        "steps_from": "typed in <b>",
        "bigger_target": "On a bigger target more.",
        "cautions": [],
        "draft": "abc",
        **changes,
    }


def test_speed_up_is_drawn_over_draft_tokens_with_a_line_per_concurrency() -> None:
    section = payoff(result(1, 4), "abc")
    assert section is not None and section.cautions == []
    chart = section.chart
    assert [series["name"] for series in chart.figure["data"]] == ["1 at a time", "4 at a time"]
    assert chart.figure["layout"]["shapes"][0]["y0"] == 1
    assert chart.head == ["draft tokens", "1 at a time", "4 at a time"]
    assert [row[0] for row in chart.rows] == ["1", "2", "3"] and chart.rows[0][1] == "1.438"
    assert section.says[0].startswith("It pays off") and section.says[-1].startswith("Acceptance: the reference")


def test_an_earlier_draft_is_named_unless_its_acceptance_was_assumed() -> None:
    about_another = payoff(result(1), "another")
    assert about_another is not None and "made again" in about_another.cautions[0]
    assumed = payoff(result(1, acceptance_from="assumed", cautions=["busy"]), "another")
    assert assumed is not None and assumed.cautions == ["busy"]


def test_the_report_has_the_section_also_where_nothing_is_worked_out(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", traces=4)
    _, without = render_report(read_findings(run), Progress(quiet=True))
    assert "Not worked out yet" in without
    draft = read_json(run / "draft" / "manifest.json")["fingerprint"]
    write_json(run / "measure" / "payoff.json", result(1, 4, draft=draft))
    _, page = render_report(read_findings(run), Progress(quiet=True))
    assert 'id="chart-payoff"' in page and "typed in &lt;b&gt;" in page and "made again since" not in page
