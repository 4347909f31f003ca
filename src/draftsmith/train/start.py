"""How a draft starts: fresh, from the target's own parts, or warm, from a draft that exists.

Fresh: embedding, final norm and head rows are the target's, so that a hidden state which resembles the target's last
one already speaks the target's language; the rest is small random numbers from the seed, the same on every device.
Warm: weights and draft vocabulary are the checkpoint's (contract 5: d2t belongs to the weights); a checkpoint that does
not fit this target is refused, never bent.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from draftsmith.data.vocab import Vocab
from draftsmith.draft.checkpoint import EMBEDDING, load_weights
from draftsmith.draft.eagle3 import AUX_STATES, DraftConfig, Eagle3Draft
from draftsmith.draft.loading import read_any_draft
from draftsmith.errors import UserError
from draftsmith.hidden.target_head import TargetHead
from draftsmith.recipe import TrainSettings
from draftsmith.train.checkpoint import BEST

INIT_STD = 0.02
MLA_HEAD_DIM = 128
"""Head width of a Llama-style draft for a target with latent attention, which has no plain head width of its own."""
UNSUPPORTED_ROPE = ("mscale", "mscale_all_dim", "partial_rotary_factor")
"""Rope values that a fresh draft is trained without. In the attention of DeepSeek and Kimi the two mscales cancel out
of cos and sin, and the scores are multiplied by the square of YaRN's factor instead. A Llama layer (transformers, vLLM
0.32 and SGLang 0.5.23 alike) has that square when cos and sin carry the factor, which is when the pair is left out. And
it turns whole heads."""


def fresh_draft(target: dict[str, Any], head: TargetHead, vocab: Vocab, settings: TrainSettings) -> Eagle3Draft:
    """A new draft for a target.

    Args:
        target: `RUN/hidden/target.json`.
        head: the target's embedding, head and norm.
        vocab: the run's draft vocabulary.
        settings: shape, where it differs from the target's, and seed.

    Raises:
        UserError: the target's config lacks a value or asks for an impossible shape.
    """
    draft = Eagle3Draft(draft_config(target, len(head.embed_tokens), len(vocab.ids), settings))
    draft.set_embedding(head.embed_tokens)
    draft.set_vocab(*_maps(vocab, head))
    generator = torch.Generator().manual_seed(settings.seed)
    with torch.no_grad():
        for name, parameter in sorted(draft.trained().items()):
            if parameter.dim() == 2 and name != "lm_head.weight":
                parameter.normal_(0.0, INIT_STD, generator=generator)
        _start_as_mean(draft.fc)
        draft.norm.weight.copy_(head.norm)
        draft.lm_head.weight.copy_(head.lm_head[torch.from_numpy(vocab.ids)])
    return draft


def draft_config(target: dict[str, Any], target_vocab: int, draft_vocab: int, settings: TrainSettings) -> DraftConfig:
    """The config of a fresh draft: the target's shape where the settings name none.

    Raises:
        UserError: as `fresh_draft`.
    """
    config = target["config"]
    needed = ("hidden_size", "intermediate_size", "num_attention_heads", "rms_norm_eps", "rope_parameters")
    missing = [name for name in needed if config.get(name) is None]
    if missing:
        raise UserError(f"{target['name']}: its config lacks {', '.join(missing)}; train needs a Llama-like target")
    heads = settings.heads or config["num_attention_heads"]
    if config["hidden_size"] % heads:  # transformers' LlamaConfig, which engines read drafts with, refuses it
        raise UserError(
            f"train: expected a number of heads that divides the hidden size {config['hidden_size']}, found {heads}; "
            "set --heads"
        )
    latent = "kv_lora_rank" in config
    own_kv = config["num_attention_heads"] if latent else config.get("num_key_value_heads") or heads
    kv_heads = settings.kv_heads or (min(own_kv, heads) if settings.heads else own_kv)
    if heads % kv_heads:
        raise UserError(f"train: expected heads to be a multiple of kv_heads, found {heads} and {kv_heads}; set both")
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    return DraftConfig(
        target_vocab_size=target_vocab,
        draft_vocab_size=draft_vocab,
        hidden_size=config["hidden_size"],
        intermediate_size=settings.intermediate or config["intermediate_size"],
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=MLA_HEAD_DIM if latent else head_dim,
        rms_norm_eps=config["rms_norm_eps"],
        rope_parameters=_rope(config["rope_parameters"]),
        max_position_embeddings=config.get("max_position_embeddings") or settings.max_length,
        aux_layers=tuple(target["layers"]),
        target_layers=target["num_layers"],
        target_model_type=target["model_type"],
        norm_before_residual=settings.norm_before_residual,
        bos_token_id=config.get("bos_token_id"),
        eos_token_id=config.get("eos_token_id"),
    )


def warm_draft(target: dict[str, Any], head: TargetHead, settings: TrainSettings) -> tuple[Eagle3Draft, list[str]]:
    """The draft of `settings.from_`, with its own vocabulary.

    Returns:
        The draft, and what a user should know about it, a line each.

    Raises:
        UserError: it is no draft, does not fit the target, or contradicts the settings.
    """
    name = str(settings.from_)
    found = read_any_draft(_folder(name), target_layers=target["num_layers"], target_model_type=target["model_type"])
    _check_fit(name, found.config, target, head, settings)
    draft = Eagle3Draft(
        replace(found.config, target_layers=target["num_layers"], target_model_type=target["model_type"])
    )
    draft.set_embedding(head.embed_tokens)
    load_weights(draft, {"lm_head.weight": head.lm_head, **found.tensors}, name)
    notes = [*found.notes, f"{name} ({found.format}): its vocabulary of {found.config.draft_vocab_size:,} ids is kept"]
    own = found.tensors.get(EMBEDDING)
    if own is not None and not torch.allclose(own.float(), head.embed_tokens.float(), atol=1e-2):
        notes.append(f"{name}: its embedding differs from the target's; the target's is used, as engines share it")
    return draft, notes


def with_vocab(draft: Eagle3Draft, head: TargetHead, vocab: Vocab) -> tuple[Eagle3Draft, int]:
    """The same draft with its head rebuilt for another vocabulary.

    Rows of ids that both vocabularies hold are kept; the others are the target head's rows.

    Returns:
        The new draft, and how many rows were kept.
    """
    values = {**draft.config.to_json(), "draft_vocab_size": len(vocab.ids)}
    rebuilt = Eagle3Draft(DraftConfig.from_json(values))
    rebuilt.set_embedding(head.embed_tokens)
    rebuilt.set_vocab(*_maps(vocab, head))
    ids = torch.from_numpy(vocab.ids)
    kept = draft.t2d[ids]
    old_row = draft.t2d.long().cumsum(0) - 1  # target id -> row of the old head
    rows = head.lm_head[ids].to(draft.lm_head.weight)
    rows[kept] = draft.lm_head.weight.detach()[old_row[ids[kept]]]
    with torch.no_grad():
        for name, parameter in rebuilt.trained().items():
            parameter.copy_(rows if name == "lm_head.weight" else draft.get_parameter(name))
    return rebuilt, int(kept.sum())


def _maps(vocab: Vocab, head: TargetHead) -> tuple[Tensor, Tensor]:
    """d2t and t2d over the target's embedding rows, which may be more than its tokenizer has ids."""
    rows = len(head.embed_tokens)
    if len(vocab.t2d) > rows:
        raise UserError(
            f"draft vocabulary: expected at most {rows} target ids, the rows of the target's embedding, found "
            f"{len(vocab.t2d)}; the traces were captured with another tokenizer"
        )
    t2d = torch.zeros(rows, dtype=torch.bool)
    t2d[: len(vocab.t2d)] = torch.from_numpy(vocab.t2d)
    return torch.from_numpy(vocab.d2t), t2d


