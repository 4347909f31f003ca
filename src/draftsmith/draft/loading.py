"""Reads a draft in any format it is published in, and says what it is in draftsmith's own words.

Formats: a checkpoint of ours, vLLM flat config, speculators (`speculators_config`), SGLang. They differ in what a
missing field means and in what a layer id means; here those differences end. What our draft module cannot compute
(several layers, MLA, extra norms, biases, another hidden size) is refused by name, and so is a broken vocabulary map
(P27): a draft half understood would train or measure as a bad draft, with no error anywhere.
"""

from __future__ import annotations

import pickle
import struct
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from draftsmith.artifacts import read_json
from draftsmith.draft import layer_ids
from draftsmith.draft.eagle3 import AUX_STATES, DraftConfig
from draftsmith.draft.formats import (
    NORM_BEFORE_RESIDUAL_WHEN_MISSING,
    OWN_BLOCK,
    Format,
    flattened,
    format_of,
    layer_config,
    named_layers,
)
from draftsmith.errors import UserError
from draftsmith.hidden.layers import default_layers

UNKNOWN_LAYERS = 0
"""`DraftConfig.target_layers` of a published draft, whose config does not say how deep its target is."""

ABSOLUTE_IDS_MIN = 256
"""From this draft vocabulary size on, a d2t that rises at every step (no two neighbouring ids kept) is absolute ids."""

SHAPES: dict[str, tuple[str, ...]] = {
    "fc.weight": ("hidden", "aux"),
    "layers.0.input_layernorm.weight": ("hidden",),
    "layers.0.hidden_norm.weight": ("hidden",),
    "layers.0.post_attention_layernorm.weight": ("hidden",),
    "layers.0.self_attn.q_proj.weight": ("q", "twice"),
    "layers.0.self_attn.k_proj.weight": ("kv", "twice"),
    "layers.0.self_attn.v_proj.weight": ("kv", "twice"),
    "layers.0.self_attn.o_proj.weight": ("hidden", "q"),
    "layers.0.mlp.gate_proj.weight": ("mlp", "hidden"),
    "layers.0.mlp.up_proj.weight": ("mlp", "hidden"),
    "layers.0.mlp.down_proj.weight": ("hidden", "mlp"),
    "norm.weight": ("hidden",),
    "lm_head.weight": ("draft_vocab", "hidden"),
    "embed_tokens.weight": ("vocab", "hidden"),
    "d2t": ("draft_vocab",),
    "t2d": ("vocab",),
}
PICKLED = "pytorch_model.bin"
"""Read where there are no safetensors; the first EAGLE-3 drafts were published so."""

OPTIONAL = frozenset({"lm_head.weight", "embed_tokens.weight", "d2t", "t2d"})
"""Tensors a draft may leave out: the target's are used, or the vocabulary is the target's whole one."""


@dataclass(frozen=True, slots=True)
class AnyDraft:
    """A draft as read.

    `tensors` are under checkpoint names in the file's own dtypes, d2t (int64 offsets) and t2d (bool) always there;
    `embed_tokens.weight` only if the file has it, `lm_head.weight` missing only when the vocabulary is not reduced.
    `notes` are lines for a person: what was assumed.
    """

    config: DraftConfig
    tensors: dict[str, Tensor]
    format: Format
    notes: tuple[str, ...]


