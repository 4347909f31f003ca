from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from draftsmith import interrupts
from draftsmith.artifacts import Stage, read_json, write_json
from draftsmith.errors import Interrupted, UserError
from draftsmith.hidden import extract
from draftsmith.hidden.backends import transformers as backend
from draftsmith.hidden.store import HiddenStore
from draftsmith.hidden.target_head import load_target_head
from draftsmith.progress import Progress
from draftsmith.recipe import ExtractSettings
from draftsmith.target.loading import load_model
from draftsmith.trace import Trace, read_metadata, write_traces
from tiny_target import save_tiny_target

LAYERS = (1, 3, 4)
SETTINGS = ExtractSettings(dtype="float32", device="cpu", batch_tokens=256)


@torch.no_grad()
def greedy(model: object, prompt: list[int], count: int) -> list[int]:
    ids = list(prompt)
    for _ in range(count):
        ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))  # type: ignore[operator]
    return ids[len(prompt) :]


def make_traces(run: Path, target: Path, *, kind: str = "capture", wrong: bool = False, count: int = 9) -> list[Trace]:
    """Greedy replies of the target after a long common prefix (so that it is computed once); `wrong` shifts the ids."""
    model = load_model(str(target), torch.float32, torch.device("cpu"))
    traces = []
    for number in range(count):
        prompt = [7] * 40 + [10 + number] * (1 + number % 4)
        generated = greedy(model, prompt, 90 + number % 3)
        if wrong:
            generated = [(token + 1) % 90 for token in generated]
        traces.append(
            Trace(trace_id=f"t{number}", question_key=f"q{number}", prompt_ids=prompt, generated_ids=generated)
        )
    (run / "traces").mkdir(parents=True)
    metadata = {"target": str(target), "source_kind": kind, "sampling": json.dumps({"temperature": 0.0})}
    write_traces(run / "traces" / "part-00000.parquet", traces, metadata)
    return traces


MakeStage = Callable[[str], Stage]


def publish(stage: Stage) -> HiddenStore:
    stage.work.rename(stage.run / "hidden")
    return HiddenStore(stage.run / "hidden")


def test_states_are_those_of_transformers_for_every_token(
    tmp_path: Path, make_stage: MakeStage, progress: Progress
) -> None:  # P30
    target = save_tiny_target(tmp_path / "m")
    stage = make_stage("hidden")
    traces = make_traces(stage.run, target)
    counts = extract.build(stage, SETTINGS, progress)
    assert counts["traces"] == len(traces)
    assert counts["layers"] == list(LAYERS)
    assert counts["agreement"] == 1.0
    store = publish(stage)
    model = load_model(str(target), torch.float32, torch.device("cpu"))
    head = load_target_head(stage.run / "hidden")
    for trace in traces:
        ids = [*trace.prompt_ids, *trace.generated_ids]
        hidden = model(torch.tensor([ids[:-1]]), output_hidden_states=True).hidden_states
        states = store.get(trace.trace_id)
        assert states.aux.shape == (len(ids) - 1, 96)
        assert states.final.shape == (len(trace.generated_ids), 32)
        expected = torch.cat([hidden[layer + 1][0] for layer in LAYERS], dim=-1)
        torch.testing.assert_close(states.aux.float(), expected, rtol=0.01, atol=0.05)
        assert states.argmax.tolist() == list(trace.generated_ids)
        normed = head.normed(states.final.float())  # transformers' last hidden state is after the norm
        torch.testing.assert_close(normed, hidden[-1][0, len(trace.prompt_ids) - 1 :], rtol=0.02, atol=0.05)


def test_the_checkpoints_own_type_is_kept_whatever_it_was_loaded_as(
    tmp_path: Path, make_stage: MakeStage, progress: Progress
) -> None:
    target = save_tiny_target(tmp_path / "m")
    config = read_json(target / "config.json")
    write_json(target / "config.json", config | {"dtype": "bfloat16"})
    stage = make_stage("hidden")
    make_traces(stage.run, target, count=2)
    extract.build(stage, SETTINGS, progress)
    assert read_json(stage.work / "target.json")["config"]["dtype"] == "bfloat16"


