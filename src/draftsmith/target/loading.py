"""Loading a target model into this process, ready for decoding and for tapping its states."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from draftsmith.errors import UserError
from draftsmith.target.kv import GROUPED_ATTENTION

WEIGHT_PATTERNS = ("*.safetensors", "*.bin", "*.gguf")


def load_model(name: str, dtype: torch.dtype, device: torch.device, *, trust_remote_code: bool = False) -> Any:
    """A transformers causal LM in eval mode, without gradients.

    Args:
        name: folder or hub id, as `embedded.resolve_model` gives it.
        dtype: compute type.
        device: where it lives.
        trust_remote_code: run code that comes with the model.

    Raises:
        UserError: no weights in the folder or unusable ones, an unknown hub id or architecture, or code that may not
            be run.
    """
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    folder = Path(name)
    if folder.is_dir():
        if not (folder / "config.json").exists():
            raise UserError(
                f"{name}: expected a model folder with config.json, found none; give the folder that has it"
            )
        if not any(next(folder.glob(pattern), None) for pattern in WEIGHT_PATTERNS):
            raise UserError(f"{name}: expected weights (*.safetensors), found none; download the model's weight files")
    logging.disable_progress_bar()
    try:
        model = AutoModelForCausalLM.from_pretrained(name, dtype=dtype, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        raise UserError(f"{name}: the model cannot be loaded: {' '.join(str(error).split())[:300]}") from None
    # Only where the model's own choice is the plain kernel: others (sinks, soft caps) need their own attention.
    if model.config._attn_implementation == "sdpa":
        model.set_attn_implementation(GROUPED_ATTENTION)
    return model.to(device).eval().requires_grad_(False)


def text_config(model: Any) -> Any:
    """The config of the language model inside a (possibly multi-modal) model."""
    return model.config.get_text_config()