def read_any_draft(folder: Path, *, target_layers: int | None = None, target_model_type: str | None = None) -> AnyDraft:
    """Reads a draft folder (config.json and weights).

    Args:
        folder: the draft.
        target_layers: how many layers the target has, where known; a draft that names no aux layers needs it.
        target_model_type: the target's model type, where known; SGLang's layer ids may need it.

    Raises:
        UserError: files missing or unreadable, tensors unknown, missing or of wrong shape, something our draft cannot
            compute, layer ids or a vocabulary map that make no sense.
    """
    folder = Path(folder)
    raw = read_json(folder / "config.json")
    tensors = renamed(read_tensors(folder), str(folder))
    if "aux_layers" in raw:
        config = DraftConfig.from_json(raw)
        return AnyDraft(config, with_vocab(tensors, config, str(folder))[0], "draftsmith", ())
    kind = format_of(raw)
    flat = flattened(raw)
    notes: list[str] = []
    config = _config(raw, flat, kind, tensors, folder, (target_layers, target_model_type), notes)
    tensors, said = with_vocab(tensors, config, str(folder))
    if "lm_head.weight" not in tensors:
        notes.append("the file has no lm_head: the draft uses the target's own head")
    return AnyDraft(config, tensors, kind, (*notes, *said))


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """All weights of a folder: safetensors (one file or an index), or a .bin that holds nothing but tensors.

    Raises:
        UserError: none of them, or a file that cannot be read.
    """
    index = folder / "model.safetensors.index.json"
    names = sorted({*read_json(index)["weight_map"].values()}) if index.exists() else ["model.safetensors"]
    if (folder / "draft.safetensors").exists():
        names = ["draft.safetensors"]
    pickled = folder / PICKLED
    if not (folder / names[0]).exists() and pickled.exists():
        return read_pickled(pickled)
    tensors: dict[str, Tensor] = {}
    for name in names:
        try:
            tensors.update(load_file(folder / name))
        except FileNotFoundError:
            raise UserError(
                f"{folder / name}: expected the draft's weights (model.safetensors), found no such file"
            ) from None
        except SafetensorError as error:
            raise UserError(f"{folder / name}: expected safetensors, found something else ({error})") from None
    return tensors


def read_pickled(path: Path) -> dict[str, Tensor]:
    """The tensors of a .bin; in torch's zip format they stay on disk until one is used.

    Raises:
        UserError: a file that cannot be read, or that holds something else than tensors.
    """
    try:
        loaded = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except (OSError, RuntimeError, ValueError, EOFError, struct.error, pickle.UnpicklingError, zipfile.BadZipFile) as e:
        said = str(e).strip().splitlines()
        why = said[0] if said else type(e).__name__
        raise UserError(f"{path}: expected tensors saved by torch, found something else ({why})") from None
    if not isinstance(loaded, dict) or not all(isinstance(value, Tensor) for value in loaded.values()):
        raise UserError(
            f"{path}: expected nothing but named tensors, found other things too; save its state dict alone"
        )
    return loaded


def renamed(tensors: Mapping[str, Tensor], name: str) -> dict[str, Tensor]:
    """Tensors under checkpoint names (`model.` dropped, `midlayer.` is `layers.0.`).

    Raises:
        UserError: a tensor that no EAGLE-3 draft of ours has, named.
    """
    result = {}
    for key, value in tensors.items():
        result[key.removeprefix("model.").replace("midlayer.", "layers.0.")] = value
    unknown = sorted(set(result) - set(SHAPES))
    if unknown:
        raise UserError(
            f"{name}: expected the tensors of an EAGLE-3 draft with one Llama layer, found also "
            f"{', '.join(unknown[:8])}{_and_more(unknown)}: {_kind_of(unknown)}"
        )
    return result


def check_shapes(tensors: Mapping[str, Tensor], config: DraftConfig, name: str) -> None:
    """Every tensor the draft needs, in the shape its config says.

    Raises:
        UserError: the first missing tensor or wrong shape.
    """
    sizes = {
        "hidden": config.hidden_size,
        "twice": 2 * config.hidden_size,
        "aux": AUX_STATES * config.hidden_size,
        "q": config.num_attention_heads * config.head_dim,
        "kv": config.num_key_value_heads * config.head_dim,
        "mlp": config.intermediate_size,
        "vocab": config.target_vocab_size,
        "draft_vocab": config.draft_vocab_size,
    }
    for key, axes in SHAPES.items():
        expected = [sizes[axis] for axis in axes]
        if key not in tensors:
            if key not in OPTIONAL:
                raise UserError(f"{name}: expected a tensor {key} {expected}, found none")
        elif list(tensors[key].shape) != expected:
            raise UserError(f"{name}: expected {key} {expected} by its config, found {list(tensors[key].shape)}")


