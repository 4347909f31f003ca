"""A draft folder as one engine would run it: from its files alone, by that engine's rules, right or wrong.

Nothing is put right here. Layer ids mean what the engine takes them for, missing fields get its defaults, a d2t of
absolute ids is added to the row like offsets, an embedding in the file is used where the engine uses it. So a faulty
draft gives the acceptance that it would have when served, and `export check` and `diagnose` look at the same thing.
What the engine refuses, or what cannot be computed from what lies there, is refused by name.

Costs one draft in float32 in memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from draftsmith.draft.eagle3 import AUX_STATES, DraftConfig, Eagle3Draft
from draftsmith.draft.formats import as_vllm_reads, layer_config
from draftsmith.draft.loading import SHAPES, check_shapes, target_ids
from draftsmith.errors import UserError
from draftsmith.export import llamacpp
from draftsmith.export.engine_module import EngineModule
from draftsmith.export.engines import ENGINES, READERS
from draftsmith.export.load_report import EMBEDDING, HEAD, LoadReport, load_report
from draftsmith.export.reading import Files, Reading, read_folder
from draftsmith.export.rope import Rope, engine_rope
from draftsmith.hidden.target_head import TargetHead
from draftsmith.recipe import Engine

Outcome = Literal["passed", "warning", "failed"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of a check."""

    name: str
    outcome: Outcome
    expected: str
    found: str

    def text(self) -> str:
        """For a person."""
        tail = self.found if self.outcome == "passed" else f"expected {self.expected}, {self.found}"
        return f"{self.outcome:<8} {self.name}: {tail}"


@dataclass(frozen=True, slots=True)
class EngineDraft:
    """A draft as an engine would run it."""

    engine: Engine
    draft: Eagle3Draft
    """float32, on the CPU, in eval mode. Its `target_ids` are the engine's; ids outside the vocabulary became the
    nearest ones inside."""
    layers: tuple[int, ...]
    """Outputs of target layers (0-based) in the order in which `draft.fuse` reads them; -1 is the embedding."""
    limit: int | None
    """Length of a sequence up to which the engine drafts; None where the draft sets no such limit."""
    rope: Rope
    reading: Reading
    findings: tuple[Finding, ...]
    """What the files alone show, without the trainer's draft."""


@dataclass(frozen=True, slots=True)
class View:
    """What an engine makes of a folder, before the draft is built."""

    engine: Engine
    folder: Path
    files: Files
    flat: dict[str, Any]
    """The layer's config under its plain names."""
    reading: Reading
    report: LoadReport
    layers: tuple[int, ...]
    rope: Rope
    ids: Tensor | None
    """Target id of each head row as the engine adds them up, unjudged; None where it cannot."""
    embedding: Tensor
    head: Tensor | None
    findings: tuple[Finding, ...]
    refusals: tuple[str, ...]
    """Why the engine would not run it, or why it cannot be computed here."""


@torch.no_grad()
def as_engine_runs(folder: Path, engine: Engine, target: Mapping[str, Any], head: TargetHead) -> EngineDraft:
    """The draft in a folder as an engine would run it.

    Args:
        folder: what the engine loads; of anybody's making.
        engine: whose rules are applied. vLLM reads flat and speculators folders, so "vllm" takes either.
        target: `RUN/hidden/target.json`.
        head: the target's embedding and head.

    Raises:
        UserError: the engine would stop while loading, or the draft cannot be computed from what lies there.
    """
    view = look(folder, engine, target, head)
    if view.refusals:
        raise UserError(f"{folder}: cannot be run as {READERS[view.engine]} reads it: {'; '.join(view.refusals)}")
    return built(view, head)


