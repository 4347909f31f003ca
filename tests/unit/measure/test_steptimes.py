from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from captured_run import OPEN, make_captured_run, said, server
from draftsmith.errors import UserError
from draftsmith.measure import steptimes
from draftsmith.measure.counters import Counters
from draftsmith.measure.load import Load
from draftsmith.measure.served_checks import ENOUGH_PAIRS
from draftsmith.measure.steptimes import (
    LEAST_PROMPTS,
    PER_REQUEST,
    _draft_step,
    _plain_step,
    draft_share,
    reference_steps,
    served_steps,
    typed_steps,
)
from draftsmith.measure.streaming import Part, Streamed
from draftsmith.progress import Progress
from draftsmith.recipe import PayoffSettings

QUIET = Progress(quiet=True)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return make_captured_run(tmp_path)


def asked(*concurrency: int, **values: Any) -> PayoffSettings:
    return PayoffSettings(concurrency=list(concurrency or (1,)), rounds=1, **values)


def load(*replies: list[tuple[float, int]], sent: tuple[float, ...] = (), drafts: int = 0) -> Load:
    """Replies given as parts: when each came, and of how many ids."""
    streamed = []
    for parts, begin in zip(replies, sent or (0.0,) * len(replies), strict=True):
        made = tuple(Part(at, (1,) * count) for at, count in parts)
        ids = tuple(token for part in made for token in part.ids)
        streamed.append(Streamed(key="q", ids=ids, finish_reason="stop", parts=made, sent=begin, seconds=made[-1].at))
    return Load(replies=tuple(streamed), seconds=9.0, counted=Counters(engine="vllm", drafts=drafts))


def test_a_plain_step_is_the_time_behind_the_first_token_over_the_tokens_in_it() -> None:
    assert _plain_step(load([(2.0, 1), (2.1, 1), (2.3, 2)], [(5.0, 1), (5.3, 3)]), 1) == pytest.approx(0.6 / 6)


def decoding(first: float, step: float, count: int, *, waits: tuple[int, float] = (0, 0.0)) -> list[tuple[float, int]]:
    """A reply of `count` ids a step apart; before one of them it waits while another's prompt is read."""
    place, seconds = waits
    return [(first + step * number + (seconds if number >= place > 0 else 0.0), 1) for number in range(count)]


def test_a_step_is_timed_while_no_prompt_is_read_and_the_batch_is_full() -> None:
    # Two at a time. When the second has ended, a third's prompt keeps the first waiting; once that ends, one is left.
    first, second = decoding(2.0, 0.1, 60, waits=(40, 3.0)), decoding(2.0, 0.1, 40)
    third = decoding(3.0, 0.05, 90)
    found = _plain_step(load(first, second, third, sent=(0.0, 0.0, 5.95)), 2)
    assert found == pytest.approx((0.1 * (39 + 19 + 39) + 0.05 * 39) / (39 + 19 + 39 + 39), rel=0.01)


def test_where_too_few_tokens_came_undisturbed_all_of_them_count() -> None:
    assert _plain_step(load(decoding(2.0, 0.1, 60, waits=(40, 3.0))), 60) == pytest.approx((5.9 + 3.0) / 59)


