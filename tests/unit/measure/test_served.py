from __future__ import annotations

import io
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from captured_run import END, OPEN, make_captured_run, said, server
from draftsmith.artifacts import Plan, Stage, build, read_json, write_json
from draftsmith.cli import app
from draftsmith.errors import UserError
from draftsmith.measure import served, served_result
from draftsmith.measure.load import Server
from draftsmith.measure.served import measure_served
from draftsmith.measure.served_bench import refuse_random
from draftsmith.measure.served_checks import connect
from draftsmith.measure.summary import served_table
from draftsmith.progress import Progress
from draftsmith.recipe import MeasureSettings, ServedSettings

QUIET = Progress(quiet=True)
ENGINES = ("vllm", "llamacpp", "sglang")
TWO_ROUNDS = MeasureSettings(rounds=2, max_tokens=64)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return make_captured_run(tmp_path)


def measured(run: Path, draft: str | None, baseline: str | None, *levels: int, **values: Any) -> dict[str, Any]:
    settings = TWO_ROUNDS.model_copy(update=values)
    asked = ServedSettings(server=draft, baseline_server=baseline, concurrency=list(levels or (1,)))
    return measure_served(run, settings, asked, QUIET)


def without_salts(bodies: list[dict[str, Any]]) -> list[str]:
    """What was asked, in no order: concurrent requests have none."""
    return sorted(json.dumps({**body, "cache_salt": "", "extra_key": ""}) for body in bodies)


@pytest.mark.parametrize("engine", ENGINES)
def test_both_servers_are_asked_the_same_in_turn_and_the_result_says_what_each_did(engine: str, run: Path) -> None:
    with server(engine, run, plan=(2, 0)) as draft, server(engine, run) as baseline:
        result = measured(run, draft.url, baseline.url, 1, 3)
    assert result == read_json(run / "measure" / "served.json")
    assert (result["engine"], result["lossless"], result["compared"]) == (engine, True, 24)
    assert [level["concurrency"] for level in result["levels"]] == [1, 3]
    for level in result["levels"]:
        assert level["interleaved"] and not level["disturbed"]
        assert level["speedup_spread"][0] <= level["speedup"] <= level["speedup_spread"][1]
        assert level["tokens_per_second"] > 0 and level["time_to_first_token"]["median"] > 0
        assert len(level["rounds"]) == 2
    assert served_table(result).row_count >= 9
    assert without_salts(draft.asked) == without_salts(baseline.asked)


def test_one_round_is_called_so_and_has_no_spread(run: Path) -> None:
    with server("vllm", run, plan=(2, 0)) as draft, server("vllm", run) as baseline:
        result = measured(run, draft.url, baseline.url, rounds=1)
    [level] = result["levels"]
    assert level["speedup"] > 0 and level["speedup_spread"] is None
    console = Console(width=200, file=io.StringIO(), record=True)
    console.print(served_table(result))
    assert f"{level['speedup']:.2f}x (one round)" in console.export_text()


@pytest.mark.parametrize("engine", ["vllm", "llamacpp"])
def test_acceptance_is_counted_in_steps_and_the_engines_own_numbers_stand_beside_it(engine: str, run: Path) -> None:
    # P41: 29 ids behind the prompt's own in steps of 3 and 1: 15 steps, the last of which ends after 1 of its 3 ids.
    with server(engine, run, plan=(2, 0)) as draft:
        level = measured(run, draft.url, None)["levels"][0]
    assert level["acceptance_from"] == "steps"
    assert level["acceptance_length"] == pytest.approx(29 / 15, abs=1e-4)
    assert level["engine_acceptance_length"] == pytest.approx(1 + 16 / 15, abs=1e-4)
    assert (level["drafts"], level["drafted"], level["accepted"]) == (15 * 12, 45 * 12, 16 * 12)
    assert level["acceptance_per_position_unconditional"][:2] == pytest.approx([8 / 15, 8 / 15], abs=1e-4)
    # vLLM does not say whether the one token that it showed of the last step was a draft.
    first = 7 / 14 if engine == "vllm" else 8 / 15
    assert level["acceptance_per_position"] == pytest.approx([first, 1.0, 0.0], abs=1e-4)
    assert level["acceptance_length_reasoning"] and level["acceptance_length_answer"]
    assert [place["steps"] for place in level["acceptance_by_place"]] == [15 * 12]


