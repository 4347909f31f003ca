"""An inspection as a person reads it: on a terminal, and as one self-contained HTML page.

Rows, ids and texts are somebody else's: the page escapes them, the terminal gets them without control characters and
never as markup.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from draftsmith.data.inspect import Inspection
from draftsmith.errors import UserError
from draftsmith.progress import harmless
from draftsmith.report.coloured import Decode, Role, ShownTrace, show
from draftsmith.report.page import render, write_page
from draftsmith.report.verdict import Mood

STYLES: dict[Role, str] = {
    "prompt": "dim",
    "first": "dim underline",
    "reasoning": "magenta",
    "answer": "green",
    "delimiter": "yellow",
    "left_out": "dim italic",
}
SEVERITY_STYLES = {"wrong": "bold red", "doubtful": "yellow", "note": "dim"}
LEGEND = {
    "prompt": "prompt, never trained on",
    "first": "first generated id, never a label",
    "reasoning": "reasoning",
    "delimiter": "delimiter",
    "answer": "answer",
}
COLUMNS = ("p5", "p25", "p50", "p75", "p95", "p99", "max", "mean", "sum", "replies")


def print_inspection(inspection: Inspection, console: Console) -> None:
    """The whole inspection, the verdict last."""
    _say(console, about(inspection))
    if inspection.lengths:
        table = Table(box=None, pad_edge=False)
        table.add_column("length" if inspection.kind not in ("conversations", "text") else "characters")
        for name in COLUMNS:
            table.add_column(name, justify="right")
        for row in length_rows(inspection):
            table.add_row(*row)
        console.print(table)
    for name, said in share_rows(inspection):
        _say(console, f"{name}: {said}")
    if inspection.longest:
        _say(console, "longest: " + ", ".join(f"{name} ({length:,})" for length, name in inspection.longest))
    for number, trace in enumerate(shown_examples(inspection), start=1):
        _print_example(number, trace, console)
    for note in inspection.notes:
        _say(console, note)
    for finding in inspection.findings:
        line = Text(f"{finding.severity:<9}", style=SEVERITY_STYLES[finding.severity])
        cure = f"; {finding.cure}" if finding.cure else ""
        rows = f" [{', '.join(finding.rows)}]" if finding.rows else ""
        line.append(harmless(f"{finding.count:,} of {finding.of:,}: {finding.says}{cure}{rows}"), style="default")
        console.print(line, soft_wrap=True)
    _say(console, f"verdict: {inspection.verdict}")


def write_inspection_page(path: Path, inspection: Inspection) -> int:
    """Writes the page; returns its size in bytes.

    Raises:
        UserError: there is no such place for it.
    """
    text = render(
        "inspection.html.jinja",
        [],
        name=Path(inspection.path).resolve().name,
        verdict=inspection.verdict[:1].upper() + inspection.verdict[1:] + ".",
        mood=_mood(inspection),
        about=about(inspection),
        notes=inspection.notes,
        findings=inspection.findings,
        unit=_unit(inspection),
        lengths_head=("", *COLUMNS),
        lengths=length_rows(inspection),
        longest=inspection.longest,
        shares=share_rows(inspection),
        traces=shown_examples(inspection),
    )
    if path.is_dir():
        raise UserError(f"--html: expected a file to write, found the folder {path}; give a name in it")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return write_page(path, text)
    except OSError as error:
        raise UserError(f"--html: expected a file that can be written, found {path} ({error.strerror})") from None


def about(inspection: Inspection) -> str:
    """What this is and how much of it there is, in one line."""
    kinds = {
        "traces": "traces",
        "masked": "ids with a loss mask",
        "conversations": "conversations as text",
        "text": "preformatted text",
    }
    said = f"{inspection.path}: {kinds[inspection.kind]}, {inspection.rows:,} rows, {inspection.trainable:,} replies"
    generated = inspection.lengths.get("generated")
    if generated:
        supervised = generated["sum"] - generated["replies"]
        said += f", {generated['sum']:,} generated ids ({supervised:,} of them labels)"
    return said


def length_rows(inspection: Inspection) -> list[list[str]]:
    """A row per kind of length, as text."""
    order = [name for name in ("prompt", "generated", "reasoning", "answer") if name in inspection.lengths]
    return [[name, *(_number(inspection.lengths[name][column]) for column in COLUMNS)] for name in order]


def share_rows(inspection: Inspection) -> list[tuple[str, str]]:
    """Name and shares in words, most frequent first."""
    return [
        (name.replace("_", " "), ", ".join(f"{value} {_share(count, counts)}" for value, count in counts.items()))
        for name, counts in inspection.shares.items()
    ]


def shown_examples(inspection: Inspection) -> list[ShownTrace]:
    """The examples cut into stretches; ids as numbers where there is neither tokenizer nor text."""
    template = inspection.template
    decode: Decode | None = template.decode if template and inspection.kind in ("traces", "masked") else None
    if template is None and inspection.kind == "masked":
        decode = _numbers
    return [show(trace, decode) for trace in inspection.examples]


def _print_example(number: int, trace: ShownTrace, console: Console) -> None:
    colours = console.is_terminal and not console.no_color
    _say(console, f"reply {number}: {trace.trace_id}, {trace.generated_length:,} generated ids, {trace.state}")
    if colours and number == 1:
        legend = Text("  ").join(Text(LEGEND[role], style=STYLES[role]) for role in STYLES if role in LEGEND)
        console.print(legend)
    text = Text()
    for stretch in trace.stretches:
        label = "" if colours else f"[{stretch.role.replace('_', ' ')}] "
        text.append(label + harmless(stretch.text) + ("" if colours else "\n"), style=STYLES[stretch.role])
    console.print(text, soft_wrap=True)


def _say(console: Console, line: str) -> None:
    console.print(Text(harmless(line)), soft_wrap=True)


def _mood(inspection: Inspection) -> Mood:
    severities = {finding.severity for finding in inspection.findings}
    return "bad" if "wrong" in severities else "even" if "doubtful" in severities else "good"


def _unit(inspection: Inspection) -> str:
    return "characters" if inspection.kind in ("conversations", "text") else "ids"


def _number(value: float) -> str:
    return f"{value:,.1f}" if isinstance(value, float) else f"{value:,}"


def _share(count: int, counts: dict[str, int]) -> str:
    return f"{count:,} ({count / sum(counts.values()):.1%})"


def _numbers(ids: Sequence[int]) -> str:
    return "".join(f"{index} " for index in ids)
