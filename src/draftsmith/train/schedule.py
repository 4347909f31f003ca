"""What happens at which optimizer step, all of it known before the first: traces, learning rate, evaluations.

The plan is a pure function of the traces' lengths and the settings. Epochs, each in its own seeded order, are one long
stream that is cut into steps of at least `batch_tokens` supervised tokens; only the very last step may be smaller. So a
resumed run needs nothing but the number of its last step, and the cosine knows its end also under a token budget.
Within a step, traces of similar length share a padded micro-batch.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np

PADDED_TOKENS = 8192
"""Tokens, padding included, of a micro-batch; a longer trace is a micro-batch of its own."""
PADDING_RATIO = 2
"""In a micro-batch, no trace has more than this many times the supervised rows of another (but for tiny ones)."""
TINY_ROWS = 16


def plan_steps(
    supervised: Sequence[int], *, batch_tokens: int, epochs: int, token_budget: int | None, seed: int
) -> list[list[int]]:
    """The traces of every optimizer step.

    Args:
        supervised: supervised tokens of each trace, each at least 1.
        batch_tokens: a step is full at this many supervised tokens.
        epochs: passes over the traces; without meaning under a budget.
        token_budget: stop at the first step at or past this many supervised tokens.
        seed: of the order.

    Returns:
        Per step, indices into `supervised`.
    """
    steps: list[list[int]] = []
    step: list[int] = []
    tokens = total = 0
    for index in _stream(len(supervised), None if token_budget else epochs, seed):
        step.append(index)
        tokens += supervised[index]
        total += supervised[index]
        done = token_budget is not None and total >= token_budget
        if tokens >= batch_tokens or done:
            steps.append(step)
            step, tokens = [], 0
        if done:
            return steps
    return [*steps, step] if step else steps


def micro_batches(indices: Sequence[int], supervised: Sequence[int], rows: Sequence[int]) -> list[list[int]]:
    """Cuts traces into micro-batches: similar supervised lengths together, padding bounded, long ones first.

    Args:
        indices: the traces of a step.
        supervised: supervised rows of every trace.
        rows: all rows of every trace, prompt included.
    """
    batches: list[list[int]] = []
    widest = 0
    for index in sorted(indices, key=lambda i: (-supervised[i], -rows[i], i)):
        if batches:
            last = batches[-1]
            widest = max(widest, rows[index])
            fits = widest * (len(last) + 1) <= PADDED_TOKENS
            if fits and supervised[last[0]] <= max(PADDING_RATIO * supervised[index], TINY_ROWS):
                last.append(index)
                continue
        batches.append([index])
        widest = rows[index]
    return batches


def learning_rate(step: int, steps: int, peak: float, warmup: float) -> float:
    """Rate of optimizer step `step` (1-based) of `steps`: linear warm-up over the share `warmup`, then cosine to 0."""
    rising = round(steps * warmup)
    if step <= rising:
        return peak * step / rising
    return peak * 0.5 * (1 + math.cos(math.pi * (step - rising - 1) / max(1, steps - rising)))


def evaluation_steps(steps: int, evals: int) -> frozenset[int]:
    """The steps (1-based) after which the held-out traces are evaluated: evenly spread, the last one always."""
    return frozenset(max(1, round(steps * part / evals)) for part in range(1, evals + 1))


def _stream(count: int, epochs: int | None, seed: int) -> Iterator[int]:
    epoch = 0
    while epochs is None or epoch < epochs:
        yield from np.random.default_rng([seed, epoch]).permutation(count).tolist()
        epoch += 1