def with_vocab(
    tensors: Mapping[str, Tensor], config: DraftConfig, name: str
) -> tuple[dict[str, Tensor], tuple[str, ...]]:
    """The tensors with a sound d2t and t2d, shapes checked, head rows in rising order of their target ids.

    Returns:
        The tensors, and notes.

    Raises:
        UserError: shapes, a reduced vocabulary without map or head, or a map that cannot be right (P27, P29).
    """
    check_shapes(tensors, config, name)
    result = dict(tensors)
    size, vocab = config.draft_vocab_size, config.target_vocab_size
    if "d2t" not in result:
        if size != vocab:
            raise UserError(f"{name}: expected a d2t for {size} of {vocab} ids, found none; the draft is incomplete")
        result["d2t"] = torch.zeros(size, dtype=torch.int64)
    if "lm_head.weight" not in result and size != vocab:
        raise UserError(
            f"{name}: expected lm_head.weight for a reduced vocabulary ({size} of {vocab} ids), found none; "
            "an engine would serve a random head"
        )
    ids = target_ids(result["d2t"], vocab, name, result.get("t2d"))
    order = ids.argsort()
    notes: tuple[str, ...] = ()
    if not torch.equal(order, torch.arange(size)):
        notes = ("d2t is not in rising order: head rows were put in order",)
        if "lm_head.weight" in result:
            result["lm_head.weight"] = result["lm_head.weight"][order]
    result["d2t"] = ids[order] - torch.arange(size)
    result["t2d"] = torch.zeros(vocab, dtype=torch.bool).index_fill_(0, ids, True)
    return result, notes


def target_ids(d2t: Tensor, target_vocab: int, name: str, t2d: Tensor | None = None) -> Tensor:
    """The target ids [draft_vocab] int64 that a d2t of offsets stands for, checked.

    Raises:
        UserError: ids outside the vocabulary or repeated, absolute ids, an arange, or another map than t2d's.
    """
    if d2t.is_floating_point() or d2t.dtype == torch.bool:
        raise UserError(f"{name}: expected integer offsets in d2t, found {d2t.dtype}")
    offsets, count = d2t.to(torch.int64), torch.arange(len(d2t))
    ids = offsets + count
    distinct = len(set(ids.tolist()))
    kept = t2d.to(torch.bool).nonzero().flatten() if t2d is not None else None
    rule = "d2t must hold offsets (target_id = i + d2t[i])"
    wrong = bool((ids < 0).any() or (ids >= target_vocab).any() or distinct != len(ids))
    if kept is not None and not wrong:
        wrong = not torch.equal(ids.sort().values, kept)
    if len(offsets) > 1 and torch.equal(offsets, count) and (wrong or kept is None):
        raise UserError(f"{name}: d2t is 0, 1, 2, ... (an arange): head row i would mean id 2 * i; {rule}")
    rising = bool((offsets[1:] > offsets[:-1]).all()) if len(offsets) > 1 else False
    plausible = rising and bool((offsets >= 0).all() and (offsets < target_vocab).all())
    absolute = torch.equal(offsets.sort().values, kept) if kept is not None else plausible
    if (wrong and absolute) or (kept is None and plausible and len(offsets) >= ABSOLUTE_IDS_MIN):
        raise UserError(f"{name}: d2t holds absolute ids ({offsets[:3].tolist()}, ...); {rule}: subtract 0, 1, 2, ...")
    if wrong:
        other = " and t2d names other ids" if kept is not None else ""
        raise UserError(
            f"{name}: expected d2t to name {len(ids)} different ids below {target_vocab}, found ids from "
            f"{int(ids.min())} to {int(ids.max())}, {distinct} different{other}; {rule}"
        )
    return ids


def _config(
    raw: Mapping[str, Any],
    flat: Mapping[str, Any],
    kind: Format,
    tensors: Mapping[str, Tensor],
    folder: Path,
    target: tuple[int | None, str | None],
    notes: list[str],
) -> DraftConfig:
    _refuse_unsupported(raw, flat, folder)
    own = raw.get(OWN_BLOCK, {})
    depth = target[0] if target[0] is not None else own.get("target_layers")
    model_type = target[1] if target[1] is not None else own.get("target_model_type")
    llama = layer_config(flat)
    partial = llama.rope_parameters.get("partial_rotary_factor", 1.0)
    if partial != 1.0:
        raise UserError(f"{folder}: partial_rotary_factor {partial}: a draft here rotates whole heads; not supported")
    if "norm_before_residual" not in flat:
        notes.append(f"norm_before_residual is missing: {NORM_BEFORE_RESIDUAL_WHEN_MISSING[kind]} in {kind} format")
    residual = flat.get("norm_before_residual", NORM_BEFORE_RESIDUAL_WHEN_MISSING[kind])
    head = tensors.get("lm_head.weight")
    drafted = flat.get("draft_vocab_size") or (len(head) if head is not None else llama.vocab_size)
    return DraftConfig(
        target_vocab_size=llama.vocab_size,
        draft_vocab_size=drafted,
        hidden_size=llama.hidden_size,
        intermediate_size=llama.intermediate_size,
        num_attention_heads=llama.num_attention_heads,
        num_key_value_heads=llama.num_key_value_heads,
        head_dim=llama.head_dim,
        rms_norm_eps=llama.rms_norm_eps,
        rope_parameters=dict(llama.rope_parameters),
        max_position_embeddings=llama.max_position_embeddings,
        aux_layers=_layers(named_layers(flat), kind, depth, model_type, folder, notes),
        target_layers=depth if depth is not None else UNKNOWN_LAYERS,
        target_model_type=model_type or "",
        hidden_act=llama.hidden_act,
        norm_before_residual=bool(residual) and kind != "sglang",
        bos_token_id=flat.get("bos_token_id"),
        eos_token_id=flat.get("eos_token_id"),
    )


