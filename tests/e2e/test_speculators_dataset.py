"""An independent reader as judge: the `speculators` library takes our exported rows as training data as they are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from draftsmith.data.exporting import export_dataset
from draftsmith.data.inspect import inspect
from draftsmith.progress import Progress
from draftsmith.recipe import DatasetSettings, InspectSettings
from draftsmith.trace import Trace, read_traces, supervised_rows
from toy_run import make_traces

pytest.importorskip("speculators", reason="the speculators library is not installed")
pytestmark = pytest.mark.slow
QUIET = Progress(quiet=True)


def test_speculators_reads_prepares_and_shifts_what_we_export(tmp_path: Path) -> None:
    # P20: after its own shift the mask supervises exactly our rows, and the one after the last id
    from speculators.data_generation.preprocessing import build_speculator_training_dataset, load_raw_dataset
    from speculators.models.eagle3.data import shift_batch
    from speculators.train.data import ArrowDataset

    make_traces(tmp_path, 40)
    export_dataset(tmp_path / "traces", tmp_path / "out", DatasetSettings(format="speculators"), QUIET)
    raw, _ = load_raw_dataset(str(tmp_path / "out" / "train.jsonl"))
    prepared = build_speculator_training_dataset(raw, object(), max_length=4096, num_proc=1)
    prepared.save_to_disk(str(tmp_path / "prepared"))

    traces: dict[tuple[int, ...], Trace] = {
        (*trace.prompt_ids, *trace.generated_ids): trace for trace in read_traces(tmp_path / "traces")
    }
    dataset = ArrowDataset(4096, tmp_path / "prepared")
    assert len(dataset) == raw.num_rows > 0
    for item in dataset.data:
        trace = traces[tuple(item["input_ids"].tolist())]
        length = len(item["input_ids"])
        batch: dict[str, Any] = {
            "input_ids": item["input_ids"],
            "loss_mask": item["loss_mask"],
            "hidden_states": torch.zeros(length, 3),
            "verifier_last_hidden_states": torch.zeros(length, 1),
            "lengths": torch.tensor([length]),
            "position_ids": torch.arange(length),
        }
        shifted = torch.nonzero(shift_batch(batch)["loss_mask"]).flatten().tolist()
        assert shifted == [*supervised_rows(len(trace.prompt_ids), length), length - 2]

    found = inspect(tmp_path / "prepared", InspectSettings(), QUIET)
    assert (found.kind, found.rows) == ("masked", len(dataset))
    assert not [finding for finding in found.findings if finding.severity == "wrong"]
