"""Proof that an exported folder computes what the trainer's draft computes, in the eyes of the engine it is for.

Reads nothing but the exported files, the target's embedding and head, and some real rows. Each fact an engine takes
from config.json (layers, norms, rope, vocabulary map, embedding) is compared on its own, so that a failure names its
cause; then the draft is built from what was read and run over the rows, and its logits are compared with the trainer's.
Acceptance would prove nothing: a wrong layer or rope order moves it by less than noise (contract 7).

Costs two drafts in float32 in memory and two unrolls of a few traces.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from draftsmith.draft.eagle3 import Eagle3Draft
from draftsmith.draft.formats import layer_config
from draftsmith.draft.unroll import Batch, unroll
from draftsmith.errors import UserError
from draftsmith.export.engine_view import Finding, View, built, look
from draftsmith.export.rope import trained_rope
from draftsmith.hidden.store import HiddenStore
from draftsmith.hidden.target_head import TargetHead
from draftsmith.recipe import Engine
from draftsmith.train.dataset import collate, read_samples

STEPS = 3
LOGIT_TOLERANCE = 1e-4
"""Largest difference of logits relative to the largest logit, both in float32 over equal weights."""


CHECK_TRACES = 4
CHECK_LENGTH = 1024
"""Ids of a trace that the check runs over at most."""


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
        return "\n".join([*lines, *(f"  {finding.text()}" for finding in self.findings)])


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
        folder: what the engine loads.
        engine: whose rules are applied.
        trained: the trainer's draft, float32 masters, on the CPU; it is not changed.
        target: `RUN/hidden/target.json`.
        head: the target's embedding and head.
        batches: real rows, float32, on the CPU.

    Raises:
        UserError: a file is missing or unreadable, or has tensors that are no draft's.
    """
    view = look(folder, engine, target, head)
    rows = sum(int(batch.count.sum()) for batch in batches)
    findings = [_strict(finding) for finding in (*view.findings, *_against(view, trained))]
    named = {finding.name for finding in findings}
    findings += [Finding("runs", "failed", "a draft", reason) for reason in view.refusals
                 if reason.partition(":")[0] not in named]  # fmt: skip
    if any(finding.outcome == "failed" for finding in findings):
        return CheckResult(engine, tuple(findings), rows)
    served = built(view, head).draft
    difference, _ = compare(served, _rounded(trained, view.files.tensors), batches)
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


def check_batches(traces: Path, store: HiddenStore) -> list[Batch]:
    """A few held-out traces as float32 rows, one trace a batch."""
    samples = read_samples(traces, store, CHECK_LENGTH).held_out
    return [collate([sample], store, torch.float32) for sample in samples[:CHECK_TRACES]]


def _strict(finding: Finding) -> Finding:
    """An export of ours leaves no field to the engine."""
    return replace(finding, outcome="failed") if finding.name == "fields" and finding.outcome == "warning" else finding


def _against(view: View, trained: Eagle3Draft) -> list[Finding]:
    """What the engine takes from the files, beside what was trained."""
    config, reading = trained.config, view.reading
    extra = [name for name in ("norm_before_fc", "fc_norm", "norm_output") if getattr(reading, name)]
    wrong_rope = trained_rope(config).difference(view.rope)
    found = [
        _equal("aux layers (outputs of)", view.layers, tuple(config.aux_layers)),
        _equal("norm_before_residual", reading.norm_before_residual, config.norm_before_residual),
        Finding(
            "extra norms",
            "failed" if extra else "passed",
            "none before fc, none on the output",
            f"found {', '.join(extra)}" if extra else "none before fc, none on the output",
        ),
        Finding(
            "rope",
            "failed" if wrong_rope else "passed",
            "the frequencies of training",
            wrong_rope or f"the frequencies of training, scale {view.rope.scale:.4g}",
        ),
        _same_sizes(_sizes(layer_config(view.flat)), _sizes(config)),
    ]
    if view.ids is not None:
        ids = trained.target_ids(torch.arange(len(trained.d2t)))
        wrong = int((view.ids != ids).sum()) if len(view.ids) == len(ids) else max(len(view.ids), len(ids))
        expected = f"{len(ids)} of {config.target_vocab_size} ids, as trained"
        found.append(
            Finding(
                "draft ids",
                "failed" if wrong else "passed",
                expected,
                f"{wrong} head rows mean other ids" if wrong else expected,
            )
        )
    return found


def _equal(name: str, found: Any, expected: Any) -> Finding:
    same = bool(found == expected)
    return Finding(name, "passed" if same else "failed", str(expected), str(expected) if same else f"found {found}")


def _same_sizes(found: dict[str, Any], trained: dict[str, Any]) -> Finding:
    wrong = {name: value for name, value in found.items() if value != trained[name]}
    expected = ", ".join(f"{name} {trained[name]}" for name in wrong or ("hidden_size", "num_attention_heads"))
    words = f"found {', '.join(f'{name} {value}' for name, value in wrong.items())}" if wrong else "as trained"
    return Finding("layer sizes", "failed" if wrong else "passed", expected, words)


def _sizes(config: Any) -> dict[str, Any]:
    names = "hidden_size intermediate_size num_attention_heads num_key_value_heads head_dim hidden_act"
    sizes = {name: getattr(config, name) for name in [*names.split(), "max_position_embeddings"]}
    return sizes | {"rms_norm_eps": float(torch.tensor(config.rms_norm_eps))}  # as it is computed with, in float32


def _rounded(trained: Eagle3Draft, stored: Mapping[str, Tensor]) -> Eagle3Draft:
    """The trainer's draft with each weight rounded to the dtype it was stored in, in float32."""
    draft = Eagle3Draft(trained.config).eval()
    draft.set_embedding(trained.embed_tokens.weight.detach().float())
    draft.set_vocab(trained.d2t, trained.t2d)
    masters = trained.trained()
    for name, parameter in draft.trained().items():
        kind = stored[name].dtype if name in stored else parameter.dtype
        parameter.copy_(masters[name].to(kind).float())
    return draft
