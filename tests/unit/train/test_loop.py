from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file, save_file

from draftsmith.artifacts import Stage
from draftsmith.data.vocab import make_vocab, save_vocab
from draftsmith.draft.checkpoint import load_draft
from draftsmith.errors import DraftsmithError, Interrupted, UserError
from draftsmith.hidden.store import HiddenStore
from draftsmith.hidden.target_head import load_target_head
from draftsmith.progress import Progress
from draftsmith.train import checkpoint, loop
from draftsmith.train.dataset import read_samples
from draftsmith.train.evaluate import held_out_acceptance
from draftsmith.train.loop import build
from toy_training import VOCAB, make_training_run, train_settings, train_stage

QUIET = Progress(quiet=True)


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_training_run(tmp_path_factory.mktemp("loop") / "run")


def curve(stage: Stage) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (stage.work / "curve.jsonl").read_text().splitlines()]


def weights(stage: Stage, which: str) -> dict[str, torch.Tensor]:
    return load_file(stage.work / which / "draft.safetensors")


def test_a_draft_memorises_a_few_traces(run: Path) -> None:
    stage, settings = train_stage(run, "overfit"), train_settings(epochs=80, evals=4)
    counts = build(stage, settings, QUIET)
    lines = [line for line in curve(stage) if line["kind"] == "step"]
    assert lines[-1]["loss"][0] < 0.6 * lines[0]["loss"][0]
    assert [line["step"] for line in lines] == list(range(1, counts["steps"] + 1))
    assert lines[-1]["supervised_tokens"] == counts["supervised_tokens"]
    cpu, store = torch.device("cpu"), HiddenStore(run / "hidden")
    draft = load_draft(stage.work / "last", load_target_head(run / "hidden"), cpu, torch.float32)
    trained_on = read_samples(run / "traces", store, 1000).train
    found = held_out_acceptance(draft, trained_on, store, settings, cpu, torch.float32)
    assert found["acceptance_length"] > 3.3  # of 4.0 with three draft tokens
    assert found["reasoning"]["cycles"] > 0 and found["answer"]["cycles"] > 0


def test_the_curve_does_not_depend_on_which_traces_are_padded_together(run: Path) -> None:
    # P35
    one, other = train_stage(run, "bounds-one"), train_stage(run, "bounds-other")
    build(one, train_settings(), QUIET)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("draftsmith.train.schedule.PADDED_TOKENS", 1)  # every trace alone
        build(other, train_settings(), QUIET)
    for a, b in zip(curve(one), curve(other), strict=True):
        if a["kind"] == "step":
            assert a["loss"] == pytest.approx(b["loss"], rel=1e-3)


@pytest.mark.parametrize("stop_at", [1, 5, 7])
def test_a_run_that_was_stopped_and_resumed_gives_the_same_curve(
    run: Path, stop_at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, parts = train_stage(run, f"whole-{stop_at}"), train_stage(run, f"parts-{stop_at}")
    settings = train_settings()
    expected = build(whole, settings, QUIET)
    append = checkpoint.append_curve

    def append_and_stop(work: Path, line: dict[str, Any]) -> None:
        append(work, line)
        if line["step"] == stop_at and line["kind"] == "step":
            os.kill(os.getpid(), signal.SIGTERM)

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "append_curve", append_and_stop)
        before = signal.getsignal(signal.SIGTERM)
        with pytest.raises(Interrupted, match=rf"after step {stop_at} of {expected['steps']}; run the same command"):
            build(parts, settings, QUIET)
        assert signal.getsignal(signal.SIGTERM) == before
    assert json.loads((parts.work / "progress.json").read_text())["step"] == stop_at
    assert build(parts, settings, QUIET) == expected
    assert curve(parts) == curve(whole)
    for which in ("last", "best"):
        for name, tensor in weights(whole, which).items():
            assert torch.equal(tensor, weights(parts, which)[name]), name


def test_a_run_that_was_killed_goes_on_from_its_last_checkpoint_to_the_same_curve(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, parts = train_stage(run, "whole-killed"), train_stage(run, "parts-killed")
    settings = train_settings()  # evaluations, and so checkpoints, at steps 5 and 10
    build(whole, settings, QUIET)
    append = checkpoint.append_curve

    def append_and_die(work: Path, line: dict[str, Any]) -> None:
        append(work, line)
        if line["step"] == 8:
            raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "append_curve", append_and_die)
        with pytest.raises(MemoryError):
            build(parts, settings, QUIET)
    assert curve(parts)[-1]["step"] == 8
    build(parts, settings, QUIET)
    assert curve(parts) == curve(whole)


