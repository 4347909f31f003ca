from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest

from draftsmith.data.ragged import Ragged, from_arrow, from_rows


def rows(*values: list[int]) -> Ragged:
    return from_rows([np.array(row, np.int32) for row in values])


def lists(ragged: Ragged | None) -> list[list[int]]:
    assert ragged is not None
    return [ragged.row(number).tolist() for number in range(len(ragged))]


@pytest.mark.parametrize("kind", [pa.list_(pa.int32()), pa.large_list(pa.int64()), pa.list_(pa.bool_())])
def test_arrow_lists_come_in_whatever_their_type_nulls_as_empty_rows(kind: pa.DataType) -> None:
    column = pa.array([[True, False], None, [], [True]]).cast(kind)
    assert lists(from_arrow(column)) == [[1, 0], [], [], [1]]
    assert lists(from_arrow(column.slice(2))) == [[], [1]]


def test_batched_rows_of_one_row_each_are_taken_for_that_row() -> None:
    column = pa.array([[[1, 2, 3]], [[4]]], pa.list_(pa.list_(pa.int64())))
    assert lists(from_arrow(column)) == [[1, 2, 3], [4]]


@pytest.mark.parametrize("column", [pa.array(["a"]), pa.array([[0.5]]), pa.array([[1 << 40]])])
def test_what_is_no_list_of_ids_is_told_apart(column: pa.Array) -> None:
    assert from_arrow(column) is None


def test_a_sequence_is_found_within_rows_never_across_them() -> None:
    ragged = rows([1, 2, 3, 1, 2], [3, 1, 2, 3], [])
    assert ragged.find([1, 2, 3]).tolist() == [0, 6]
    assert ragged.find([2]).tolist() == [1, 4, 7]
    assert ragged.find([9, 9, 9, 9, 9, 9, 9, 9, 9, 9, 9]).tolist() == []


def test_first_last_and_count_are_per_row() -> None:
    ragged = rows([7, 1, 7], [], [1], [1, 7])
    hits = ragged.find([7])
    nowhere = len(ragged.values)
    assert ragged.first(hits).tolist() == [0, nowhere, nowhere, 5]
    assert ragged.last(hits).tolist() == [2, -1, -1, 5]
    assert ragged.count(hits).tolist() == [2, 0, 0, 1]


def test_cutting_rows_leaves_the_others_out() -> None:
    ragged = rows([1, 2, 3], [4, 5])
    assert lists(ragged.cut(np.array([1, 3]), np.array([3, 3]))) == [[2, 3], []]
    assert ragged.cut(ragged.starts, ragged.ends) is ragged
