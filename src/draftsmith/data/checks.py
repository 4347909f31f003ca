"""What can be wrong with training data: one table of checks, what each means and what helps, and the verdict over them.

A check is `wrong` (such a row must not be trained on), `doubtful` (look at it; below its share it is only noted) or a
`note`. Counts are of rows, or of replies where a row holds several.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from draftsmith.data.ragged import Bools

Severity = Literal["wrong", "doubtful", "note"]
RANK: dict[Severity, int] = {"wrong": 0, "doubtful": 1, "note": 2}
NAMED = 5
"""Rows named per finding."""
SPARED = 0.05
"""A file with a smaller share of wrong rows is usable without them."""


@dataclass(frozen=True, slots=True)
class Check:
    """One kind of finding."""

    severity: Severity
    says: str
    cure: str = ""
    from_share: float = 0.0
    """Doubtful only from this share of all rows on; below, a note."""


STOP_SHARE = 0.5
"""A last id that this share of all replies has is taken for the stop id where nothing says which that is."""
CHECKS: dict[str, Check] = {
    "no_ids": Check(
        "wrong",
        "text only: re-tokenised text is not what the target said, neither in its ids nor, mostly, in its words",
        "capture the questions from the target (`draftsmith capture`); `draftsmith import` takes text for comparison",
    ),
    "no_mask": Check("wrong", "ids without a loss_mask: nothing says which of them were generated", "export them anew"),
    "broken_line": Check(
        "wrong",
        "not one JSON object to a line: cut short, or cut at a separator inside a text",
        "write it again, with one json.dumps per line and lines split at LF alone",
    ),
    "unusable_row": Check("wrong", "not a row of this format", "see the reasons"),
    "mask_length": Check("wrong", "loss_mask of another length than input_ids", "export them anew"),
    "mask_value": Check("wrong", "loss_mask holds other values than 0 and 1", "export them anew"),
    "mask_zero": Check(
        "wrong", "loss_mask is all zero: nothing is trained", "the tool that made it did not find the assistant's turns"
    ),
    "mask_ones": Check("wrong", "loss_mask is all ones: the prompt is trained too", "take it from prompt + reply ids"),
    "mask_early": Check(
        "wrong", "loss_mask starts early: ids of the prompt are trained", "do not shift it in the file"
    ),
    "mask_late": Check(
        "wrong", "loss_mask starts late: a reply's first ids are left out", "do not shift it in the file"
    ),
    "mask_prompt": Check("wrong", "loss_mask covers the header of a further turn", "mask all that was not generated"),
    "mask_ends_early": Check("doubtful", "loss_mask leaves out the stop id: the draft never learns to stop there"),
    "mask_start_unknown": Check(
        "note", "the template's header does not stand before the supervised ids: whether they start right is not known"
    ),
    "mask_after_delimiter": Check(
        "doubtful",
        "loss_mask starts after a think delimiter that the template does not write by itself: right only if the "
        "options it was served with do",
    ),
    "mask_on_delimiter": Check(
        "doubtful",
        "loss_mask covers the think delimiter that the template writes itself: right only if the options it was "
        "served with leave it out",
    ),
    "several_spans": Check("note", "several replies in one row; each is counted as a reply of its own"),
    "beyond_vocabulary": Check("wrong", "an id outside the target's vocabulary", "the ids are another tokenizer's"),
    "other_tokenizer": Check(
        "wrong", "made with another tokenizer than the one given", "give --tokenizer the target's own"
    ),
    "no_prompt": Check("wrong", "no prompt ids: everything would be trained on", "capture or export it anew"),
    "too_short": Check("wrong", "fewer than two generated ids: nothing to learn", "leave it out"),
    "doubled_id": Check("wrong", "an id that an earlier row has", "give each row its own"),
    "bad_span": Check("wrong", "a reasoning or answer span outside the generated ids", "capture it anew"),
    "doubled_bos": Check("wrong", "two BOS ids at the front", "encode rendered text without special tokens"),
    "empty_pair_first": Check(
        "wrong",
        "an empty think pair, then thinking that a lone delimiter closes: the turn was rendered again",
        "keep the ids as generated; never render a finished reply",
    ),
    "unclosed": Check(
        "wrong", "ended, but never closes its thinking", "look at the reply: a delimiter was lost, or it was cut off"
    ),
    "opened_twice": Check("doubtful", "opens thinking twice before closing it", from_share=0.01),
    "closed_twice": Check("doubtful", "closes thinking twice: the second time in its answer", from_share=0.01),
    "unopened": Check(
        "doubtful",
        "closes thinking that nothing opened: the prompt's end was lost, or the target leaves it out",
        from_share=0.01,
    ),
    "empty_pair": Check("note", "thinks nothing: an empty think pair"),
    "without_reasoning": Check(
        "doubtful", "no reasoning although the target thinks", "check the thinking mode that you serve", 0.5
    ),
    "earlier_reasoning": Check(
        "doubtful",
        "earlier turns without the reasoning that the last one has: templates strip it, and so did this file",
        "capture each turn from the target; import trains every turn as it is written",
    ),
    "reasoning_twice": Check("wrong", "reasoning both in its field and in the text", "keep one of them"),
    "no_answer": Check("doubtful", "no assistant answer: a question, not training data", "capture it"),
    "empty_answer": Check("doubtful", "an empty answer", from_share=0.01),
    "argument_types": Check(
        "doubtful", "tool arguments as text here and as a mapping there: Arrow loaders refuse the file", "choose one"
    ),
    "separators": Check(
        "doubtful",
        "holds U+2028, U+2029 or U+0085 unescaped: readers that use splitlines() cut the row in two",
        "write JSON with ASCII escapes",
    ),
    "rejected": Check("doubtful", "rejected by capture or import; not trained on", from_share=0.1),
    "failed": Check("doubtful", "failed: no reply; not trained on", from_share=0.1),
    "cut_in_reasoning": Check(
        "doubtful", "cut off while thinking: the draft sees few answers", "capture with more --max-tokens", 0.3
    ),
    "cut_in_answer": Check("doubtful", "cut off while answering", "capture with more --max-tokens", 0.3),
    "cut": Check("doubtful", "does not end in a stop id: cut off", "make the length limit larger", 0.3),
    "not_verified": Check(
        "doubtful",
        "ids that no engine vouches for (`rendered`): tokenised from text, or somebody's",
        "capture with an engine that returns ids (`draftsmith probe` says which)",
    ),
    "loops": Check(
        "doubtful",
        "repeats itself until its end",
        "sample as the model's makers recommend; greedy decoding often loops",
        0.05,
    ),
    "alike_elsewhere": Check("doubtful", "nearly the reply to another prompt", "look at them: refusals?", 0.1),
    "alike_here": Check("note", "nearly an earlier reply to the same prompt (samples, or a question asked twice)"),
    "text_differs": Check("doubtful", "its text column is not what its ids say", "the ids count; text is for people"),
    "retokenised": Check("note", "its text would tokenise to other ids: only the ids are exact"),
    "nothing": Check("wrong", "no row that can be trained on", "see the reasons"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """What one check found."""

    check: str
    severity: Severity
    says: str
    cure: str
    count: int
    of: int
    rows: list[str]
    """The first few rows that it is about."""


class Tally:
    """Counts per check, with the first rows' names."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.rows: dict[str, list[str]] = {}
        self.of: dict[str, int] = {}
        """Of how many a check counts, where that is not the number of rows."""

    def add(self, check: str, count: int, names: Sequence[str] = ()) -> None:
        """So many rows, the first of them by name."""
        self.counts[check] += count
        named = self.rows.setdefault(check, [])
        named += names[: NAMED - len(named)]

    def note(self, check: str, name: str) -> None:
        """One row."""
        self.add(check, 1, [name])

    def note_all(self, check: str, where: Bools, names: Sequence[str]) -> None:
        """All rows of a batch that `where` marks."""
        marked = np.flatnonzero(where)
        self.add(check, len(marked), [names[number] for number in marked[:NAMED]])

    def findings(self, rows: int) -> list[Finding]:
        """All that was found, worst first, of `rows` in all."""
        found = [self._finding(check, count, self.of.get(check, rows)) for check, count in self.counts.items() if count]
        return sorted(found, key=lambda finding: (RANK[finding.severity], -finding.count))

    def _finding(self, check: str, count: int, of: int) -> Finding:
        kind = CHECKS[check]
        severity: Severity = "note" if count < kind.from_share * of else kind.severity
        return Finding(
            check=check, severity=severity, says=kind.says, cure=kind.cure, count=count, of=of, rows=self.rows[check]
        )


def verdict(findings: Sequence[Finding], trainable: int, rows: int) -> str:
    """In one sentence, whether this is ready to train on."""
    wrong = [finding for finding in findings if finding.severity == "wrong"]
    doubts = [finding for finding in findings if finding.severity == "doubtful"]
    if wrong and (wrong[0].count > SPARED * rows or not trainable):
        more = f" ({len(wrong) - 1} more below)" if len(wrong) > 1 else ""
        return f"not fit to train on: {_share(wrong[0])}: {wrong[0].says}{more}"
    if wrong:
        return f"usable without the rows that are wrong: {_share(wrong[0])}: {wrong[0].says}"
    if doubts:
        return f"usable, but look first: {_share(doubts[0])}: {doubts[0].says}"
    return f"ready to train on: {trainable:,} replies, nothing wrong found"


def _share(finding: Finding) -> str:
    return f"{finding.count:,} of {finding.of:,}"