def test_checkpoints_are_due_by_time(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved = []
    save = checkpoint.save_last
    monkeypatch.setattr(checkpoint, "save_last", lambda *args: (saved.append(args[3].step), save(*args)))
    build(train_stage(run, "often"), train_settings(checkpoint_minutes=1e-9), QUIET)
    assert saved == list(range(1, 11))


def test_a_token_budget_is_kept_whatever_the_epochs(run: Path) -> None:
    counts = build(train_stage(run, "budget"), train_settings(epochs=1, token_budget=700), QUIET)
    assert 700 <= counts["supervised_tokens"] < 730  # one trace past it at most
    assert counts["epochs"] > 1


def test_best_is_the_longest_held_out_acceptance_and_the_earlier_of_equals(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lengths = iter([2.0, 3.0, 3.0, 1.0])
    monkeypatch.setattr(
        loop,
        "held_out_acceptance",
        lambda *_: {"acceptance_length": next(lengths), "acceptance_per_position": [], "reasoning": {}, "answer": {}},
    )
    stage = train_stage(run, "best")
    counts = build(stage, train_settings(evals=4), QUIET)
    evaluated = [line["step"] for line in curve(stage) if line["kind"] == "eval"]
    assert counts["best"]["step"] == evaluated[1] and counts["best"]["acceptance_length"] == 3.0
    assert json.loads((stage.work / "metrics.json").read_text()) == counts["best"]
    assert not torch.equal(weights(stage, "best")["fc.weight"], weights(stage, "last")["fc.weight"])


def test_steps_without_a_counted_label_change_nothing_and_are_counted(run: Path, tmp_path: Path) -> None:
    # P35
    for folder in ("traces", "hidden"):
        (tmp_path / folder).symlink_to(run / folder)
    store = HiddenStore(run / "hidden")
    said = {int(token) for name in store.trace_ids for token in store.argmax(name)}
    unsaid = sorted(set(range(VOCAB)) - said)
    assert unsaid
    (tmp_path / "vocab").mkdir()
    save_vocab(tmp_path / "vocab", make_vocab(np.array(unsaid), VOCAB))
    stage = train_stage(tmp_path)
    counts = build(stage, train_settings(evals=2), QUIET)
    assert counts["empty_steps"] == counts["steps"] > 1 and counts["final_loss"] == 0.0
    assert counts["best"]["acceptance_length"] == 1.0
    for name, tensor in weights(stage, "best").items():
        assert torch.equal(tensor, weights(stage, "last")[name])


def test_bfloat16_compute_keeps_float32_masters_and_trains_about_as_well(run: Path) -> None:
    exact, half = train_stage(run, "exact"), train_stage(run, "half")
    wanted = build(exact, train_settings(epochs=6), QUIET)
    found = build(half, train_settings(epochs=6, dtype="bfloat16"), QUIET)
    assert found["final_loss"] == pytest.approx(wanted["final_loss"], rel=0.1)
    assert found["dtype"] == "bfloat16"
    assert {t.dtype for name, t in weights(half, "last").items() if name.endswith("weight")} == {torch.float32}


def test_float16_is_refused(run: Path) -> None:
    with pytest.raises(UserError, match="float16: its range is too small"):
        build(train_stage(run, "float16"), train_settings(dtype="float16"), QUIET)


def test_a_gradient_that_is_not_finite_stops_the_run_and_keeps_the_checkpoint(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop, "ttt_loss", lambda draft, *rest: _broken(draft, rest))
    stage = train_stage(run, "nan")
    with pytest.raises(DraftsmithError, match="the gradient of step 1 is nan"):
        build(stage, train_settings(), QUIET)
    assert not (stage.work / "last").exists()


def test_a_warm_start_begins_where_the_checkpoint_stood(run: Path, tmp_path: Path) -> None:
    # P29: another vocabulary in this run, the checkpoint's is kept, and its accuracy is there before step 1.
    first = train_stage(run, "first")
    best = build(first, train_settings(epochs=20), QUIET)["best"]
    for folder in ("traces", "hidden"):
        (tmp_path / folder).symlink_to(run / folder)
    (tmp_path / "vocab").mkdir()
    save_vocab(tmp_path / "vocab", make_vocab(np.arange(20), VOCAB))
    source = str(first.work / "best")

    stage = train_stage(tmp_path, "kept")
    console = Console(record=True, width=400)
    counts = build(stage, train_settings(**{"from": source, "epochs": 1}), Progress(console=console))
    before = curve(stage)[0]
    assert (before["kind"], before["step"]) == ("eval", 0)
    assert before["acceptance_length"] == best["acceptance_length"]
    assert torch.equal(weights(stage, "best")["d2t"], weights(first, "best")["d2t"])
    said = console.export_text()
    assert "its vocabulary of 48 ids is kept" in said and "vocab stage is not used" in said
    assert counts["draft_vocab"] == 48

    stage = train_stage(tmp_path, "rebuilt")
    counts = build(stage, train_settings(**{"from": source, "epochs": 1, "new_vocab": True}), QUIET)
    before = curve(stage)[0]
    assert before["own_vocabulary"]["acceptance_length"] == best["acceptance_length"]
    assert before["acceptance_length"] != best["acceptance_length"]
    assert counts["draft_vocab"] == 20
    assert any("rows kept; first-position acceptance" in note for note in counts["warm_start"])


def test_a_checkpoint_that_predicts_nothing_is_called_broken_before_it_is_trained(run: Path, tmp_path: Path) -> None:
    # Contract 8; P27: a d2t that does not belong to the head.
    first = train_stage(run, "before")
    build(first, train_settings(epochs=20), QUIET)
    tensors = weights(first, "best")
    tensors["lm_head.weight"] = tensors["lm_head.weight"].roll(7, dims=0)
    (tmp_path / "broken").mkdir()
    save_file(tensors, tmp_path / "broken" / "draft.safetensors")
    (tmp_path / "broken" / "config.json").write_bytes((first.work / "best" / "config.json").read_bytes())
    counts = build(train_stage(run, "after"), train_settings(**{"from": str(tmp_path / "broken"), "epochs": 1}), QUIET)
    assert any("WARNING: this checkpoint predicts next to nothing" in note for note in counts["warm_start"])


def _broken(draft: Any, rest: tuple[Any, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    outputs = rest[3]
    return draft.norm(outputs[0]).sum() * float("nan"), torch.zeros(2, len(outputs))
