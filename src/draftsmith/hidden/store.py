"""The hidden-state store: shards of unpadded rows, an index, a checksum per shard; keyed by trace_id.

A shard is written beside, flushed, renamed, and only then entered (with its checksum) into `shards.jsonl`: what is
listed there is whole, anything else is made again. Reading maps the shards into memory and verifies a shard's checksum
when it is first opened. Per trace of n ids (m of them generated): aux rows for tokens 0..n-2, final and argmax rows for
the last m of those, so that row j of `final` predicts generated token j. Cost: (4 * n) * hidden * 2 bytes at most.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from draftsmith import artifacts
from draftsmith.errors import UserError

INDEX = "index.parquet"
SHARDS = "shards.jsonl"
INDEX_SCHEMA = pa.schema(
    [
        ("trace_id", pa.string()),
        ("shard", pa.string()),
        ("aux_start", pa.int64()),
        ("aux_rows", pa.int64()),
        ("final_start", pa.int64()),
        ("final_rows", pa.int64()),
        ("prompt_length", pa.int64()),
        ("agreement", pa.float32()),
    ]
)


@dataclass(frozen=True, slots=True)
class States:
    """Of one trace with n ids, m generated: aux bf16 [n-1, 3H], final bf16 [m, H], argmax int32 [m]."""

    aux: Tensor
    final: Tensor
    argmax: Tensor


class ShardWriter:
    """Collects traces and writes a shard whenever `shard_bytes` are together; knows what earlier attempts finished."""

    def __init__(self, folder: Path, shard_bytes: int) -> None:
        self.folder, self.shard_bytes = folder, shard_bytes
        self.shards = _whole_shards(folder)
        self.pending: list[tuple[dict[str, Any], States]] = []
        self.pending_bytes = 0
        for stray in [*folder.glob("*.tmp"), *folder.glob("states-*.safetensors")]:
            if stray.name not in {shard["name"] for shard in self.shards}:
                stray.unlink()

    def done(self) -> set[str]:
        """trace_ids in whole shards."""
        return {row["trace_id"] for shard in self.shards for row in shard["rows"]}

    def rows(self) -> list[dict[str, Any]]:
        """Index rows of the whole shards."""
        return [row for shard in self.shards for row in shard["rows"]]

    def add(self, trace_id: str, states: States, prompt_length: int, agreement: float) -> None:
        """Takes one trace's states; may write a shard."""
        row = {"trace_id": trace_id, "prompt_length": prompt_length, "agreement": agreement}
        self.pending.append((row, states))
        self.pending_bytes += sum(part.nbytes for part in (states.aux, states.final, states.argmax))
        if self.pending_bytes >= self.shard_bytes:
            self.flush()

    def flush(self) -> None:
        """Writes what is pending as one shard."""
        if not self.pending:
            return
        taken = {shard["name"] for shard in self.shards}
        name = next(n for n in map("states-{:05}.safetensors".format, itertools.count()) if n not in taken)
        aux_start = final_start = 0
        rows = []
        for row, states in self.pending:
            rows.append(
                {
                    **row,
                    "shard": name,
                    "aux_start": aux_start,
                    "aux_rows": len(states.aux),
                    "final_start": final_start,
                    "final_rows": len(states.final),
                }
            )
            aux_start, final_start = aux_start + len(states.aux), final_start + len(states.final)
        tensors = {
            part: torch.cat([getattr(states, part) for _, states in self.pending]).contiguous()
            for part in ("aux", "final", "argmax")
        }
        path = self.folder / name
        temporary = path.with_suffix(".tmp")
        save_file(tensors, temporary)
        with open(temporary, "rb+") as file:
            os.fsync(file.fileno())
            digest = hashlib.file_digest(file, "blake2b").hexdigest()
        os.replace(temporary, path)
        shard = {"name": name, "bytes": path.stat().st_size, "blake2b": digest, "rows": rows}
        with open(self.folder / SHARDS, "a", encoding="utf-8") as log:
            log.write(json.dumps(shard) + "\n")
            log.flush()
            os.fsync(log.fileno())
        self.shards.append(shard)
        self.pending, self.pending_bytes = [], 0

    def finish(self) -> list[dict[str, Any]]:
        """Writes the last shard and the index; returns the index rows."""
        self.flush()
        rows = self.rows()
        pq.write_table(pa.Table.from_pylist(rows, schema=INDEX_SCHEMA), self.folder / INDEX, compression="zstd")
        return rows


