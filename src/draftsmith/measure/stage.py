"""The measure stage: is the draft right, what is accepted, and does it pay off on this machine.

Two passes over held-out prompts. In float32: losslessness (greedy output with the draft equals the target's own) and
acceptance. In the compute dtype: paired timing. Writes `result.json` (the numbers) and `questions.jsonl` (one row per
prompt with its cycles). Needs the target in memory once, in float32 for the first pass; costs about three decodes of
each prompt at batch 1, and two per timed prompt and round. An interrupted first pass is resumed.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from draftsmith.artifacts import Stage, read_json, write_json
from draftsmith.draft.checkpoint import load_draft
from draftsmith.errors import UserError
from draftsmith.hidden.target_head import load_target_head
from draftsmith.measure.acceptance import verdict
from draftsmith.measure.decode import DraftProposer, Verifier
from draftsmith.measure.prompts import (
    Prompt,
    Prompts,
    held_out_prompts,
    longest_reply,
    question_prompts,
    samplings_of,
    with_room,
)
from draftsmith.measure.replies import Reply, ReplyLog, counted, measure_reply
from draftsmith.measure.timing import Round, speed, timed_round, warm_up
from draftsmith.progress import Progress, Tracker
from draftsmith.recipe import MeasureSettings
from draftsmith.target.device import compute_dtype, pick_device
from draftsmith.target.embedded import resolve_model
from draftsmith.target.loading import load_model, text_config
from draftsmith.target.reply import Sampling
from draftsmith.target.template import Template, load_template
from draftsmith.target.thinking import Delimiters, delimiters_from_json
from draftsmith.trace import read_metadata

RESULT, QUESTIONS = "result.json", "questions.jsonl"


def build(stage: Stage, settings: MeasureSettings, progress: Progress) -> dict[str, Any]:
    """Measures `RUN/draft/best` and writes the stage folder.

    Returns:
        Counts for the manifest.

    Raises:
        UserError: nothing to measure on, or a target, draft and run that do not belong together.
    """
    bench = _Bench.set_up(stage, settings, progress)
    timed_dtype = compute_dtype(settings.dtype, bench.device)
    timed = bench.prompts[: settings.timing_questions]
    log = ReplyLog(stage.work / QUESTIONS)
    total = len(bench.prompts) + settings.rounds * len(timed)
    with progress.track("measure", total, "replies", done=len(log.replies)) as tracker:
        with bench.open(torch.float32) as pair:
            _compare(bench, pair, log, stage, tracker)
            rounds = _time(bench, pair, timed, tracker) if timed_dtype == torch.float32 else []
        if not rounds:
            with bench.open(timed_dtype) as pair:
                rounds = _time(bench, pair, timed, tracker)
    replies = [log.replies[prompt.key] for prompt in bench.prompts]
    result = _result(bench, replies, rounds, timed_dtype)
    write_json(stage.work / RESULT, result)
    _tell(result, progress)
    kept = ("acceptance_length", "lossless", "speedup", "questions", "degenerate", "cycles", "emitted", "verdict")
    return {name: result[name] for name in kept}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Bench:
    """Everything a measurement needs that does not depend on the dtype."""

    stage: Stage
    settings: MeasureSettings
    target: str
    device: torch.device
    source: Prompts
    prompts: list[Prompt]
    samplings: dict[str, Sampling]
    """Per prompt key."""
    max_tokens: int
    stop_ids: frozenset[int]
    delimiters: Delimiters | None
    template: Template | None
    metadata: dict[str, str]

    @classmethod
    def set_up(cls, stage: Stage, settings: MeasureSettings, progress: Progress) -> _Bench:
        """Reads the run; loads no model weights yet, so that a user's mistake shows at once."""
        traces = stage.folder("traces")
        metadata = read_metadata(traces)
        max_tokens = settings.max_tokens or int(metadata.get("max_tokens", 0)) or longest_reply(traces)
        target = resolve_model(settings.target or read_json(stage.folder("hidden") / "target.json")["name"], progress)
        delimiters = delimiters_from_json(metadata.get("delimiters", "null"))
        template = None
        if delimiters is not None or settings.questions:
            options = json.loads(metadata.get("template_options", "{}"))
            template = load_template(metadata["tokenizer"], options, settings.trust_remote_code)
        share = float(metadata["held_out"])
        if settings.questions:
            assert template is not None
            source = question_prompts(settings, template, metadata, traces, share)
        else:
            source = held_out_prompts(traces, share, settings.limit)
        context = _context(target, settings.trust_remote_code)
        prompts = with_room(source.prompts, context)
        samplings = samplings_of(prompts, settings, max_tokens, context)
        return cls(
            stage=stage,
            settings=settings,
            target=target,
            device=pick_device(settings.device),
            source=source,
            prompts=prompts,
            samplings=samplings,
            max_tokens=max_tokens,
            stop_ids=frozenset(json.loads(metadata["stop_ids"])),
            delimiters=delimiters,
            template=template,
            metadata=metadata,
        )

    def open(self, dtype: torch.dtype) -> _Pair:
        """Loads target and draft in `dtype`."""
        return _Pair(self, dtype)


