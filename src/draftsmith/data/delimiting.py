"""Think delimiters in a batch of replies: where reasoning and answer lie, and replies whose delimiters do not pair up.

By ids alone, in a few numpy passes. A delimiter that is several ids long is found in the spellings that `Delimiters`
lists, which leaves out a spelling nobody foresaw. The order within gpt-oss channels is not looked at: several analysis
messages are usual there.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from draftsmith.data.ragged import Bools, Ints, Ragged
from draftsmith.target.thinking import TAIL, Delimiters

SLACK = 4
"""Ids of whitespace that may stand between a delimiter and the end of the prompt, or the start of the reply."""
PAIR_SLACK = 2
"""Ids of whitespace that may stand within an empty pair."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Structure:
    """Per reply; spans are int64 [replies, 2] over its own ids, (-1, -1) for none."""

    reasoning: Ints
    answer: Ints
    faults: dict[str, Bools]
    """Name of a check -> the replies it is about."""


def structure(prompts: Ragged, replies: Ragged, finished: Bools, delimiters: Delimiters) -> Structure:
    """Looks at the delimiters of every reply.

    Args:
        prompts: ids before each reply.
        replies: generated ids.
        finished: whether the target itself ended the reply.
        delimiters: the target's.
    """
    opened, switched_off = _prompt_state(prompts, delimiters)
    open_at, open_end = _positions(replies, delimiters.open_ids)
    close_at, close_end = _positions(replies, delimiters.close_ids)
    nowhere = len(replies.values)
    first_close, first_open = replies.first(close_at), replies.first(open_at)
    closed, closes = first_close < nowhere, replies.count(close_at)
    leads = opened | ((first_open < nowhere) & (first_open - replies.starts <= SLACK))
    opens = replies.count(open_at[open_at < first_close[replies.rows_of(open_at)]])
    depth = opens + opened
    begin = np.where(opens > 0, replies.first(open_end - 1) + 1, replies.starts)
    thinks = closed & ((depth > 0) | ~switched_off) | leads
    to = np.where(closed, first_close, replies.ends)
    after = np.where(closed, np.minimum(replies.first(close_end - 1) + 1, replies.ends), replies.ends)
    empty = closed & (depth > 0) & (to - begin <= PAIR_SLACK)
    faults = {
        "unclosed": finished & leads & ~closed,
        "unopened": closed & (depth == 0) & ~switched_off,
        "opened_twice": depth > 1,
        "empty_pair_first": (empty & (closes > 1)) | (closed & (depth == 0) & switched_off),
        "empty_pair": empty & (closes == 1),
        "closed_twice": (closes > 1) & ~empty,
    }
    return Structure(
        reasoning=_spans(begin - replies.starts, to - replies.starts, thinks & (to > begin)),
        answer=_spans(np.where(thinks, after, replies.starts) - replies.starts, replies.lengths, closed | ~thinks),
        faults={} if delimiters.family == "gpt-oss" else faults,
    )


def _prompt_state(prompts: Ragged, delimiters: Delimiters) -> tuple[Bools, Bools]:
    """Whether each prompt ends inside thinking, and whether it ends in a closed pair."""
    tails = prompts.cut(np.maximum(prompts.starts, prompts.ends - TAIL), prompts.ends)
    opened, closed = (
        tails.last(_positions(tails, ways)[1] - 1) for ways in (delimiters.open_ids, delimiters.close_ids)
    )
    ends_open = (opened > closed) & (tails.ends - opened - 1 <= SLACK)
    ends_closed = (closed > opened) & (tails.ends - closed - 1 <= SLACK)
    return ends_open, ends_closed


def _positions(rows: Ragged, ways: tuple[tuple[int, ...], ...]) -> tuple[Ints, Ints]:
    """Where a delimiter starts and ends, ascending; of spellings that start together the longest."""
    ends: dict[int, int] = {}
    for way in sorted(ways, key=len):
        ends |= {at: at + len(way) for at in rows.find(way).tolist()}
    starts = sorted(ends)
    return np.array(starts, np.int64), np.array([ends[at] for at in starts], np.int64)


def _spans(starts: Ints, ends: Ints, there: Bools) -> Ints:
    return np.where(there[:, None], np.stack([starts, ends], axis=1), -1)