@torch.no_grad()
def built(view: View, head: TargetHead) -> EngineDraft:
    """The draft of a view without refusals.

    Raises:
        UserError: a tensor is missing or has another shape than the config says.
    """
    assert view.ids is not None and view.head is not None
    config, name = _config(view), f"{view.folder}: as {view.engine} reads it"
    ones = torch.ones(config.hidden_size)
    made = {line.name: ones for line in view.report.tensors if line.use == "made" and line.name in SHAPES}
    weights = {**made, **view.files.tensors, EMBEDDING: view.embedding, HEAD: view.head}
    check_shapes(weights, config, name)
    draft = EngineModule(config, view.reading, view.rope).eval()
    draft.set_embedding(view.embedding.float())
    for parameter_name, parameter in draft.trained().items():
        if parameter_name in weights:  # norms around fc that the files lack stay at one, as engines make them
            stored = weights[parameter_name]
            if stored.shape != parameter.shape:  # of the norms around fc, which `check_shapes` does not know
                expected, found = list(parameter.shape), list(stored.shape)
                raise UserError(f"{name}: expected {parameter_name} {expected} by its config, found {found}")
            parameter.copy_(stored.float())
    ids = view.ids.clamp(0, config.target_vocab_size - 1)
    draft.d2t.copy_(ids - torch.arange(len(ids)))
    draft.t2d.index_fill_(0, ids, True)
    limit = _limit(view.engine, view.flat)
    return EngineDraft(view.engine, draft, view.layers, limit, view.rope, view.reading, view.findings)


def look(folder: Path, engine: Engine, target: Mapping[str, Any], head: TargetHead) -> View:
    """Reads a folder by an engine's rules and says what its files alone show.

    Raises:
        UserError: files missing or unreadable, a field missing without which the engine stops, or a rope or target
            that it refuses.
    """
    report = load_report(folder, engine)
    engine = report.engine
    if report.stops:
        raise UserError(f"{folder}: {report.reader} stops at a config without {', '.join(report.stops)}; write them")
    files = llamacpp.read_files(folder) if engine == "llamacpp" else read_folder(folder, engine)
    flat, reading = as_vllm_reads(files.raw), ENGINES[engine].read_back(files.raw)
    layers = ENGINES[engine].taken_layers(files.raw, target)
    vocab = target["config"].get("vocab_size") or len(head.embed_tokens)
    vocabulary, ids = _vocabulary(engine, flat, files.tensors, vocab, str(folder))
    embedding, embedding_used = _embedding(reading, files.tensors.get(EMBEDDING), head.embed_tokens)
    own_head, head_used = _head(report, reading, flat, files.tensors.get(HEAD), head, vocab)
    findings = [
        _architecture(engine, reading),
        _fields(report),
        _states(reading, layers),
        vocabulary,
        embedding,
        own_head,
        *_tensors(report),
        *_positions(engine, flat, target),
    ]
    if engine == "sglang" and flat.get("norm_before_residual"):
        found = "found True, which SGLang does not know: it computes False"
        findings.append(Finding("norm_before_residual in the file", "failed", "False", found))
    if engine == "llamacpp" and target["model_type"] not in llamacpp.TRIED_TARGETS:
        found = f"{target['model_type']} targets were not tried with llama.cpp's EAGLE-3"
        findings.append(Finding("tried", "warning", "a kind of target seen running", found))
    stoppers = {"architecture", "aux states used", "tensors"}
    stoppers |= {"vocabulary"} if ids is None else set()
    stoppers |= {"head"} if head_used is None else set()
    refusals = [f"{one.name}: {one.found}" for one in findings if one.outcome == "failed" and one.name in stoppers]
    rope = engine_rope(engine, files.raw)
    return View(
        *(engine, folder, files, flat, reading, report, layers, rope),
        *(ids, embedding_used, head_used, tuple(findings), (*refusals, *_beyond(engine, flat))),
    )


def _config(view: View) -> DraftConfig:
    llama = layer_config(view.flat)
    assert view.ids is not None
    return DraftConfig(
        target_vocab_size=len(view.embedding),
        draft_vocab_size=len(view.ids),
        hidden_size=llama.hidden_size,
        intermediate_size=llama.intermediate_size,
        num_attention_heads=llama.num_attention_heads,
        num_key_value_heads=llama.num_key_value_heads,
        head_dim=llama.head_dim,
        rms_norm_eps=llama.rms_norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},  # replaced by the engine's own frequencies
        max_position_embeddings=llama.max_position_embeddings,
        aux_layers=view.layers,
        target_layers=0,
        target_model_type="",
        hidden_act=llama.hidden_act,
        norm_before_residual=view.reading.norm_before_residual,
    )


