from __future__ import annotations

import numpy as np
import numpy.typing as npt

from draftsmith.data import likeness
from draftsmith.data.ragged import from_rows

RNG = np.random.default_rng(0)


def reply(length: int = 400) -> npt.NDArray[np.int32]:
    return RNG.integers(0, 30_000, length).astype(np.int32)


def changed(ids: npt.NDArray[np.int32], places: list[int]) -> npt.NDArray[np.int32]:
    copy = ids.copy()
    copy[places] += 1
    return copy


def first_alike(*rows: npt.NDArray[np.int32]) -> list[int]:
    found: list[int] = likeness.first_alike(likeness.sketches(*likeness.shingles(from_rows(rows)))).tolist()
    return found


def test_a_copy_with_one_id_changed_is_alike_and_another_reply_is_not() -> None:
    one, other = reply(), reply()
    assert first_alike(one, other, changed(one, [200]), other) == [-1, -1, 0, 1]


def test_a_reply_with_one_id_in_eight_changed_is_another_reply() -> None:
    one = reply()
    assert first_alike(one, changed(one, list(range(0, 400, 8)))) == [-1, -1]


def test_likeness_does_not_depend_on_the_batch_a_reply_stands_in() -> None:
    one, other = reply(), reply(5000)
    alone = likeness.sketches(*likeness.shingles(from_rows([one])))
    beside = likeness.sketches(*likeness.shingles(from_rows([other, one])))
    assert (alone[0] == beside[1]).all()
    assert likeness.row_hashes(from_rows([one]))[0] == likeness.row_hashes(from_rows([other, one]))[1]


def test_replies_too_short_for_a_shingle_are_alike_to_nothing() -> None:
    assert first_alike(reply(3), reply(3), reply(0)) == [-1, -1, -1]


def test_rows_of_other_ids_or_another_order_hash_apart() -> None:
    hashes = likeness.row_hashes(from_rows([np.array(row) for row in ([1, 2], [2, 1], [1, 2, 0], [1, 2])]))
    assert len(set(hashes.tolist())) == 3 and hashes[0] == hashes[3]
