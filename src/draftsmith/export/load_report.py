"""What one engine version makes of a draft folder, field by field and tensor by tensor.

Says of each config field whether the engine reads it, which default it takes where one is missing, and which fields it
ignores; of each tensor whether it is read, shared with the target, skipped, dropped without a word (SGLang), or where
the engine stops. Reads configs and headers only: a draft of any size is explained in a second, and no target is needed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Set
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from draftsmith.artifacts import read_json
from draftsmith.draft.formats import OWN_BLOCK, as_vllm_reads
from draftsmith.draft.loading import OPTIONAL, SHAPES
from draftsmith.export import llamacpp, speculators
from draftsmith.export.engines import ENGINES, READERS, reader_of
from draftsmith.export.reading import RARE, REQUIRED, Reading, canonical
from draftsmith.export.shapes import (
    INPUT_NORM,
    MLA_FIELDS,
    Shape,
    axes_of,
    fc_norms,
    is_mla,
    layer_count,
    stored_shapes,
)
from draftsmith.recipe import Engine

FieldUse = Literal["read", "default", "stops", "ignored"]
TensorUse = Literal["read", "shared", "skipped", "dropped", "made", "unset", "stops"]
"""`made`: not in the files, the engine makes one; `unset`: it serves whatever lies in memory."""

EMBEDDING = "embed_tokens.weight"
HEAD = "lm_head.weight"
LOST_HEAD = (HEAD, "dropped")
TIED = "tie_word_embeddings is true: SGLang serves the target's embedding under the draft's ids"
SHOWN_VALUE = 60
LLAMA_ONLY = frozenset({"head_dim", "num_key_value_heads", "attention_bias", "mlp_bias", "norm_before_fc"})
"""Fields that a draft with latent attention has no use for."""
PROVENANCE = frozenset({OWN_BLOCK, "transformers_version", "_name_or_path", "speculators_version", "torch_dtype"})
"""Config keys that say where a draft comes from."""


@dataclass(frozen=True, slots=True)
class FieldLine:
    """One config field: `value` as written ("" where missing), `default` what the engine takes where it is missing."""

    name: str
    use: FieldUse
    value: str
    default: str
    note: str = ""


@dataclass(frozen=True, slots=True)
class TensorLine:
    """One tensor, under its checkpoint name where the engine knows it."""

    name: str
    use: TensorUse
    shape: tuple[int, ...]
    dtype: str
    note: str = ""


@dataclass(frozen=True, slots=True)
class LoadReport:
    """What `load_report` found."""

    engine: Engine
    reader: str
    fields: tuple[FieldLine, ...]
    tensors: tuple[TensorLine, ...]

    def to_json(self) -> dict[str, Any]:
        """For load_report.json."""
        return asdict(self)

    @property
    def stops(self) -> tuple[str, ...]:
        """Missing fields without which the engine stops."""
        return tuple(line.name for line in self.fields if line.use == "stops")

    @property
    def faults(self) -> tuple[str, ...]:
        """Why the engine would stop while loading, or serve what was never loaded."""
        fields = [f"{name} is missing" for name in self.stops]
        bad = [one for one in self.tensors if one.use in ("made", "unset", "stops") or (one.name, one.use) == LOST_HEAD]
        tensors = [f"{line.name}: {line.note}" for line in bad]
        return (*fields, *tensors)

    def text(self) -> str:
        """For a person: what is not simply read, a line each, then what is."""
        uses = Counter(line.use for line in self.tensors)
        read = [line.name for line in self.fields if line.use == "read"]
        ignored = [line.name for line in self.fields if line.use == "ignored" and not line.note]
        lines = [f"{self.reader}: reads {len(read)} fields, {uses['read']} tensors"]
        for field in self.fields:
            if field.use in ("default", "stops"):
                taken = f"missing: taken as {field.default}" if field.use == "default" else "missing: stops"
                lines.append(f"  {field.use:<8} {field.name}: {taken}{field.note and '; ' + field.note}")
            elif field.note:
                lines.append(f"  {field.use:<8} {field.name} = {field.value}: {field.note}")
        for tensor in self.tensors:
            if tensor.use != "read" or tensor.note:
                shape = f" {list(tensor.shape)}" if tensor.shape else ""
                lines.append(f"  {tensor.use:<8} {tensor.name}{shape}: {tensor.note}")
        if ignored:
            lines.append(f"  ignored  {', '.join(ignored)}")
        return "\n".join([*lines, f"  read     {', '.join(read)}"])


def load_report(folder: Path, engine: Engine) -> LoadReport:
    """What an engine makes of a folder.

    Raises:
        UserError: files missing or unreadable, or a format that the engine does not read.
    """
    if engine == "llamacpp":
        values, shapes = llamacpp.read_headers(folder)
        read = {name.removeprefix(f"{llamacpp.ARCHITECTURE}."): value for name, value in values.items()}
        reading = ENGINES[engine].read_back({**read, "architectures": ()})
        known = {*SHAPES, INPUT_NORM} if reading.norm_before_fc else {*SHAPES}
        tensors = tuple(_tensor(engine, name, shape, reading, known) for name, shape in sorted(shapes.items()))
        absent = _absent(engine, read, reading, shapes)
        return LoadReport(engine, READERS[engine], _fields(engine, read), (*tensors, *absent))
    raw = read_json(folder / "config.json")
    engine = reader_of(engine, raw, folder)
    reading = ENGINES[engine].read_back(raw)
    flat = as_vllm_reads(raw)
    shapes = {canonical(name, engine): shape for name, shape in stored_shapes(folder).items()}
    known = {*axes_of(flat, engine)}
    known |= {*fc_norms(flat)} if reading.fc_norm else set()
    known |= {INPUT_NORM} if reading.norm_before_fc else set()
    tensors = tuple(_tensor(engine, name, shape, reading, known) for name, shape in sorted(shapes.items()))
    absent = _absent(engine, flat, reading, shapes)
    if engine == "speculators":
        fields = _fields(engine, speculators.read_fields(raw), speculators.passed_over(raw))
    else:
        fields = _fields(engine, flat)
    return LoadReport(engine, READERS[engine], fields, (*tensors, *absent))


def tensor_use(engine: Engine, name: str, reading: Reading, known: Set[str]) -> tuple[TensorUse, str]:
    """What an engine does with a tensor, and why.

    Args:
        engine: the engine.
        name: the tensor's checkpoint name.
        reading: what the engine understood of the config.
        known: names it has a place for.
    """
    if name == "t2d":
        return "skipped", "d2t alone says what head rows mean"
    if name == EMBEDDING:
        if not reading.reads_embedding:
            return "skipped", "the target's is always used"
        return (
            "read",
            "shared with the target where it is equal bit by bit" if engine != "llamacpp" else "used as it is",
        )
    if name == HEAD and reading.tied_head:
        return "dropped", TIED
    if name in known:
        return "read", ""
    if engine == "sglang":
        return "dropped", "SGLang knows no such tensor and says nothing"
    if engine != "llamacpp" and (name == INPUT_NORM or name.endswith("rotary_emb.inv_freq") or "mask_hidden" in name):
        return "skipped", "not used with this config"
    return "stops", f"{READERS[engine]} knows no such tensor and stops"


def _tensor(engine: Engine, name: str, shape: Shape, reading: Reading, known: Set[str]) -> TensorLine:
    use, note = tensor_use(engine, name, reading, known)
    return TensorLine(name, use, shape.shape, shape.dtype, note)


def _absent(
    engine: Engine, values: Mapping[str, Any], reading: Reading, there: Mapping[str, Shape]
) -> list[TensorLine]:
    """Tensors that are not in the files."""
    if not there:
        return []
    lines = []
    if EMBEDDING not in there:
        lines.append(TensorLine(EMBEDDING, "shared", (), "", "not in the files: the target's"))
    if HEAD not in there:
        lines.append(TensorLine(HEAD, *_absent_head(engine, values, reading, "d2t" in there)))
    norms = {INPUT_NORM} if reading.norm_before_fc else set()
    norms |= {*fc_norms(values)} if reading.fc_norm else set()
    missing = ((axes_of(values, engine).keys() - OPTIONAL) | norms) - there.keys()
    for number in range(1, layer_count(values) if engine != "llamacpp" else 1):
        prefix = f"layers.{number}."
        # Of layers behind the first vLLM does not use this norm, SGLang not that one.
        missing.discard(prefix + ("input_layernorm.weight" if engine == "sglang" else "hidden_norm.weight"))
        if not any(name.startswith(prefix) for name in there):
            missing = {name for name in missing if not name.startswith(prefix)}
            note = "no tensor of this layer is in the files, and nobody notices: whatever lies in memory is served"
            lines.append(TensorLine(prefix.rstrip("."), "unset", (), "", note))
    for name in sorted(missing):
        if engine == "llamacpp":
            lines.append(TensorLine(name, "stops", (), "", "not in the file: llama.cpp stops"))
        elif name.endswith("norm.weight") or name in norms:
            lines.append(
                TensorLine(name, "made", (), "", "not in the files, and nobody notices: the norm's weight is one")
            )
        else:
            note = "not in the files, and nobody notices: whatever lies in memory is served"
            lines.append(TensorLine(name, "unset", (), "", note))
    return lines


def _absent_head(
    engine: Engine, values: Mapping[str, Any], reading: Reading, reduced: bool
) -> tuple[TensorUse, tuple[int, ...], str, str]:
    size, vocab = values.get("draft_vocab_size"), values.get("vocab_size")
    if reading.tied_head:
        return ("shared" if size in (None, vocab) else "unset"), (), "", f"not in the files, and {TIED}"
    if engine == "sglang" and size is not None:
        return "unset", (), "", "not in the files, though draft_vocab_size is set: whatever lies in memory is served"
    if engine in ("vllm", "speculators") and size not in (None, vocab):
        # vLLM 0.32, v1/spec_decode/llm_base_proposer.py `_maybe_share_lm_head`; the logits are cut to the draft's size.
        return "unset", (), "", f"not in the files: the target's first {size} rows are served under the draft's ids"
    if engine == "llamacpp" and reduced:
        return "stops", (), "", "not in the file: the target's has other rows than d2t"
    return "shared", (), "", "not in the files: the target's"


def _fields(
    engine: Engine, values: Mapping[str, Any], passed_over: Mapping[str, Any] | None = None
) -> tuple[FieldLine, ...]:
    rules: dict[str, str] = {**ENGINES[engine].FIELDS}
    if engine == "speculators":
        rules |= {name: default for name, default in speculators.LAYER_FIELDS.items() if name in values}
    if is_mla(values):
        # vLLM 0.32, models/deepseek_eagle3.py; SGLang 0.5.23, srt/models/kimi_k25_eagle3.py.
        rules = {name: default for name, default in rules.items() if name not in LLAMA_ONLY}
        rules |= dict.fromkeys(MLA_FIELDS, REQUIRED)
    lines = []
    for name, default in rules.items():
        other = speculators.LIBRARY_DEFAULTS.get(name)
        note = f"the speculators library takes {other}" if other and engine == "speculators" else ""
        if name in values and not (values[name] is None and name in RARE):
            lines.append(FieldLine(name, "read", _shown(values[name]), default))
        elif default == REQUIRED:
            lines.append(FieldLine(name, "stops", "", default))
        elif name not in RARE:
            lines.append(FieldLine(name, "default", "", default, note))
    ignored = {name: value for name, value in values.items() if name not in rules} | dict(passed_over or {})
    for name in sorted(ignored.keys() - PROVENANCE):
        lines.append(FieldLine(name, "ignored", _shown(ignored[name]), "", _misread(engine, name, ignored[name])))
    return tuple(lines)


def _misread(engine: Engine, name: str, value: Any) -> str:
    """Why it matters that an engine ignores a field."""
    if engine == "sglang" and name == "norm_before_residual" and value:
        return "SGLang computes False"
    if engine == "sglang" and name in ("mlp_bias",) and value:
        return "SGLang computes without"
    return ""


def _shown(value: Any) -> str:
    words = str(value)
    return words if len(words) <= SHOWN_VALUE else words[: SHOWN_VALUE - 3] + "..."
