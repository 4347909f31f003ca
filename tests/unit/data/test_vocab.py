from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from draftsmith.data import vocab
from draftsmith.errors import UserError
from draftsmith.progress import Progress
from draftsmith.recipe import VocabSettings
from draftsmith.target.thinking import Delimiters, delimiters_json
from draftsmith.trace import Trace, held_out, write_traces

DELIMITERS = Delimiters("think", ((2, 3),), ((4, 3),), "<think>", "</think>")
METADATA = {
    "held_out": "0.5",
    "vocab_size": "20",
    "special_ids": "[0, 1]",
    "stop_ids": "[1]",
    "delimiters": delimiters_json(None),
}
KEYS = [f"question {i}" for i in range(40)]
TRAIN = next(key for key in KEYS if not held_out(key, 0.5))
HELD_OUT = next(key for key in KEYS if held_out(key, 0.5))


def trace(key: str, generated: Sequence[int], **values: Any) -> Trace:
    return Trace(trace_id=key, question_key=key, prompt_ids=[9, 9, 9], generated_ids=generated, **values)


def built(
    make_stage: Any, size: int, *traces: Trace, **metadata: str
) -> tuple[vocab.Vocab, dict[str, Any], dict[str, Any]]:
    """The vocabulary, coverage.json and manifest counts that the stage makes of `traces`."""
    stage = make_stage("vocab")
    folder = stage.folder("traces")
    folder.mkdir()
    write_traces(folder / "part-00000.parquet", traces, {**METADATA, **metadata})
    counts = vocab.build(stage, VocabSettings(size=size), Progress(quiet=True))
    return vocab.load_vocab(stage.work), json.loads((stage.work / "coverage.json").read_text()), counts


def test_offsets_resolve_to_the_kept_ids() -> None:
    # P27
    made = vocab.make_vocab(np.array([5, 9, 12]), 13)
    assert made.d2t.tolist() == [5, 8, 10]
    assert (np.arange(3) + made.d2t).tolist() == [5, 9, 12]
    assert made.t2d.tolist() == [i in (5, 9, 12) for i in range(13)]
    assert (made.d2t.dtype, made.t2d.dtype) == (np.int64, np.bool_)


def test_ids_past_the_tokenizers_are_refused_by_trace(make_stage: Any) -> None:
    with pytest.raises(UserError, match=rf"trace {TRAIN} holds id 20, the tokenizer .*toy.* has 20 ids"):
        built(make_stage, 10, trace(TRAIN, [9, 20]), tokenizer="toy")


def test_too_few_distinct_ids_are_filled_up_with_the_lowest_unseen(make_stage: Any) -> None:
    # P27: six distinct ids seen, ten wanted, specials always kept
    made, _, counts = built(make_stage, 10, trace(TRAIN, [9, 8, 10, 12, 14, 16, 18]))
    assert made.ids.tolist() == [0, 1, 2, 3, 8, 10, 12, 14, 16, 18]
    assert counts["distinct_seen"] == 6


@pytest.mark.parametrize("size", [0, -1, 21])
def test_sizes_that_cannot_be_are_refused(make_stage: Any, size: int) -> None:
    # P27
    with pytest.raises(UserError, match=f"vocab size {size}: expected 1 to 20"):
        built(make_stage, size, trace(TRAIN, [9, 8]))


def test_the_targets_own_size_is_the_identity(make_stage: Any) -> None:
    # P27
    made, coverage, _ = built(make_stage, 20, trace(TRAIN, [9, 8]))
    assert not made.d2t.any()
    assert made.t2d.all()
    assert coverage["train"]["all"]["share"] == 1.0


def test_special_stop_and_delimiter_ids_stay_whatever_their_count(make_stage: Any) -> None:
    spoken = trace(TRAIN, [9, *([7] * 9), *([8] * 8), *([6] * 7)])
    made, _, _ = built(make_stage, 7, spoken, delimiters=delimiters_json(DELIMITERS), stop_ids="[1, 19]")
    assert made.ids.tolist() == [0, 1, 2, 3, 4, 7, 19]


def test_a_size_below_the_ids_that_must_stay_is_refused(make_stage: Any) -> None:
    with pytest.raises(UserError, match="choose a size of at least 5"):
        built(make_stage, 4, trace(TRAIN, [9, 8]), delimiters=delimiters_json(DELIMITERS))


def test_the_most_frequent_ids_win_and_equals_go_to_the_lower_id() -> None:
    counts = np.array([0, 5, 3, 3, 9, 0])
    assert vocab.choose_ids(counts, 3, ()).tolist() == [1, 2, 4]


def test_only_labels_of_the_training_split_are_counted(make_stage: Any) -> None:
    # the first generated id is never a label, prompts and held-out questions never count
    made, coverage, _ = built(make_stage, 3, trace(TRAIN, [17, 12]), trace(HELD_OUT, [17, 13, 13, 13, 12]))
    assert made.ids.tolist() == [0, 1, 12]
    assert coverage["train"]["all"] == {"labels": 1, "covered": 1, "share": 1.0}
    assert coverage["held_out"]["all"] == {"labels": 4, "covered": 1, "share": 0.25}


