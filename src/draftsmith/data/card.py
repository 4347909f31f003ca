"""The card (README.md) of an exported dataset: what it is, of which target, how exact, and how its mask is meant.

Nothing of the machine it was made on goes in: of a model folder only its name, of a server nothing.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from draftsmith import __version__

CARD = "README.md"
MARK = "<!-- written by draftsmith export-dataset -->"
"""What a folder must hold to be replaced by --force."""
SOURCES_SHOWN = 10
LICENCE = (
    "The licence is not stated (`other`): the text is the output of the target to these questions, and what it may be "
    "used for depends on the terms of both. State it before you publish this."
)
FORMS = {
    "speculators": (
        "Rows of `train.jsonl` and `test.jsonl`: `id`, `primary_id` (the question), `input_ids`, `loss_mask`, `text` "
        "(decoded, for people) and `metadata`, as `speculators prepare-data --data train.jsonl` takes them without "
        "rendering anything. Name the file: given the folder, it reads the test split too. Its trainer (0.9.0) "
        "moves the mask along with inputs and targets, so its first label is the second generated id."
    ),
    "specforge": (
        "Each trace in up to three forms, `train.jsonl` and `test.jsonl` in each folder. `ids/` (`input_ids`, "
        "`loss_mask`) is exact; SpecForge 0.2.0 takes it as `train_data_path` as it is (its trainer moves inputs and "
        "targets but not the mask, so its first label is the third generated id). `conversations/` and `text/` "
        "(with `is_preformatted: true`) are for versions that take no ids: they tokenise the text again, which may "
        "give other ids than the target's. Set `train_only_last_turn: true` with them: a trace supervises its last "
        "turn, the earlier ones are its prompt. A reply is written in `conversations/` with its reasoning between the "
        "target's delimiters; a template may strip that."
    ),
    "hf": (
        "Traces in Parquet: `load_dataset` gives the splits. `prompt_ids` and `generated_ids` are the record, spans "
        "are half-open over `generated_ids`, text columns are for people. Supervised are the generated ids but the "
        "first, which the target gives itself."
    ),
}


def card(form: str, metadata: Mapping[str, str], counts: Mapping[str, Any], facts: Mapping[str, Counter[str]]) -> str:
    """The card's text.

    Args:
        form: the dataset's format.
        metadata: what the traces say about themselves.
        counts: rows per split, ids, rows left out.
        facts: `state`, `ids_source` and `source` -> value -> rows.
    """
    lines = [
        *_front_matter(form, counts),
        MARK,
        "",
        "# What a target itself said",
        "",
        "Training data for a speculative-decoding draft (EAGLE-3): prompts and replies of one target model, as token "
        f"ids. Made by draftsmith {__version__}.",
        "",
        "| | |",
        "|---|---|",
        *(f"| {name} | {_cell(value)} |" for name, value in _about(metadata, counts) if value),
        "",
        "| | rows |",
        "|---|---:|",
        *(
            f"| {_cell(name.replace('_', ' '))}: {_cell(value or '(none)')} | {count:,} |"
            for name, found in facts.items()
            for value, count in found.most_common(SOURCES_SHOWN)
        ),
        "",
        "`engine`: the ids are those the engine generated. `rendered_verified`: tokenised here and checked against the "
        "server's counts. `rendered`: tokenised from text, not verified.",
        "",
        "## Form",
        "",
        FORMS[form],
        "",
        "A `loss_mask` is 1 exactly on generated ids, at their own places; it is not moved.",
        "",
        "## Licence",
        "",
        LICENCE,
        "",
    ]
    return "\n".join(lines)


def _front_matter(form: str, counts: Mapping[str, Any]) -> list[str]:
    """YAML that `datasets` reads splits from; only for what it is to load as it is."""
    there = [split for split in ("train", "test") if counts[split]]
    lines = ["---", "license: other", "tags:", "- speculative-decoding", "- eagle3"]
    folders = {"hf": ["data/{split}-*.parquet"], "speculators": ["{split}.jsonl"]}.get(form, ["ids/{split}.jsonl"])
    lines += ["configs:", "- config_name: default", "  data_files:"]
    for split in there:
        lines += [f"  - split: {split}", f"    path: {folders[0].format(split=split)}"]
    return [*lines, "---", ""]


def _about(metadata: Mapping[str, str], counts: Mapping[str, Any]) -> list[tuple[str, str]]:
    delimiters = json.loads(metadata.get("delimiters", "null"))
    return [
        ("target", _model(metadata.get("target", ""))),
        ("target fingerprint", metadata.get("target_fingerprint", "")),
        ("tokenizer", _model(metadata.get("tokenizer", ""))),
        ("tokenizer fingerprint", metadata.get("tokenizer_fingerprint", "")),
        ("template fingerprint", metadata.get("template_fingerprint", "")),
        ("template options", metadata.get("template_options", "")),
        ("think delimiters", f"{delimiters['open_text']} {delimiters['close_text']}" if delimiters else ""),
        ("sampling", metadata.get("sampling", "")),
        ("generated ids at most", metadata.get("max_tokens", "")),
        ("train rows", f"{counts['train']:,}"),
        ("test rows (held-out questions)", f"{counts['test']:,}"),
        ("prompt ids", f"{counts['prompt_ids']:,}"),
        ("generated ids", f"{counts['generated_ids']:,}"),
        ("left out (rejected or failed)", f"{counts['left_out']:,}"),
    ]


def _model(name: str) -> str:
    """A hub id as it is, of a folder just its name."""
    return Path(name).name if name.startswith(("/", "~", ".")) or Path(name).exists() else name


def _cell(text: str) -> str:
    """Text as a Markdown table cell may hold it: one line, no markup of its own."""
    plain = " ".join(text.split()).replace("\\", "\\\\")
    for mark in "|<>`*_[]":
        plain = plain.replace(mark, "\\" + mark)
    return plain
