"""The engines an export is for, each with its rules (`FIELDS`, `VERSION`, `read_back`, `taken_layers`), and how to tell
for which of them a folder was made."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from draftsmith.artifacts import read_json
from draftsmith.draft.formats import format_of
from draftsmith.errors import UserError
from draftsmith.export import llamacpp, sglang, speculators, vllm
from draftsmith.export.launching import GGUF_DRAFT
from draftsmith.recipe import Engine

ENGINES: dict[Engine, ModuleType] = {
    "vllm": vllm,
    "speculators": speculators,
    "sglang": sglang,
    "llamacpp": llamacpp,
}
READERS: dict[Engine, str] = {
    "vllm": f"vLLM {vllm.VERSION}",
    "speculators": f"vLLM {vllm.VERSION} (speculators format)",
    "sglang": f"SGLang {sglang.VERSION}",
    "llamacpp": f"llama.cpp ({llamacpp.VERSION})",
}
"""Whose source the rules are from."""


def made_for(folder: Path) -> Engine:
    """The engine whose format a draft folder is in; a flat config of unknown origin is vLLM's.

    Raises:
        UserError: no draft there.
    """
    if (folder / GGUF_DRAFT).exists():
        return "llamacpp"
    return format_engine(read_json(folder / "config.json"), folder)


def format_engine(raw: Mapping[str, Any], folder: Path) -> Engine:
    """The same for a config.json that was read.

    Raises:
        UserError: a checkpoint of ours, which no engine reads.
    """
    kind = format_of(raw)
    if "aux_layers" in raw or kind == "draftsmith":
        raise UserError(f"{folder}: expected what an engine loads, found a checkpoint of train's; export it first")
    return kind


def reader_of(engine: Engine, raw: Mapping[str, Any], folder: Path) -> Engine:
    """By which rules an engine reads a config.json: vLLM looks at the folder to know which of its two formats it is.

    Raises:
        UserError: a format that the engine does not read.
    """
    kind = format_engine(raw, folder)
    if kind == "speculators" and engine in ("vllm", "speculators"):
        if not isinstance(raw.get("transformer_layer_config"), dict):
            raise UserError(f"{folder}: expected transformer_layer_config in a speculators config.json, found none")
        return "speculators"
    if kind == "speculators" or engine == "speculators":
        found = "speculators" if kind == "speculators" else "flat"
        raise UserError(f"{folder}: expected a config.json that {engine} reads, found one in {found} format")
    return engine
