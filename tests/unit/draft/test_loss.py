from __future__ import annotations

import pytest
import torch
from torch import Tensor

from draftsmith.draft import loss as loss_module
from draftsmith.draft.eagle3 import Eagle3Draft
from draftsmith.draft.loss import LabelRows, label_rows, proposals, ttt_loss
from draftsmith.draft.unroll import Batch, shifted, unroll
from toy_draft import HIDDEN, KEPT, tiny_batch, tiny_draft

STEPS = 3
WEIGHTS = [1.0, 0.5, 0.25]
LENGTHS = [(5, 19), (3, 12), (4, 2)]


def teacher(final: Tensor) -> Tensor:
    head = torch.randn(len(KEPT), HIDDEN, generator=torch.Generator().manual_seed(6))
    return final.float() @ head.T


def run(draft: Eagle3Draft, batch: Batch, rows: LabelRows | None = None) -> tuple[Tensor, Tensor]:
    rows = rows or label_rows(batch, draft.t2d, STEPS)
    outputs = list(unroll(draft, batch, STEPS))
    return ttt_loss(draft, teacher, batch.final, rows, outputs, WEIGHTS, torch.float32)


def plain(draft: Eagle3Draft, batch: Batch) -> tuple[Tensor, Tensor]:
    """The definition, row by row of the full logits."""
    sums = torch.zeros(2, STEPS)
    total = torch.zeros(())
    for step, output in enumerate(unroll(draft, batch, STEPS)):
        counted = batch.valid(step) & draft.t2d[shifted(batch.argmax, step)]
        wanted = teacher(shifted(batch.final, step)[counted]).softmax(-1)
        logits = draft.logits(output[counted])
        part = -(wanted * logits.log_softmax(-1)).sum()
        total = total + WEIGHTS[step] * part
        sums[0, step] = part.detach()
        sums[1, step] = (logits.argmax(-1) == wanted.argmax(-1)).sum()
    return total, sums


@pytest.mark.parametrize("logits_at_once", [1 << 25, 3 * len(KEPT)], ids=["whole", "chunked"])
def test_loss_sums_and_gradients_equal_the_plain_definition(
    logits_at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loss_module, "LOGITS_AT_ONCE", logits_at_once)
    batch = tiny_batch(LENGTHS)
    ours, reference = tiny_draft(), tiny_draft()
    found, sums = run(ours, batch)
    expected, expected_sums = plain(reference, batch)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(sums, expected_sums)
    found.backward()
    expected.backward()
    assert sums[1].sum() > 0
    for name, parameter in reference.trained().items():
        torch.testing.assert_close(ours.get_parameter(name).grad, parameter.grad, rtol=1e-4, atol=1e-6, msg=name)


def test_counted_rows_are_those_whose_teacher_argmax_is_in_the_draft_vocabulary() -> None:
    draft, batch = tiny_draft(), tiny_batch(LENGTHS)
    rows = label_rows(batch, draft.t2d, STEPS)
    for step in range(STEPS):
        counted = batch.valid(step) & draft.t2d[shifted(batch.argmax, step)]
        assert rows.per_step[step] == int(counted.sum())
    assert 0 < rows.per_step[2] < rows.per_step[0] < int(batch.count.sum())


def test_padding_changes_nothing() -> None:
    # P35: the loss must not depend on how much padding a batch has.
    draft = tiny_draft()
    alone, sums_alone = run(draft, tiny_batch([(3, 6)]))
    padded, sums_padded = run(draft, tiny_batch([(3, 6)], pad=20))
    torch.testing.assert_close(padded, alone)
    torch.testing.assert_close(sums_padded, sums_alone)


def test_a_batch_is_the_sum_of_its_traces() -> None:
    draft = tiny_draft()
    together, sums = run(draft, tiny_batch(LENGTHS))
    parts = [run(draft, tiny_batch([length])) for length in LENGTHS]
    torch.testing.assert_close(together, sum((part[0] for part in parts), torch.zeros(())))
    torch.testing.assert_close(sums, sum((part[1] for part in parts), torch.zeros(2, STEPS)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_batch_without_a_counted_row_has_loss_zero_and_finite_zero_gradients(dtype: torch.dtype) -> None:
    # P35
    draft, batch = tiny_draft(), tiny_batch(LENGTHS)
    outside = Batch(**{**{f: getattr(batch, f) for f in batch.__slots__}, "argmax": torch.ones_like(batch.argmax)})
    rows = label_rows(outside, draft.t2d, STEPS)
    assert rows.per_step == (0, 0, 0)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype == torch.bfloat16):
        outputs = list(unroll(draft, outside, STEPS))
        found, sums = ttt_loss(draft, teacher, outside.final, rows, outputs, WEIGHTS, dtype)
    found.backward()
    assert found.item() == 0.0 and sums.sum().item() == 0.0
    gradients = [parameter.grad for parameter in draft.trained().values() if parameter.grad is not None]
    assert gradients and all(bool((gradient == 0).all()) for gradient in gradients)


def test_the_divisor_is_the_number_of_counted_labels_and_not_of_slots() -> None:
    # P35: masks that sum to 4 and 0, 16 slots: the mean is over 4.
    draft = tiny_draft()
    batch = tiny_batch([(3, 9), (4, 9)])
    argmax = torch.ones_like(batch.argmax)
    argmax[0, :4] = KEPT[1]
    batch = Batch(**{**{f: getattr(batch, f) for f in batch.__slots__}, "argmax": argmax})
    rows = label_rows(batch, draft.t2d, 1)
    assert batch.argmax.numel() == 16 and rows.per_step == (4,)
    outputs = list(unroll(draft, batch, 1))
    mean, sums = ttt_loss(draft, teacher, batch.final, rows, outputs, [1 / rows.per_step[0]], torch.float32)
    torch.testing.assert_close(mean, sums[0, 0] / 4)


def test_bfloat16_compute_stays_close_to_float32() -> None:
    batch = tiny_batch(LENGTHS)
    exact, half = tiny_draft(), tiny_draft()
    run(exact, batch)[0].backward()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        outputs = list(unroll(half, batch, STEPS))
        found, _ = ttt_loss(
            half, teacher, batch.final, label_rows(batch, half.t2d, STEPS), outputs, WEIGHTS, torch.bfloat16
        )
    found.backward()
    for name, parameter in exact.trained().items():
        gradient = half.get_parameter(name).grad
        assert gradient is not None and parameter.grad is not None and gradient.dtype == torch.float32
        assert torch.cosine_similarity(gradient.flatten(), parameter.grad.flatten(), dim=0) > 0.99, name


def test_proposals_are_target_ids_of_the_best_draft_logit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loss_module, "LOGITS_AT_ONCE", 2 * len(KEPT))
    draft = tiny_draft()
    hidden = torch.randn(2, 5, HIDDEN, generator=torch.Generator().manual_seed(3))
    found = proposals(draft, hidden)
    assert found.tolist() == torch.tensor(KEPT)[draft.logits(hidden).argmax(-1)].tolist()
