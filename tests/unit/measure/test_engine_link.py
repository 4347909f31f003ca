"""What an engine's own counts say, from measurements alone."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from draftsmith.measure import engine_link
from draftsmith.measure.counters import CountedEngine, Counters
from draftsmith.measure.engine_link import Served
from draftsmith.measure.engine_states import UNREADABLE
from draftsmith.measure.links import Link, skipped
from draftsmith.measure.load import Load
from draftsmith.measure.scene import Alive
from draftsmith.measure.streaming import Part, Streamed
from draftsmith.measure.walks import Walk
from draftsmith.recipe import DiagnoseSettings

QUESTIONS, TOKENS, K = 8, 40, 3


def load(length: int, engine: CountedEngine = "llamacpp", drafts: bool = True) -> Load:
    """Every reply a first token and steps of `length` tokens, as llama.cpp counts them."""
    replies = []
    for number in range(QUESTIONS):
        parts = [Part(0.0, (7,), 0, 0, 0.0)]
        steps = TOKENS // length
        for step in range(1, steps + 1):
            parts.append(Part(float(step), (7,) * length, K * step, (length - 1) * step, float(step)))
        ids = (7,) * (1 + steps * length)
        replies.append(
            Streamed(key=f"q{number}", ids=ids, finish_reason="length", parts=tuple(parts), sent=0.0, seconds=1.0)
        )
    steps = QUESTIONS * (TOKENS // length) if drafts else 0
    counted = Counters(
        engine=engine, drafts=steps, draft_tokens=K * steps, accepted=(length - 1) * steps, per_position=(steps,) * K
    )
    return Load(replies=tuple(replies), seconds=1.0, counted=counted)


def counted(
    monkeypatch: pytest.MonkeyPatch, alone: Load, together: Load, expected: int = 4, agreement: float = 1.0
) -> Link:
    """The link where our own files give `expected` tokens per forward over the same prompts."""
    replies = [Alive(f"q{number}", (1, 2), (7,) * (TOKENS + 1)) for number in range(QUESTIONS)]
    cells = np.full(QUESTIONS, TOKENS)
    best = Walk(tuple(one.key for one in replies), cells, cells // expected, cells, cells)
    monkeypatch.setattr(engine_link, "_expected", lambda *_: best)
    monkeypatch.setattr(Alive, "agreement", property(lambda _: agreement))
    scene: Any = SimpleNamespace(look=lambda *_: None, draft_tokens=K)
    server: Any = SimpleNamespace(engine=alone.counted.engine)
    return engine_link._counted(scene, Served(server, alone, together), None, None, replies)


def test_an_engine_that_accepts_what_the_files_give_is_not_at_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    found = counted(monkeypatch, load(4), load(4))
    assert (found.fell, found.value, found.suspects) == ("no", 4.0, ())


def test_acceptance_that_falls_as_soon_as_requests_run_together_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    found = counted(monkeypatch, load(4), load(2))
    assert found.fell == "yes"
    [suspect] = found.suspects
    assert suspect.name == "several requests at a time"
    assert suspect.found.startswith("acceptance length is 4.00 one request at a time, 2.00 with 4 together")
    assert "--no-spec-draft-backend-sampling" in suspect.change


# P40
def test_an_engine_that_accepts_nothing_is_called_not_working_and_no_data_is_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = counted(monkeypatch, load(1), load(1))
    assert [one.name for one in found.suspects] == ["the draft is not working"]
    assert "EAGLE-3" in found.suspects[0].change
    assert "data" not in found.suspects[0].change


# P40
def test_an_engine_that_drafts_nothing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    found = counted(monkeypatch, load(1, drafts=False), load(1, drafts=False))
    assert (found.fell, found.suspects[0].name) == ("yes", "the engine drafts nothing")
    assert "--spec-type draft-eagle3" in found.suspects[0].change


def test_merged_parts_of_a_stream_are_not_taken_for_longer_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    # Steps of 2 tokens, two of which came in each part.
    merged = replace(load(4, "vllm"), counted=load(2, "vllm").counted)
    found = counted(monkeypatch, merged, load(2, "vllm"), expected=2)
    assert (found.value, found.fell) == (2.0, "no")
    honest = counted(monkeypatch, load(4, "vllm"), load(4, "vllm"))
    assert honest.value == 4.0


@pytest.mark.parametrize(
    ("states", "skips"),
    [
        (skipped("engine states", "this vLLM was not started with a hidden-states connector"), False),
        (skipped("engine states", f"/states/1, which vLLM names, {UNREADABLE}: run this on the server's host"), True),
        (Link(name="engine states", value=0.99, questions=1, noise=None, loss=None), True),
    ],
)
def test_a_server_that_hands_out_states_is_not_judged_as_one_that_drafts(
    states: Link, skips: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def connected(*_: Any) -> tuple[Any, int]:
        return SimpleNamespace(engine="vllm"), 64

    async def drafted(*_: Any) -> Load:
        return load(4, "vllm", drafts=False)

    monkeypatch.setattr(engine_link, "connect", connected)
    monkeypatch.setattr(engine_link, "states_link", lambda *_: states)
    monkeypatch.setattr(engine_link, "run_load", drafted)
    scene: Any = SimpleNamespace(context=64, stop_ids=frozenset(), draft_tokens=K)
    settings = DiagnoseSettings(server="http://here:1")
    links = engine_link.engine_links(scene, settings, None, None, [Alive("q0", (1, 2), (7, 7))], lambda _: None)
    assert links[0] is states
    assert (links[1].note == "this server hands out hidden states and does not draft") == skips
    assert (links[1].suspects == ()) == skips


def test_an_engine_whose_replies_are_one_token_has_no_words_to_compare(monkeypatch: pytest.MonkeyPatch) -> None:
    short = Walk(("q0",), *[np.zeros(1, np.int64)] * 4)
    assert engine_link._other_words(SimpleNamespace(), [Alive("q0", (1, 2), (7,))], short, short) == []  # type: ignore[arg-type]


def test_an_engine_whose_target_says_other_words_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    found = counted(monkeypatch, load(2), load(2), agreement=0.7)
    assert found.fell == "yes"
    assert found.suspects[0].name == "quantised or other target"