def _beyond(engine: Engine, flat: Mapping[str, Any]) -> list[str]:
    """What the reference decoder cannot compute, by name; the engine itself may well."""
    llama = layer_config(flat)
    sliding = "sliding_attention" in (flat.get("layer_types") or ())
    # SGLang's MLP has no biases, whatever the config says.
    biases = [name for name in ("attention_bias", "mlp_bias", "bias") if (engine, name) != ("sglang", "mlp_bias")]
    found = {
        "num_hidden_layers": (llama.num_hidden_layers, 1),
        "num_aux_hidden_states": (flat.get("num_aux_hidden_states") or AUX_STATES, AUX_STATES),
        "target_hidden_size": (flat.get("target_hidden_size") or llama.hidden_size, llama.hidden_size),
        "hidden_act": (llama.hidden_act, "silu"),
        "kv_lora_rank (latent attention)": (flat.get("kv_lora_rank"), None),
        "model_type (Qwen3 layer)": (engine == "speculators" and flat.get("model_type") == "qwen3", False),
        **{f"{name} (biases)": (bool(flat.get(name)), False) for name in biases},
        "layer_types (sliding attention)": (sliding, False),
    }
    return [f"cannot be computed here: {name}: expected {wanted}, found {value}"
            for name, (value, wanted) in found.items() if value != wanted]  # fmt: skip


def _architecture(engine: Engine, reading: Reading) -> Finding:
    known = bool({*reading.known_architectures} & {*reading.architectures})
    kind = "" if any("Qwen3ForCausalLM" in name for name in reading.architectures) else " Llama"
    found = f"{list(reading.architectures)} is an EAGLE-3{kind} draft to {engine}"
    if known:
        return Finding("architecture", "passed", "", found)
    expected = f"one of {', '.join(reading.known_architectures)}"
    return Finding("architecture", "failed", expected, f"found {list(reading.architectures)}")


def _fields(report: LoadReport) -> Finding:
    """Fields left to the engine: a default belongs to a release, not to the draft."""
    missing = [line for line in report.fields if line.use == "default"]
    words = [f"{line.name} ({line.default})" for line in missing]
    there = sum(line.use == "read" for line in report.fields)
    found = f"missing {', '.join(words)}" if missing else f"all {there} there"
    return Finding("fields", "warning" if missing else "passed", "every field written out", found)


def _states(reading: Reading, layers: tuple[int, ...]) -> Finding:
    """Whether the draft reads the target's aux states, and as many as it gets (P40)."""
    name, expected = "aux states used", f"{AUX_STATES} of the target's, read by the draft"
    if not reading.uses_aux_states:
        return Finding(name, "failed", expected, "found use_aux_hidden_state false: the draft would ignore them")
    if len(layers) != AUX_STATES:
        return Finding(name, "failed", expected, f"found {len(layers)} (outputs of layers {list(layers)})")
    return Finding(name, "passed", expected, f"outputs of layers {list(layers)}")


def _tensors(report: LoadReport) -> list[Finding]:
    """Tensors that the engine has no place for, or lacks; embedding and head are judged on their own."""
    odd = [line for line in report.tensors if line.name not in (EMBEDDING, HEAD)]
    found = []
    outcomes: dict[str, Outcome] = {"dropped": "warning", "made": "failed", "unset": "failed", "stops": "failed"}
    for use, outcome in outcomes.items():
        names = [line.name for line in odd if line.use == use]
        if names:
            more = f" and {len(names) - 8} more" if len(names) > 8 else ""
            note = next(line.note for line in odd if line.use == use)
            said = f"found {', '.join(names[:8])}{more}: {note}"
            name = "norms missing" if use == "made" else "tensors"
            found.append(Finding(name, outcome, f"those that {report.reader} reads", said))
    return found


def _limit(engine: Engine, flat: Mapping[str, Any]) -> int | None:
    """vLLM 0.32: config/model.py `_get_and_verify_max_len`; SGLang 0.5.23: hf_transformers/common.py
    `get_context_length`, not counting what comes from linear scaling. llama.cpp only warns."""
    return None if engine == "llamacpp" else flat.get("max_position_embeddings")


def _positions(engine: Engine, flat: Mapping[str, Any], target: Mapping[str, Any]) -> list[Finding]:
    limit, wanted = _limit(engine, flat), target["config"].get("max_position_embeddings")
    if limit is None or wanted is None or limit >= wanted:
        return []
    if engine == "sglang":
        said = f"found {limit}: SGLang does not start, unless with --context-length {limit} or less"
    else:
        # vLLM 0.32, v1/worker/gpu_model_runner.py `_input_fits_in_drafter`: the longest sequence decides for all.
        said = f"found {limit}: vLLM drafts nothing while any running sequence is longer"
    return [Finding("positions", "warning", f"the target's {wanted}", said)]