def test_a_batch_gives_the_states_of_single_passes(tmp_path: Path) -> None:  # P30
    target = save_tiny_target(tmp_path / "m")
    traces = make_traces(tmp_path, target, count=4)
    model = load_model(str(target), torch.float32, torch.device("cpu"))
    together = list(backend.states(model, LAYERS, traces))
    for trace, (aux, final) in zip(traces, together, strict=True):
        [(alone_aux, alone_final)] = backend.states(model, LAYERS, [trace])
        assert len(aux) == len(trace.prompt_ids) + len(trace.generated_ids) - 1
        torch.testing.assert_close(aux, alone_aux, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(final, alone_final, rtol=1e-4, atol=1e-4)


def test_batches_stay_within_their_tokens_and_lose_nothing() -> None:
    traces = [Trace(trace_id=str(n), question_key="q", prompt_ids=[1] * n, generated_ids=[1]) for n in range(1, 40)]
    groups = list(backend.batches(traces, 60))
    assert sorted(int(t.trace_id) for group in groups for t in group) == list(range(1, 40))
    widths = [max(len(t.prompt_ids) + 1 for t in group) * len(group) for group in groups]
    assert max(widths) <= 60


def test_states_of_another_target_stop_the_run(tmp_path: Path, make_stage: MakeStage, progress: Progress) -> None:
    stage = make_stage("hidden")
    make_traces(stage.run, save_tiny_target(tmp_path / "m"))
    other = save_tiny_target(tmp_path / "other", seed=1)
    with pytest.raises(
        UserError, match=r"reproduces .* of 5\d\d captured ids, expected at least 90.0%; no known fault"
    ):
        extract.build(stage, SETTINGS.model_copy(update={"target": str(other)}), progress)


def test_each_trace_is_judged_at_the_temperature_it_was_made_with(
    tmp_path: Path, make_stage: MakeStage, progress: Progress
) -> None:
    stage = make_stage("hidden")
    traces = make_traces(stage.run, save_tiny_target(tmp_path / "m"))
    hot = json.dumps({"temperature": 1000.0})  # draws from it are nearly even over the vocabulary
    rng = random.Random(0)
    mixed = [
        replace(trace, sampling=hot, generated_ids=[rng.randrange(90) for _ in trace.generated_ids])
        if number % 2
        else trace
        for number, trace in enumerate(traces)
    ]
    path = stage.folder("traces") / "part-00000.parquet"
    write_traces(path, mixed, read_metadata(stage.folder("traces")))
    assert 0.4 < extract.build(stage, SETTINGS, progress)["agreement"] < 0.7


def test_a_shift_by_one_is_named(tmp_path: Path, make_stage: MakeStage, progress: Progress) -> None:
    stage = make_stage("hidden")
    target = save_tiny_target(tmp_path / "m")
    traces = make_traces(stage.run, target)
    shifted = [
        Trace(
            trace_id=t.trace_id, question_key=t.question_key, prompt_ids=t.prompt_ids, generated_ids=t.generated_ids[1:]
        )
        for t in traces
    ]
    # Ids of a reply whose first token was lost: every row is one token early.
    metadata = {"target": str(target), "source_kind": "capture", "sampling": "{}"}
    write_traces(stage.folder("traces") / "part-00000.parquet", shifted, metadata)
    with pytest.raises(UserError, match="reproduces"):
        extract.build(stage, SETTINGS, progress)


def test_imported_text_is_not_judged(tmp_path: Path, make_stage: MakeStage, progress: Progress) -> None:
    stage = make_stage("hidden")
    make_traces(stage.run, save_tiny_target(tmp_path / "m"), kind="static", wrong=True)
    counts = extract.build(stage, SETTINGS, progress)
    assert counts["agreement"] < 0.5


def test_an_interrupted_extraction_keeps_its_shards_and_goes_on(
    tmp_path: Path, make_stage: MakeStage, progress: Progress, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage = make_stage("hidden")
    traces = make_traces(stage.run, save_tiny_target(tmp_path / "m"))
    passes: list[int] = []
    states = backend.states

    def counted(*args: object) -> object:
        passes.append(1)
        if len(passes) == 2:
            interrupts.signal.raise_signal(interrupts.signal.SIGTERM)
        return states(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(backend, "states", counted)
    with pytest.raises(Interrupted, match="run again to go on"):
        extract.build(stage, SETTINGS, progress)
    first = len(passes)
    counts = extract.build(stage, SETTINGS, progress)
    assert counts["traces"] == len(traces)
    total = len(list(backend.batches(traces, SETTINGS.batch_tokens)))
    assert (first, len(passes) - first) == (2, total - 2)


def test_too_little_space_is_refused_before_the_first_pass(
    tmp_path: Path, make_stage: MakeStage, progress: Progress, monkeypatch: pytest.MonkeyPatch
) -> None:  # P33
    stage = make_stage("hidden")
    make_traces(stage.run, save_tiny_target(tmp_path / "m"))
    usage = type("Usage", (), {"free": 100_000})
    monkeypatch.setattr(extract.shutil, "disk_usage", lambda path: usage)
    monkeypatch.setattr(backend, "states", None)
    with pytest.raises(UserError, match=r"need .* GB \(\d+ bytes per token\), found 0.0 GB free; .* --limit"):
        extract.build(stage, SETTINGS, progress)


def test_traces_without_a_trainable_row_are_refused(tmp_path: Path, make_stage: MakeStage, progress: Progress) -> None:
    stage = make_stage("hidden")
    (stage.run / "traces").mkdir(parents=True)
    failed = Trace(trace_id="a", question_key="q", state="failed")
    write_traces(stage.run / "traces" / "part-00000.parquet", [failed], {"target": "x"})
    with pytest.raises(UserError, match="holds no trace to learn from"):
        extract.build(stage, SETTINGS, progress)
