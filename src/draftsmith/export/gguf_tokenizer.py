"""The target's tokenizer and chat template as GGUF keys.

llama.cpp knows a pre-tokenizer only by name and refuses a draft whose tokens differ from the target's. So a tokenizer
is written only where its way to split text is one that llama.cpp has under a name; the others are copied from a GGUF
file of the target that llama.cpp's own converter wrote.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from draftsmith.errors import UserError
from draftsmith.export.gguf_values import Value, open_gguf, read_keys
from draftsmith.target.template import Template

NORMAL, CONTROL, USER_DEFINED, UNUSED = 1, 3, 4, 5
"""`tokenizer.ggml.token_type`."""

WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
NORMALIZERS = (None, {"type": "NFC"})
"""llama.cpp normalises nothing: of text that is not NFC (Qwen) it makes other ids, as after its own converter."""

BYTES = ("ByteLevel", True)
"""A byte-level step that splits by GPT-2's pattern; False: one that only maps bytes."""

SPLITS: dict[tuple[Any, ...], str] = {
    (BYTES,): "gpt-2",
    (("Digits", True), BYTES): "smollm",
    (("Split", rf"{WORDS}|\p{{N}}{{1,3}}|{REST}"), ("ByteLevel", False)): "llama-bpe",
    (("Split", rf"{WORDS}|\p{{N}}|{REST}"), ("ByteLevel", False)): "qwen2",
}
"""The pre-tokenizer's steps -> the name under which llama.cpp has the same (src/llama-vocab.cpp)."""


def tokenizer_keys(source: Template | Path, vocab_size: int) -> dict[str, Value]:
    """The keys `tokenizer.*`.

    Args:
        source: the target's template, or a GGUF file of the target to copy from.
        vocab_size: rows of the target's embedding; ids past the tokenizer's own are written as unused.

    Raises:
        UserError: a tokenizer that llama.cpp has no name for, or a file of another target.
    """
    if isinstance(source, Path):
        return _copied(source, vocab_size)
    tokenizer = source.tokenizer
    backend = getattr(tokenizer, "backend_tokenizer", None)
    state = json.loads(backend.to_str()) if backend is not None else {}
    if (state.get("model") or {}).get("type") != "BPE" or state["normalizer"] not in NORMALIZERS:
        raise _unknown(source, "its model is not byte-level BPE")
    steps = _steps(state["pre_tokenizer"])
    if steps not in SPLITS:
        raise _unknown(source, f"its pre-tokenizer {steps} has no name there")
    tokens, kinds = _tokens(state, vocab_size)
    merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in state["model"]["merges"]]
    keys = {
        "tokenizer.ggml.model": Value("gpt2", "STRING"),
        "tokenizer.ggml.pre": Value(SPLITS[steps], "STRING"),
        "tokenizer.ggml.tokens": Value(tokens, "ARRAY", "STRING"),
        "tokenizer.ggml.token_type": Value(kinds, "ARRAY", "INT32"),
        "tokenizer.ggml.merges": Value(merges, "ARRAY", "STRING"),
        "tokenizer.ggml.add_space_prefix": Value(False, "BOOL"),
        "tokenizer.chat_template": Value(source.template_text(), "STRING"),
    }
    for name, index in (
        ("bos", tokenizer.bos_token_id),
        ("eos", tokenizer.eos_token_id),
        ("unknown", tokenizer.unk_token_id),
        ("padding", tokenizer.pad_token_id),
    ):
        if index is not None:
            keys[f"tokenizer.ggml.{name}_token_id"] = Value(index, "UINT32")
    around = tokenizer("a")["input_ids"]
    keys["tokenizer.ggml.add_bos_token"] = Value(around[0] == tokenizer.bos_token_id, "BOOL")
    keys["tokenizer.ggml.add_eos_token"] = Value(around[-1] == tokenizer.eos_token_id, "BOOL")
    return keys


def _steps(pre_tokenizer: dict[str, Any] | None) -> tuple[Any, ...]:
    """The pre-tokenizer as a sequence of what decides how it splits."""
    if pre_tokenizer is None:
        return ()
    parts = pre_tokenizer["pretokenizers"] if pre_tokenizer["type"] == "Sequence" else [pre_tokenizer]
    found: list[Any] = []
    for part in parts:
        match part:
            case {"type": "ByteLevel", "add_prefix_space": False, "use_regex": regex}:
                found.append(("ByteLevel", regex))
            case {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}:
                found.append(("Split", pattern))
            case {"type": "Digits", "individual_digits": True}:
                found.append(("Digits", True))
            case _:
                found.append(json.dumps(part))
    return tuple(found)


def _tokens(state: dict[str, Any], vocab_size: int) -> tuple[list[str], list[int]]:
    """Text and type of every id."""
    tokens = [f"[UNUSED{index}]" for index in range(vocab_size)]
    kinds = [UNUSED] * vocab_size
    for token, index in state["model"]["vocab"].items():
        tokens[index], kinds[index] = token, NORMAL
    for added in state["added_tokens"]:
        tokens[added["id"]] = added["content"]
        kinds[added["id"]] = CONTROL if added["special"] else USER_DEFINED
    return tokens, kinds


def _copied(path: Path, vocab_size: int) -> dict[str, Value]:
    found = {key: value for key, value in read_keys(open_gguf(path)).items() if key.startswith("tokenizer.")}
    tokens = found.get("tokenizer.ggml.tokens")
    size = len(tokens.value) if tokens else 0
    if size != vocab_size:
        raise UserError(f"{path}: expected a tokenizer of {vocab_size} ids as the target has, found {size}")
    return found


def _unknown(source: Template, why: str) -> UserError:
    return UserError(
        f"{source.name}: the tokenizer cannot be written for llama.cpp: {why}; convert the target with llama.cpp's "
        "convert_hf_to_gguf.py and give that file with --gguf-tokenizer"
    )