def _vocabulary(
    engine: Engine, flat: Mapping[str, Any], tensors: Mapping[str, Tensor], vocab: int, name: str
) -> tuple[Finding, Tensor | None]:
    """The target ids of the head's rows as the engine adds them up, and whether they can be right (P27)."""
    label = "vocabulary"
    size, d2t = flat.get("draft_vocab_size") or flat.get("vocab_size"), tensors.get("d2t")
    expected = f"{size} different ids of {vocab}"
    if flat.get("vocab_size") != vocab or not isinstance(size, int):
        found = f"found draft_vocab_size {size}, vocab_size {flat.get('vocab_size')}"
        return Finding(label, "failed", f"a vocabulary of {vocab}", found), None
    if d2t is not None and size == vocab and engine in ("vllm", "speculators"):
        # vLLM 0.32 (models/llama_eagle3.py) has no parameter for it then and stops while loading.
        return Finding(label, "failed", "no d2t for a whole vocabulary", "found one"), None
    if d2t is None:
        ids = torch.arange(size)
        found = "found no d2t: ids would be taken as they are"
        return Finding(
            label, "passed" if size == vocab else "failed", expected, expected if size == vocab else found
        ), ids
    if len(d2t) != size:
        return Finding(label, "failed", expected, f"found a d2t of {len(d2t)}"), None
    ids = d2t.to(torch.int64) + torch.arange(size)
    try:
        target_ids(d2t, vocab, name, tensors.get("t2d"))
    except UserError as error:
        return Finding(label, "failed", expected, str(error).removeprefix(f"{name}: ")), ids
    return Finding(label, "passed", expected, expected), ids


def _embedding(reading: Reading, stored: Tensor | None, target: Tensor) -> tuple[Finding, Tensor]:
    """Which embedding the engine will use (P37)."""
    name = "embedding"
    if not reading.reads_embedding:
        return Finding(name, "passed", "the target's", "the engine always uses the target's"), target
    if stored is None:
        return Finding(name, "passed", "the target's", "not in the file: the engine shares the target's"), target
    if stored.shape != target.shape:
        found = f"found shape {list(stored.shape)}"
        return Finding(name, "failed", f"the target's {list(target.shape)}", found), stored
    if stored.dtype == target.dtype and torch.equal(stored, target):
        return Finding(name, "passed", "the target's", "in the file, equal to the target's bit by bit"), stored
    coarse = max((torch.finfo(kind.dtype).eps for kind in (stored, target)), default=0.0)
    if torch.allclose(stored.float(), target.float(), rtol=4 * coarse, atol=1e-6):
        if stored.dtype == target.dtype:
            found = "found one that differs from it by rounding: the engine keeps its own copy"
        else:
            found = f"found a copy in {stored.dtype} of {target.dtype}: sharing may not be detected"
        return Finding(name, "warning", "the target's", found), stored
    off = float((stored.float() - target.float()).norm() / target.float().norm())
    found = f"found another one (off by {off:.0%}), which the engine would use as it is"
    return Finding(name, "failed", "the target's", found), stored


def _head(
    report: LoadReport,
    reading: Reading,
    flat: Mapping[str, Any],
    stored: Tensor | None,
    target: TargetHead,
    vocab: int,
) -> tuple[Finding, Tensor | None]:
    """Which head the engine will use (P37)."""
    size = flat.get("draft_vocab_size") or vocab
    expected = f"{HEAD} [{size}, {flat.get('hidden_size')}]"
    line = next((line for line in report.tensors if line.name == HEAD), None)
    note = line.note if line else "not in the files"
    if reading.tied_head:
        # As it should be only where the target's own head is its embedding and the draft has no other.
        same = stored is None and size == vocab and torch.equal(target.embed_tokens, target.lm_head)
        return Finding("head", "warning" if same else "failed", expected, f"found {note}"), target.embed_tokens[:size]
    if stored is not None:
        fits = list(stored.shape) == [size, flat.get("hidden_size")]
        found = f"found {list(stored.shape)}"
        return Finding("head", "passed" if fits else "failed", expected, expected if fits else found), stored
    if line and line.use == "shared":
        return Finding("head", "warning", expected, f"found none: {note} is used"), target.lm_head
    served = target.lm_head[:size] if report.engine in ("vllm", "speculators") else None
    return Finding("head", "failed", expected, f"found none: {note}"), served
