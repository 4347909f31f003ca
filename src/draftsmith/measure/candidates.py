"""What llama.cpp drafts, beside what our own draft would have drafted behind the same tokens.

Acceptance does not prove a conversion: on a weak draft a wrong order of q and k or a wrong layer moves it by less than
noise. The candidates do. llama.cpp prints its first three per position at log level 5; ours come from the target's
states over the very tokens it served, so both sides draft from the same past. A chain is compared up to the first
candidate that differs, since what follows a different token may differ.

Costs one target forward per reply and one draft forward per drafted token.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from draftsmith.draft.cache import DraftCache, extend
from draftsmith.draft.eagle3 import Eagle3Draft
from draftsmith.errors import UserError
from draftsmith.measure.decode import Verifier
from draftsmith.target import direct

CANDIDATE = re.compile(r"seq_id (\d+), draft candidate +(\d+), pos +(\d+): +(\d+) ")
DRAFTED = re.compile(r"task (\d+) \| generate_draft: id=(-?\d+), #tokens=(\d+), #draft=(\d+)")
"""Lines of the llama.cpp inside xllamacpp 2026.10.11549 (common/speculative.cpp, tools/server)."""

SHOWN = 3
"""Candidates per position that llama.cpp prints."""

REPLY_SECONDS = 1800.0

Chain = tuple[tuple[int, ...], ...]
"""Of each drafted position the candidates, best first, as target ids; the first of each was drafted."""


@dataclass(frozen=True, slots=True)
class Drafted:
    """One drafting: behind `known` tokens (prompt included), of which `last` follows as the newest."""

    task: int
    known: int
    last: int
    chain: Chain


@dataclass(frozen=True, slots=True)
class Alike:
    """How far two sides draft alike."""

    positions: int = 0
    equal: int = 0
    """Positions with the same first candidate."""
    lists: int = 0
    equal_lists: int = 0
    """Lists of candidates that are the same in the same order."""

    @property
    def share(self) -> float:
        """Of the positions, those with the same first candidate."""
        return self.equal / self.positions if self.positions else 0.0

    def __add__(self, other: Alike) -> Alike:
        return Alike(
            self.positions + other.positions,
            self.equal + other.equal,
            self.lists + other.lists,
            self.equal_lists + other.equal_lists,
        )


def read_drafted(log: Iterable[str]) -> list[Drafted]:
    """The draftings in a log of level 5, in order. The server must have had one slot: it prints no owner otherwise."""
    found: list[Drafted] = []
    pending: dict[int, list[int]] = {}
    for line in log:
        if match := CANDIDATE.search(line):
            sequence, rank, position, token = (int(text) for text in match.groups())
            if sequence != 0:
                raise UserError(
                    "llama.cpp: expected a server with one slot, whose drafts are told apart, found several"
                )
            if rank == 0 and position == 0:
                pending.clear()
            pending.setdefault(position, []).append(token)
        elif match := DRAFTED.search(line):
            task, last, known, count = (int(text) for text in match.groups())
            chain = tuple(tuple(pending[position]) for position in sorted(pending))[:count]
            found.append(Drafted(task, known, last, chain))
            pending.clear()
    return found


def by_reply(drafted: Sequence[Drafted], replies: Sequence[Mapping[str, Any]]) -> list[list[Drafted]]:
    """The draftings of each reply, asked one after the other. A reply too short to draft in has none, and its task is
    not in the log."""
    tasks = iter(sorted({one.task for one in drafted if one.chain}))
    owners = [next(tasks) if reply["timings"].get("draft_n") else None for reply in replies]
    return [[one for one in drafted if one.task == owner and one.chain] for owner in owners]


def ask(url: str, prompt_ids: Sequence[int], max_tokens: int) -> dict[str, Any]:
    """One greedy reply of llama.cpp to prompt ids, as it says it: `tokens`, `timings` with draft counts.

    Nothing is taken from its prompt cache, so that replies do not depend on their order.
    """
    body = {
        "prompt": list(prompt_ids),
        "n_predict": max_tokens,
        "temperature": 0,
        "return_tokens": True,
        "cache_prompt": False,
    }
    answer: dict[str, Any] = json.loads(direct.ask(f"{url}/completion", REPLY_SECONDS, body=json.dumps(body).encode()))
    return answer


@torch.inference_mode()
def reference_chains(
    verifier: Verifier, draft: Eagle3Draft, ids: Sequence[int], drafted: Sequence[Drafted]
) -> list[Chain]:
    """What our draft proposes at the same places of one reply.

    Args:
        verifier: the target, giving aux states.
        draft: the draft, on the target's device.
        ids: the prompt and what was served behind it.
        drafted: the draftings of that reply, in order; ours have the same lengths.
    """
    verifier.begin()
    _, aux = verifier.forward(ids[: max(one.known for one in drafted)], 1)
    assert aux is not None
    hidden = draft.fuse(aux[None].to(draft.fc.weight.dtype))  # [1, tokens, H]
    tokens = torch.tensor([list(ids)], device=aux.device)
    cache, rows = DraftCache(draft), 0
    chains = []
    for one in drafted:
        cache.crop(rows)
        output = extend(draft, cache, tokens[:, rows + 1 : one.known + 1], hidden[:, rows : one.known], rows)
        rows = one.known
        chains.append(_chain(draft, cache, output, rows, len(one.chain)))
    return chains


def alike(served: Chain, ours: Chain) -> Alike:
    """Compares two chains up to the first position where they part."""
    total = Alike()
    for theirs, mine in zip(served, ours, strict=True):
        same = theirs[0] == mine[0]
        total += Alike(1, int(same), 1, int(theirs == mine[: len(theirs)]))
        if not same:
            break
    return total


def _chain(draft: Eagle3Draft, cache: DraftCache, output: Tensor, rows: int, count: int) -> Chain:
    chain = []
    for step in range(count):
        last = output[:, -1:]
        best = draft.target_ids(draft.logits(last)[0, 0].topk(SHOWN).indices)
        chain.append(tuple(best.tolist()))
        if step + 1 < count:
            output = extend(draft, cache, best[:1][None], last, rows + step)
    return tuple(chain)
