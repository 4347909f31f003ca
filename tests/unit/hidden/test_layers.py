from __future__ import annotations

import pytest

from draftsmith.errors import UserError
from draftsmith.hidden.layers import checked_layers, default_layers


def test_the_default_is_what_vllm_calls_2_half_and_n_minus_3() -> None:  # P31
    assert [layer + 1 for layer in default_layers(36)] == [2, 18, 33]
    assert default_layers(30) == (1, 14, 26)


def test_a_model_too_shallow_for_three_layers_is_refused() -> None:  # P31
    with pytest.raises(UserError, match=r"found \[1, 1, 1\] for a target of 5 layers"):
        default_layers(5)


@pytest.mark.parametrize("layers", [(1, 2), (1, 1, 2), (3, 2, 1), (-1, 2, 3), (1, 2, 8)])
def test_layers_that_are_not_three_rising_ones_of_the_model_are_refused(layers: tuple[int, ...]) -> None:
    with pytest.raises(UserError, match="--layers"):
        checked_layers(layers, 8)
