"""A diagnosis for the terminal: the verdict, the chain with where it falls, the suspects tried, what to change."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table
from rich.text import Text

from draftsmith.measure.links import NAMES, Diagnosis, Suspect
from draftsmith.progress import harmless

FALLS = {"yes": "<- HERE", "cannot tell": "<- ?", "no": ""}


def print_diagnosis(found: Diagnosis, console: Console) -> None:
    """Prints it."""
    console.print(Text(harmless(found.verdict), style="bold"))
    console.print()
    console.print(_chain(found))
    suspects = [suspect for link in found.links for suspect in link.suspects]
    if suspects:
        console.print()
        console.print(_suspects(suspects))
    if found.advice:
        console.print()
    for line in found.advice:
        console.print(Text(f"change: {harmless(line)}"))


def _chain(found: Diagnosis) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0))
    for heading in ("link", "value", "noise", "n", "", "what"):
        table.add_column(heading, justify="left", no_wrap=heading != "what")
    for link in found.links:
        told = "; ".join(text for text in (NAMES[link.name], link.note) if text)
        named = found.link == link.name
        mark = FALLS[link.fell] if named or link.fell != "yes" else "<- also"
        table.add_row(
            *map(
                Text,
                (
                    link.name,
                    value_words(link.name, link.value),
                    noise_words(link.noise),
                    str(link.questions or "-"),
                    mark,
                    harmless(told),
                ),
            )
        )
    return table


def _suspects(suspects: list[Suspect]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0))
    for heading in ("suspect", "link", "as it is", "put right", "evidence"):
        table.add_column(heading, justify="left", no_wrap=heading != "evidence")
    for one in suspects:
        values = ("-" if value is None else f"{value:.2f}" for value in (one.before, one.after))
        table.add_row(*map(Text, (one.name, one.link, *values, harmless(one.found))))
    return table


def value_words(name: str, value: float | None) -> str:
    """A link's value: a share where it is one, else tokens per target forward."""
    if value is None:
        return "-"
    return f"{value:.1%}" if name in ("training", "engine states") else f"{value:.2f}"


def noise_words(noise: float | None) -> str:
    """Half of the 95 % interval."""
    return "-" if noise is None else f"±{noise:.2f}"
