"""Typed values of GGUF keys, and the optional package that reads and writes them."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from draftsmith.errors import UserError


@dataclass(frozen=True, slots=True)
class Value:
    """A key's value with the name of its GGUF type (`GGUFValueType`); `items` is that of an array's members."""

    value: Any
    kind: str
    items: str | None = None


def gguf_package() -> Any:
    """The module gguf.

    Raises:
        UserError: it is not installed.
    """
    try:
        return importlib.import_module("gguf")
    except ImportError:
        raise UserError("llamacpp: expected the package gguf, found none; pip install 'draftsmith[llamacpp]'") from None


def open_gguf(path: Path) -> Any:
    """A `GGUFReader` on a file; tensors are mapped, not read.

    Raises:
        UserError: gguf is not installed, no such file, or not a GGUF file.
    """
    gguf = gguf_package()
    if not path.is_file():
        raise UserError(f"{path}: expected a GGUF file, found none")
    try:
        return gguf.GGUFReader(path)
    except (ValueError, IndexError, KeyError) as error:
        raise UserError(f"{path}: expected a GGUF file, found something else ({error})") from None


def read_keys(reader: Any) -> dict[str, Value]:
    """Every key of an open file, with its type."""
    found = {}
    for name, field in reader.fields.items():
        if not name.startswith("GGUF."):
            kinds = [kind.name for kind in field.types]
            found[name] = Value(field.contents(), kinds[0], kinds[1] if len(kinds) > 1 else None)
    return found
