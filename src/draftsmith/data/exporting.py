"""Traces as other tools' training data: speculators' rows, SpecForge's, or a Hugging Face dataset; each with a card.

Only traces that can be trained on are written; held-out questions become the `test` split. Ids are written as they
are. A `loss_mask` is 1 exactly on generated ids, at their own places. What a trainer makes of it is its own affair
(P20): speculators 0.9.0 (`shift_batch`) moves it along with inputs and targets, so that its first label is the second
generated id; SpecForge 0.2.0 (`TargetHead.preprocess`) moves inputs and targets but not the mask, so that its first
label is the third. JSON is ASCII, so that no reader cuts a row at U+2028 (P16). The folder is made beside its place
and renamed when it is whole.
"""

from __future__ import annotations

import json
import os
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TextIO

import pyarrow as pa
import pyarrow.parquet as pq

from draftsmith.artifacts import room_on_disk, sync
from draftsmith.data.card import CARD, MARK, card
from draftsmith.errors import UserError
from draftsmith.progress import Progress
from draftsmith.recipe import DatasetSettings
from draftsmith.target.embedded import resolve_model
from draftsmith.target.template import Template, load_template
from draftsmith.target.thinking import delimiters_from_json, opened_by_prompt
from draftsmith.trace import SCHEMA, TRAINABLE, Trace, held_out, read_metadata, read_traces, trace_files

SPLITS = ("train", "test")
Row = dict[str, Any]
Rows = Callable[[Trace], Iterator[tuple[str, Row]]]
"""A trace -> folder within the dataset and row, for each file that it goes to."""


def traces_folder(run: Path | None, traces: Path | None) -> Path:
    """Where the traces are.

    Raises:
        UserError: both or neither was given.
    """
    if (run is None) == (traces is None):
        raise UserError(f"export-dataset: expected --run or --traces, found {'both' if run else 'neither'}")
    return traces if traces is not None else Path(run or "") / "traces"


def export_dataset(
    folder: Path, out: Path, settings: DatasetSettings, progress: Progress, *, force: bool = False
) -> dict[str, Any]:
    """Writes the traces of `folder` as the dataset `out`.

    Returns:
        Counts: rows of each split, ids, what was left out.

    Raises:
        UserError: no traces there, none of them trainable, something other than such a dataset is in the way, or no
            room on the disk.
    """
    files = trace_files(folder)
    metadata = read_metadata(folder)
    _check_free(out, force)
    template = None if settings.format == "hf" else _template(settings, metadata, progress)
    work = out.with_name(out.name + ".partial")
    shutil.rmtree(work, ignore_errors=True)
    try:
        work.mkdir(parents=True)
    except OSError as error:
        raise UserError(f"--out: expected a folder that can be made, found {out} ({error.strerror})") from None
    try:
        with room_on_disk(work):
            if settings.format == "hf":
                counts = _write_parquet(files, metadata, work)
            else:
                rows = _speculators(template) if settings.format == "speculators" else _specforge(template, metadata)
                counts = _write_json(folder, metadata, rows, work, progress)
            if not counts["train"] + counts["test"]:
                raise UserError(f"{folder}: none of its {counts['left_out']} traces can be trained on")
            (work / CARD).write_text(card(settings.format, metadata, counts, _facts(files)), encoding="utf-8")
            for path in (*work.rglob("*"), work):
                sync(path)
    except BaseException:
        shutil.rmtree(work, ignore_errors=True)
        raise
    _publish(work, out)
    return counts


def _check_free(out: Path, force: bool) -> None:
    if not out.exists():
        return
    ours = out.is_dir() and (out / CARD).is_file() and MARK in (out / CARD).read_text(encoding="utf-8")
    if not ours and not (out.is_dir() and not any(out.iterdir())):
        raise UserError(f"{out}: holds something that is not such a dataset; choose another --out")
    if ours and not force:
        raise UserError(f"{out}: holds a dataset already; --force replaces it, or choose another --out")


def _publish(work: Path, out: Path) -> None:
    old = out.with_name(out.name + ".old")
    shutil.rmtree(old, ignore_errors=True)
    if out.exists():
        os.replace(out, old)
    os.replace(work, out)
    sync(out.parent)
    shutil.rmtree(old, ignore_errors=True)


def _template(settings: DatasetSettings, metadata: dict[str, str], progress: Progress) -> Template | None:
    """From --tokenizer, else the one the traces name, if it is a folder here; None: no decoded text is written."""
    named = metadata.get("tokenizer", "")
    if settings.tokenizer is not None:
        template = load_template(resolve_model(settings.tokenizer, progress), {}, settings.trust_remote_code)
        own = metadata.get("tokenizer_fingerprint", template.tokenizer_fingerprint)
        if own != template.tokenizer_fingerprint:
            raise UserError(
                f"{settings.tokenizer}: the traces were made with another tokenizer (fingerprint {own}, this one has "
                f"{template.tokenizer_fingerprint}); give the target's own"
            )
        return template
    if named and Path(named).is_dir():
        return load_template(named, {}, settings.trust_remote_code)
    progress.say("export-dataset: no tokenizer, so no decoded text is written; give --tokenizer DIR to have it")
    return None


def _speculators(template: Template | None) -> Rows:
    """What `speculators prepare-data` takes as it is: the form of its own regenerate-responses."""

    def rows(trace: Trace) -> Iterator[tuple[str, Row]]:
        row = {"id": trace.trace_id, "primary_id": trace.question_key, **_masked(trace)}
        if template is not None:
            row["text"] = template.decode(row["input_ids"])
        yield "", row | {"metadata": _notes(trace)}

    return rows


