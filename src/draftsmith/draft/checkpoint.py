"""A draft as a folder: `draft.safetensors` (float32 masters, d2t, t2d) and `config.json` (DraftConfig).

Parameter names are the checkpoint names of the engines. The embedding is not in it: it is the target's and lies once in
`RUN/hidden/target.safetensors`.
"""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from draftsmith.artifacts import read_json, write_json
from draftsmith.draft.eagle3 import DraftConfig, Eagle3Draft
from draftsmith.errors import UserError
from draftsmith.hidden.target_head import TargetHead

WEIGHTS, CONFIG = "draft.safetensors", "config.json"
EMBEDDING = "embed_tokens.weight"


def save_draft(folder: Path, draft: Eagle3Draft) -> None:
    """Writes the draft into an existing folder."""
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in draft.state_dict().items()}
    del tensors[EMBEDDING]
    save_file(tensors, folder / WEIGHTS)
    write_json(folder / CONFIG, draft.config.to_json())


def load_draft(folder: Path, head: TargetHead, device: torch.device, dtype: torch.dtype) -> Eagle3Draft:
    """Reads a draft that `save_draft` wrote.

    Args:
        folder: such as `RUN/draft/best`.
        head: the target's, for the embedding.
        device: where the draft shall live.
        dtype: of its parameters; the embedding keeps the target's dtype.

    Raises:
        UserError: files missing, or a draft of another shape than its own config.
    """
    if not (folder / WEIGHTS).exists():
        raise UserError(f"{folder}: expected a draft checkpoint ({WEIGHTS}, {CONFIG}), found none; train makes it")
    draft = Eagle3Draft(DraftConfig.from_json(read_json(folder / CONFIG)))
    draft.set_embedding(head.embed_tokens)
    load_weights(draft, load_file(folder / WEIGHTS), str(folder))
    for parameter in draft.trained().values():
        parameter.data = parameter.data.to(dtype)
    return draft.to(device).eval()


def load_weights(draft: Eagle3Draft, tensors: dict[str, Tensor], where: str) -> None:
    """Copies tensors (all but the embedding, which stays) into `draft`.

    Raises:
        UserError: a tensor is missing, unknown, or of another shape.
    """
    wanted: dict[str, Tensor] = {**draft.trained(), "d2t": draft.d2t, "t2d": draft.t2d}
    given = {name: tensor for name, tensor in tensors.items() if name != EMBEDDING}
    missing, unknown = sorted(wanted.keys() - given.keys()), sorted(given.keys() - wanted.keys())
    if missing or unknown:
        raise UserError(f"{where}: not the tensors of an EAGLE-3 draft: missing {missing}, unknown {unknown}")
    for name, tensor in given.items():
        if tensor.shape != wanted[name].shape:
            raise UserError(
                f"{where}: {name}: expected shape {list(wanted[name].shape)} by its config, found {list(tensor.shape)}"
            )
    draft.set_vocab(given.pop("d2t"), given.pop("t2d"))
    with torch.no_grad():
        for name, tensor in given.items():
            wanted[name].copy_(tensor)
