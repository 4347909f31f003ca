"""Embedding, head and final norm of a target, read from just the files that hold them; the model is never built.

Candidate names are tried in the order of the table, so that nested checkpoints (Kimi-K2.5 keeps its text model under
`language_model.`) and tied embeddings are found by looking, not by asking the model's class. Quantised ones are refused
with the name of their scheme: a draft that starts from a rounded head, or learns from one, learns the rounding.

Costs the three tensors in memory, also for a model of a thousand shards: the index says which files hold them.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from safetensors import safe_open
from torch import Tensor

from draftsmith.errors import UserError

PREFIXES = ("", "language_model.", "model.language_model.", "text_model.", "model.text_model.")
EMBEDDING = "model.embed_tokens.weight"
NORM = "model.norm.weight"
HEAD = "lm_head.weight"

SCHEMES: tuple[tuple[str, str], ...] = (
    (".weight_global_scale", "nvfp4, compressed-tensors"),
    (".weight_packed", "int4 or int8 packed, compressed-tensors"),
    (".weight_scale_inv", "fp8 in blocks"),
    (".weight_scale", "fp8 or int8, compressed-tensors"),
    (".weight_blocks", "mxfp4"),
    ("_blocks", "mxfp4"),
    (".qweight", "GPTQ or AWQ"),
    (".weight.absmax", "4 bits, bitsandbytes"),
    (".SCB", "int8, bitsandbytes"),
)
"""A tensor beside a quantised weight, by what it adds to the weight's stem, and the scheme it belongs to."""


@dataclass(frozen=True, slots=True)
class HeadWeights:
    """As stored: embed_tokens [V, H], norm [H], lm_head [V, H] or None where it is tied to the embedding."""

    embed_tokens: Tensor
    norm: Tensor
    lm_head: Tensor | None


def read_head_weights(folder: Path, *, tied: bool) -> HeadWeights:
    """Reads the three tensors from a folder of safetensors.

    Args:
        folder: a model folder.
        tied: what the config's `tie_word_embeddings` says; a head in the files wins over it.

    Raises:
        UserError: no safetensors, a tensor is not there under any known name, or it is quantised.
    """
    where = tensor_files(folder)
    for name in (EMBEDDING, HEAD):
        _refuse_quantised(where, folder, name)
    embedding = _first(where, folder, EMBEDDING)
    norm = _first(where, folder, NORM)
    head = next((name for name in candidates(HEAD) if name in where), None)
    if head is None and not tied:
        raise UserError(
            f"{folder}: found no lm_head under {', '.join(candidates(HEAD))}, and the config says embeddings are not "
            "tied; is a shard missing?"
        )
    names = [name for name in (embedding, norm, head) if name]
    tensors = {name: _read(where[name], name) for name in names}
    return HeadWeights(tensors[embedding], tensors[norm], tensors[head] if head else None)


def tensor_files(folder: Path) -> dict[str, Path]:
    """Tensor name -> the file that holds it.

    Raises:
        UserError: no safetensors.
    """
    index = folder / "model.safetensors.index.json"
    if index.exists():
        weight_map: dict[str, str] = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        return {name: folder / file for name, file in weight_map.items()}
    where = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            where.update(dict.fromkeys(file.keys(), path))
    if not where:
        raise UserError(f"{folder}: expected safetensors weights, found none; convert the model to safetensors")
    return where


def candidates(name: str) -> list[str]:
    """Where a tensor of a plain checkpoint may be, in the order in which it is looked for."""
    last = name.removeprefix("model.")
    tried = [prefix + name for prefix in PREFIXES]
    # Multi-modal checkpoints of transformers 5 have no second `model.` in the text model's names.
    return tried if last == name else [*tried, *(prefix + last for prefix in PREFIXES if prefix.startswith("model."))]


def _first(where: dict[str, Path], folder: Path, name: str) -> str:
    tried = candidates(name)
    for candidate in tried:
        if candidate in where:
            return candidate
    last = name.removeprefix("model.")
    raise UserError(f"{folder}: found no {last}; tried {', '.join(tried)}; this architecture is not known yet")


def _refuse_quantised(where: dict[str, Path], folder: Path, name: str) -> None:
    for candidate in candidates(name):
        stem = candidate.removesuffix(".weight")
        for suffix, scheme in SCHEMES:
            if stem + suffix in where:
                raise UserError(
                    f"{folder}: {stem} is quantised ({scheme}: {stem + suffix} is there); a draft needs it in bf16, "
                    "fp16 or fp32: take embedding, head and norm from an unquantised release of the target"
                )


def _read(path: Path, name: str) -> Tensor:
    try:
        with safe_open(path, framework="pt") as file:
            tensor: Tensor = file.get_tensor(name)
    except FileNotFoundError:
        raise UserError(f"{path}: expected this shard (it holds {name}), found none; download it") from None
    if not tensor.dtype.is_floating_point or tensor.element_size() < 2:
        raise UserError(f"{path}: {name} is quantised ({tensor.dtype}); a draft needs it in bf16, fp16 or fp32")
    return tensor