def _specforge(template: Template | None, metadata: dict[str, str]) -> Rows:
    """Three forms: `ids` (exact), `conversations` and, with a tokenizer, `text` (both tokenised again by SpecForge)."""
    delimiters = delimiters_from_json(metadata.get("delimiters", "null"))

    def reply(trace: Trace) -> str:
        if template is None:
            if delimiters is None or trace.reasoning_span is None:
                return trace.reasoning + trace.answer
            closing = f"\n{delimiters.close_text}\n\n{trace.answer}" if trace.answer_span is not None else ""
            return f"{delimiters.open_text}\n{trace.reasoning}{closing}"
        ids = list(trace.generated_ids)
        if ids and ids[-1] in template.stop_ids:
            ids.pop()
        opened = delimiters is not None and opened_by_prompt(delimiters, template, trace.prompt_ids)
        return (f"{delimiters.open_text}\n" if delimiters and opened else "") + template.decode(ids)

    def rows(trace: Trace) -> Iterator[tuple[str, Row]]:
        yield "ids", {"id": trace.trace_id, "primary_id": trace.question_key, **_masked(trace)}
        history = [_plain_turn(turn) for turn in json.loads(trace.messages)]
        turns = [*history, {"role": "assistant", "content": reply(trace)}]
        yield "conversations", {"id": trace.trace_id, "conversations": turns}
        if template is not None:
            ids = [*trace.prompt_ids, *trace.generated_ids]
            yield "text", {"id": trace.trace_id, "text": template.decode(ids)}

    return rows


def _masked(trace: Trace) -> Row:
    prompt, generated = list(trace.prompt_ids), list(trace.generated_ids)
    return {"input_ids": prompt + generated, "loss_mask": [0] * len(prompt) + [1] * len(generated)}


def _notes(trace: Trace) -> Row:
    """The same keys with the same types in every row, as Arrow wants it."""
    return {
        "finish_reason": trace.finish_reason,
        "state": trace.state,
        "ids_source": trace.ids_source,
        "source": trace.source,
        "sample": trace.sample,
        "sampling": trace.sampling,
    }


def _plain_turn(turn: Row) -> Row:
    """A turn whose tool calls are JSON text, because Arrow wants one type per field (P24); SpecForge reads it so."""
    if not turn.get("tool_calls"):
        return turn
    return {**turn, "tool_calls": json.dumps(turn["tool_calls"])}


def _write_json(folder: Path, metadata: dict[str, str], rows: Rows, work: Path, progress: Progress) -> dict[str, Any]:
    share = float(metadata.get("held_out", 0))
    total = sum(pq.read_metadata(file).num_rows for file in trace_files(folder))
    counts: Counter[str] = Counter(dict.fromkeys((*SPLITS, "prompt_ids", "generated_ids"), 0))
    with ExitStack() as stack, progress.track("export-dataset", total, "traces") as tracker:
        files: dict[Path, TextIO] = {}
        for trace in read_traces(folder):
            split = SPLITS[held_out(trace.question_key, share)]
            for part, row in rows(trace):
                path = work / part / f"{split}.jsonl"
                if path not in files:
                    path.parent.mkdir(exist_ok=True)
                    files[path] = stack.enter_context(open(path, "w", encoding="ascii"))
                files[path].write(json.dumps(row, ensure_ascii=True) + "\n")
            counts[split] += 1
            counts["prompt_ids"] += len(trace.prompt_ids)
            counts["generated_ids"] += len(trace.generated_ids)
            tracker.update(counts["train"] + counts["test"])
    return dict(counts) | {"left_out": total - counts["train"] - counts["test"]}


def _write_parquet(files: list[Path], metadata: dict[str, str], work: Path) -> dict[str, Any]:
    """All columns, one part per part of the traces and split, read and written a batch at a time."""
    share = float(metadata.get("held_out", 0))
    schema = SCHEMA.with_metadata({"draftsmith": json.dumps(metadata, sort_keys=True)})
    counts: Counter[str] = Counter(dict.fromkeys((*SPLITS, "prompt_ids", "generated_ids", "left_out"), 0))
    (work / "data").mkdir()
    for number, file in enumerate(files):
        with ExitStack() as stack, pq.ParquetFile(file) as opened:
            writers: dict[str, pq.ParquetWriter] = {}
            for batch in opened.iter_batches(batch_size=512):
                batch = batch.select(SCHEMA.names)
                good = [state in TRAINABLE for state in batch["state"].to_pylist()]
                keys = batch["question_key"].to_pylist()
                counts["left_out"] += good.count(False)
                for place, split in enumerate(SPLITS):
                    mine = [fit and held_out(key, share) == place for fit, key in zip(good, keys, strict=True)]
                    chosen = batch.filter(pa.array(mine, pa.bool_()))
                    if not chosen.num_rows:
                        continue
                    if split not in writers:
                        path = work / "data" / f"{split}-{number:05}.parquet"
                        writers[split] = stack.enter_context(pq.ParquetWriter(path, schema, compression="zstd"))
                    writers[split].write_batch(chosen.cast(schema))
                    counts[split] += chosen.num_rows
                    for name in ("prompt_ids", "generated_ids"):
                        counts[name] += len(chosen[name].flatten())
    return dict(counts)


def _facts(files: list[Path]) -> dict[str, Counter[str]]:
    """State, exactness and source of the trainable traces, for the card."""
    found: dict[str, Counter[str]] = {name: Counter() for name in ("state", "ids_source", "source")}
    for file in files:
        table = pq.read_table(file, columns=list(found))
        rows = [row for row in table.to_pylist() if row["state"] in TRAINABLE]
        for name, counter in found.items():
            counter.update(row[name] for row in rows)
    return found
