"""The train stage: an EAGLE-3 draft from traces, draft vocabulary and hidden states.

A step is: some micro-batches forward and backward (the unroll of the training-time test, in the compute dtype), one
clip, one AdamW update of float32 masters. Everything about steps is planned beforehand (`schedule`), so the run is
resumable to the same loss curve from the number of its last step; a checkpoint is written every few minutes, after
every evaluation and when a signal asks to stop. `best/` is the checkpoint with the longest held-out acceptance.

Costs: 16 bytes per trained parameter, and per supervised token and TTT step one draft layer and one draft head, three
times (forward and backward). The device is waited for once per optimizer step, to read loss and gradient norm.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from draftsmith.artifacts import Stage, write_json
from draftsmith.data.vocab import load_vocab
from draftsmith.draft.eagle3 import Eagle3Draft
from draftsmith.draft.loss import Teacher, ttt_loss
from draftsmith.draft.unroll import unroll
from draftsmith.errors import DraftsmithError, Interrupted, UserError
from draftsmith.hidden.store import HiddenStore
from draftsmith.hidden.target_head import TargetHead, load_target_head
from draftsmith.interrupts import stopping
from draftsmith.progress import Progress, Tracker
from draftsmith.recipe import TrainSettings
from draftsmith.target.device import compute_dtype, pick_device
from draftsmith.train import checkpoint
from draftsmith.train.dataset import Micro, Samples, ahead, micro_steps, read_samples
from draftsmith.train.evaluate import autocast, held_out_acceptance, look_before_step_1
from draftsmith.train.schedule import evaluation_steps, learning_rate, plan_steps
from draftsmith.train.start import fresh_draft, warm_draft

BETAS = (0.9, 0.95)


@dataclass(slots=True)
class Trainer:
    """What the loop works with. All tensors are on `device`, but for `t2d`, which the loader uses."""

    settings: TrainSettings
    samples: Samples
    store: HiddenStore
    draft: Eagle3Draft
    teacher: Teacher
    t2d: Tensor
    device: torch.device
    dtype: torch.dtype


def build(stage: Stage, settings: TrainSettings, progress: Progress) -> dict[str, Any]:
    """Trains the draft into `stage.work`; resumes what an interrupted attempt left there.

    Returns:
        Counts for the manifest.

    Raises:
        UserError: unusable inputs or settings, a warm start that does not fit.
        Interrupted: a signal asked to stop; the state is saved.
    """
    device = pick_device(settings.device)
    dtype = compute_dtype(settings.dtype, device)
    if dtype == torch.float16:
        raise UserError("train.dtype float16: its range is too small to train in; use bfloat16 or float32")
    store = HiddenStore(stage.folder("hidden"))
    head = load_target_head(stage.folder("hidden"))
    samples = read_samples(stage.folder("traces"), store, settings.max_length)
    vocab = load_vocab(stage.folder("vocab"))
    lines: list[dict[str, Any]] = []
    notes: list[str] = []
    if settings.from_ is None:
        draft = fresh_draft(store.target, head, vocab, settings)
    else:
        draft, notes = warm_draft(store.target, head, settings)
        draft, lines, more = look_before_step_1(draft, head, vocab, settings, samples, store, device, dtype)
        notes += more
    for note in notes:
        progress.say(f"train: {note}")
    trainer = Trainer(
        settings, samples, store, draft.to(device), _teacher(head, draft, device, dtype), draft.t2d.cpu(), device, dtype
    )
    counts = _train(trainer, stage, progress, lines)
    return {**counts, "warm_start": notes}


def _train(trainer: Trainer, stage: Stage, progress: Progress, first_lines: list[dict[str, Any]]) -> dict[str, Any]:
    settings, draft, samples = trainer.settings, trainer.draft, trainer.samples
    plan = plan_steps(
        [sample.supervised for sample in samples.train],
        batch_tokens=settings.batch_tokens,
        epochs=settings.epochs,
        token_budget=settings.token_budget,
        seed=settings.seed,
    )
    evaluations = evaluation_steps(len(plan), settings.evals)
    optimizer = torch.optim.AdamW(
        draft.trained().values(), lr=settings.lr, betas=BETAS, weight_decay=settings.weight_decay
    )
    state = checkpoint.load_last(stage.work, draft, optimizer)
    if state.step:
        progress.say(f"train: going on after step {state.step:,} of {len(plan):,}")
    else:
        for line in first_lines:
            checkpoint.append_curve(stage.work, line)
    work = micro_steps(
        plan[state.step :],
        samples.train,
        trainer.store,
        trainer.t2d,
        settings.ttt_steps,
        trainer.dtype,
        trainer.device,
    )
    sums = torch.zeros(2, settings.ttt_steps, device=trainer.device)
    saved = started = time.monotonic()
    tokens_before = state.supervised_tokens
    with (
        stopping() as asked_to_stop,
        progress.track("train", len(plan), "steps", state.step) as bar,
        closing(ahead(work)) as loaded,
    ):
        for micro in loaded:
            sums += _accumulate(trainer, micro)
            state.supervised_tokens += micro.supervised
            if not micro.last:
                continue
            state.step += 1
            rate = learning_rate(state.step, len(plan), settings.lr, settings.warmup)
            line = _update(trainer, optimizer, rate, sums, micro.divisors, state)
            checkpoint.append_curve(stage.work, line)
            sums.zero_()
            speed = (state.supervised_tokens - tokens_before) / (time.monotonic() - started)
            bar.update(state.step, loss=state.loss, tok_s=speed)
            if state.step in evaluations:
                _evaluate_and_keep(trainer, stage, state, bar)
            due = time.monotonic() - saved > 60 * settings.checkpoint_minutes
            if due or state.step in evaluations or asked_to_stop():
                checkpoint.save_last(stage.work, draft, optimizer, state)
                saved = time.monotonic()
                stage.note_progress({"step": state.step, "steps": len(plan), **_tokens(state)})
            if asked_to_stop() and state.step < len(plan):
                raise Interrupted(
                    f"train: stopped after step {state.step:,} of {len(plan):,}; run the same command to go on"
                )
    best = checkpoint.best_metrics(stage.work)
    write_json(stage.work / checkpoint.METRICS, best)
    return {
        "steps": state.step,
        **_tokens(state),
        "empty_steps": state.empty_steps,
        "epochs": round(state.supervised_tokens / sum(sample.supervised for sample in samples.train), 3),
        "train_traces": len(samples.train),
        "held_out_traces": len(samples.held_out),
        "too_short": samples.too_short,
        "cut": samples.cut,
        "parameters": sum(parameter.numel() for parameter in draft.trained().values()),
        "draft_vocab": draft.config.draft_vocab_size,
        "dtype": str(trainer.dtype).removeprefix("torch."),
        "device": trainer.device.type,
        "final_loss": state.loss,
        "best": best,
    }


def _accumulate(trainer: Trainer, micro: Micro) -> Tensor:
    """Forward and backward of one micro-batch; returns the sums of `ttt_loss`."""
    settings, draft = trainer.settings, trainer.draft
    weights = [settings.ttt_decay**step / max(1, count) for step, count in enumerate(micro.divisors)]
    with autocast(trainer.device, trainer.dtype):
        outputs = list(unroll(draft, micro.batch, settings.ttt_steps))
        loss, sums = ttt_loss(draft, trainer.teacher, micro.batch.final, micro.rows, outputs, weights, trainer.dtype)
    loss.backward()  # type: ignore[no-untyped-call]
    return sums


def _update(
    trainer: Trainer,
    optimizer: torch.optim.Optimizer,
    rate: float,
    sums: Tensor,
    divisors: Sequence[int],
    state: checkpoint.State,
) -> dict[str, Any]:
    """One optimizer step, and its line of the curve. A step in which no label counts changes nothing."""
    settings = trainer.settings
    norm = torch.nn.utils.clip_grad_norm_(trainer.draft.trained().values(), settings.clip)
    *totals, grad_norm = torch.cat([sums.flatten(), norm[None]]).tolist()  # the one wait for the device
    losses = [total / max(1, count) for total, count in zip(totals[: settings.ttt_steps], divisors, strict=True)]
    hits = [total / max(1, count) for total, count in zip(totals[settings.ttt_steps :], divisors, strict=True)]
    if not math.isfinite(grad_norm):
        raise DraftsmithError(
            f"train: the gradient of step {state.step} is {grad_norm} (loss {losses[0]}); the last checkpoint is kept. "
            "Hidden states that are not finite, or a learning rate far too high"
        )
    if divisors[0]:
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()
    else:
        state.empty_steps += 1
    optimizer.zero_grad(set_to_none=True)
    state.loss = round(sum(loss * settings.ttt_decay**step for step, loss in enumerate(losses)), 6)
    return {
        "kind": "step",
        "step": state.step,
        **_tokens(state),
        "counted": list(divisors),
        "loss": [round(loss, 6) for loss in losses],
        "accuracy": [round(hit, 4) for hit in hits],
        "lr": rate,
        "grad_norm": round(grad_norm, 6),
    }


def _evaluate_and_keep(trainer: Trainer, stage: Stage, state: checkpoint.State, bar: Tracker) -> None:
    """Evaluates the held-out traces; keeps the draft as `best/` if none before was as good."""
    found = held_out_acceptance(
        trainer.draft, trainer.samples.held_out, trainer.store, trainer.settings, trainer.device, trainer.dtype
    )
    line = {"kind": "eval", "step": state.step, **_tokens(state), **found}
    checkpoint.append_curve(stage.work, line)
    bar.update(state.step, acceptance=found["acceptance_length"])
    best = checkpoint.best_metrics(stage.work)
    if best is None or found["acceptance_length"] > best["acceptance_length"]:
        checkpoint.save_best(stage.work, trainer.draft, line)


def _teacher(head: TargetHead, draft: Eagle3Draft, device: torch.device, dtype: torch.dtype) -> Teacher:
    """The target's final norm and its head's rows for the draft vocabulary, on the device."""
    ids = draft.t2d.cpu().nonzero().flatten()
    weight, norm = head.lm_head[ids].to(device, dtype), head.norm.float().to(device)

    def logits(final: Tensor) -> Tensor:
        normed = torch.nn.functional.rms_norm(final.float(), norm.shape, norm, head.eps)  # [N, H]
        rows: Tensor = (normed.to(dtype) @ weight.T).float()  # [N, draft_vocab]
        return rows

    return logits


def _tokens(state: checkpoint.State) -> dict[str, int]:
    return {"supervised_tokens": state.supervised_tokens}
