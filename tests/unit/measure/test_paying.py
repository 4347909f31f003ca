from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from captured_run import make_captured_run, server
from draftsmith.artifacts import read_json, write_json
from draftsmith.cli import app
from draftsmith.errors import UserError
from draftsmith.measure.paying import payoff_table, work_out
from draftsmith.progress import Progress
from draftsmith.recipe import PayoffSettings

QUIET = Progress(quiet=True)
TYPED = {"target_ms": ["1:20", "16:24"], "verify_ms": ["1:22", "16:80"], "draft_ms": ["1:2", "16:4"], "draft_tokens": 4}
RESULT = {
    "acceptance_per_position": [0.6, 0.5, None],
    "acceptance_length": 1.9,
    "draft_tokens": 3,
    "tokens_per_second": 50.0,
    "baseline_tokens_per_second": 40.0,
    "rounds": [{"speedup": 1.25}],
    "generated_tokens": 300,
    "questions": 6,
}


def measured(run: Path) -> Path:
    """A run that has a reference measurement."""
    (run / "measure").mkdir(parents=True)
    write_json(run / "measure" / "result.json", RESULT)
    write_json(run / "measure" / "manifest.json", {})
    return run


def paid(run: Path, **values: Any) -> dict[str, Any]:
    return work_out(run, PayoffSettings(**values), QUIET)


@pytest.mark.parametrize("alone", [{"concurrency": [4]}, {"draft_share": 0.1}, {"questions": "q.jsonl"}])
def test_what_is_for_servers_is_not_dropped_without_one(tmp_path: Path, alone: dict[str, Any]) -> None:
    flag = next(iter(alone)).replace("_", "-")
    with pytest.raises(UserError, match=f"payoff: --{flag} says how servers are timed: expected --baseline-server"):
        paid(measured(tmp_path), **alone)


def test_before_there_is_anything_typed_times_and_an_assumed_acceptance_say_what_a_draft_must_reach(
    tmp_path: Path,
) -> None:
    found = paid(tmp_path, acceptance=[0.7], draft_tokens_up_to=4, **TYPED)
    at = {(cell["concurrency"], cell["draft_tokens"]): cell for cell in found["cells"]}
    assert at[1, 4]["break_even_length"] == pytest.approx((22 + 4 * 2) / 20)
    assert at[16, 4]["speedup"] == pytest.approx((1 + 0.7 + 0.49 + 0.343 + 0.2401) * 24 / (80 + 16))
    assert found["pays_up_to"] == 1
    assert "It will not pay off above 1 request at a time: at 16 it is" in found["words"][1]
    assert any("the assumed one has" in line for line in found["words"])
    assert not any("was not measured" in line for line in found["words"]), "an assumption holds at every position"
    assert found == read_json(tmp_path / "measure" / "payoff.json")


def test_a_measured_run_alone_is_worked_out_from_its_own_steps(tmp_path: Path) -> None:
    found = paid(measured(tmp_path))
    assert found["acceptance_per_position"] == [0.6, 0.5]
    assert found["steps_from"] == "measured with the reference decoder, one request at a time"
    assert found["acceptance_from"] == "the reference decoder"
    assert "Beyond 2 draft tokens acceptance was not measured: the last value is taken." in found["words"]


def test_steps_deeper_than_the_table_are_in_it(tmp_path: Path) -> None:
    found = paid(tmp_path, acceptance=[0.7], draft_tokens_up_to=2, **TYPED)
    assert {cell["draft_tokens"] for cell in found["cells"]} == {1, 2, 4}
    assert found["levels"][0]["draft_tokens"] == 4


def test_a_prediction_for_whole_replies_takes_their_length_from_the_reference(tmp_path: Path) -> None:
    run = measured(make_captured_run(tmp_path))
    with server("vllm", run, plan=(1,)) as draft, server("vllm", run) as baseline:
        level = paid(run, server=draft.url, baseline_server=baseline.url, rounds=1)["levels"][0]
    assert level["tokens_per_reply"] == 50 and level["draft_tokens"] == 3
    assert level["prefill_seconds"] > 0 and level["whole_reply_speedup"] > 0


def test_a_draft_step_of_no_cost_is_taken_as_said(tmp_path: Path) -> None:
    run = make_captured_run(tmp_path)
    with server("vllm", run) as baseline:
        found = paid(run, acceptance=[0.7], baseline_server=baseline.url, draft_share=0.0, rounds=1)
    assert "a draft step as 0.0% of a plain one" in found["steps_from"]


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        (
            {},
            "expected a measured run, or --acceptance (a share, repeated for later positions) to assume; found neither",
        ),
        ({"acceptance": [0.6]}, "expected step times: --baseline-server (and --server), or --target-ms"),
        ({"acceptance": [0.6], "target_ms": ["20"]}, "for the same concurrencies"),
        ({"acceptance": [0.6], "server": "http://x", "draft_ms": ["2"]}, "found both; give one"),
    ],
)
def test_what_nothing_can_be_worked_out_from_is_refused_and_leaves_no_folder(
    values: dict[str, Any], problem: str, tmp_path: Path
) -> None:
    with pytest.raises(UserError) as refused:
        paid(tmp_path / "no-such-run", **values)
    assert problem in str(refused.value) and not (tmp_path / "no-such-run").exists()


def test_the_table_marks_the_best_number_of_draft_tokens(tmp_path: Path) -> None:
    table = payoff_table(paid(tmp_path, acceptance=[0.7], draft_tokens_up_to=4, **TYPED))
    assert [column.header for column in table.columns] == ["draft tokens", "1 at a time", "16 at a time"]
    cells = list(table.columns[1].cells)
    assert [str(cell).endswith("*") for cell in cells] == [False, False, False, True]


def test_the_command_prints_table_words_and_where_they_come_from(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    app(["payoff", "--run", str(measured(tmp_path))], result_action="return_value")
    said = capsys.readouterr().out
    assert "1 at a time" in said and "It pays off" in said and "On a bigger target" in said
    assert "(acceptance: the reference decoder; steps: measured with the reference decoder" in said
    app(["payoff", "--run", str(tmp_path), "--json"], result_action="return_value")
    assert json.loads(capsys.readouterr().out)["pays_up_to"] == 1
