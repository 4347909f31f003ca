"""What diagnosis says: links of the chain with their values, and suspects with the effect of putting them right."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from draftsmith.measure.acceptance import BROKEN_LENGTH
from draftsmith.measure.walks import Fell, Loss, Walk

NAMES = {
    "data": "training replies, what the draft learned from",
    "training": "trained draft, teacher-forced on stored states",
    "chain": "chain from stored states, simulated",
    "live": "reference decoder, the target's states as they are now",
    "export": "exported files, as the engine reads them",
    "engine states": "hidden states inside the engine",
    "engine": "the engine's own counters",
}
"""The chain, in order."""

SHARES = ("training", "engine states")
"""Links whose value is a share, not an acceptance length."""
CLEARLY = 0.5
"""A repair that gives back this share of a loss explains it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Suspect:
    """One hypothesis that was tried, with its repair applied to a copy in memory."""

    name: str
    link: str
    found: str
    """What speaks for it."""
    change: str
    """What to do about it."""
    before: float | None = None
    after: float | None = None
    """Acceptance length as it is and with the repair; None where no repair can be tried in memory."""
    restored: float = 0.0
    """Share of the link's loss that the repair gives back."""
    certain: bool = False
    """Files or states themselves show it, whatever acceptance does."""

    @property
    def guilty(self) -> bool:
        """Whether it explains a fall, or stands in the files."""
        return self.certain or self.restored >= CLEARLY


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """One measuring point. `value` is an acceptance length (of `training`, a share); None: not measured, see `note`."""

    name: str
    value: float | None
    questions: int
    noise: float | None
    """Half of the 95 % interval."""
    loss: Loss | None
    """Against the link before it."""
    note: str = ""
    suspects: tuple[Suspect, ...] = ()

    @property
    def fell(self) -> Fell:
        """Whether this is where acceptance goes, or where files show a fault."""
        if any(suspect.certain for suspect in self.suspects):
            return "yes"
        return self.loss.fell if self.loss else "no"


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """The whole finding."""

    verdict: str
    link: str | None
    """The first link at fault; None where nothing is."""
    suspect: str | None
    clean: bool
    links: tuple[Link, ...]
    advice: tuple[str, ...]
    draft_tokens: int
    questions: int
    engine: str

    def to_json(self) -> dict[str, Any]:
        """For diagnosis.json."""
        return {**asdict(self), "links": [{**asdict(one), "fell": one.fell} for one in self.links]}


def measured(name: str, walk: Walk, loss: Loss | None = None, suspects: Sequence[Suspect] = (), note: str = "") -> Link:
    """A link whose value is the walk's acceptance length; none where no question had a step."""
    if not walk.cycles.sum():
        return skipped(name, "; ".join(filter(None, ("no question had a step to measure", note))), suspects)
    return Link(
        name=name,
        value=round(walk.length, 4),
        questions=len(walk.keys),
        noise=walk.half_width,
        loss=loss,
        note=note,
        suspects=ranked(suspects),
    )


def skipped(name: str, why: str, suspects: Sequence[Suspect] = ()) -> Link:
    """A link that was not measured."""
    return Link(name=name, value=None, questions=0, noise=None, loss=None, note=why, suspects=ranked(suspects))


def ranked(suspects: Sequence[Suspect]) -> tuple[Suspect, ...]:
    """The one whose repair gives back most comes first; among equals what files show, then the order they came in."""
    return tuple(sorted(suspects, key=lambda one: (-round(min(one.restored, 1.0) / 0.05), not one.certain)))


def concluded(links: Sequence[Link], draft_tokens: int, questions: int, engine: str) -> Diagnosis:
    """The first link at fault, its first suspect, and one sentence."""
    guilty = next((link for link in links if link.fell == "yes"), None)
    unsure = next((link for link in links if link.fell == "cannot tell"), None)
    first = next((one for one in guilty.suspects if one.guilty), None) if guilty else None
    advice = [one.change for one in guilty.suspects if one.guilty] if guilty else []
    if guilty and not advice:
        advice = ["none of the suspects tried explains it: look at what differs between this link and the one before"]
    return Diagnosis(
        verdict=_sentence(links, guilty, first, unsure),
        link=guilty.name if guilty else None,
        suspect=first.name if first else None,
        clean=guilty is None and unsure is None and not _broken(links) and any(one.value is not None for one in links),
        links=tuple(links),
        advice=tuple(dict.fromkeys(advice)),
        draft_tokens=draft_tokens,
        questions=questions,
        engine=engine,
    )


def _sentence(links: Sequence[Link], guilty: Link | None, first: Suspect | None, unsure: Link | None) -> str:
    lengths = [link for link in links if link.value is not None and link.name not in SHARES]
    last = lengths[-1] if lengths else None
    if guilty is None and unsure is not None:
        return (
            f"cannot tell: {unsure.questions} questions are too few to say whether acceptance falls at "
            f"`{unsure.name}` ({NAMES[unsure.name]}); ask more with --limit"
        )
    if guilty is None and _broken(links):
        return (
            f"the draft is not working ({_broken(links)} tokens per target forward), and none of the suspects tried "
            "explains it; more data will not change that"
        )
    if guilty is None and all(link.value is None for link in links):
        return "nothing was measured, so where acceptance falls is not known; each link says why"
    if guilty is None:
        reached = f" ({last.value:.2f} tokens per target forward at `{last.name}`)" if last and last.value else ""
        left = ", ".join(f"`{link.name}`" for link in links if link.value is None)
        where = f"in the links measured{reached}; not measured: {left}" if left else f"anywhere in the chain{reached}"
        return f"clean: acceptance does not fall {where}; what is missing, training must bring"
    cause = f"{first.name}: {first.found}" if first else "none of the suspects tried explains it"
    if guilty.loss and guilty.loss.fell == "yes" and guilty.value is not None and guilty.name != "training":
        before = guilty.value + guilty.loss.loss
        return f"acceptance falls at `{guilty.name}` ({before:.2f} to {guilty.value:.2f}): {cause}"
    return f"the fault is at `{guilty.name}` ({NAMES[guilty.name]}): {cause}"


def _broken(links: Sequence[Link]) -> str:
    """The last acceptance length measured, if it says that the draft does nothing (contract 8); else empty."""
    values = [link.value for link in links if link.value is not None and link.name not in SHARES]
    return f"{values[-1]:.2f}" if values and values[-1] <= BROKEN_LENGTH else ""
