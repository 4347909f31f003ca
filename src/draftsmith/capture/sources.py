"""Rows of a question source: a file, a folder, a hub dataset or `builtin:` questions, one dict per row, in order.

JSONL is split at LF only (U+2028, U+2029 and U+0085 are text) and Parquet is read as it is, both row by row, so that a
field may have another type in every row. Other folders and hub names go through `datasets.load_dataset`. A hub name may
carry a configuration and a revision: `owner/name:config@revision`. This module imports nothing heavy until it reads.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from draftsmith.artifacts import fingerprint, fingerprint_file
from draftsmith.errors import UserError

BUILTIN = "builtin:"
JSONL = (".jsonl", ".ndjson")
READ_HERE = (*JSONL, ".json", ".parquet")
HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?(:[\w.-]+)?(@[\w./-]+)?")
SPLITS = ("train", "test", "validation", "valid", "dev")
SAVED_BY_DATASETS = ("dataset_dict.json", "state.json")

Row = dict[str, Any]


def read_rows(source: str, split: str) -> Iterator[tuple[str, Row]]:
    """Rows of `source`, each with its place (for messages): `file.jsonl: line 3`.

    Args:
        source: file, folder, hub name or `builtin:NAME`.
        split: split of a hub dataset; picks among a folder's files where their names tell splits apart.

    Raises:
        UserError: missing, unreadable, of an unknown kind, or the hub does not give it.
    """
    if source.startswith(BUILTIN):
        yield from _read_builtin(source)
        return
    path = Path(source).expanduser()
    if path.is_dir():
        yield from _read_folder(path, split)
    elif path.exists():
        yield from _read_file(path)
    elif _is_hub_name(source):
        yield from _read_hub(source, split)
    else:
        raise UserError(f"{source}: expected a file, a folder or a hub dataset name, found no such file")


def source_name(source: str) -> str:
    """What rows without a `source` of their own are called."""
    path = Path(source).expanduser()
    return path.stem if path.exists() else source.removeprefix(BUILTIN)


def source_fingerprint(source: str, split: str) -> str:
    """16 hex digits: bytes of a file or folder, name and split of a hub dataset, version of `builtin:` questions.

    Raises:
        UserError: no such source, or it cannot be read.
    """
    if source.startswith(BUILTIN):
        return fingerprint({"builtin": source, "version": _builtin(source)[0]})
    path = Path(source).expanduser()
    try:
        if path.is_dir():
            files = sorted(file for file in path.rglob("*") if file.is_file())
            return fingerprint({str(file.relative_to(path)): fingerprint_file(file) for file in files})
        if path.exists():
            return fingerprint_file(path)
    except OSError as error:
        raise UserError(f"{source}: cannot be read: {error.strerror or error}") from None
    if _is_hub_name(source):
        return fingerprint({"hub": source, "split": split})
    raise UserError(f"{source}: expected a file, a folder or a hub dataset name, found no such file")


def _is_hub_name(source: str) -> bool:
    return HUB_NAME.fullmatch(source) is not None and not source.endswith(READ_HERE)


def _builtin(source: str) -> tuple[int, Callable[[], Iterator[Row]]]:
    """Version and rows of a builtin source."""
    from draftsmith.capture import arithmetic

    if source != f"{BUILTIN}arithmetic":
        raise UserError(f"{source}: unknown builtin questions; known: {BUILTIN}arithmetic")
    return arithmetic.VERSION, arithmetic.rows


def _read_builtin(source: str) -> Iterator[tuple[str, Row]]:
    for number, row in enumerate(_builtin(source)[1](), start=1):
        yield f"{source}: row {number}", row


def _read_file(path: Path) -> Iterator[tuple[str, Row]]:
    suffix = path.suffix.lower()
    readers = {**dict.fromkeys(JSONL, _read_jsonl), ".json": _read_json, ".parquet": _read_parquet}
    if suffix not in readers:
        raise UserError(f"{path}: expected a file ending in {', '.join(READ_HERE)}, found {suffix or 'no ending'}")
    try:
        yield from readers[suffix](path)
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror or error}") from None


def _read_jsonl(path: Path) -> Iterator[tuple[str, Row]]:
    import msgspec

    decoder = msgspec.json.Decoder()
    with open(path, "rb") as file:  # iterating bytes splits at LF alone
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                row = decoder.decode(line)
            except (msgspec.DecodeError, UnicodeDecodeError) as error:
                raise UserError(f"{path}: line {number}: expected a JSON object, found other text ({error})") from None
            yield _checked(f"{path}: line {number}", row)


def _read_json(path: Path) -> Iterator[tuple[str, Row]]:
    """A JSON array of rows, or JSON lines under this ending."""
    import msgspec

    with open(path, "rb") as file:
        is_array = file.read(4096).lstrip()[:1] == b"["
    if not is_array:
        yield from _read_jsonl(path)
        return
    try:
        rows = msgspec.json.decode(path.read_bytes())
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: expected a JSON array of objects, found other text ({error})") from None
    for number, row in enumerate(rows, start=1):
        yield _checked(f"{path}: row {number}", row)


def _read_parquet(path: Path) -> Iterator[tuple[str, Row]]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    number = 0
    try:
        with pq.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=1024):
                for row in batch.to_pylist():
                    number += 1
                    yield f"{path}: row {number}", _without_filler(row)
    except pa.ArrowException as error:
        raise UserError(f"{path}: expected a Parquet file, found something else ({error})") from None


def _read_folder(folder: Path, split: str) -> Iterator[tuple[str, Row]]:
    if any((folder / name).exists() for name in SAVED_BY_DATASETS):
        yield from _read_saved(folder, split)
        return
    files = sorted(file for file in folder.rglob("*") if file.suffix.lower() in READ_HERE and file.is_file())
    files = [file for file in files if not any(part.startswith(".") for part in file.relative_to(folder).parts)]
    if not files:
        raise UserError(f"{folder}: expected files ending in {', '.join(READ_HERE)}, found none in this folder")
    for file in _of_split(folder, files, split):
        yield from _read_file(file)


def _of_split(folder: Path, files: list[Path], split: str) -> list[Path]:
    """The files whose name or folder starts with the split's name; all of them where no name tells splits apart."""

    def names(file: Path) -> set[str]:
        return {re.split(r"[-_.]", part.lower())[0] for part in file.relative_to(folder).parts}

    chosen = [file for file in files if split.lower() in names(file)]
    others = sorted(set(SPLITS) & set().union(*map(names, files)))
    if chosen or not others:
        return chosen or files
    raise UserError(f"{folder}: no file of split {split}, found {', '.join(others)}; choose one with --split")


