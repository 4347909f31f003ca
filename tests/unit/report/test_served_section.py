from __future__ import annotations

from pathlib import Path
from typing import Any

from draftsmith.artifacts import read_json, write_json
from draftsmith.progress import Progress
from draftsmith.report.findings import read_findings
from draftsmith.report.page import render_report
from draftsmith.report.served import served
from toy_run import make_run


def level(concurrency: int, speedup: float | None, length: float | None = 1.5) -> dict[str, Any]:
    times = {"median": 0.02, "p95": 0.03}
    return {
        "concurrency": concurrency,
        "tokens_per_second": 40.0,
        "baseline_tokens_per_second": None if speedup is None else 40.0 / speedup,
        "speedup": speedup,
        "speedup_spread": None if speedup is None else [speedup - 0.1, speedup + 0.2],
        "time_per_output_token": times,
        "baseline_time_per_output_token": None if speedup is None else times,
        "acceptance_length": length,
        "acceptance_length_reasoning": length,
        "acceptance_length_answer": None,
    }


def result(*levels: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return {
        "verdict": "1.50 tokens per target forward",
        "engine": "llamacpp",
        "version": "",
        "questions": 8,
        "prompts": "the run's held-out questions",
        "compared": 32,
        "different": 2,
        "cautions": ["2 of 32 greedy replies differ <b>"],
        "draft": "abc",
        "levels": list(levels),
        **changes,
    }


def test_speed_and_acceptance_are_drawn_over_concurrency_with_their_spread() -> None:
    section = served(result(level(1, 1.4), level(4, 0.8)), "abc")
    assert section is not None
    speedup, length = section.charts
    assert speedup.rows == [["1", "1.400", "1.300", "1.600"], ["4", "0.800", "0.700", "1.000"]]
    assert length.head == ["requests at a time", "overall", "reasoning"]
    assert section.rows[1][:4] == ["4", "40.0", "50.0", "0.80x"]
    assert "30 of 32 greedy replies were the same" in section.says


def test_a_speed_up_between_two_engines_is_not_called_the_drafts() -> None:
    says = {
        same: section.charts[0].says
        for same in (True, False, None)
        if (section := served(result(level(1, 1.4), same_engine=same), "abc"))
    }
    assert "not what the draft gains" in says[False]
    assert all(says[same].endswith("Below 1.0 the draft costs more than it saves.") for same in (True, None))


def test_one_round_has_no_spread_to_draw_or_to_list() -> None:
    section = served(result({**level(1, 1.4), "speedup_spread": None}), "abc")
    assert section is not None
    assert section.charts[0].rows == [["1", "1.400", "–", "–"]]
    assert section.charts[0].figure["data"][0]["error_y"]["array"] == [0]


def test_one_side_alone_has_no_speed_up_and_an_earlier_draft_is_named() -> None:
    section = served(result(level(1, None)), "another")
    assert section is not None
    assert [chart.name for chart in section.charts] == ["chart-served-length"]
    assert section.rows[0][2:4] == ["–", "–"] and "made again" in section.cautions[0]


def test_the_report_has_the_section_also_where_nothing_is_measured_on_a_server(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", traces=4)
    _, without = render_report(read_findings(run), Progress(quiet=True))
    assert "No numbers from a serving engine yet" in without
    fingerprint = read_json(run / "draft" / "manifest.json")["fingerprint"]
    write_json(run / "measure" / "served.json", result(level(1, 1.4), draft=fingerprint))
    _, page = render_report(read_findings(run), Progress(quiet=True))
    assert 'id="chart-served-speedup"' in page and "differ &lt;b&gt;" in page and "made again since" not in page
