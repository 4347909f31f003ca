"""The quality gate: stops a capture whose replies show that the rest would be worthless, before it is paid for.

Three looks: the first FIRST replies, all of them useless (the fast path); then every share of `GateLimits`, from
`limits.first` replies on, over the latest `limits.window`; and requests that fail one after the other. It sees the
replies of this process, costs about 20 microseconds for each, and holds no trace, only ids and counts.
"""

from __future__ import annotations

import json
from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from draftsmith.capture.quality import CAUSES, LOOP_TAIL, NEVER_ASKED, Fault, cure_of, faults, likeness, loops, mode_of
from draftsmith.errors import GateStop
from draftsmith.progress import harmless
from draftsmith.recipe import GateLimits
from draftsmith.target.thinking import Delimiters
from draftsmith.trace import Trace

FIRST = 8
EXAMPLES = 5
SAMPLED = 8
"""After the first verdict, one reply in so many is looked at for loops."""
CONTRADICTIONS = ("no reasoning", "unasked reasoning")
USELESS = frozenset({*CONTRADICTIONS, "rejected", "failed"})
"""Causes that the fast path knows."""


@dataclass(frozen=True, slots=True)
class _Seen:
    """What is remembered of a reply in the window."""

    trace_id: str
    faults: tuple[Fault, ...]
    bases: tuple[str, ...]
    """What it counts for: `replies`, `looked` (for loops), `thinks`, `not` or `open` (its mode), `reasoned`."""
    likeness: int | None


BASES = {"no reasoning": "thinks", "lost reasoning": "open", "unasked reasoning": "not", "loops": "looked"}
"""Shares of these causes are over a part of the replies; all others are over all."""


