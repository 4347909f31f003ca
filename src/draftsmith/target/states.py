"""Taps a transformers causal LM for what an EAGLE-3 draft needs: three layers' outputs and the state before the norm.

Layer ids mean "output of layer i", 0-based, everywhere in this project (contract 3); only exporters convert. Where the
decoder layers, the final norm and the head lie in a model is read off one visible table, in order; a model that fits
no row is refused with the list of what was tried. A tap keeps references to one forward pass's tensors: no copy, no
extra compute, and nothing of the layers in between.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from draftsmith.errors import UserError

PATHS: tuple[tuple[str, str, str], ...] = (
    ("model.layers", "model.norm", "lm_head"),  # Llama, Qwen, Mistral, Gemma, DeepSeek, gpt-oss
    ("model.language_model.layers", "model.language_model.norm", "lm_head"),  # multimodal models of transformers 5
    ("language_model.model.layers", "language_model.model.norm", "language_model.lm_head"),  # Kimi-K2.5, older VLMs
    ("language_model.layers", "language_model.norm", "lm_head"),
    ("model.text_model.layers", "model.text_model.norm", "lm_head"),
    ("model.layers", "model.final_layernorm", "lm_head"),  # Phi
    ("model.decoder.layers", "model.decoder.final_layer_norm", "lm_head"),  # OPT
    ("transformer.h", "transformer.ln_f", "lm_head"),  # GPT-2, Falcon, GPT-J
    ("gpt_neox.layers", "gpt_neox.final_layer_norm", "embed_out"),
    ("transformer.blocks", "transformer.norm_f", "lm_head"),
    ("backbone.layers", "backbone.norm_f", "lm_head"),
)
"""(decoder layers, final norm, head), tried in order."""


@dataclass(frozen=True, slots=True)
class Parts:
    """The parts of a causal LM that this project reads."""

    layers: nn.ModuleList
    norm: nn.Module
    head: nn.Module


def find_parts(model: nn.Module) -> Parts:
    """The decoder layers, final norm and head of `model`, by the first row of PATHS that fits.

    Raises:
        UserError: no row fits; says what was tried.
    """
    for paths in PATHS:
        layers, norm, head = (_at(model, path) for path in paths)
        if isinstance(layers, nn.ModuleList) and norm is not None and head is not None:
            return Parts(layers, norm, head)
    tried = "; ".join(", ".join(paths) for paths in PATHS)
    raise UserError(
        f"{type(model).__name__}: expected decoder layers, final norm and head at one of these places, "
        f"found none: {tried}"
    )


def check_layers(layers: Sequence[int], count: int) -> tuple[int, ...]:
    """Layer ids ("output of layer i", 0-based) that a model of `count` layers can give, in ascending order.

    Raises:
        UserError: an id is outside 0..count-1, named twice, or not in ascending order.
    """
    found = tuple(int(layer) for layer in layers)
    if any(not 0 <= layer < count for layer in found):
        raise UserError(f"aux layers {list(found)}: expected ids from 0 to {count - 1} (the target has {count} layers)")
    if len(set(found)) != len(found):
        raise UserError(
            f"aux layers {list(found)}: the same layer is named twice, so a draft would read one state under two "
            f"names; name {len(found)} different layers of the target's {count}"
        )
    if list(found) != sorted(found):
        raise UserError(
            f"aux layers {list(found)}: expected ascending order, which is the order that engines concatenate states in"
        )
    return found


class StateTap:
    """Forward hooks that keep the latest forward pass's aux and final states; use as a context manager, or `close`.

    Args:
        model: a transformers causal LM (or anything shaped like one, see PATHS).
        layers: "output of layer i", 0-based, ascending.

    Raises:
        UserError: the model's parts are not found, or a layer id is outside the model or named twice.
    """

    def __init__(self, model: nn.Module, layers: Sequence[int]) -> None:
        self.parts = find_parts(model)
        self.layers = check_layers(layers, len(self.parts.layers))
        self._outputs: dict[int, Tensor] = {}
        self._final: Tensor | None = None
        self._handles = [self.parts.layers[layer].register_forward_hook(self._keeper(layer)) for layer in self.layers]
        self._handles.append(self.parts.norm.register_forward_pre_hook(self._keep_final))

    def aux(self) -> Tensor:
        """Outputs of the tapped layers in the latest forward pass, concatenated in layer order: [B, T, L * H]."""
        if len(self._outputs) != len(self.layers):
            raise RuntimeError("no forward pass has gone through the tapped layers")
        device = self._outputs[self.layers[0]].device
        return torch.cat([self._outputs[layer].to(device) for layer in self.layers], dim=-1)

    def final(self) -> Tensor:
        """The last hidden state of the latest forward pass, before the final norm: [B, T, H]."""
        if self._final is None:
            raise RuntimeError("no forward pass has gone through the final norm")
        return self._final

    def clear(self) -> None:
        """Lets go of the kept tensors."""
        self._outputs.clear()
        self._final = None

    def close(self) -> None:
        """Takes the hooks off the model and lets go of the kept tensors."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self.clear()

    def __enter__(self) -> StateTap:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _keeper(self, layer: int) -> Any:
        def keep(module: nn.Module, args: Any, output: Any) -> None:
            # Decoder layers return the hidden state alone, or first in a tuple (older and custom models).
            self._outputs[layer] = output[0] if isinstance(output, tuple) else output

        return keep

    def _keep_final(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        self._final = args[0]


def _at(model: nn.Module, path: str) -> nn.Module | None:
    """The submodule at a dotted path, or None."""
    module: Any = model
    for name in path.split("."):
        module = getattr(module, name, None)
        if not isinstance(module, nn.Module):
            return None
    found: nn.Module = module
    return found
