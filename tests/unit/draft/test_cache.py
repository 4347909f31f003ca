from __future__ import annotations

import pytest
import torch

from draftsmith.draft.cache import DraftCache, extend
from draftsmith.draft.eagle3 import DraftConfig, Eagle3Draft
from draftsmith.draft.unroll import Batch, unroll

HIDDEN, VOCAB, DRAFT_VOCAB = 32, 64, 24


def tiny_draft(norm_before_residual: bool = False) -> Eagle3Draft:
    torch.manual_seed(3)
    draft = Eagle3Draft(
        DraftConfig(
            target_vocab_size=VOCAB,
            draft_vocab_size=DRAFT_VOCAB,
            hidden_size=HIDDEN,
            intermediate_size=48,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=8,
            rms_norm_eps=1e-5,
            rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
            max_position_embeddings=128,
            aux_layers=(0, 1, 2),
            target_layers=4,
            target_model_type="llama",
            norm_before_residual=norm_before_residual,
        )
    )
    return draft.eval()


@pytest.mark.parametrize("norm_before_residual", [False, True])
def test_decoding_steps_equal_the_rows_of_the_training_unroll(norm_before_residual: bool) -> None:
    draft = tiny_draft(norm_before_residual)
    random = torch.Generator().manual_seed(5)
    prompt, total, steps = 4, 13, 3
    ids = torch.randint(0, VOCAB, (total,), generator=random)
    aux = torch.randn(total - 2, 3 * HIDDEN, generator=random)
    rows = total - prompt - 1
    first = prompt - 1
    batch = Batch(
        aux=aux[None],
        ids=ids[None, 1:-1],
        first=torch.tensor([first]),
        count=torch.tensor([rows]),
        inputs=ids[None, prompt:-1],
        labels=ids[None, prompt + 1 :],
        final=torch.zeros(1, rows, HIDDEN),
        argmax=ids[None, prompt + 1 :],
    )
    with torch.no_grad():
        unrolled = list(unroll(draft, batch, steps))
        cache = DraftCache(draft, capacity=2)  # must grow
        for row in range(rows):
            p = first + row
            # Rows up to p are true ones: the first call brings the prompt's, each later call one more.
            start = 0 if row == 0 else p
            output = extend(draft, cache, ids[None, start + 1 : p + 2], draft.fuse(aux[None, start : p + 1]), start)
            chain = output[:, -1:]
            torch.testing.assert_close(chain[0, 0], unrolled[0][0, row], rtol=1e-5, atol=1e-5)
            for step in range(1, min(steps, rows - row)):
                chain = extend(draft, cache, ids[None, p + 1 + step : p + 2 + step], chain, p + step)
                torch.testing.assert_close(chain[0, 0], unrolled[step][0, row], rtol=1e-5, atol=1e-5)
            cache.crop(p + 1)


def test_rows_after_a_crop_are_as_if_the_cropped_ones_had_never_been() -> None:
    draft = tiny_draft()
    random = torch.Generator().manual_seed(6)
    ids = torch.randint(0, VOCAB, (1, 9), generator=random)
    hidden = torch.randn(1, 9, HIDDEN, generator=random)
    with torch.no_grad():
        straight = DraftCache(draft)
        expected = extend(draft, straight, ids, hidden, 0)
        cropped = DraftCache(draft, capacity=3)
        extend(draft, cropped, ids[:, :4], hidden[:, :4], 0)
        extend(draft, cropped, ids[:, :5].flip(1), hidden[:, :5].flip(1), 4)  # guesses
        cropped.crop(4)
        found = extend(draft, cropped, ids[:, 4:], hidden[:, 4:], 4)
    torch.testing.assert_close(found, expected[:, 4:], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(cropped.keys, straight.keys, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(cropped.values, straight.values, rtol=1e-5, atol=1e-5)


def test_a_cache_refuses_rows_that_do_not_follow_and_crops_it_cannot_do() -> None:
    draft = tiny_draft()
    cache = DraftCache(draft)
    with pytest.raises(ValueError, match="row 3 does not follow the 0 rows"):
        extend(draft, cache, torch.tensor([[1]]), torch.zeros(1, 1, HIDDEN), 3)
    with pytest.raises(ValueError, match="crop to 2 rows"):
        cache.crop(2)