def test_rejected_and_failed_traces_are_not_counted(make_stage: Any) -> None:
    bad = [trace(TRAIN, [9, 15, 15, 15], state=state) for state in ("rejected", "failed")]
    made, coverage, _ = built(make_stage, 3, trace(TRAIN, [9, 8]), *bad)
    assert made.ids.tolist() == [0, 1, 8]
    assert coverage["train"]["all"]["labels"] == 1


def test_coverage_is_told_apart_for_reasoning_and_answer(make_stage: Any) -> None:
    spoken = trace(TRAIN, [5, 6, 7, 2, 8, 1], reasoning_span=(0, 3), answer_span=(4, 6))
    held = trace(HELD_OUT, [6, 7, 2, 11, 1], reasoning_span=(0, 2), answer_span=(3, 5))
    _, coverage, counts = built(make_stage, 6, spoken, held)
    assert coverage["train"]["reasoning"]["labels"] == 2
    assert coverage["train"]["answer"]["labels"] == 2
    assert coverage["held_out"]["reasoning"] == {"labels": 1, "covered": 1, "share": 1.0}
    assert coverage["held_out"]["answer"] == {"labels": 2, "covered": 1, "share": 0.5}
    assert counts["coverage_held_out_answer"] == 0.5


def test_coverage_of_what_was_never_seen_is_unknown_and_not_zero(make_stage: Any) -> None:
    _, coverage, counts = built(make_stage, 6, trace(TRAIN, [9, 8], answer_span=(0, 2)))
    assert coverage["train"]["reasoning"]["share"] is None
    assert counts["coverage_held_out"] is None


def test_a_training_split_without_labels_is_refused(make_stage: Any) -> None:
    with pytest.raises(UserError, match=r"no trace of the training split has labels to count \(1 traces in all\)"):
        built(make_stage, 6, trace(HELD_OUT, [9, 8]))


def test_random_maps_survive_disk(tmp_path: Path) -> None:
    chance = np.random.default_rng(0)
    for _ in range(20):
        target = int(chance.integers(1, 200))
        ids = np.sort(chance.choice(target, size=int(chance.integers(1, target + 1)), replace=False))
        made = vocab.make_vocab(ids, target)
        vocab.save_vocab(tmp_path, made)
        found = vocab.load_vocab(tmp_path)
        assert (found.ids == ids).all()
        assert (found.ids == np.arange(len(ids)) + found.d2t).all()
        assert (np.flatnonzero(found.t2d) == ids).all()


@pytest.mark.parametrize(
    ("d2t", "message"),
    [
        ([5, 9, 12], "points to target id 14 of 13; it holds absolute ids instead of offsets"),
        ([0, 1, 2], "differ from the 3 ids marked in t2d; absolute ids instead of offsets"),
        ([5, 8, 9], "differ from the 3 ids marked in t2d"),
        ([9, 4, 10], "do not increase"),
        ([-1, 8, 10], "points to target id -1 of 13"),
        ([5, 8], "resolves to 2 ids that differ from the 3 ids"),
    ],
    ids=["absolute", "arange", "other ids", "unsorted", "negative", "too few"],
)
def test_maps_that_are_not_offsets_are_refused_by_name(d2t: list[int], message: str) -> None:
    # P27
    mask = np.isin(np.arange(13), [5, 9, 12])
    with pytest.raises(UserError, match=f"draft: expected offsets .*{message}"):
        vocab.check_vocab(np.array(d2t), mask, "draft")


def test_absolute_ids_are_found_out_even_where_they_stay_in_range() -> None:
    mask = np.isin(np.arange(30), [5, 9, 12])
    with pytest.raises(UserError, match="it holds absolute ids instead of offsets"):
        vocab.check_vocab(np.array([5, 9, 12]), mask, "draft")


@pytest.mark.parametrize("d2t", [np.zeros((2, 2), np.int64), np.zeros(0, np.int64), np.zeros(2, np.float32)])
def test_maps_of_another_form_are_refused(d2t: Any) -> None:
    with pytest.raises(UserError, match="expected d2t as a list of integers"):
        vocab.check_vocab(d2t, np.ones(2, np.bool_), "draft")


def test_vocabularies_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="`draftsmith vocab` makes it"):
        vocab.load_vocab(tmp_path)
    save_file({"d2t": np.zeros(2, np.int64)}, tmp_path / "vocab.safetensors")
    with pytest.raises(UserError, match="expected tensors d2t and t2d, found d2t"):
        vocab.load_vocab(tmp_path)
    (tmp_path / "vocab.safetensors").write_bytes(b"{}")
    with pytest.raises(UserError, match="expected safetensors"):
        vocab.load_vocab(tmp_path)
