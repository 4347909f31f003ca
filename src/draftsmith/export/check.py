"""Proof that an exported folder computes what the trainer's draft computes, in the eyes of the engine it is for.

Reads nothing but the exported files, the target's embedding and head, and some real rows. Each fact an engine takes
from config.json (layers, norms, rope, vocabulary map, embedding) is compared on its own, so that a failure names its
cause; then the draft is built from what was read and run over the rows, and its logits are compared with the trainer's.
Acceptance would prove nothing: a wrong layer or rope order moves it by less than noise (contract 7).

Costs two drafts in float32 in memory and two unrolls of a few traces.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

import torch
from torch import Tensor

from draftsmith.artifacts import read_json
from draftsmith.draft.eagle3 import DraftConfig, Eagle3Draft
from draftsmith.draft.loading import check_shapes, flattened, layer_config, read_tensors, renamed, target_ids
from draftsmith.draft.unroll import Batch, unroll
from draftsmith.errors import UserError
from draftsmith.export import sglang, speculators, vllm
from draftsmith.export.reading import Reading, layer_fields
from draftsmith.export.rope import Rope, engine_rope, trained_rope
from draftsmith.hidden.target_head import TargetHead
from draftsmith.recipe import Engine

ENGINES: dict[Engine, ModuleType] = {"vllm": vllm, "speculators": speculators, "sglang": sglang}
STEPS = 3
LOGIT_TOLERANCE = 1e-4
"""Largest difference of logits relative to the largest logit, both in float32 over equal weights."""
EMBEDDING = "embed_tokens.weight"
HEAD = "lm_head.weight"

Outcome = Literal["passed", "warning", "failed"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the check."""

    name: str
    outcome: Outcome
    expected: str
    found: str


@dataclass(frozen=True, slots=True)
class CheckResult:
    """What the check found for one engine.

    Differences are the largest of any logit, relative to the largest logit; None where the draft could not be built.
    `difference` is against the trainer's draft with equally rounded weights, `masters_difference` against its float32
    masters, `masters_agreement` the share of rows with the same first choice as theirs.
    """

    engine: Engine
    findings: tuple[Finding, ...]
    rows: int
    difference: float | None = None
    masters_difference: float | None = None
    masters_agreement: float | None = None

    @property
    def passed(self) -> bool:
        """No finding failed and logits were compared."""
        return self.difference is not None and all(finding.outcome != "failed" for finding in self.findings)

    def to_json(self) -> dict[str, Any]:
        """For check.json."""
        return {"passed": self.passed, **asdict(self)}

    def text(self) -> str:
        """For a person, a line per finding."""
        lines = [f"{self.engine}: {'passed' if self.passed else 'FAILED'}"]
        for finding in self.findings:
            tail = finding.found if finding.outcome == "passed" else f"expected {finding.expected}, {finding.found}"
            lines.append(f"  {finding.outcome:<8} {finding.name}: {tail}")
        return "\n".join(lines)