class HiddenStore:
    """Read access to a published hidden folder."""

    def __init__(self, folder: Path) -> None:
        if not (folder / INDEX).exists():
            raise UserError(f"{folder}: expected a store of hidden states, found no {INDEX}; run `draftsmith extract`")
        self.folder = folder
        self.target: dict[str, Any] = artifacts.read_json(folder / "target.json")
        self._rows = {row["trace_id"]: row for row in pq.read_table(folder / INDEX).to_pylist()}
        self._shards = {shard["name"]: shard for shard in _read_log(folder)}
        self._open: dict[str, Any] = {}

    @property
    def trace_ids(self) -> set[str]:
        """Ids of all traces held."""
        return set(self._rows)

    def get(self, trace_id: str) -> States:
        """The states of one trace (copied out of the mapped shard).

        Raises:
            UserError: the trace is not here, or its shard does not match its checksum.
        """
        if trace_id not in self._rows:
            raise UserError(f"{self.folder}: no hidden states for trace {trace_id}; run `draftsmith extract` again")
        row = self._rows[trace_id]
        shard = self._shard(row["shard"])
        aux = slice(row["aux_start"], row["aux_start"] + row["aux_rows"])
        final = slice(row["final_start"], row["final_start"] + row["final_rows"])
        return States(shard.get_slice("aux")[aux], shard.get_slice("final")[final], shard.get_slice("argmax")[final])

    def argmax(self, trace_id: str) -> Tensor:
        """Of one trace, the argmax rows alone (see `get`): no hidden state is read for them."""
        row = self._rows[trace_id]
        rows: Tensor = self._shard(row["shard"]).get_slice("argmax")[
            row["final_start"] : row["final_start"] + row["final_rows"]
        ]
        return rows

    def _shard(self, name: str) -> Any:
        if name not in self._open:
            path = self.folder / name
            if not _is_whole(self.folder, self._shards[name]):
                raise UserError(
                    f"{path}: does not match its checksum; the file was changed or the disk is failing; "
                    "run `draftsmith extract --force`"
                )
            self._open[name] = safe_open(path, framework="pt")
        return self._open[name]


def estimate_bytes(tokens: int, generated: int, hidden: int, aux_layers: int = 3) -> int:
    """Bytes that states of `tokens` ids need in bf16, `generated` of them with a final state."""
    return (tokens * aux_layers + generated) * hidden * 2


def _whole_shards(folder: Path) -> list[dict[str, Any]]:
    """The shards an earlier attempt finished and that are still whole; the log is rewritten to list just these."""
    whole = [shard for shard in _read_log(folder) if _is_whole(folder, shard)]
    temporary = folder / (SHARDS + ".tmp")
    with open(temporary, "w", encoding="utf-8") as log:
        log.writelines(json.dumps(shard) + "\n" for shard in whole)
        log.flush()
        os.fsync(log.fileno())
    os.replace(temporary, folder / SHARDS)
    return whole


def _read_log(folder: Path) -> list[dict[str, Any]]:
    path = folder / SHARDS
    if not path.exists():
        return []
    shards = []
    for line in path.read_bytes().split(b"\n"):
        try:
            shards.append(json.loads(line))
        except ValueError:  # the torn last line of a killed attempt: its shard is made again
            break
    return shards


def _is_whole(folder: Path, shard: dict[str, Any]) -> bool:
    path = folder / shard["name"]
    if not path.exists() or path.stat().st_size != shard["bytes"]:
        return False
    with open(path, "rb") as file:
        return bool(hashlib.file_digest(file, "blake2b").hexdigest() == shard["blake2b"])
