"""The rounds of a served measurement as they are kept, so that one side can be measured today and the other tomorrow.

`RUN/measure/served-rounds.json` holds every reply of every round with its times and steps. Rounds stay as long as what
was asked is the same (`plan`); a level that is measured again replaces what was kept of that side and level.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from draftsmith.artifacts import replacing
from draftsmith.errors import UserError
from draftsmith.measure.acceptance import Cycle
from draftsmith.measure.counters import CountedEngine, Counters
from draftsmith.measure.load import Load, Server
from draftsmith.measure.streaming import cycles

ROUNDS = "served-rounds.json"


class Answer(msgspec.Struct, frozen=True):
    """One reply. Times in seconds."""

    key: str
    ids: tuple[int, ...]
    finish_reason: str
    first_token: float
    per_token: float | None
    cycles: tuple[Cycle, ...] | None = None
    """None: a baseline's, or an engine that does not show them."""
    verified: int | None = None


class Round(msgspec.Struct, frozen=True):
    """One round on one server."""

    session: str
    """Rounds of one session were measured in turn with the other side's."""
    seconds: float
    in_flight: float
    foreign: int
    disturbed: bool
    counted: Counters
    answers: tuple[Answer, ...]

    @property
    def tokens(self) -> int:
        """Generated, stop ids included."""
        return sum(len(answer.ids) for answer in self.answers)

    @property
    def tokens_per_second(self) -> float:
        """Output of the whole server, prompts' own time included."""
        return self.tokens / self.seconds


class Side(msgspec.Struct):
    """One server's rounds per concurrency."""

    url: str
    engine: CountedEngine
    version: str
    model: str
    cautions: list[str]
    levels: dict[int, list[Round]] = {}


class Kept(msgspec.Struct):
    """The file."""

    plan: str
    draft: str
    """Fingerprint of the run's draft when its side was measured; "": the run has none."""
    sides: dict[str, Side] = {}


def round_of(load: Load, server: Server, session: str) -> Round:
    """A round as it is kept."""
    draft_tokens = len(load.counted.per_position)  # vLLM counts every position of the chain, also where it is 0
    return Round(
        session=session,
        seconds=round(load.seconds, 4),
        in_flight=round(load.in_flight, 2),
        foreign=load.foreign,
        disturbed=load.disturbed,
        counted=load.counted,
        answers=tuple(
            Answer(
                key=reply.key,
                ids=reply.ids,
                finish_reason=reply.finish_reason,
                first_token=round(reply.first_token, 5),
                per_token=None if reply.per_token is None else round(reply.per_token, 6),
                cycles=cycles(reply, server.engine, draft_tokens) if server.side == "draft" else None,
                verified=reply.verified,
            )
            for reply in load.replies
        ),
    )


def depth(rounds: Sequence[Round]) -> int:
    """Draft tokens per step: as many as positions are counted, or were drafted at once; 0 where nothing tells."""
    positions = max((len(one.counted.per_position) for one in rounds), default=0)
    steps = [step for one in rounds for answer in one.answers for step in answer.cycles or ()]
    return max(positions, max((step.proposed for step in steps), default=0))


def read_kept(folder: Path, plan: str, draft: str) -> Kept:
    """What was kept of the same plan; nothing of another one. The draft's side is kept for the same draft only.

    Raises:
        UserError: the file is unreadable.
    """
    path = folder / ROUNDS
    if not path.exists():
        return Kept(plan, draft)
    try:
        kept = msgspec.json.decode(path.read_bytes(), type=Kept)
    except msgspec.DecodeError as error:
        raise UserError(f"{path}: expected a served measurement's rounds, found something else ({error})") from None
    if kept.plan != plan:
        return Kept(plan, draft)
    if kept.draft != draft:
        kept.sides.pop("draft", None)
    kept.draft = draft
    return kept


def write_kept(folder: Path, kept: Kept) -> None:
    """Writes the file, whole or not at all."""
    folder.mkdir(parents=True, exist_ok=True)
    with replacing(folder / ROUNDS) as beside:
        beside.write_bytes(msgspec.json.encode(kept))
