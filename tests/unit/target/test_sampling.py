from __future__ import annotations

import torch

from draftsmith.target.reply import Sampling
from draftsmith.target.sampling import draw, probabilities

LOGITS = torch.tensor([[2.0, 1.0, 0.0, -1.0]])


def test_greedy_puts_all_mass_on_the_first_maximum() -> None:
    found = probabilities(torch.tensor([[1.0, 3.0, 3.0]]), Sampling(max_tokens=1))
    assert found.tolist() == [[0.0, 1.0, 0.0]]


def test_temperature_divides_the_logits() -> None:
    found = probabilities(LOGITS, Sampling(max_tokens=1, temperature=0.5))
    torch.testing.assert_close(found, (LOGITS / 0.5).softmax(-1))


def test_top_k_keeps_the_k_most_likely() -> None:
    found = probabilities(LOGITS, Sampling(max_tokens=1, temperature=1.0, top_k=2))
    torch.testing.assert_close(found[0, :2], LOGITS[0, :2].softmax(-1))
    assert found[0, 2:].tolist() == [0.0, 0.0]


def test_top_p_keeps_the_smallest_set_that_reaches_it() -> None:
    # Probabilities are about 0.64, 0.24, 0.09, 0.03.
    for top_p, kept in ((0.6, 1), (0.65, 2), (0.9, 3), (1.0, 4)):
        found = probabilities(LOGITS, Sampling(max_tokens=1, temperature=1.0, top_p=top_p))
        assert int((found > 0).sum()) == kept


def test_draws_follow_the_probabilities() -> None:
    generator = torch.Generator().manual_seed(0)
    wanted = torch.tensor([0.5, 0.3, 0.2])
    drawn = draw(wanted.expand(20000, 3), generator)
    torch.testing.assert_close(drawn.bincount() / 20000, wanted, rtol=0, atol=0.02)