def _read_saved(folder: Path, split: str) -> Iterator[tuple[str, Row]]:
    """A folder written by `datasets.save_to_disk`."""
    import datasets

    try:
        loaded = datasets.load_from_disk(str(folder))
    except (OSError, ValueError) as error:
        raise UserError(f"{folder}: expected a dataset saved to disk, found {_first_line(error)}") from None
    if isinstance(loaded, datasets.DatasetDict):
        if split not in loaded:
            raise UserError(f"{folder}: no split {split}, found {', '.join(loaded)}; choose one with --split")
        loaded = loaded[split]
    for number, row in enumerate(loaded, start=1):
        yield f"{folder}: row {number}", _without_filler(row)


def _read_hub(source: str, split: str) -> Iterator[tuple[str, Row]]:
    import datasets
    from datasets.exceptions import DatasetsError

    name, _, revision = source.partition("@")
    name, _, config = name.partition(":")
    try:
        loaded = datasets.load_dataset(name, config or None, split=split, revision=revision or None)
    except (OSError, ValueError, RuntimeError, DatasetsError) as error:
        raise UserError(
            f"{source}: no such file here, and the hub did not give a dataset of this name and split {split}: "
            f"{_first_line(error)}"
        ) from None
    for number, row in enumerate(loaded, start=1):
        yield f"{source}: row {number}", _without_filler(row)


def _checked(place: str, row: Any) -> tuple[str, Row]:
    if not isinstance(row, dict):
        raise UserError(f"{place}: expected a JSON object, found {type(row).__name__}")
    return place, row


def _without_filler(value: Any) -> Any:
    """Arrow gives every struct the fields of all rows' structs, null where a row had none: drops those nulls."""
    if isinstance(value, dict):
        return {name: _without_filler(inner) for name, inner in value.items() if inner is not None}
    return [_without_filler(inner) for inner in value] if isinstance(value, list) else value


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).splitlines()), "") or type(error).__name__