def test_the_command_line_measures_servers_and_needs_nothing_but_traces(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with server("vllm", run, plan=(2, 0)) as draft, server("vllm", run) as baseline:
        both = ["--server", draft.url, "--baseline-server", baseline.url, "--concurrency", "1", "--concurrency", "2"]
        app(["measure", "--run", str(run), *both, "--rounds", "1", "--quiet"], result_action="return_value")
    said = capsys.readouterr().out
    assert "speed-up" in said and "outputs the same" in said
    assert [level["concurrency"] for level in read_json(run / "measure" / "served.json")["levels"]] == [1, 2]


def test_sglang_gives_a_length_and_no_positions(run: Path) -> None:
    with server("sglang", run, plan=(2, 0)) as draft:
        level = measured(run, draft.url, None)["levels"][0]
    assert level["acceptance_length"] == pytest.approx(29 / 15, abs=1e-4)
    assert level["acceptance_per_position"] == []


def test_sides_measured_one_after_the_other_are_paired_and_it_is_said(run: Path) -> None:
    with server("vllm", run) as baseline:
        alone = measured(run, None, baseline.url)
    assert alone["verdict"].startswith("only the baseline is measured") and alone["levels"][0]["speedup"] is None
    with server("vllm", run, plan=(1,)) as draft:
        result = measured(run, draft.url, None)
        assert result["levels"][0]["speedup"] is not None and not result["levels"][0]["interleaved"]
        assert any("measured apart" in caution for caution in result["cautions"])
        other = measured(run, draft.url, None, max_tokens=20)
    assert other["levels"][0]["speedup"] is None, "a baseline that was asked otherwise is no baseline"


def test_rounds_that_were_asked_otherwise_are_not_replaced_without_a_word(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with server("vllm", run) as baseline:
        asked = ServedSettings(baseline_server=baseline.url)
        for tokens, words in ((64, 0), (32, 1)):
            settings = TWO_ROUNDS.model_copy(update={"max_tokens": tokens})
            measure_served(run, settings, asked, Progress())
            assert capsys.readouterr().err.count("asked otherwise") == words


def test_two_engines_beside_each_other_are_said_and_never_called_a_gain_of_the_draft(run: Path) -> None:
    with server("vllm", run, plan=(2, 0)) as draft, server("llamacpp", run) as baseline:
        result = measured(run, draft.url, baseline.url)
    assert result["same_engine"] is False
    names = "vllm 0.5.23 with the draft, llamacpp 0.5.23 without"
    assert f"the two engines differ ({names}), so what the draft gains is not known" in result["verdict"]
    assert "pays off" not in result["verdict"] and "pay off" not in result["verdict"]
    assert any(caution.startswith("expected the same engine on both servers") for caution in result["cautions"])


def test_one_engine_on_both_sides_needs_no_word(run: Path) -> None:
    with server("vllm", run, plan=(2, 0)) as draft, server("vllm", run) as baseline:
        result = measured(run, draft.url, baseline.url)
    assert result["same_engine"] is True and result["cautions"] == [] and "engines differ" not in result["verdict"]


@pytest.mark.parametrize("changed", ["engine", "version", "model"])
def test_rounds_of_another_server_are_not_carried_under_the_new_ones_name(
    changed: str, run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with server("vllm", run) as baseline:
        measured(run, None, baseline.url, 1)
        measured(run, None, baseline.url, 2)
        assert [one["concurrency"] for one in read_json(run / "measure" / "served.json")["levels"]] == [1, 2]

    async def now(*arguments: Any) -> tuple[Server, int]:
        found, context = await connect(*arguments)
        return (found if changed == "engine" else replace(found, **{changed: "another"})), context

    monkeypatch.setattr(served, "connect", now)
    with server("llamacpp" if changed == "engine" else "vllm", run) as baseline:
        measure_served(run, TWO_ROUNDS, ServedSettings(baseline_server=baseline.url, concurrency=[1]), Progress())
    assert [one["concurrency"] for one in read_json(run / "measure" / "served.json")["levels"]] == [1]
    assert "its earlier rounds are dropped" in capsys.readouterr().err


def test_a_server_that_drafts_nothing_is_refused(run: Path) -> None:  # P40
    with server("llamacpp", run) as draft, pytest.raises(UserError, match=r"the draft is not working.*--spec-type"):
        measured(run, draft.url, None)


def test_a_draft_of_which_nothing_is_accepted_is_called_not_working(run: Path) -> None:  # P40
    with server("vllm", run, plan=(0,)) as draft:
        result = measured(run, draft.url, None)
    assert "the draft is not working" in result["verdict"]


def test_a_baseline_that_drafts_is_refused(run: Path) -> None:
    with server("vllm", run, plan=(1,)) as baseline, pytest.raises(UserError, match="expected a baseline without a"):
        measured(run, None, baseline.url)


def test_another_model_on_the_server_is_refused(run: Path) -> None:
    other = lambda prompt: [OPEN, *range(60, 80), END]  # noqa: E731
    with server("vllm", run, plan=(1,), say=other) as draft, pytest.raises(UserError, match="serves another model"):
        measured(run, draft.url, None)


def test_another_tokenizer_on_the_server_is_refused(run: Path) -> None:
    with server("vllm", run, plan=(1,)) as draft:
        draft.tokenize = lambda text: [1000 + ord(letter) for letter in text]
        with pytest.raises(UserError, match="its tokenizer is not the one"):
            measured(run, draft.url, None)


def test_others_on_the_server_make_a_level_disturbed(run: Path) -> None:
    with server("vllm", run, plan=(1,), foreign=5, running=2) as draft:
        result = measured(run, draft.url, None)
    assert result["levels"][0]["disturbed"] and result["levels"][0]["foreign_tokens"] == 2 * 6 * 5
    assert any("2 requests of others" in caution for caution in result["cautions"])


def test_where_greedy_replies_part_is_shown_with_both_texts(run: Path) -> None:
    def differs(prompt: tuple[int, ...]) -> list[int]:
        ids = said(prompt)
        return [*ids[:20], 99, *ids[21:]]

    with server("vllm", run, plan=(1,), say=differs) as draft, server("vllm", run) as baseline:
        result = measured(run, draft.url, baseline.url)
    first = result["differences"][0]
    assert not result["lossless"] and result["different"] == 12 and result["baseline_repeats_itself"] == 1.0
    assert (first["index"], first["found"]) == (20, 99) and first["found_text"] != first["expected_text"]


def test_replies_that_only_repeat_themselves_are_counted_and_left_out(run: Path) -> None:  # P42
    def loops(prompt: tuple[int, ...]) -> list[int]:
        return said(prompt)[:8] + [33] * 60 if prompt[-4] % 2 else said(prompt)

    with server("llamacpp", run, plan=(2, 0)) as draft:
        draft.say = loops
        level = measured(run, draft.url, None)["levels"][0]
    assert (level["degenerate"], level["replies"]) == (6, 12)
    assert level["acceptance_length"] == pytest.approx(29 / 15, abs=1e-4)


def test_replies_of_one_token_are_not_called_loops(run: Path) -> None:
    with server("vllm", run, plan=(2, 0)) as draft:
        result = measured(run, draft.url, None, max_tokens=1)
    assert "no step with a draft was counted in 12 replies" in result["verdict"]


def loop(prompt: tuple[int, ...]) -> list[int]:
    return said(prompt)[:8] + [33] * 60


@pytest.mark.parametrize("engine", ENGINES)
def test_loops_alone_have_no_acceptance_length_whatever_the_counters_say(engine: str, run: Path) -> None:
    with server(engine, run, plan=(2, 0), say=loop) as draft:
        result = measured(run, draft.url, None)
    assert result["levels"][0]["acceptance_length"] is None
    assert "12 of 12 replies are loops" in result["verdict"]
    assert any("left out of the acceptance, not of the speed" in caution for caution in result["cautions"])


def test_loops_that_the_engines_counters_hold_are_said_to_be_in_the_acceptance(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    some = lambda prompt: loop(prompt) if prompt[-4] % 2 else said(prompt)  # noqa: E731
    monkeypatch.setattr(served_result, "steps_agree", lambda *_: False)
    with server("vllm", run, plan=(2, 0), say=some) as draft:
        result = measured(run, draft.url, None)
    assert result["levels"][0]["acceptance_from"] == "counters"
    assert [caution.partition("themselves: ")[2] for caution in result["cautions"]] == [
        "they are in the acceptance, which only the engine's counters tell, and in the speed"
    ]


def test_loops_are_left_out_where_the_engine_tells_the_steps_of_each_reply(run: Path) -> None:
    some = lambda prompt: loop(prompt) if prompt[-4] % 2 else said(prompt)  # noqa: E731
    with server("sglang", run, plan=(2, 0), say=some) as draft:
        result = measured(run, draft.url, None)
    assert result["levels"][0]["acceptance_from"] == "replies"
    assert any("left out of the acceptance" in caution for caution in result["cautions"])


@pytest.mark.parametrize(("limit", "refused"), [(3, False), (4, True)])
def test_a_few_replies_that_begin_otherwise_are_a_caution_and_no_refusal(limit: int, refused: bool, run: Path) -> None:
    other = lambda prompt: [OPEN, *range(60, 80), END]  # noqa: E731
    with server("vllm", run, plan=(1,), say=other) as draft:
        if refused:
            with pytest.raises(UserError, match="serves another model"):
                measured(run, draft.url, None, limit=limit)
        else:
            [caution] = measured(run, draft.url, None, limit=limit)["cautions"]
            assert "0 of 3 greedy replies begin" in caution and "too few to tell; ask at least 4" in caution


@pytest.mark.parametrize("engine", ENGINES)
def test_a_reply_that_breaks_off_ends_the_measurement_instead_of_being_counted(engine: str, run: Path) -> None:
    with server(engine, run, plan=(1,), cut=True) as draft, pytest.raises(UserError, match="ended before the reply"):
        measured(run, draft.url, None)
    assert not (run / "measure").exists()


def test_a_batch_that_the_questions_cannot_fill_is_refused(run: Path) -> None:
    with server("vllm", run, plan=(1,)) as draft, pytest.raises(UserError, match="--concurrency 8: expected at least"):
        measured(run, draft.url, None, 8)


def test_sampling_values_are_explicit_and_ends_are_never_ignored(run: Path) -> None:  # P42
    with server("vllm", run, plan=(1,)) as draft:
        measured(run, draft.url, None, temperature=0.7, top_p=0.9)
    body = draft.asked[-1]
    assert (body["temperature"], body["top_p"], body["top_k"], body["min_p"]) == (0.7, 0.9, -1, 0.0)
    assert body["repetition_penalty"] == 1.0 and body["stop_token_ids"] == [END] and "ignore_eos" not in body


def test_random_tokens_are_no_benchmark_and_natural_text_is() -> None:  # P42
    import random

    rng = random.Random(0)
    shared = list(range(40))
    noise: list[Sequence[int]] = [[*shared, *(rng.randrange(50_000) for _ in range(60))] for _ in range(8)]
    with pytest.raises(UserError, match="looks like random tokens"):
        refuse_random(noise, 50_000, "noise.jsonl")
    common = [rng.randrange(50_000) for _ in range(120)]  # every other token is one of a few hundred words
    text: list[Sequence[int]] = [
        [*shared, *(rng.choice(common) if rng.random() < 0.6 else rng.randrange(50_000) for _ in range(60))]
        for _ in range(8)
    ]
    refuse_random(text, 50_000, "text.jsonl")


def _made(stage: Stage) -> dict[str, Any]:
    write_json(stage.work / "result.json", {})
    return {}


def test_a_served_measurement_outlives_the_reference_measurement_that_is_made_again(tmp_path: Path) -> None:
    plans = [Plan("measure", {"limit": limit}, {}) for limit in (1, 2)]
    (tmp_path / "measure").mkdir()
    write_json(tmp_path / "measure" / "served.json", {"speedup": 2})
    for plan in plans:
        build(tmp_path, plan, _made, force=True)
    assert read_json(tmp_path / "measure" / "served.json") == {"speedup": 2}
    assert "served.json" not in read_json(tmp_path / "measure" / "manifest.json")["files"]