class _Pair:
    """Target and draft in one dtype; a context manager that lets go of both, so that two dtypes never coexist.

    Raises:
        UserError: the draft was made for another target.
    """

    def __init__(self, bench: _Bench, dtype: torch.dtype) -> None:
        model = load_model(bench.target, dtype, bench.device, trust_remote_code=bench.settings.trust_remote_code)
        head = load_target_head(bench.stage.folder("hidden"))
        folder = bench.stage.folder("draft") / "best"
        draft = load_draft(folder, head, bench.device, dtype)
        config, wanted = text_config(model), draft.config
        if (config.hidden_size, config.vocab_size) != (wanted.hidden_size, wanted.target_vocab_size):
            raise UserError(
                f"{folder}: was made for a target of hidden size {wanted.hidden_size} and vocabulary "
                f"{wanted.target_vocab_size}; {bench.target} has {config.hidden_size} and {config.vocab_size}"
            )
        self.verifier = Verifier(model, wanted.aux_layers)
        self.proposer = DraftProposer(draft)

    def __enter__(self) -> _Pair:
        return self

    def __exit__(self, *_: object) -> None:
        self.verifier.close()
        del self.verifier, self.proposer
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def _context(target: str, trust_remote_code: bool) -> int:
    """Positions the target was made for."""
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(target, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, KeyError) as error:
        raise UserError(f"{target}: the model's config cannot be read: {' '.join(str(error).split())[:300]}") from None
    return int(config.get_text_config().max_position_embeddings)


def _compare(bench: _Bench, pair: _Pair, log: ReplyLog, stage: Stage, tracker: Tracker) -> None:
    """The float32 pass over the prompts that an earlier attempt has not done."""
    draft_tokens = bench.settings.draft_tokens
    for prompt in bench.prompts:
        if prompt.key in log.replies:
            continue
        log.add(
            measure_reply(
                pair.verifier,
                pair.proposer,
                prompt,
                bench.samplings[prompt.key],
                bench.stop_ids,
                draft_tokens,
                bench.delimiters,
                bench.template,
            )
        )
        done = list(log.replies.values())
        stage.note_progress({"questions": len(done), "of": len(bench.prompts)})
        length = counted(done, draft_tokens)[0].length
        facts = {"acceptance": length} if length is not None else {}
        tracker.update(len(done), differences=sum(not reply.identical for reply in done), **facts)


def _time(bench: _Bench, pair: _Pair, timed: Sequence[Prompt], tracker: Tracker) -> list[Round]:
    samplings = [bench.samplings[prompt.key] for prompt in timed]
    draft_tokens = bench.settings.draft_tokens
    warm_up(pair.verifier, pair.proposer, timed[0], samplings[0], bench.stop_ids, draft_tokens)
    rounds: list[Round] = []
    for number in range(bench.settings.rounds):
        rounds.append(
            timed_round(
                pair.verifier,
                pair.proposer,
                timed,
                samplings,
                bench.stop_ids,
                draft_tokens,
                number,
                lambda: tracker.update(tracker.done + 1),
            )
        )
        tracker.update(tracker.done, speedup=speed(rounds)["speedup"])
    return rounds


def _result(bench: _Bench, replies: list[Reply], rounds: list[Round], dtype: torch.dtype) -> dict[str, Any]:
    settings = bench.settings
    overall, reasoning, answer = counted(replies, settings.draft_tokens)
    degenerate = sum(reply.degenerate for reply in replies)
    differences = [{"key": reply.key, **reply.difference} for reply in replies if reply.difference]
    timed = [reply for one in rounds for reply in one.replies]
    expected = [reply.ids for reply in replies[: settings.timing_questions]] * len(rounds)
    same = sum(a == b for a, b in zip(timed, expected, strict=True)) / len(timed)
    return {
        "verdict": verdict(overall.length, overall.per_position, degenerate, len(replies)),
        "acceptance_length": _rounded(overall.length),
        "acceptance_per_position": [_rounded(rate) for rate in overall.per_position],
        "acceptance_length_reasoning": _rounded(reasoning.length),
        "acceptance_per_position_reasoning": [_rounded(rate) for rate in reasoning.per_position],
        "acceptance_length_answer": _rounded(answer.length),
        "acceptance_per_position_answer": [_rounded(rate) for rate in answer.per_position],
        "engine_acceptance_length": _rounded(overall.engine_length),
        "draft_tokens": settings.draft_tokens,
        "lossless": not differences,
        "compared": len(replies),
        "differences": differences,
        **speed(rounds),
        "rounds": [one.to_json() for one in rounds],
        "timed_questions": len(rounds[0].replies),
        "timed_identical_to_float32": None if settings.temperature else round(same, 4),
        "questions": len(replies),
        "degenerate": degenerate,
        "cycles": overall.cycles,
        "emitted": overall.emitted,
        "generated_tokens": sum(len(reply.ids) for reply in replies),
        "finished": sum(reply.finish_reason == "stop" for reply in replies),
        "prompts": bench.source.source,
        "left_out": {"in_training": bench.source.trained, "no_room": len(bench.source.prompts) - len(replies)},
        "sampling": {
            "temperature": settings.temperature,
            "top_p": settings.top_p,
            "top_k": settings.top_k,
            "seed": settings.seed,
            "max_tokens": bench.max_tokens,
            "stop_ids": sorted(bench.stop_ids),
            "template_options": json.loads(bench.metadata.get("template_options", "{}")),
        },
        "target": bench.target,
        "dtype": str(dtype).removeprefix("torch."),
        "device": str(bench.device),
    }


def _tell(result: dict[str, Any], progress: Progress) -> None:
    progress.event("measured", **{name: value for name, value in result.items() if name not in ("rounds", "sampling")})
    progress.say(f"measure: {result['verdict']}")
    if not result["lossless"]:
        where = result["differences"][0]
        progress.say(
            f"measure: NOT lossless: {len(result['differences'])} of {result['compared']} greedy replies differ in "
            f"float32; first {where['key']} at token {where['index']}: {where['found']} instead of {where['expected']}"
        )


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4)
