"""The float32 pass: each prompt decoded with and without the draft, compared token for token, and its cycles kept.

Losslessness is proved greedily, where both decoders must say the same; in float32, because bfloat16 has exact ties
between logits that kernels for one and for five tokens break differently. One row per prompt goes to `questions.jsonl`
as soon as it is done, so that an interrupted measurement goes on where it stopped.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from draftsmith.measure.acceptance import Acceptance, Cycle, acceptance, is_degenerate
from draftsmith.measure.decode import Proposer, Verifier, decode_plain, decode_speculative
from draftsmith.measure.prompts import Prompt
from draftsmith.target.reply import Sampling
from draftsmith.target.template import Template
from draftsmith.target.thinking import Delimiters, split
from draftsmith.trace import Span


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """One measured prompt. `ids` and `cycles` are of the pass that acceptance is counted on."""

    key: str
    prompt_tokens: int
    ids: tuple[int, ...]
    finish_reason: str
    cycles: tuple[Cycle, ...]
    identical: bool
    """Greedy decoding with the draft gave the target's own tokens."""
    difference: dict[str, Any] | None
    degenerate: bool
    """A loop: left out of the mean acceptance (P42)."""
    reasoning_span: Span | None
    answer_span: Span | None


def measure_reply(
    verifier: Verifier,
    proposer: Proposer,
    prompt: Prompt,
    sampling: Sampling,
    stop_ids: frozenset[int],
    draft_tokens: int,
    delimiters: Delimiters | None,
    template: Template | None,
) -> Reply:
    """Decodes one prompt with and without the draft.

    Args:
        verifier: the target in float32.
        proposer: the draft in float32.
        prompt: the prompt.
        sampling: what acceptance is counted under; where it is not greedy, the greedy comparison is made besides.
        stop_ids: ids that end a reply.
        draft_tokens: chain length.
        delimiters: of the target's thinking; None: it does not think.
        template: needed with delimiters.
    """
    greedy = replace(sampling, temperature=0.0)
    expected = decode_plain(verifier, prompt.ids, greedy, stop_ids)
    found = decode_speculative(verifier, proposer, prompt.ids, greedy, stop_ids, draft_tokens)
    identical = found.ids == expected.ids
    difference = None if identical else first_difference(verifier, prompt.ids, found.ids, expected.ids)
    if sampling.temperature:
        found = decode_speculative(verifier, proposer, prompt.ids, sampling, stop_ids, draft_tokens)
    reasoning: Span | None = None
    answer: Span | None = (0, len(found.ids))
    if delimiters is not None and template is not None:
        parts = split(delimiters, template, prompt.ids, found.ids, found.finish_reason)
        reasoning, answer = parts.reasoning, parts.answer
    return Reply(
        key=prompt.key,
        prompt_tokens=len(prompt.ids),
        ids=found.ids,
        finish_reason=found.finish_reason,
        cycles=found.cycles,
        identical=identical,
        difference=difference,
        degenerate=is_degenerate(found.ids),
        reasoning_span=reasoning,
        answer_span=answer,
    )


@torch.inference_mode()
def first_difference(
    verifier: Verifier, prompt_ids: Sequence[int], found: Sequence[int], expected: Sequence[int]
) -> dict[str, Any]:
    """Where two replies part, and how close the target's choice was there.

    Returns:
        index (in the reply), found and expected token with their logits, and the margin between the target's two best,
        all from one forward over the common part. A token is None where a reply ended.
    """
    pairs = zip(found, expected, strict=False)
    index = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(found), len(expected)))
    verifier.begin()
    logits, _ = verifier.forward([*prompt_ids, *expected[:index]], 1)
    best = logits[-1].float().topk(2).values.tolist()
    tokens = [reply[index] if index < len(reply) else None for reply in (found, expected)]
    values = [None if token is None else round(float(logits[-1, token]), 6) for token in tokens]
    return {
        "index": index,
        "found": tokens[0],
        "expected": tokens[1],
        "found_logit": values[0],
        "expected_logit": values[1],
        "top2_margin": round(best[0] - best[1], 6),
    }


def counted(replies: Sequence[Reply], draft_tokens: int) -> tuple[Acceptance, Acceptance, Acceptance]:
    """Acceptance overall, in the reasoning and in the answer, over the replies that are no loops.

    A cycle belongs to the span its first token lies in.
    """
    kept = [reply for reply in replies if not reply.degenerate]
    everything = [cycle for reply in kept for cycle in reply.cycles]
    reasoning = [c for reply in kept for c in _within(reply.cycles, reply.reasoning_span)]
    answer = [c for reply in kept for c in _within(reply.cycles, reply.answer_span)]
    return (
        acceptance(everything, draft_tokens),
        acceptance(reasoning, draft_tokens),
        acceptance(answer, draft_tokens),
    )


class ReplyLog:
    """`questions.jsonl`: one reply per line, appended as it is done; a torn last line is dropped when opened."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.replies: dict[str, Reply] = {}
        if path.exists():
            lines = path.read_bytes().split(b"\n")[:-1]  # what follows the last LF is torn (or nothing)
            path.write_bytes(b"".join(line + b"\n" for line in lines))
            self.replies = {reply.key: reply for reply in map(_loaded, lines)}

    def add(self, reply: Reply) -> None:
        """Appends a reply."""
        with open(self.path, "a", encoding="utf-8") as file:
            file.write(json.dumps(asdict(reply)) + "\n")
        self.replies[reply.key] = reply


def _within(cycles: Sequence[Cycle], span: Span | None) -> list[Cycle]:
    start, end = span or (0, 0)
    return [cycle for cycle in cycles if start <= cycle.start < end]


def _loaded(line: bytes) -> Reply:
    values = json.loads(line)
    spans = {name: tuple(values[name]) if values[name] else None for name in ("reasoning_span", "answer_span")}
    cycles = tuple(Cycle(**cycle) for cycle in values["cycles"])
    return Reply(**{**values, **spans, "ids": tuple(values["ids"]), "cycles": cycles})
