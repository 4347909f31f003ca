"""What a running capture looks like: one state drawn as a screen of text, or said in one line.

Reads nothing but the state (see `meter.facts`), so that the capture's own process and one that watches it from another
terminal draw the same. Imports nothing heavy. Fits 80x24; on a smaller terminal the least important rows go first, and
rows are cut at the right. Whatever comes from a server or a data set is escaped.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Group
from rich.text import Text

from draftsmith.progress import State, View, clock, harmless, shown

BLOCKS = "▁▂▃▄▅▆▇█"
LABEL = 11
LEAST_BAR = 8
BAD = {"cut_in_reasoning": "cut in reasoning", "cut_in_answer": "in answer", "rejected": "rejected", "failed": "failed"}
ERRORS = ("rejected", "failed")
SERVER_STYLES = {"ok": "", "resting": "yellow", "down": "bold red"}
GIGABYTE = 10**9
Row = tuple[int, Text]
"""A line of the screen and its rank: on a terminal that is too low, the highest ranks go first."""


def capture_screen(state: State, width: int, height: int) -> Group:
    """The state within `width` x `height` characters."""
    rows = [
        (0, _head(state, width)),
        *_paused(state),
        (1, _row("rates", _rates(state))),
        *_load(state),
        *_latency(state),
        *_lengths("reasoning", state, _share_thinking(state)),
        *_lengths("answer", state, ""),
        (1, _row("replies", _outcome(state))),
        *_reasons(state),
        *_resources(state),
    ]
    rows += _servers(state, max(height - len(rows), 1))
    while len(rows) > max(height, 1):
        worst = max(rank for rank, _ in rows)
        del rows[max(index for index, (rank, _) in enumerate(rows) if rank == worst)]
    for _, text in rows:
        text.truncate(width, overflow="ellipsis")
    return Group(*(text for _, text in rows))


def capture_line(state: State) -> str:
    """The state in one line, for a log."""
    parts = [f"capture: {state['done']:,}/{state['total']:,} {state['unit']}", _left(state), _rates(state)]
    if state.get("running") is not None:
        parts.append(f"{state['running']:,} running")
    if state.get("paused"):
        parts.append(f"paused: {state['paused']}")
    counts: Mapping[str, int] = state.get("states", {})
    errors = sum(counts.get(name, 0) for name in ERRORS)
    truncated = sum(counts.get(name, 0) for name in BAD) - errors
    parts += [f"truncated {truncated:,}", f"errors {errors:,}"]
    if errors and state.get("reasons"):
        parts[-1] += f" ({_reason(*state['reasons'][0])})"
    if state.get("with_reasoning") is not None:
        parts.append(f"with reasoning {state['with_reasoning']:.0%}")
    if state.get("cost") is not None:
        parts.append(_cost(state))
    return harmless(", ".join(part for part in parts if part)).replace("\n", " ")


CAPTURE = View(capture_line, capture_screen)


def sparkline(counts: Sequence[int]) -> str:
    """One block per count, its height in proportion to the largest; the lowest block stands for none at all."""
    most = max(counts, default=0)
    return "".join(BLOCKS[-(-count * (len(BLOCKS) - 1) // most) if most else 0] for count in counts)


def _head(state: State, width: int) -> Text:
    done, total = state["done"], state["total"]
    share = done / total if total else 1.0
    before = f"capture {done:,}/{total:,} {state['unit']} "
    after = ", ".join(part for part in (f" {share:.0%}", _left(state), f"after {clock(state['seconds'])}") if part)
    room = width - len(before) - len(after)
    filled = int(room * share)
    bar = [("━" * filled, "green"), ("━" * (room - filled), "dim")] if room >= LEAST_BAR else []
    return _text((before, "bold"), *bar, (after, "bold"))


def _left(state: State) -> str:
    eta = state["eta_seconds"]
    if eta is None or state["done"] >= state["total"]:
        return ""
    return f"{'about ' if state.get('eta_rough') else ''}{clock(eta)} left"


def _paused(state: State) -> list[Row]:
    return [(0, _text(("paused", "bold yellow"), (f": {state['paused']}", "")))] if state.get("paused") else []


def _rates(state: State) -> str:
    if state.get("tok_s") is None:
        return ""
    rates = f"{shown(float(state['req_s']))} req/s, {shown(float(state['prompt_tok_s']))} tok/s in"
    return f"{rates}, {shown(float(state['tok_s']))} tok/s out"


def _load(state: State) -> list[Row]:
    if state.get("running") is None:
        return []
    action = f"; {state['action']}" if state.get("action") else ""
    return [
        (
            1,
            _row(
                "load", f"{state['running']:,} running, {state['waiting']:,} waiting, level {state['level']:,}{action}"
            ),
        )
    ]


def _latency(state: State) -> list[Row]:
    found = state.get("latency")
    return [(2, _row("latency", f"p50 {_seconds(found['p50'])}, p95 {_seconds(found['p95'])}"))] if found else []


def _lengths(name: str, state: State, share: str) -> list[Row]:
    """Percentiles and the histogram of recent lengths, by half octaves, between its labelled ends."""
    found = state.get(name)
    if not found:
        return [(3, _row(name, share))] if share else []
    percentiles = f"p50 {found['p50']:,}, p95 {found['p95']:,} tokens"
    spark = f"{_short(found['low'])} {sparkline(found['counts'])} {_short(found['high'])}"
    return [(3, _row(name, f"{percentiles:<32}{spark}{', ' if share else ''}{share}"))]


def _share_thinking(state: State) -> str:
    share = state.get("with_reasoning")
    return "" if share is None else "in no reply" if not share else f"in {share:.0%}"


def _outcome(state: State) -> Text:
    counts: Mapping[str, int] = state.get("states", {})
    parts = [(f"ok {counts.get('ok', 0):,}", "")]
    for name, words in BAD.items():
        count = counts.get(name, 0)
        parts.append((f", {words} {count:,}", "red" if count and name in ERRORS else ""))
    return _text(*parts)


def _reasons(state: State) -> list[Row]:
    return [
        (4, _row("because" if first else "", _reason(*found)))
        for first, found in zip([True, False, False], state.get("reasons", []), strict=False)
    ]


def _reason(text: str, count: int) -> str:
    return f"{count:,} x {text}"


def _resources(state: State) -> list[Row]:
    parts = []
    if state.get("disk_free") is not None:
        parts.append(f"{state['disk_free'] / GIGABYTE:,.1f} GB left on disk")
    if state.get("cost") is not None:
        parts.append(_cost(state))
    return [(2, _row("resources", ", ".join(parts)))] if parts else []


def _cost(state: State) -> str:
    expected = state.get("cost_expected")
    return f"cost {state['cost']:,.2f} so far" + (f", {expected:,.2f} expected" if expected is not None else "")


def _servers(state: State, room: int) -> list[Row]:
    """A row each while there is room, those that are not well first; then how many are not shown."""
    servers = sorted(state.get("servers") or [], key=lambda server: server["state"] == "ok")
    fit = servers if len(servers) <= room else servers[: room - 1]
    rows = [(5, _server(server, first=index == 0)) for index, server in enumerate(fit)]
    if fit != servers:
        left = servers[len(fit) :]
        well = sum(server["state"] == "ok" for server in left)
        rows.append((5, _row("" if fit else "servers", f"and {len(left)} more, {well} of them ok")))
    return rows


def _server(server: Mapping[str, Any], *, first: bool) -> Text:
    state = str(server["state"])
    queue = f", {server['queue']:,} in its queue" if server.get("queue") is not None else ""
    return _row(
        "servers" if first else "",
        _text(
            (f"{state:<8}", SERVER_STYLES.get(state, "")),
            (f"{server['in_flight']:>5,} in flight{queue}  {server['url']}", ""),
        ),
    )


def _row(name: str, value: str | Text) -> Text:
    text = _text((f"{name:<{LABEL}}", "dim"))
    return text.append(value if isinstance(value, Text) else _text((value, "")))


def _text(*parts: tuple[str, str]) -> Text:
    """One line of styled parts; nothing in them is markup, a control character or a line break."""
    text = Text(no_wrap=True, end="\n")
    for part, style in parts:
        text.append(harmless(part).replace("\n", "\\n"), style)
    return text


def _seconds(value: float) -> str:
    return clock(value) if value >= 60 else f"{value:.3g} s"


def _short(count: int) -> str:
    """A power of two as 512 or 8k."""
    return f"{count // 1024}k" if count >= 1024 else str(count)
