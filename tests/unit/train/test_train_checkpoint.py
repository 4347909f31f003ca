from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch

from draftsmith.draft.eagle3 import Eagle3Draft
from draftsmith.draft.unroll import unroll
from draftsmith.train import checkpoint
from draftsmith.train.checkpoint import BEST, CURVE, LAST, State
from toy_draft import tiny_batch, tiny_draft


def optimizer_of(draft: Eagle3Draft) -> torch.optim.AdamW:
    return torch.optim.AdamW(draft.trained().values(), lr=1e-2)


def step(draft: Eagle3Draft, optimizer: torch.optim.Optimizer) -> None:
    outputs = list(unroll(draft, tiny_batch([(4, 8)]), 2))
    draft.logits(outputs[1]).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def test_an_optimizer_goes_on_from_a_checkpoint_exactly_as_if_nothing_happened(tmp_path: Path) -> None:
    draft = tiny_draft()
    optimizer = optimizer_of(draft)
    step(draft, optimizer)
    checkpoint.save_last(tmp_path, draft, optimizer, State(step=1, supervised_tokens=7))
    step(draft, optimizer)

    again = tiny_draft(seed=9)
    again.set_embedding(draft.embed_tokens.weight.detach())  # the target's, no part of a checkpoint
    resumed = optimizer_of(again)
    state = checkpoint.load_last(tmp_path, again, resumed)
    assert (state.step, state.supervised_tokens) == (1, 7)
    step(again, resumed)
    for name, parameter in draft.trained().items():
        assert torch.equal(again.get_parameter(name), parameter), name


def test_without_a_checkpoint_training_starts_over_and_leaves_no_old_curve(tmp_path: Path) -> None:
    checkpoint.append_curve(tmp_path, {"kind": "step", "step": 1})
    checkpoint.save_best(tmp_path, tiny_draft(), {"acceptance_length": 2.0})
    draft = tiny_draft()
    assert checkpoint.load_last(tmp_path, draft, optimizer_of(draft)) == State()
    assert not (tmp_path / CURVE).exists() and checkpoint.best_metrics(tmp_path) is None


def test_the_curve_is_cut_back_to_the_checkpoint_and_a_torn_line_goes(tmp_path: Path) -> None:
    draft = tiny_draft()
    optimizer = optimizer_of(draft)
    for number in range(1, 6):
        checkpoint.append_curve(tmp_path, {"kind": "step", "step": number})
    checkpoint.save_last(tmp_path, draft, optimizer, State(step=3))
    with open(tmp_path / CURVE, "a") as file:
        file.write('{"kind": "step", "st')
    checkpoint.load_last(tmp_path, draft, optimizer)
    assert [json.loads(line)["step"] for line in (tmp_path / CURVE).read_text().splitlines()] == [1, 2, 3]


@pytest.mark.parametrize("crash_at", [1, 2], ids=["before the old one moves", "between the two renames"])
def test_a_crash_while_a_checkpoint_is_replaced_leaves_the_older_one_whole(
    tmp_path: Path, crash_at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # P34: half a checkpoint is never taken for one.
    draft = tiny_draft()
    optimizer = optimizer_of(draft)
    checkpoint.save_last(tmp_path, draft, optimizer, State(step=1))
    saved = {name: parameter.detach().clone() for name, parameter in draft.trained().items()}
    step(draft, optimizer)

    renames = 0
    replace = os.replace

    def crash(source: str | Path, destination: str | Path) -> None:
        nonlocal renames
        if Path(source).is_dir():
            renames += 1
            if renames == crash_at:
                raise KeyboardInterrupt
        replace(source, destination)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", crash)
        with pytest.raises(KeyboardInterrupt):
            checkpoint.save_last(tmp_path, draft, optimizer, State(step=2))

    again = tiny_draft(seed=9)
    assert checkpoint.load_last(tmp_path, again, optimizer_of(again)).step == 1
    for name, parameter in saved.items():
        assert torch.equal(again.get_parameter(name), parameter)
    assert sorted(path.name for path in tmp_path.iterdir()) == [LAST]


def test_the_best_draft_and_its_metrics_are_replaced_together(tmp_path: Path) -> None:
    assert checkpoint.best_metrics(tmp_path) is None
    for length in (2.0, 3.0):
        checkpoint.save_best(tmp_path, tiny_draft(), {"acceptance_length": length})
        assert checkpoint.best_metrics(tmp_path) == {"acceptance_length": length}
    assert sorted(path.name for path in tmp_path.iterdir()) == [BEST]
