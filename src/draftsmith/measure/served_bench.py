"""What both servers are asked: the same prompts as ids, the same sampling, and a name for exactly this.

Two measurements can be paired only if they asked the same, so everything that shapes a reply is in `plan`. Prompts must
be text that somebody could mean: random tokens are refused, because acceptance on them says nothing (P42).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

from draftsmith.artifacts import fingerprint, read_json
from draftsmith.errors import UserError
from draftsmith.measure.prompts import (
    Prompt,
    Prompts,
    held_out_prompts,
    longest_reply,
    question_prompts,
    samplings_of,
    with_room,
)
from draftsmith.recipe import MeasureSettings
from draftsmith.target.reply import Sampling
from draftsmith.target.template import Template, load_template
from draftsmith.target.thinking import Delimiters, delimiters_from_json
from draftsmith.trace import read_metadata

RANDOM_SHARE = 0.85
"""Of the different ids that uniformly random ones would show: natural text repeats itself, and stays below 0.7."""
TELLING_TOKENS = 256
"""So many ids it takes to tell the two apart; the first 4,096 are looked at."""
MOST_TOKENS = 4096
TELLING_EXPECTED = 0.5
"""In a small vocabulary random ids repeat too: nothing can be told."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """Everything a served measurement asks, whichever server answers."""

    run: Path
    source: Prompts
    prompts: list[Prompt]
    samplings: dict[str, Sampling]
    """Per prompt key."""
    stop_ids: frozenset[int]
    delimiters: Delimiters | None
    template: Template
    sampling: dict[str, Any]
    """For the result."""
    target: dict[str, Any] | None
    """`hidden/target.json`, where the run has it."""

    @property
    def plan(self) -> str:
        """The same for two measurements that asked the same."""
        asked = [[prompt.key, list(prompt.ids), self.samplings[prompt.key].max_tokens] for prompt in self.prompts]
        return fingerprint([asked, self.sampling])


def set_up(run: Path, settings: MeasureSettings, contexts: Sequence[int]) -> Bench:
    """Reads the run's prompts.

    Args:
        run: needs its traces only.
        settings: what `measure` was asked for.
        contexts: ids of a request at most, of each server that says so.

    Raises:
        UserError: nothing to measure on, or prompts that are random tokens.
    """
    traces = run / "traces"
    metadata = read_metadata(traces)
    options = json.loads(metadata.get("template_options", "{}"))
    template = load_template(metadata["tokenizer"], options, settings.trust_remote_code)
    share = float(metadata["held_out"])
    if settings.questions:
        source = question_prompts(settings, template, metadata, traces, share)
        refuse_random([prompt.ids for prompt in source.prompts], template.vocab_size, settings.questions)
    else:
        source = held_out_prompts(traces, share, settings.limit)
    file = run / "hidden" / "target.json"
    target = read_json(file) if file.exists() else None
    longest = [int(target["config"]["max_position_embeddings"])] if target else []
    context = min([*contexts, *longest, 1 << 30])
    prompts = with_room(source.prompts, context)
    max_tokens = settings.max_tokens or int(metadata.get("max_tokens", 0)) or longest_reply(traces)
    stop_ids = frozenset(json.loads(metadata["stop_ids"]))
    samplings = samplings_of(prompts, settings, max_tokens, context)
    return Bench(
        run=run,
        source=source,
        prompts=prompts,
        samplings=samplings,
        stop_ids=stop_ids,
        delimiters=delimiters_from_json(metadata.get("delimiters", "null")),
        template=template,
        sampling={
            "temperature": settings.temperature,
            "top_p": settings.top_p,
            "top_k": settings.top_k,
            "seed": settings.seed,
            "max_tokens": max_tokens,
            "stop_ids": sorted(stop_ids),
            "template_options": options,
        },
        target=target,
    )


def refuse_random(prompts: Sequence[Sequence[int]], vocab_size: int, source: str) -> None:
    """Refuses prompts that are made of random tokens.

    What all of them share (the template's turns, a preamble) is left aside. Ids of natural text in any language, of
    code or of figures come again and again; random ids hardly ever do, so the share of different ids tells.

    Raises:
        UserError: nearly all ids differ.
    """
    first, last = min(map(tuple, prompts)), max(map(tuple, prompts))
    shared = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(first, last, strict=False)))
    ids = [token for prompt in prompts for token in prompt[shared if len(prompts) > 1 else 0 :]][:MOST_TOKENS]
    expected = vocab_size * (1 - (1 - 1 / vocab_size) ** len(ids)) / max(1, len(ids))
    found = len(set(ids)) / max(1, len(ids))
    if len(ids) >= TELLING_TOKENS and expected > TELLING_EXPECTED and found > RANDOM_SHARE * expected:
        raise UserError(
            f"{source}: expected natural text, found what looks like random tokens ({found:.0%} of {len(ids):,} prompt "
            "ids differ from each other); acceptance and speed on them say nothing about real requests, give real "
            "questions"
        )
