"""Faults to plant, one at a time, into a copy of a good run on the counting target."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from counting_run import exported, imported, learned, stage, write_answers, write_questions
from draftsmith.artifacts import read_json, write_json
from draftsmith.draft.unroll import Batch
from draftsmith.hidden.store import SHARDS
from draftsmith.recipe import ExtractSettings
from draftsmith.train import dataset


@dataclass(frozen=True, slots=True)
class Bed:
    """Where a fault is planted: a copy of the good run, beside the targets it may need."""

    run: Path
    target: Path
    early: Path

    @property
    def folder(self) -> Path:
        """The exported folder."""
        return self.run / "export" / "vllm"

    def config(self, **changes: Any) -> None:
        write_json(self.folder / "config.json", {**read_json(self.folder / "config.json"), **changes})

    def layer_ids(self, *ids: int) -> None:
        eagle = {"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": list(ids)}
        self.config(eagle_aux_hidden_state_layer_ids=list(ids), eagle_config=eagle)

    def rope(self, kept: bool = True, **changes: Any) -> None:
        raw = read_json(self.folder / "config.json")
        values = {**(raw["rope_parameters"] if kept else {}), **changes}
        self.config(rope_parameters=values, rope_theta=values["rope_theta"], rope_scaling=values if kept else None)

    def tensors(self, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
        change_tensors(self.folder / "model.safetensors", change)

    def again(self) -> None:
        """Exports what the draft has become."""
        shutil.rmtree(self.run / "export")
        exported(self.run)


def change_tensors(path: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    tensors = load_file(path)
    change(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path, metadata={"format": "pt"})


def layer_ids_one_up(bed: Bed) -> None:
    bed.layer_ids(3, 5, 6)


def layer_ids_as_sglang(bed: Bed) -> None:
    bed.layer_ids(1, 3, 4)


def final_norm_skipped(bed: Bed) -> None:
    def skip(tensors: dict[str, torch.Tensor]) -> None:
        tensors["norm.weight"] = torch.ones_like(tensors["norm.weight"])

    bed.tensors(skip)


def residual_flipped(bed: Bed) -> None:
    bed.config(norm_before_residual=True)


def rope_theta_changed(bed: Bed) -> None:
    bed.rope(rope_theta=10000.0)


def rope_scaling_dropped(bed: Bed) -> None:
    bed.rope(kept=False, rope_type="default", rope_theta=1000.0)


def d2t_absolute(bed: Bed) -> None:
    def absolute(tensors: dict[str, torch.Tensor]) -> None:
        tensors["d2t"] = tensors["d2t"] + torch.arange(len(tensors["d2t"]))

    bed.tensors(absolute)


def vocabulary_of_another_run(bed: Bed) -> None:
    def other(tensors: dict[str, torch.Tensor]) -> None:
        kept = tensors["t2d"].nonzero().flatten()
        spare = (~tensors["t2d"]).nonzero().flatten()
        ids = torch.cat([kept[: len(kept) // 2], spare[: len(kept) - len(kept) // 2]]).sort().values
        tensors["d2t"] = ids - torch.arange(len(ids))
        tensors["t2d"] = torch.zeros_like(tensors["t2d"]).index_fill_(0, ids, True)

    bed.tensors(other)


def head_rows_permuted(bed: Bed) -> None:
    def permute(tensors: dict[str, torch.Tensor]) -> None:
        order = torch.randperm(len(tensors["d2t"]), generator=torch.Generator().manual_seed(0))
        tensors["lm_head.weight"] = tensors["lm_head.weight"][order]

    bed.tensors(permute)


def embedding_random(bed: Bed) -> None:
    def randomise(tensors: dict[str, torch.Tensor]) -> None:
        kept = tensors["embed_tokens.weight"]
        noise = torch.randn(kept.shape, generator=torch.Generator().manual_seed(0))
        tensors["embed_tokens.weight"] = (noise * kept.std()).to(kept.dtype)

    bed.tensors(randomise)


def layers_missing(bed: Bed) -> None:
    def drop(tensors: dict[str, torch.Tensor]) -> None:
        for name in [name for name in tensors if ".mlp." in name]:
            del tensors[name]

    bed.tensors(drop)


def positions_too_few(bed: Bed) -> None:
    bed.config(max_position_embeddings=40)


def norms_in_bf16(bed: Bed) -> None:
    def round_norms(tensors: dict[str, torch.Tensor]) -> None:
        for name in [name for name in tensors if "norm" in name]:
            tensors[name] = tensors[name].bfloat16().float()

    change_tensors(bed.run / "draft" / "best" / "draft.safetensors", round_norms)
    bed.again()


def eos_not_in_vocabulary(bed: Bed) -> None:
    best = bed.run / "draft" / "best"
    eos = read_json(bed.target / "config.json")["eos_token_id"]

    def drop(tensors: dict[str, torch.Tensor]) -> None:
        ids = tensors["d2t"] + torch.arange(len(tensors["d2t"]))
        kept = ids != eos
        tensors["lm_head.weight"] = tensors["lm_head.weight"][kept]
        tensors["d2t"] = ids[kept] - torch.arange(int(kept.sum()))
        tensors["t2d"][eos] = False

    change_tensors(best / "draft.safetensors", drop)
    config = read_json(best / "config.json")
    write_json(best / "config.json", {**config, "draft_vocab_size": config["draft_vocab_size"] - 1})
    bed.again()


def rows_zero(bed: Bed) -> None:
    """5 % of the stored aux rows, as a broken cache would leave them."""

    def zero(tensors: dict[str, torch.Tensor]) -> None:
        rows = torch.rand(len(tensors["aux"]), generator=torch.Generator().manual_seed(0)) < 0.05
        tensors["aux"][rows] = 0

    hidden = bed.run / "hidden"
    shards = [json.loads(line) for line in (hidden / SHARDS).read_text().splitlines()]
    for shard in shards:
        path = hidden / shard["name"]
        change_tensors(path, zero)
        shard["bytes"] = path.stat().st_size
        shard["blake2b"] = hashlib.file_digest(path.open("rb"), "blake2b").hexdigest()
    (hidden / SHARDS).write_text("".join(json.dumps(shard) + "\n" for shard in shards))


def states_stale(bed: Bed) -> None:
    """Extracted and trained before the target had finished learning."""
    for name in ("hidden", "draft", "export"):
        shutil.rmtree(bed.run / name)
    stage(bed.run, "extract", ExtractSettings(target=str(bed.early), dtype="float32", min_agreement=0.0))
    learned(bed.run, bed.early)
    exported(bed.run)
    facts = read_json(bed.run / "hidden" / "target.json")
    write_json(bed.run / "hidden" / "target.json", {**facts, "name": str(bed.target)})


def target_wrong(bed: Bed) -> None:
    """Measured with a model of the same shape that the draft was not made for."""
    facts = read_json(bed.run / "hidden" / "target.json")
    write_json(bed.run / "hidden" / "target.json", {**facts, "name": str(bed.early)})


def text_static(bed: Bed) -> None:
    """Trained on answers that the target would not give."""
    shutil.rmtree(bed.run)
    imported(bed.run, bed.target, write_answers(bed.run.parent / "answers.jsonl", 5, pace=5))
    learned(bed.run, bed.target)
    exported(bed.run)


def mask_unshifted(bed: Bed) -> None:
    """Labels were moved left against the inputs, the mask was not: the first row of a reply is never taught (P20)."""

    def unmoved(batch: Batch) -> Batch:
        cut = {name: getattr(batch, name)[:, 1:] for name in ("inputs", "labels", "final", "argmax")}
        return replace(batch, first=batch.first + 1, count=batch.count - 1, **cut)

    _train_again(bed, unmoved)


def labels_unshifted(bed: Bed) -> None:
    """Every row learns the token it reads."""

    def early(batch: Batch) -> Batch:
        return replace(batch, labels=batch.inputs, argmax=batch.inputs, final=batch.final.roll(1, dims=1))

    _train_again(bed, early)


def _train_again(bed: Bed, change: Callable[[Batch], Batch]) -> None:
    for name in ("draft", "export"):
        shutil.rmtree(bed.run / name)
    with _collated(change):
        learned(bed.run, bed.target)
    exported(bed.run)


@contextmanager
def _collated(change: Callable[[Batch], Batch]) -> Iterator[None]:
    """Training batches (and only those) come out changed."""
    collate = dataset.collate
    dataset.collate = lambda *given: change(collate(*given))
    try:
        yield
    finally:
        dataset.collate = collate


def thinking_off(bed: Bed) -> dict[str, Any]:
    """Served in the mode that was not trained (P23); what diagnose is asked besides."""
    path = write_questions(bed.run.parent / "served.jsonl", 99, 40, {"enable_thinking": False})
    return {"questions": str(path)}