def _layers(
    ids: list[int] | None, kind: Format, depth: int | None, model_type: str | None, folder: Path, notes: list[str]
) -> tuple[int, ...]:
    if ids is None:
        if depth is None:
            raise UserError(
                f"{folder}: names no aux layers, and the engines' default depends on the target's depth; "
                "expected eagle_aux_hidden_state_layer_ids in its config.json"
            )
        notes.append("the config names no aux layers: the engines' default for this target")
        return default_layers(depth)
    if kind == "sglang":
        return layer_ids.from_sglang(ids, model_type or "", depth)
    if ids[0] == 1 and kind == "vllm":
        # Trainers for SGLang write outputs; the engines' own default tells the two meanings apart.
        if depth is not None and ids == list(default_layers(depth)):
            notes.append(f"aux layers {ids} are the default as SGLang's trainers write it: read as outputs of layers")
            return layer_ids.checked(ids, depth)
        notes.append(f"aux layers {ids} are read as vLLM reads them (inputs); SGLang would take the outputs")
    return layer_ids.from_vllm(ids, depth)


def _refuse_unsupported(raw: Mapping[str, Any], flat: Mapping[str, Any], folder: Path) -> None:
    """What our draft module cannot compute, by name."""
    width, target_width = flat.get("hidden_size"), flat.get("target_hidden_size")
    faults = {
        "num_hidden_layers": (flat.get("num_hidden_layers", 1), 1),
        "target_hidden_size": (target_width if target_width is not None else width, width),
        "num_aux_hidden_states": (flat.get("num_aux_hidden_states") or AUX_STATES, AUX_STATES),
        "norm_before_fc": (_flag(flat, "norm_before_fc"), False),
        "fc_norm": (_flag(flat, "fc_norm"), False),
        "norm_output": (_flag(flat, "norm_output"), False),
        "attention_bias": (_flag(flat, "attention_bias"), False),
        "mlp_bias": (_flag(flat, "mlp_bias"), False),
        "use_aux_hidden_state": ((flat.get("eagle_config") or {}).get("use_aux_hidden_state", True), True),
        "speculators_model_type": (raw.get("speculators_model_type", "eagle3"), "eagle3"),
        "model_type of the layer": (flat.get("model_type", "llama"), "llama"),
        "sliding attention layers": ("sliding_attention" in (flat.get("layer_types") or []), False),
    }
    for field, (found, expected) in faults.items():
        if found != expected:
            raise UserError(
                f"{folder}: expected an EAGLE-3 draft with {field} {expected!r}, found {found!r}; "
                "drafts of that kind are not supported"
            )


def _flag(flat: Mapping[str, Any], name: str) -> bool:
    """A flag that engines look for in `eagle_config` first."""
    return bool((flat.get("eagle_config") or {}).get(name, flat.get(name, False)))


def _kind_of(names: Sequence[str]) -> str:
    joined = " ".join(names)
    if "_a_proj" in joined or "kv_b_proj" in joined:
        return "an MLA draft, which is not supported"
    if "layers.1." in joined:
        return "a draft with more than one layer, which is not supported"
    if "q_norm" in joined or "k_norm" in joined:
        return "a draft with a Qwen3 layer (q_norm, k_norm), which is not supported"
    if ".bias" in joined:
        return "a draft with biases, which is not supported"
    if "fc_norm" in joined or "input_norm" in joined or "aux_norm" in joined:
        return "a draft that normalises the aux states, which is not supported"
    return "is this an EAGLE-3 draft?"


def _and_more(names: Sequence[str]) -> str:
    return f" and {len(names) - 8} more" if len(names) > 8 else ""