def _check_fit(
    name: str, config: DraftConfig, target: dict[str, Any], head: TargetHead, settings: TrainSettings
) -> None:
    vocab_size, hidden_size = head.embed_tokens.shape
    facts = (
        ("hidden size", config.hidden_size, hidden_size, "it belongs to another target"),
        ("target vocabulary", config.target_vocab_size, vocab_size, "it belongs to another target"),
        (
            "aux layers (outputs of)",
            list(config.aux_layers),
            list(target["layers"]),
            f"extract with --layers {' '.join(map(str, config.aux_layers))}",
        ),
    )
    for what, found, expected, advice in facts:
        if found != expected:
            raise UserError(f"{name}: {what} {found}, but the target {target['name']} has {expected}; {advice}")
    wanted = (
        ("intermediate", settings.intermediate, config.intermediate_size),
        ("heads", settings.heads, config.num_attention_heads),
        ("kv_heads", settings.kv_heads, config.num_key_value_heads),
    )
    for what, asked, found in wanted:
        if asked not in (None, found):
            raise UserError(f"train.{what}: {asked} was asked for, but {name} has {found}; leave it out with --from")


def _folder(name: str) -> Path:
    folder = Path(name).expanduser()
    if folder.is_dir():
        return folder / BEST if (folder / BEST).is_dir() else folder
    if folder.is_absolute() or name.startswith((".", "~")) or name.count("/") != 1:
        raise UserError(f"{name}: expected a draft folder or a hub id (owner/name), found neither")
    from huggingface_hub import snapshot_download  # only drafts by hub id need it
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError, OfflineModeIsEnabled

    try:
        return Path(snapshot_download(name))
    except (HfHubHTTPError, LocalEntryNotFoundError, OfflineModeIsEnabled) as error:
        reason = " ".join(str(error).split())[:200]
        raise UserError(f"{name}: no such folder, and the hub did not give such a draft ({reason})") from None


def _rope(parameters: dict[str, Any]) -> dict[str, Any]:
    """The rope of full attention, without what a plain Llama layer cannot express."""
    plain = parameters.get("full_attention", parameters)
    return {name: value for name, value in plain.items() if name not in UNSUPPORTED_ROPE}


def _start_as_mean(fc: nn.Linear) -> None:
    """The fused state starts as the mean of the aux states, plus the noise that is there."""
    hidden = fc.out_features
    for part in range(AUX_STATES):
        fc.weight[:, part * hidden : (part + 1) * hidden].diagonal().add_(1 / AUX_STATES)