def test_too_few_tokens_between_prompts_are_said(run: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(steptimes, "FEW_TOKENS", 1 << 20)
    with server("vllm", run) as baseline:
        settings = asked(1, baseline_server=baseline.url, draft_tokens=1)
        found = served_steps(run, settings, 0.1, QUIET)
    said = "too few tokens came while no prompt was read, so the steps hold the share of prompts; raise --max-tokens"
    assert found.cautions == tuple(f"at {level}: {said}" for level in (1, 2))


def test_a_step_with_draft_is_the_same_time_over_the_drafts_counted() -> None:
    assert _draft_step(load([(2.0, 1), (2.5, 4)], [(2.0, 1), (2.3, 2)], drafts=4), 1, "") == pytest.approx(0.8 / 4)


def test_a_round_without_a_draft_has_no_step_of_one() -> None:
    with pytest.raises(UserError, match="http://here: drafted nothing in a round"):
        _draft_step(load([(2.0, 1), (2.5, 4)]), 1, "http://here")


@pytest.mark.parametrize("engine", ["vllm", "llamacpp"])
def test_both_servers_are_timed_at_every_concurrency_and_the_depth_is_the_servers_own(engine: str, run: Path) -> None:
    with server(engine, run, plan=(2, 0)) as draft, server(engine, run) as baseline:
        measured = served_steps(run, asked(1, 2, server=draft.url, baseline_server=baseline.url), None, QUIET)
    assert [level.times.concurrency for level in measured.levels] == [1, 2]
    for level in measured.levels:
        assert list(level.times.with_draft) == [3] and level.times.target > 0
        assert level.replies is not None and level.replies.tokens == 30
    assert measured.source == f"measured on {engine} with and without the draft"
    assert all("while no prompt was read" in caution for caution in measured.cautions)  # replies take no time here
    warm_up, timed = (
        ENOUGH_PAIRS + PER_REQUEST * 2,
        2 * LEAST_PROMPTS,
    )  # few requests at a time are timed on some more prompts
    assert len(draft.asked) == len(baseline.asked) == warm_up + timed


def test_an_engine_that_starts_slowly_does_not_make_first_tokens_dear(run: Path, monkeypatch: Any) -> None:
    """An engine that was idle takes long for its first reply of a round."""
    loads = []
    measure = steptimes.run_load

    async def slow_first(*arguments: Any) -> Load:
        found = await measure(*arguments)
        late = tuple(replace(part, at=part.at + 9.0) for part in found.replies[0].parts)
        loads.append(len(found.replies))
        return replace(found, replies=(replace(found.replies[0], parts=late), *found.replies[1:]))

    monkeypatch.setattr(steptimes, "run_load", slow_first)
    with server("vllm", run, plan=(2, 0)) as draft, server("vllm", run) as baseline:
        measured = served_steps(run, asked(1, server=draft.url, baseline_server=baseline.url), None, QUIET)
    assert measured.levels[0].replies is not None and measured.levels[0].replies.prefill < 1.0
    assert abs(measured.levels[0].draft_prefill) < 1.0 and max(loads) == LEAST_PROMPTS


def test_where_the_engine_does_not_tell_how_much_it_drafts_it_is_taken_as_said(run: Path) -> None:
    with server("sglang", run, plan=(1,)) as draft, server("sglang", run) as baseline:
        settings = asked(server=draft.url, baseline_server=baseline.url, draft_tokens=5)
        measured = served_steps(run, settings, None, QUIET)
    assert list(measured.levels[0].times.with_draft) == [5]
    assert "taken for 5 draft tokens, which it does not tell" in measured.source


def test_more_at_a_time_than_there_are_questions_asks_them_again(run: Path) -> None:
    with server("vllm", run) as baseline:
        measured = served_steps(run, asked(5, baseline_server=baseline.url, draft_tokens=1), 0.1, QUIET)
    assert measured.levels[0].times.concurrency == 5
    prompts = [tuple(body["prompt"]) for body in baseline.asked]
    prompts_alone = ENOUGH_PAIRS + LEAST_PROMPTS  # one at a time: what reading them takes
    assert len(prompts) == 2 * PER_REQUEST * (5 + 10) + prompts_alone and len(set(prompts)) == 6


def test_a_plain_server_stands_in_for_one_that_drafts_and_it_is_said(run: Path) -> None:
    with server("vllm", run) as baseline:
        measured = served_steps(run, asked(2, baseline_server=baseline.url, draft_tokens=3), 0.25, QUIET)
    assert "a draft step as 25.0% of a plain one (estimates)" in measured.source
    times = measured.levels[0].times
    assert list(times.with_draft) == [3] and times.step(3) > 3 * 0.25 * times.target
    # 4 tokens of 2 requests are as 8 requests; one at a time for what the prompts take.
    warm_up, timed = ENOUGH_PAIRS + PER_REQUEST * (2 + 8), 2 * LEAST_PROMPTS + PER_REQUEST * 8
    assert len(baseline.asked) == warm_up + timed


def test_what_spoils_the_times_is_said(run: Path) -> None:
    with server("vllm", run, plan=(1,), foreign=5, waiting=3) as draft, server("vllm", run) as baseline:
        found = served_steps(run, asked(server=draft.url, baseline_server=baseline.url), None, QUIET).cautions
    assert [caution.partition(": ")[2] for caution in found] == [
        "asked 1 at a time, up to 3 waited for a place, so its steps are of fewer requests; let it run more at once",
        "generated tokens for others while steps were timed",
    ]


@pytest.mark.parametrize(
    ("plan", "of_baseline", "problem"),
    [
        ((), (), "expected a server that drafts, it generated"),
        ((1,), (1,), "expected a baseline without a draft, it drafted"),
    ],
)
def test_a_server_that_is_not_what_it_is_taken_for_is_refused(
    plan: tuple[int, ...], of_baseline: tuple[int, ...], problem: str, run: Path
) -> None:
    with (
        server("vllm", run, plan=plan) as draft,
        server("vllm", run, plan=of_baseline) as baseline,
        pytest.raises(UserError, match=problem),
    ):
        served_steps(run, asked(server=draft.url, baseline_server=baseline.url), None, QUIET)


def test_another_model_is_refused_also_where_one_request_at_a_time_is_timed(run: Path) -> None:
    other = lambda prompt: [OPEN, *range(60, 80), 5]  # noqa: E731
    with server("vllm", run, say=other) as baseline, pytest.raises(UserError, match="serves another model"):
        served_steps(run, asked(baseline_server=baseline.url), 0.1, QUIET)
    assert len(baseline.asked) == ENOUGH_PAIRS


def test_replies_of_one_token_have_no_steps(run: Path) -> None:
    short = lambda prompt: said(prompt)[:1]  # noqa: E731
    with server("vllm", run, say=short) as baseline, pytest.raises(UserError, match="found none; raise --max-tokens"):
        served_steps(run, asked(baseline_server=baseline.url), 0.1, QUIET)


def test_a_draft_without_a_baseline_and_a_plain_server_without_a_share_are_refused(run: Path) -> None:
    with server("vllm", run, plan=(1,)) as draft, server("vllm", run) as baseline:
        with pytest.raises(UserError, match="expected --baseline-server"):
            served_steps(run, asked(server=draft.url), None, QUIET)
        with pytest.raises(UserError, match="expected --server with a draft, or --draft-share"):
            served_steps(run, asked(baseline_server=baseline.url), None, QUIET)
        assert baseline.asked == []


def test_typed_parts_make_a_step() -> None:
    measured = typed_steps(
        asked(target_ms=["20", "16:24"], verify_ms=["1:22", "16:40"], draft_ms=["1:2", "16:3"], draft_tokens=3)
    )
    assert [level.times.concurrency for level in measured.levels] == [1, 16]
    assert measured.levels[1].times.step(3) == pytest.approx(0.040 + 3 * 0.003)
    assert measured.levels[0].times.target == pytest.approx(0.020) and measured.levels[0].replies is None


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        (
            {"target_ms": ["1:20"], "verify_ms": ["4:22"], "draft_ms": ["1:2"]},
            "expected --target-ms, --verify-ms and --draft-ms for the same concurrencies, found [1], [4] and [1]",
        ),
        ({"verify_ms": ["22"]}, "for the same concurrencies, found [], [1] and []"),
        ({"target_ms": ["1:fast"]}, "--target-ms 1:fast: expected CONCURRENCY:MILLISECONDS, e.g. 16:24.5"),
        ({"target_ms": ["x:20"]}, "--target-ms x:20: expected CONCURRENCY:MILLISECONDS"),
        ({"target_ms": ["0:20"]}, "--target-ms: expected a concurrency of 1 or more and milliseconds above 0"),
        ({"target_ms": ["1:0"]}, "milliseconds above 0, found ['1:0']"),
        ({"draft_ms": ["nan"]}, "--draft-ms: expected a concurrency of 1 or more and milliseconds above 0"),
    ],
)
def test_typed_times_that_make_no_step_are_refused(values: dict[str, Any], problem: str) -> None:
    with pytest.raises(UserError) as refused:
        typed_steps(asked(**values))
    assert problem in str(refused.value)


