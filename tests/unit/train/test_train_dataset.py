from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from draftsmith.data.vocab import load_vocab
from draftsmith.draft.loss import label_rows
from draftsmith.errors import UserError
from draftsmith.hidden.store import HiddenStore
from draftsmith.trace import Trace, held_out, read_traces, write_traces
from draftsmith.train.dataset import ahead, collate, counted_labels, micro_steps, read_samples
from draftsmith.train.schedule import plan_steps
from toy_training import HIDDEN, VOCAB, make_training_run, target


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_training_run(tmp_path_factory.mktemp("dataset") / "run")


def test_traces_are_split_by_question_as_everywhere(run: Path) -> None:
    samples = read_samples(run / "traces", HiddenStore(run / "hidden"), 1000)
    expected = {trace.trace_id for trace in read_traces(run / "traces") if held_out(trace.question_key, 0.25)}
    assert {sample.trace_id for sample in samples.held_out} == expected
    assert len(samples.train) + len(samples.held_out) == 24 and samples.train


def test_a_batch_pairs_each_row_with_its_tokens_and_states(run: Path) -> None:
    store = HiddenStore(run / "hidden")
    samples = read_samples(run / "traces", store, 1000).train[:5]
    batch = collate(samples, store, torch.float32)
    model = target()
    for b, sample in enumerate(samples):
        tokens, g = sample.ids.tolist(), sample.prompt_length
        count = len(tokens) - g - 1
        assert batch.ids[b, : sample.rows].tolist() == tokens[1:-1]
        assert (int(batch.first[b]), int(batch.count[b])) == (g - 1, count)
        assert batch.inputs[b, :count].tolist() == tokens[g:-1]
        assert batch.labels[b, :count].tolist() == tokens[g + 1 :]
        with torch.no_grad():
            states = model(torch.tensor([tokens]), output_hidden_states=True).hidden_states
            # The teacher of a label is the target's head at the token before it; the trace is the target's greedy text.
            taught = model.lm_head(model.model.norm(batch.final[b, :count])).argmax(-1)
        aux = torch.cat([states[layer + 1] for layer in (0, 1, 2)], dim=-1)[0, : sample.rows]
        torch.testing.assert_close(batch.aux[b, : sample.rows], aux.bfloat16().float(), rtol=0.02, atol=0.02)
        assert (taught == batch.labels[b, :count]).float().mean() > 0.9
        assert torch.equal(batch.argmax[b, :count], batch.labels[b, :count])
    assert batch.aux.shape[2] == 3 * HIDDEN and batch.final.shape[2] == HIDDEN


def test_padding_is_never_supervised(run: Path) -> None:
    # P20
    store = HiddenStore(run / "hidden")
    samples = sorted(read_samples(run / "traces", store, 1000).train, key=lambda sample: sample.supervised)
    short, long = samples[0], samples[-1]
    batch = collate([short, long], store, torch.float32)
    assert short.supervised < long.supervised
    rows = label_rows(batch, torch.ones(VOCAB, dtype=torch.bool), 2)
    assert int((rows.flat < batch.labels.shape[1]).sum()) == short.supervised
    assert rows.per_step == (
        short.supervised + long.supervised,
        short.supervised + long.supervised - 2,
    )


def test_a_trace_longer_than_max_length_is_cut_at_its_end_and_counted(run: Path) -> None:
    store = HiddenStore(run / "hidden")
    whole, cut = read_samples(run / "traces", store, 1000), read_samples(run / "traces", store, 16)
    assert whole.cut == 0 and cut.cut > 0
    for before, after in zip(whole.train, cut.train, strict=True):
        assert after.ids.tolist() == before.ids.tolist()[:16]
    batch = collate(cut.train, store, torch.float32)
    assert batch.aux.shape[1] == 14


def test_divisors_are_the_labels_that_count_in_the_whole_optimizer_step(run: Path) -> None:
    # P35
    store, t2d = HiddenStore(run / "hidden"), torch.from_numpy(load_vocab(run / "vocab").t2d)
    samples = read_samples(run / "traces", store, 1000).train
    plan = plan_steps([s.supervised for s in samples], batch_tokens=120, epochs=1, token_budget=None, seed=0)
    micros = list(micro_steps(plan, samples, store, t2d, 3, torch.float32, torch.device("cpu")))
    assert sum(micro.last for micro in micros) == len(plan) < len(micros)
    assert sum(micro.supervised for micro in micros) == sum(sample.supervised for sample in samples)
    totals = [0, 0, 0]
    for micro in micros:
        totals = [total + here for total, here in zip(totals, micro.rows.per_step, strict=True)]
        if micro.last:
            assert micro.divisors == tuple(totals)
            totals = [0, 0, 0]


def test_labels_outside_the_draft_vocabulary_do_not_count(run: Path) -> None:
    store = HiddenStore(run / "hidden")
    samples = read_samples(run / "traces", store, 1000).train
    assert counted_labels(samples, store, torch.zeros(VOCAB, dtype=torch.bool), 2) == (0, 0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"prompt_ids": ()}, "has no prompt ids"),
        ({"trace_id": "stranger"}, "1 traces have no hidden states"),
    ],
)
def test_unusable_traces_are_named(run: Path, tmp_path: Path, change: dict[str, object], message: str) -> None:
    # P18: a row that would be supervised throughout is refused with its id.
    traces = list(read_traces(run / "traces"))
    traces[3] = replace(traces[3], **change)  # type: ignore[arg-type]
    write_traces(tmp_path / "traces.parquet", traces, {"held_out": "0.25"})
    with pytest.raises(UserError, match=message) as raised:
        read_samples(tmp_path, HiddenStore(run / "hidden"), 1000)
    assert traces[3].trace_id in str(raised.value)


def test_a_reply_of_one_token_trains_nothing_and_is_counted(run: Path, tmp_path: Path) -> None:
    traces = list(read_traces(run / "traces"))
    short = Trace(trace_id="short", question_key="short", prompt_ids=[1, 5, 9], generated_ids=[2])
    write_traces(tmp_path / "traces.parquet", [*traces, short], {"held_out": "0.25"})
    assert read_samples(tmp_path, HiddenStore(run / "hidden"), 1000).too_short == 1


def test_an_empty_held_out_split_names_the_share_and_the_questions(run: Path, tmp_path: Path) -> None:
    write_traces(tmp_path / "traces.parquet", list(read_traces(run / "traces")), {"held_out": "0"})
    with pytest.raises(UserError, match=r"found none among 24 questions with a held_out share of 0 "):
        read_samples(tmp_path, HiddenStore(run / "hidden"), 1000)


def test_items_are_made_one_ahead_in_order_and_faults_are_raised_here() -> None:
    made: list[int] = []
    second = threading.Event()

    def items() -> Iterator[np.int64]:
        for number in range(3):
            made.append(number)
            if number == 1:
                second.set()
            yield np.int64(number)
        raise ValueError("torn")

    loaded = ahead(items())
    assert next(loaded) == 0
    assert second.wait(5), "the next item was not begun while the first is in use"
    assert [next(loaded), next(loaded)] == [1, 2]
    with pytest.raises(ValueError, match="torn"):
        next(loaded)
