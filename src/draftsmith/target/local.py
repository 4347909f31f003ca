"""The target in this process: batched generation with exact ids, for small models and for tests of everything else.

Replies are decoded together, left-padded to one length. A reply that ends leaves its slot; when enough slots are free,
the next prompts are prefilled as a batch of their own and merged in. What all prompts of such a batch begin with (a
system text, worked examples) is computed once. Greedy in float32 does not depend on the batch in practice; in bfloat16
near-ties may fall either way, and the ids are still exactly what was generated.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from draftsmith import artifacts
from draftsmith.progress import Progress
from draftsmith.recipe import CaptureSettings
from draftsmith.target.device import compute_dtype, pick_device
from draftsmith.target.embedded import resolve_model
from draftsmith.target.kv import BufferedCache, new_cache
from draftsmith.target.loading import load_model, text_config
from draftsmith.target.reply import Reply, Sampling
from draftsmith.target.sampling import draw, probabilities
from draftsmith.target.template import Template, load_template

Job = tuple[Hashable, list[int], Sampling]
PREFILL_TOKENS = 16384
REFILL_SHARE = 0.25
"""Slots that must be free before new prompts are prefilled: merging copies the cache, so not for every one."""
COMPACT_SHARE = 0.125
"""Dead rows that are carried along before the cache is rewritten without them."""


@dataclass(slots=True)
class _Row:
    """One reply in the making."""

    key: Hashable
    prompt: list[int]
    sampling: Sampling
    generator: torch.Generator
    started: float
    generated: list[int] = field(default_factory=list)
    ended: bool = False


@dataclass(slots=True)
class _Running:
    """The rows that share a cache; `mask` [B, length] is 0 on left padding, `logits` [B, V] are for the next token."""

    rows: list[_Row]
    cache: BufferedCache
    mask: Tensor
    logits: Tensor


class LocalTarget:
    """A transformers model behind the interface that capture drives."""

    def __init__(
        self, name: str, model: Any, template: Template, batch_size: int, *, fingerprint: str, device: torch.device
    ) -> None:
        self.name, self.model, self.template, self.batch_size = name, model, template, batch_size
        self.fingerprint, self.device = fingerprint, device
        self.config = text_config(model)
        self.max_length: int = self.config.max_position_embeddings

    @torch.inference_mode()
    def generate(self, jobs: Iterator[Job | None], stop: Callable[[], bool]) -> Iterator[tuple[Hashable, Reply]]:
        """Runs jobs and yields each reply as it ends.

        Args:
            jobs: pulled as slots free up; None means nothing is ready now but more may come.
            stop: when it turns true, no new jobs are taken and those in flight are finished.
        """
        running: _Running | None = None
        more = True
        while True:
            alive = running.rows if running else []
            free = self.batch_size - sum(not row.ended for row in alive)
            if more and not stop() and (running is None or free >= self.batch_size * REFILL_SHARE):
                rows, more = self._pull(jobs, free)
                for group in self._groups(rows):
                    running = self._merge(running, self._prefill(group))
            if running is None:
                return
            tokens, ended = self._choose(running)
            for row in ended:
                yield row.key, self._reply(row)
            running = self._step(running, tokens)
            if running is None and (stop() or not more):
                return

    def _pull(self, jobs: Iterator[Job | None], free: int) -> tuple[list[_Row], bool]:
        """Up to `free` new rows, and whether the iterator may have more."""
        rows: list[_Row] = []
        while len(rows) < free:
            try:
                job = next(jobs)
            except StopIteration:
                return rows, False
            if job is None:
                break
            key, prompt, sampling = job
            generator = torch.Generator(device=self.device).manual_seed(sampling.seed)
            rows.append(_Row(key, prompt, sampling, generator, time.monotonic()))
        return rows, True

    def _groups(self, rows: list[_Row]) -> Iterator[list[_Row]]:
        """Rows of similar length together, each group within PREFILL_TOKENS padded tokens."""
        group: list[_Row] = []
        for row in sorted(rows, key=lambda row: len(row.prompt)):
            if group and len(row.prompt) * (len(group) + 1) > PREFILL_TOKENS:
                yield group
                group = []
            group.append(row)
        if group:
            yield group

    def _prefill(self, rows: list[_Row]) -> _Running:
        prompts = [row.prompt for row in rows]
        shared = shared_prefix(prompts)
        cache = new_cache(self.config)
        if shared:
            self._forward(cache, torch.tensor([prompts[0][:shared]]), None, None)
            cache.expand(len(rows))
        length = max(map(len, prompts))
        ids = torch.zeros(len(rows), length, dtype=torch.long)
        mask = torch.zeros(len(rows), length, dtype=torch.long)
        for index, prompt in enumerate(prompts):
            # The shared prefix stays at the left edge; padding lies between it and the row's own tokens.
            own = len(prompt) - shared
            ids[index, length - own :] = torch.tensor(prompt[shared:])
            mask[index, length - own :] = 1
        mask[:, :shared] = 1
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        logits = self._forward(cache, ids[:, shared:], mask, positions[:, shared:])
        return _Running(rows, cache, mask.to(self.device), logits)

    def _merge(self, running: _Running | None, new: _Running) -> _Running:
        if running is None:
            return new
        running.cache.append_rows(new.cache)
        length = max(running.mask.shape[1], new.mask.shape[1])
        masks = [torch.nn.functional.pad(part.mask, (length - part.mask.shape[1], 0)) for part in (running, new)]
        return _Running(
            running.rows + new.rows, running.cache, torch.cat(masks), torch.cat([running.logits, new.logits])
        )

    def _choose(self, running: _Running) -> tuple[Tensor, list[_Row]]:
        """Adds one token to every row; returns the tokens [B] and the rows that ended with theirs."""
        tokens = running.logits.argmax(-1)
        for index, row in enumerate(running.rows):
            if row.sampling.temperature > 0 and not row.ended:
                tokens[index] = draw(probabilities(running.logits[index], row.sampling), row.generator)
        ended = []
        for row, token in zip(running.rows, tokens.tolist(), strict=True):
            if row.ended:
                continue
            row.generated.append(token)
            row.ended = token in self.template.stop_ids or len(row.generated) >= row.sampling.max_tokens
            if row.ended:
                ended.append(row)
        return tokens, ended

    def _step(self, running: _Running, tokens: Tensor) -> _Running | None:
        """Drops dead rows when there are enough of them, and computes the logits that follow `tokens` [B]."""
        alive = [index for index, row in enumerate(running.rows) if not row.ended]
        if not alive:
            return None
        if len(alive) < len(running.rows) and len(running.rows) - len(alive) >= len(running.rows) * COMPACT_SHARE:
            keep = torch.tensor(alive, device=self.device)
            running.mask, tokens = running.mask[keep], tokens[keep]
            unused = int((running.mask.sum(0) == 0).cumprod(0).sum())
            running.cache.take(keep, unused)
            running.mask = running.mask[:, unused:]
            running.rows = [running.rows[index] for index in alive]
        running.mask = torch.cat([running.mask, running.mask.new_ones(len(tokens), 1)], dim=1)
        positions = running.mask.sum(1, keepdim=True) - 1
        running.logits = self._forward(running.cache, tokens[:, None], running.mask, positions)
        return running

    def _forward(self, cache: BufferedCache, ids: Tensor, mask: Tensor | None, positions: Tensor | None) -> Tensor:
        """Logits [B, V] of the last column."""
        output = self.model(
            ids.to(self.device),
            attention_mask=None if mask is None else mask.to(self.device),
            position_ids=None if positions is None else positions.to(self.device),
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        )
        logits: Tensor = output.logits[:, -1]
        return logits

    def _reply(self, row: _Row) -> Reply:
        return Reply(
            prompt_ids=row.prompt,
            generated_ids=row.generated,
            finish_reason="stop" if row.generated[-1] in self.template.stop_ids else "length",
            usage={"prompt_tokens": len(row.prompt), "completion_tokens": len(row.generated)},
            timing={"seconds": round(time.monotonic() - row.started, 3)},
        )


def shared_prefix(prompts: Sequence[Sequence[int]]) -> int:
    """How many leading ids all prompts share, leaving each at least one of its own; 0 for a single prompt."""
    if len(prompts) < 2:
        return 0
    first, last = min(map(list, prompts)), max(map(list, prompts))
    limit = min(len(prompt) for prompt in prompts) - 1
    return next((at for at in range(limit) if first[at] != last[at]), limit)


def load_local(settings: CaptureSettings, progress: Progress | None = None) -> LocalTarget:
    """The target that `--local` names, with its tokenizer (or `--tokenizer`'s).

    Raises:
        UserError: as `resolve_model`, `load_model` and `load_template`.
    """
    assert settings.local is not None
    name = resolve_model(settings.local, progress)
    device = pick_device(settings.device)
    template = load_template(settings.tokenizer or name, settings.template_options, settings.trust_remote_code)
    model = load_model(
        name, compute_dtype(settings.dtype, device), device, trust_remote_code=settings.trust_remote_code
    )
    folder = Path(name)
    identity = artifacts.fingerprint_model(folder) if folder.is_dir() else name
    return LocalTarget(name, model, template, settings.batch_size, fingerprint=identity, device=device)