@torch.no_grad()
def check_export(
    folder: Path,
    engine: Engine,
    trained: Eagle3Draft,
    target: Mapping[str, Any],
    head: TargetHead,
    batches: Sequence[Batch],
) -> CheckResult:
    """Checks one exported folder.

    Args:
        folder: config.json and model.safetensors.
        engine: whose rules are applied.
        trained: the trainer's draft, float32 masters, on the CPU; it is not changed.
        target: `RUN/hidden/target.json`.
        head: the target's embedding and head.
        batches: real rows, float32, on the CPU.

    Raises:
        UserError: a file is missing or unreadable, or has tensors that are no draft's.
    """
    raw = read_json(folder / "config.json")
    stored = read_tensors(folder)
    tensors = renamed(stored, str(folder))
    reading: Reading = ENGINES[engine].read_back(raw, target)
    rope = engine_rope(engine, raw)
    rows = sum(int(batch.count.sum()) for batch in batches)
    embedding, embedding_used = _embedding(reading, tensors.get(EMBEDDING), head.embed_tokens)
    vocabulary, ids = _vocabulary(flattened(raw), tensors, trained, str(folder))
    findings = [
        _equal("architecture", sorted({*reading.known_architectures} & {*reading.architectures}) != [], True,
               f"{list(reading.architectures)} is an EAGLE-3 Llama draft to {engine}"),
        _explicit(raw, trained.config),
        _equal("aux states used", reading.uses_aux_states, True, "the draft reads the target's aux states"),
        _equal("aux layers (outputs of)", reading.layers, tuple(trained.config.aux_layers)),
        _equal("norm_before_residual", reading.norm_before_residual, trained.config.norm_before_residual),
        _equal("extra norms", (reading.normalises_aux, reading.normalises_output), (False, False),
               "none before fc, none on the output"),
        _rope(rope, trained_rope(trained.config)),
        _equal("layer sizes", _sizes(layer_config(flattened(raw))), _sizes(trained.config)),
        vocabulary,
        embedding,
        _head(tensors.get(HEAD), trained.config),
    ]  # fmt: skip
    if any(finding.outcome == "failed" for finding in findings):
        return CheckResult(engine, tuple(findings), rows)
    served = _served(trained.config, reading, rope, tensors, ids, embedding_used, head)
    rounded = _rounded(trained, tensors)
    difference, _ = compare(served, rounded, batches)
    masters_difference, agreement = compare(served, trained, batches)
    findings.append(
        Finding(
            "logits",
            "passed" if difference <= LOGIT_TOLERANCE else "failed",
            f"at most {LOGIT_TOLERANCE:g} from the trainer's at equal weights",
            f"off by {difference:.2g} over {rows} rows and {STEPS} steps; {masters_difference:.2g} from the float32 "
            f"masters, first choice alike in {agreement:.1%}",
        )
    )
    return CheckResult(engine, tuple(findings), rows, difference, masters_difference, agreement)


@torch.no_grad()
def compare(first: Eagle3Draft, second: Eagle3Draft, batches: Sequence[Batch]) -> tuple[float, float]:
    """Runs two drafts over the same rows.

    Returns:
        Largest difference of any logit, relative to the largest logit of `second`; share of rows with the same first
        choice as a target id.
    """
    worst, largest, alike, total = 0.0, 0.0, 0, 0
    for batch in batches:
        both = zip(unroll(first, batch, STEPS), unroll(second, batch, STEPS), strict=True)
        for step, (left, right) in enumerate(both):
            valid = batch.valid(step)
            if not bool(valid.any()):
                continue
            one, two = first.logits(left[valid]), second.logits(right[valid])  # [rows, draft_vocab]
            # NaN must not pass for small.
            worst = max(worst, float((one - two).abs().max().nan_to_num(nan=float("inf"))))
            largest = max(largest, float(two.abs().max()))
            alike += int((first.target_ids(one.argmax(-1)) == second.target_ids(two.argmax(-1))).sum())
            total += len(one)
    if total == 0:
        raise UserError("export check: expected supervised rows to compare on, found none; capture longer replies")
    return (worst / largest if largest else worst), alike / total


def _equal(name: str, found: Any, expected: Any, words: str | None = None) -> Finding:
    outcome: Outcome = "passed" if found == expected else "failed"
    return Finding(name, outcome, words or str(expected), words if words and found == expected else f"found {found}")


def _explicit(raw: Mapping[str, Any], config: DraftConfig) -> Finding:
    """Every field is in the file: a default belongs to a release, not to the draft."""
    flat = flattened(raw)
    wanted = [name for name, value in layer_fields(config).items() if value is not None]
    wanted += ["draft_vocab_size", "target_hidden_size", "norm_before_residual", "eagle_aux_hidden_state_layer_ids"]
    missing = [name for name in wanted if name not in flat]
    found = f"missing {', '.join(missing)}" if missing else f"all {len(wanted)} there"
    return Finding("fields", "failed" if missing else "passed", "every field written out", found)


def _rope(found: Rope, trained: Rope) -> Finding:
    difference = trained.difference(found)
    same = f"the frequencies of training, scale {found.scale:.4g}"
    return Finding("rope", "failed" if difference else "passed", "the frequencies of training", difference or same)


