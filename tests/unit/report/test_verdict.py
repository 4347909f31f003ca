"""The one sentence is true for every kind of result."""

from __future__ import annotations

from typing import Any

import pytest

from draftsmith.report.verdict import conditions, sampling_words, verdict

RESULT: dict[str, Any] = {
    "acceptance_length": 1.9,
    "lossless": True,
    "compared": 32,
    "speedup": 1.2,
    "tokens_per_second": 60.0,
    "baseline_tokens_per_second": 50.0,
    "draft_tokens": 4,
    "questions": 32,
    "degenerate": 0,
    "sampling": {"temperature": 0.0, "top_p": 1.0, "top_k": 0},
}


@pytest.mark.parametrize(
    ("changes", "mood", "words"),
    [
        ({}, "good", "1.20 times as fast: with the draft the target writes 60.0 tokens per second instead of 50.0"),
        ({"speedup": 0.7}, "bad", "does not pay off here: 1.90 tokens per target forward do not cover"),
        ({"speedup": 1.01}, "even", "No difference here"),
        ({"speedup": 0.98}, "even", "No difference here"),
        ({"lossless": False}, "bad", "Do not serve this draft"),
        ({"acceptance_length": None}, "bad", "No acceptance estimate"),
    ],
)
def test_the_sentence_says_what_was_measured(changes: dict[str, Any], mood: str, words: str) -> None:
    found = verdict({**RESULT, **changes}, "RUN")
    assert (found.mood, words in found.sentence) == (mood, True), found.sentence


def test_without_an_estimate_loops_and_replies_without_a_step_are_told_apart() -> None:
    loops = verdict({**RESULT, "acceptance_length": None, "degenerate": 32}, "RUN").sentence
    short = verdict({**RESULT, "acceptance_length": None, "degenerate": 2}, "RUN").sentence
    assert "every measured reply repeats itself" in loops and "repeats" not in short
    assert "no step with a draft was counted" in short


# P40
def test_a_draft_that_nothing_is_accepted_of_is_broken_and_needs_no_data() -> None:
    found = verdict({**RESULT, "acceptance_length": 1.0, "speedup": 0.6}, "RUN")
    assert found.sentence.startswith("The draft is not working")
    assert "more data will not help" in found.sentence
    assert all(word in found.sentence for word in ("EAGLE-3", "aux", "head", "d2t"))


def test_a_fault_in_losslessness_outranks_any_speed_up() -> None:
    assert "Do not serve" in verdict({**RESULT, "lossless": False, "speedup": 3.0}, "RUN").sentence


def test_without_a_measurement_the_command_that_makes_one_is_named() -> None:
    found = verdict(None, "RUN")
    assert "draftsmith measure --run RUN" in found.sentence
    assert found.facts == []


# P42
def test_few_questions_and_replies_left_out_are_said() -> None:
    cautions = verdict({**RESULT, "questions": 6, "degenerate": 2}, "RUN").cautions
    assert len(cautions) == 2
    assert "6 questions" in cautions[0] and "2 of 6 replies" in cautions[1]
    assert verdict(RESULT, "RUN").cautions == []


def test_timed_replies_that_differ_from_the_proved_ones_are_said() -> None:
    cautions = verdict({**RESULT, "timed_identical_to_float32": 0.5, "dtype": "bfloat16"}, "RUN").cautions
    assert len(cautions) == 1
    assert "bfloat16" in cautions[0] and "50% of the timed" in cautions[0]
    for same in (1.0, None):
        assert verdict({**RESULT, "timed_identical_to_float32": same}, "RUN").cautions == []


def test_sampling_reads_as_words() -> None:
    assert sampling_words({"temperature": 0.0, "top_p": 0.9}) == "greedy"
    assert sampling_words({"temperature": 0.6, "top_p": 0.95, "top_k": 20}) == "temperature 0.6, top-p 0.95, top-k 20"


def test_conditions_leave_out_what_a_result_does_not_say() -> None:
    assert [name for name, _ in conditions(RESULT)] == ["sampling", "draft tokens", "questions"]
    more = {**RESULT, "prompts": "mine", "dtype": "bfloat16", "device": "cpu", "rounds": [{}, {}], "cycles": 1234}
    found = dict(conditions(more))
    assert (found["timed in"], found["paired rounds"], found["target forwards"]) == ("bfloat16 on cpu", "2", "1,234")