RESULT = {
    "draft_tokens": 4,
    "acceptance_length": 2.0,
    "tokens_per_second": 50.0,
    "baseline_tokens_per_second": 40.0,
    "rounds": [{"speedup": 1.2}, {"speedup": 1.3}],
}


def test_an_older_reference_measurement_gives_steps_that_give_its_own_speed_up() -> None:
    level = reference_steps(RESULT).levels[0]
    assert 2.0 * level.times.target / level.times.step(4) == pytest.approx(50 / 40)
    assert level.spread == pytest.approx(1.3 / 1.2)


def test_an_older_reference_measurement_of_nothing_but_loops_has_no_steps() -> None:
    with pytest.raises(UserError, match="no acceptance length"):
        reference_steps({**RESULT, "acceptance_length": None})


def a_round(seconds: float, steps: int, baseline_seconds: float, baseline_steps: int) -> dict[str, Any]:
    found = {"seconds": seconds, "steps": steps, "baseline_seconds": baseline_seconds, "speedup": 1.0}
    return {**found, "baseline_steps": baseline_steps}


def test_a_reference_step_is_of_the_timed_replies_whatever_is_accepted_in_the_others() -> None:
    # A loop was timed: 5 tokens a step at 50 ms, where plain ones take 20 ms. All other replies give 2 tokens a step.
    rounds = [a_round(2.0, 40, 4.0, 200), a_round(2.2, 40, 4.2, 200), a_round(1.8, 40, 3.8, 200)]
    times = reference_steps({**RESULT, "tokens_per_second": 100.0, "rounds": rounds}).levels[0].times
    assert (times.step(4), times.target) == pytest.approx((0.050, 0.020))
    assert RESULT["acceptance_length"] * times.target / times.step(4) < 1, "two tokens in 50 ms do not pay off"


def test_a_reference_measurement_of_nothing_but_loops_has_steps_where_they_are_counted() -> None:
    found = reference_steps({**RESULT, "acceptance_length": None, "rounds": [a_round(2.0, 40, 4.0, 200)]})
    assert found.levels[0].times.step(4) == pytest.approx(0.050)


def test_timed_replies_of_one_token_have_no_reference_step() -> None:
    with pytest.raises(UserError, match="expected timed replies of several tokens"):
        reference_steps({**RESULT, "rounds": [a_round(2.0, 0, 4.0, 0)]})


def test_a_draft_step_costs_its_share_of_the_weights_read_per_token() -> None:
    shape = {"hidden_size": 8, "num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 16}
    target = {**shape, "num_hidden_layers": 10, "vocab_size": 100}
    draft = {**shape, "head_dim": 4, "draft_vocab_size": 50}
    whole = 10 * (8 * 8 * 2 + 8 * 4 * 2 + 3 * 8 * 16) + 8 * 100
    own = (2 * 8) * 8 + 2 * (2 * 8) * 4 + 8 * 8 + 3 * 8 * 16 + 8 * 50
    assert draft_share(target, draft) == pytest.approx(own / whole)
    assert draft_share({**target, "n_routed_experts": 384}, draft) is None