class Gate:
    """Sees every trace that a request was made for.

    `withdrawn` holds the trace ids that a verdict was about where its cause can be mended: the next run asks for them
    again. Whoever drives the gate empties it after each look.
    """

    def __init__(
        self,
        limits: GateLimits,
        delimiters: Delimiters | None,
        *,
        thought: bool = False,
        warn: bool,
        say: Callable[[str], None],
        event: Callable[..., None],
    ) -> None:
        """Args:
        limits: shares above which it acts.
        delimiters: the target's.
        thought: the probe's test reply held reasoning.
        warn: only say a verdict; else it stops the run.
        say: what people read.
        event: writes to the event log.
        """
        self.limits, self.delimiters, self.warn, self.say, self.event = limits, delimiters, warn, say, event
        self.thought = thought and delimiters is not None
        self.window: deque[_Seen] = deque()
        self.seen = self.faults_in_a_row = 0
        self.counts: Counter[str] = Counter()
        self.alike: dict[int, str] = {}
        self.examples: dict[str, deque[tuple[str, str, str]]] = {cause: deque(maxlen=EXAMPLES) for cause in CAUSES}
        self.withdrawn: list[str] = []
        self.warned: Counter[str] = Counter()
        """Causes that were only said, each with how many replies of this process have it."""
        self.stopped_by = ""

    def look(self, trace: Trace, *, passing_fault: bool) -> None:
        """One more trace.

        Raises:
            GateStop: the replies are not worth going on, or the server stopped answering. Once only: replies that were
                in flight are still looked at, and withdrawn if they have what stopped the run.
        """
        found = self.note(trace)
        if self.stopped_by:
            if any(cause == self.stopped_by for cause, _ in found) and CAUSES[self.stopped_by].again:
                self.withdrawn.append(trace.trace_id)
            return
        self.faults_in_a_row = self.faults_in_a_row + 1 if passing_fault else 0
        if self.faults_in_a_row == FIRST:
            self.stopped_by = "failed"
            raise GateStop(
                f"the last {FIRST} requests failed ({trace.error}); what was captured is kept: "
                "look at the server, then run the same command to go on"
            )
        if self.seen == FIRST:
            self._judge_first()
        if self.seen == self.limits.first:
            self._hint()
            self._judge(CAUSES)
        elif self.seen > self.limits.first:
            self._judge(cause for cause, _ in found)

    def note(self, trace: Trace) -> tuple[Fault, ...]:
        """One more trace, without a verdict: what is wrong with it."""
        if trace.error.startswith(NEVER_ASKED):
            return ()
        found, bases = list(faults(trace, self.delimiters)), ["replies"]
        if trace.state != "failed":
            thinks = mode_of(trace.sampling).thinks
            if any(cause == "no reasoning" for cause, _ in found):  # what was lost was there
                thinks = True
            bases += ["reasoned"] if trace.reasoning_span is not None else []
            if thinks is not None:
                bases.append("thinks" if thinks else "not")
            elif trace.state != "rejected":
                bases.append("open")
                if self.thought and trace.reasoning_span is None:
                    found.append(("lost reasoning", "the probe's reply had it"))
            if self.seen < self.limits.first or self.seen % SAMPLED == 0:
                bases.append("looked")
                if loops(trace.generated_ids):
                    found.append(("loops", f"in their last {LOOP_TAIL:,} ids"))
        alike = likeness(trace)
        if alike is not None and self.alike.setdefault(alike, trace.question_key) != trace.question_key:
            found.append(("duplicates", "as another question's"))
        self._remember(_Seen(trace.trace_id, tuple(found), tuple(bases), alike))
        for cause, kind in found:
            self.examples[cause].append((trace.messages, (trace.answer or trace.reasoning)[-200:], trace.error or kind))
            if cause in self.warned:
                self.warned[cause] += 1
        return tuple(found)

    def end(self, earlier: Iterable[Trace]) -> None:
        """Everything was asked: the verdict on a run too small for `limits.first`.

        Args:
            earlier: traces that an earlier process captured, looked at as far as this one's are too few.

        Raises:
            GateStop: as `look`; with fewer than FIRST replies only where all contradict the thinking mode.
        """
        if not self.seen or self.seen >= self.limits.first:
            return
        for trace in earlier:
            if self.seen < self.limits.first:
                self.note(trace)
        if self.seen >= FIRST:
            self._judge(CAUSES)
            return
        for cause in CONTRADICTIONS:
            if 0 < self.counts[cause] == self.counts[BASES[cause]]:
                self._act(cause, self.counts[cause])

    def _remember(self, seen: _Seen) -> None:
        self.seen += 1
        self.window.append(seen)
        self._count(seen, 1)
        if len(self.window) > self.limits.window:
            gone = self.window.popleft()
            self._count(gone, -1)
            if gone.likeness is not None:
                self.alike.pop(gone.likeness, None)

    def _count(self, seen: _Seen, step: int) -> None:
        for base in seen.bases:
            self.counts[base] += step
        for cause in {cause for cause, _ in seen.faults}:
            self.counts[cause] += step

    def _judge_first(self) -> None:
        """The fast path: not one of the first replies is of use."""
        if all(any(cause in USELESS for cause, _ in seen.faults) for seen in self.window):
            found = Counter(cause for seen in self.window for cause, _ in seen.faults if cause in USELESS)
            self._act(found.most_common(1)[0][0], FIRST)

    def _hint(self) -> None:
        """Nobody asked for thinking or against it, and it may be meant: worth a word, no verdict."""
        if (
            self.delimiters
            and not self.thought
            and not any(self.counts[name] for name in ("thinks", "not", "reasoned"))
        ):
            self.say(
                f"capture: the tokenizer knows {self.delimiters.open_text}, but none of the first {self.seen} replies "
                "thinks; if the target should, switch it on with --template-options"
            )

    def _judge(self, causes: Iterable[str]) -> None:
        for cause in causes:
            base, count = self.counts[BASES.get(cause, "replies")], self.counts[cause]
            if CAUSES[cause].limit:
                limit: float = getattr(self.limits, CAUSES[cause].limit)
                past = count > limit * base
            else:  # what one reply refutes
                past = count == base > len(self.window) // 2
            if base >= FIRST and past:
                self._act(cause, base)

    def _act(self, cause: str, base: int) -> None:
        """Says a verdict once, and stops the run unless it is only to be said."""
        if cause in self.warned:
            return
        message = self._message(cause, base)
        count = self.counts[cause]
        self.event("gate", cause=cause, count=count, of=base, action="warn" if self.warn else "stop", message=message)
        if self.warn:
            self.warned[cause] = count
            self.say("\n".join([f"capture: {message}", *self._shown(cause)]))
            return
        self.stopped_by = cause
        if CAUSES[cause].again:
            self.withdrawn += [seen.trace_id for seen in self.window if any(cause == found for found, _ in seen.faults)]
        raise GateStop(message, details=self._shown(cause))

    def _message(self, cause: str, base: int) -> str:
        kinds = Counter(kind for seen in self.window for found, kind in seen.faults if found == cause)
        count, which = self.counts[cause], "first" if len(self.window) == self.seen else "last"
        kind = kinds.most_common(1)[0][0]
        shown = kind if len(kinds) == 1 else ", ".join(f"{number} {kind}" for kind, number in kinds.most_common(3))
        return (
            f"{'all' if count == base else count} of the {which} {base} replies {CAUSES[cause].words} ({shown}); "
            f"{cure_of(cause, kind)}; what was captured is kept (--on-gate warn goes on all the same)"
        )

    def _shown(self, cause: str) -> tuple[str, ...]:
        return tuple(_example(*example) for example in self.examples[cause])


def _example(messages: str, reply: str, kind: str) -> str:
    """A question's start, its reply's end, and what is wrong."""
    asked = [turn["content"] for turn in json.loads(messages) if turn["role"] == "user"]
    start, end = _line(asked[-1] if asked else ""), _line(reply)
    start = start if len(start) <= 60 else start[:60] + "..."
    end = end if len(end) <= 60 else "..." + end[-60:]
    return harmless(f"  {start!r} -> {end!r}: {_line(kind)}")


def _line(text: str) -> str:
    return " ".join(text.split())