def _sizes(config: Any) -> dict[str, Any]:
    names = "hidden_size intermediate_size num_attention_heads num_key_value_heads head_dim rms_norm_eps hidden_act"
    return {name: getattr(config, name) for name in [*names.split(), "max_position_embeddings"]}


def _vocabulary(
    flat: Mapping[str, Any], tensors: Mapping[str, Tensor], trained: Eagle3Draft, name: str
) -> tuple[Finding, Tensor | None]:
    """The target ids of the head's rows as the engine maps them, and whether they are the trainer's."""
    vocab, trained_ids = trained.config.target_vocab_size, trained.target_ids(torch.arange(len(trained.d2t)))
    expected = f"{len(trained_ids)} of {vocab} ids, as trained"
    size = flat.get("draft_vocab_size") or flat.get("vocab_size")
    if flat.get("vocab_size") != vocab or size != len(trained_ids):
        found = f"found draft_vocab_size {size}, vocab_size {flat.get('vocab_size')}"
        return Finding("vocabulary", "failed", expected, found), None
    if "d2t" in tensors and size == vocab:
        # vLLM 0.32 (models/llama_eagle3.py) has no parameter for it then and stops while loading.
        return Finding("vocabulary", "failed", "no d2t for a whole vocabulary", "found one"), None
    if "d2t" not in tensors and size != vocab:
        return Finding("vocabulary", "failed", expected, "found no d2t: ids would be taken as they are"), None
    try:
        ids = target_ids(tensors["d2t"], vocab, name, tensors.get("t2d")) if "d2t" in tensors else torch.arange(vocab)
    except UserError as error:
        return Finding("vocabulary", "failed", expected, str(error)), None
    if not torch.equal(ids, trained_ids):
        wrong = int((ids != trained_ids).sum())
        return Finding("vocabulary", "failed", expected, f"{wrong} head rows mean other ids"), None
    return Finding("vocabulary", "passed", expected, expected), ids


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


def _head(stored: Tensor | None, config: DraftConfig) -> Finding:
    whole = config.draft_vocab_size == config.target_vocab_size
    expected = f"{HEAD} [{config.draft_vocab_size}, {config.hidden_size}]"
    if stored is None and whole:
        return Finding("head", "warning", expected, "found none: the engine uses the target's own head")
    if stored is None:
        return Finding("head", "failed", expected, "found none: the engine would serve a head it made up")
    return _equal("head", list(stored.shape), [config.draft_vocab_size, config.hidden_size])


def _served(
    config: DraftConfig,
    reading: Reading,
    rope: Rope,
    tensors: Mapping[str, Tensor],
    ids: Tensor | None,
    embedding: Tensor,
    head: TargetHead,
) -> Eagle3Draft:
    """The draft as the engine would run it, in float32."""
    weights = {**tensors, EMBEDDING: embedding, HEAD: tensors.get(HEAD, head.lm_head)}
    check_shapes(weights, config, "the exported draft")
    values = {**config.to_json(), "norm_before_residual": reading.norm_before_residual}
    draft = _with_weights(DraftConfig.from_json(values), weights)
    assert ids is not None
    t2d = torch.zeros(config.target_vocab_size, dtype=torch.bool).index_fill_(0, ids, True)
    draft.set_vocab(ids - torch.arange(len(ids)), t2d)
    draft.rotary.inv_freq = rope.inv_freq
    draft.rotary.attention_scaling = rope.scale
    return draft


def _rounded(trained: Eagle3Draft, stored: Mapping[str, Tensor]) -> Eagle3Draft:
    """The trainer's draft with each weight rounded to the dtype it was stored in, in float32."""
    weights = {
        name: value.to(stored[name].dtype) if name in stored else value for name, value in trained.state_dict().items()
    }
    draft = _with_weights(trained.config, weights)
    draft.set_vocab(trained.d2t, trained.t2d)
    return draft


def _with_weights(config: DraftConfig, weights: Mapping[str, Tensor]) -> Eagle3Draft:
    draft = Eagle3Draft(config).eval()
    draft.set_embedding(weights[EMBEDDING].float())
    for name, parameter in draft.trained().items():
        parameter.copy_(weights[name].float())
    return draft
