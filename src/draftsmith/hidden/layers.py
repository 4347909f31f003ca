"""Which target layers feed the draft. Ids mean "output of layer i", 0-based, everywhere inside draftsmith."""

from __future__ import annotations

from collections.abc import Sequence

from draftsmith.errors import UserError

AUX_LAYERS = 3


def default_layers(num_layers: int) -> tuple[int, int, int]:
    """Outputs of layers 1, n//2 - 1 and n - 4: what vLLM calls 2, n//2 and n - 3 (inputs of those layers).

    Raises:
        UserError: the model is too shallow for three different layers.
    """
    return checked_layers((1, num_layers // 2 - 1, num_layers - 4), num_layers)


def checked_layers(layers: Sequence[int], num_layers: int) -> tuple[int, int, int]:
    """Three different layer ids of the model, in rising order.

    Raises:
        UserError: not three, not different, not rising, or not in the model.
    """
    found = list(layers)
    if len(found) != AUX_LAYERS or sorted(set(found)) != found or found[0] < 0 or found[-1] >= num_layers:
        raise UserError(
            f"--layers: expected three different rising ids (outputs of layers 0 to {num_layers - 1}), found {found} "
            f"for a target of {num_layers} layers; name three with --layers"
        )
    return (found[0], found[1], found[2])
