from __future__ import annotations

import pytest
import torch
from torch import Tensor

from draftsmith.draft import attention
from draftsmith.draft.eagle3 import Eagle3Draft
from draftsmith.draft.unroll import Batch, shifted, unroll
from draftsmith.trace import supervised_rows
from toy_draft import tiny_batch, tiny_draft

STEPS = 4


def decode_row(draft: Eagle3Draft, aux: Tensor, tokens: Tensor, row: int, steps: int) -> list[Tensor]:
    """What a served draft computes from row `row` when its proposals turn out to be the true tokens.

    One row at a time over a cache: rows 0..row from the target's aux states, then `steps` - 1 rows from the draft's own
    output. `tokens` are all ids of the trace.
    """
    config = draft.config
    groups = config.num_attention_heads // config.num_key_value_heads
    keys: list[Tensor] = []
    values: list[Tensor] = []
    outputs = []
    for p in range(row + steps):
        hidden = draft.fuse(aux[p])[None, None] if p <= row else outputs[-1]
        x, residual = draft.inputs(tokens[None, None, p + 1], hidden)
        position = torch.tensor([[p]])
        k, v = draft.keys_values(x, position)
        keys.append(k[0, :, 0].repeat_interleave(groups, dim=0))
        values.append(v[0, :, 0].repeat_interleave(groups, dim=0))
        q = draft.queries(x, position)[0, :, 0]  # [A, D]
        scores = torch.stack([(q * k).sum(-1) for k in keys], dim=-1) / config.head_dim**0.5  # [A, p+1]
        attended = torch.einsum("at,tad->ad", scores.softmax(-1), torch.stack(values))
        output = draft.finish(attended[None, :, None], residual)
        if p >= row:
            outputs.append(output)
    return [output[0, 0] for output in outputs]


@pytest.mark.parametrize("norm_before_residual", [False, True])
@pytest.mark.parametrize("scores_at_once", [1 << 27, 64], ids=["whole", "chunked"])
@torch.no_grad()
def test_every_supervised_row_equals_what_a_decoder_with_a_cache_computes(
    norm_before_residual: bool, scores_at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "SCORES_AT_ONCE", scores_at_once)
    draft = tiny_draft(norm_before_residual=norm_before_residual)
    lengths = [(5, 9), (3, 6)]
    batch = tiny_batch(lengths)
    outputs = list(unroll(draft, batch, STEPS))
    for b, (g, m) in enumerate(lengths):
        tokens = torch.cat([torch.zeros(1, dtype=torch.int64), batch.ids[b, : g + m - 2], batch.labels[b, None, m - 2]])
        for row in supervised_rows(g, g + m):
            steps = min(STEPS, g + m - 2 - row)
            reference = decode_row(draft, batch.aux[b], tokens, row, steps)
            for step in range(steps):
                found, scale = outputs[step][b, row - (g - 1)], float(reference[step].abs().max())
                torch.testing.assert_close(found, reference[step], rtol=0, atol=1e-5 * scale)


def test_gradients_are_the_same_when_queries_are_taken_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    gradients = []
    for scores_at_once in (1 << 27, 64):
        monkeypatch.setattr(attention, "SCORES_AT_ONCE", scores_at_once)
        draft = tiny_draft()
        sum(output.square().mean() for output in unroll(draft, tiny_batch([(5, 9), (3, 6)]), 3)).backward()
        gradients.append({name: p.grad for name, p in draft.trained().items() if p.grad is not None})
    assert gradients[0].keys() == gradients[1].keys() and len(gradients[0]) > 8
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], gradient, rtol=1e-4, atol=1e-6)


def test_labels_are_the_generated_tokens_but_the_first() -> None:
    # P20: 10 ids, the answer at positions 4-7, then padding: labels at step 0 are positions 5, 6, 7, never padding.
    batch = _counting_batch(prompt=4, total=8, padding=2)
    assert supervised_rows(4, 8) == range(3, 6)
    for step, expected in enumerate([[5, 6, 7], [6, 7], [7], []]):
        assert shifted(batch.labels, step)[batch.valid(step)].tolist() == expected
        assert shifted(batch.inputs, step)[batch.valid(step)].tolist() == [label - 1 for label in expected]


def _counting_batch(prompt: int, total: int, padding: int) -> Batch:
    """One trace whose token at position i is i."""
    width = total - prompt - 1
    tail = torch.zeros(padding, dtype=torch.int64)
    tokens = torch.arange(total)
    return Batch(
        aux=torch.zeros(1, total - 2 + padding, 3),
        ids=torch.cat([tokens[1:-1], tail])[None],
        first=torch.tensor([prompt - 1]),
        count=torch.tensor([width]),
        inputs=torch.cat([tokens[prompt:-1], tail])[None],
        labels=torch.cat([tokens[prompt + 1 :], tail])[None],
        final=torch.zeros(1, width + padding, 1),
        argmax=torch.cat([tokens[prompt + 1 :], tail])[None],
    )
