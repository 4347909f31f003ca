"""A small draft of the embedded model, exported and served by real engines: do they compute what we computed?

The run is the one that was killed in every stage. Acceptance is compared as well, but it is the candidates that prove
an export: with q and k in the wrong order, or layers off by one, acceptance stays where it is.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from draftsmith.draft.checkpoint import load_draft
from draftsmith.draft.eagle3 import Eagle3Draft
from draftsmith.export import llamacpp
from draftsmith.export.gguf_values import Value, open_gguf, read_keys
from draftsmith.export.launching import GGUF_DRAFT
from draftsmith.hidden.target_head import TargetHead, load_target_head
from draftsmith.measure.acceptance import Cycle, acceptance, unconditional
from draftsmith.measure.candidates import Alike, alike, ask, read_drafted, reference_chains
from draftsmith.measure.counters import difference, read_counters
from draftsmith.measure.decode import Verifier
from draftsmith.measure.diagnose import diagnose
from draftsmith.measure.prompts import held_out_prompts
from draftsmith.measure.served import measure_served
from draftsmith.progress import Progress
from draftsmith.recipe import DiagnoseSettings, ExportSettings, MeasureSettings, ServedSettings, ServeSettings
from draftsmith.serve.commands import Launch, launch_of
from draftsmith.serve.llamacpp import SHOWS_CANDIDATES
from draftsmith.serve.process import running
from draftsmith.target.loading import load_model
from killed_run import DRAFT_TOKENS, HELD_OUT, MAX_TOKENS, MEASURED, KilledRun
from real_servers import free_port

pytestmark = pytest.mark.slow

POINTS = 0.02
"""How far acceptance at a position may be from the reference decoder's, as shares of all drafts: what is accepted four
tokens on is too little to be compared by itself."""


@dataclass(frozen=True)
class Small:
    """The run and what is compared with: its held-out prompts and the reference decoder's replies to them."""

    run: Path
    prompts: dict[str, list[int]]
    replies: dict[str, list[int]]
    cycles: dict[str, list[Cycle]]


@pytest.fixture(scope="module")
def small(killed_run: KilledRun) -> Small:
    pytest.importorskip("xllamacpp", reason="llama.cpp is not installed (extra llamacpp)")
    run = killed_run.folder
    assert killed_run.ended.returncode == 0, killed_run.ended.stderr
    rows = [json.loads(line) for line in (run / "measure" / "questions.jsonl").read_text().splitlines()]
    found = held_out_prompts(run / "traces", HELD_OUT, MEASURED)
    cycles = {row["key"]: [Cycle(**cycle) for cycle in row["cycles"]] for row in rows}
    return Small(run, {p.key: list(p.ids) for p in found.prompts}, {row["key"]: row["ids"] for row in rows}, cycles)


def llama(small: Small, *extra: str, parallel: int = 1) -> Launch:
    settings = ServeSettings(engine="llamacpp", port=free_port(), parallel=parallel, context=1024)
    return launch_of(small.run, settings, ("--threads", "1", *extra))


def metrics(url: str) -> str:
    with urllib.request.urlopen(f"{url}/metrics") as reply:
        text: str = reply.read().decode()
        return text


def served(launch: Launch, log: Path, prompts: list[list[int]], parallel: int = 1) -> tuple[list[Any], list[float]]:
    """llama.cpp's replies to prompts, and the share of its drafts that was accepted at each position."""
    with running(launch, log, Progress(quiet=True), 120):
        before = read_counters(launch.url)
        with ThreadPoolExecutor(parallel) as threads:
            replies = list(threads.map(lambda ids: ask(launch.url, ids, MAX_TOKENS), prompts))
        return replies, difference(read_counters(launch.url), before).unconditional


@dataclass(frozen=True)
class Reference:
    """Our own target and draft."""

    head: TargetHead
    draft: Eagle3Draft
    verifier: Verifier


@pytest.fixture(scope="module")
def reference(small: Small, smollm2: str) -> Reference:
    cpu = torch.device("cpu")
    head = load_target_head(small.run / "hidden")
    draft = load_draft(small.run / "draft" / "best", head, cpu, torch.float32)
    return Reference(head, draft, Verifier(load_model(smollm2, torch.float32, cpu), draft.config.aux_layers))


def compared(small: Small, reference: Reference, launch: Launch, folder: Path, count: int) -> tuple[Alike, list[float]]:
    """How far llama.cpp's candidates are ours over the first `count` prompts, and its acceptance."""
    prompts = list(small.prompts.values())[:count]
    replies, rates = served(launch, folder / "candidates.log", prompts)
    with open(folder / "candidates.log", encoding="utf-8", errors="replace") as log:
        drafted = read_drafted(log)
    tasks = sorted({one.task for one in drafted})
    assert len(tasks) == count
    total = Alike()
    for task, prompt, reply in zip(tasks, prompts, replies, strict=True):
        mine = [one for one in drafted if one.task == task]
        ids = [*prompt, *reply["tokens"]]
        assert all(ids[one.known] == one.last for one in mine)
        for one, chain in zip(mine, reference_chains(reference.verifier, reference.draft, ids, mine), strict=True):
            total += alike(one.chain, chain)
    return total, rates


def test_llamacpp_drafts_what_we_would_have_drafted(small: Small, reference: Reference, tmp_path: Path) -> None:
    """In plain attention and float32 throughout, down to the order of three candidates."""
    launch = llama(small, "--exact", "--log-level", str(SHOWS_CANDIDATES))
    found, _ = compared(small, reference, launch, tmp_path, 4)
    print(found)
    assert found.positions > 100
    assert found.share >= 0.99
    assert found.equal_lists >= 0.99 * found.lists


def test_its_replies_and_acceptance_are_those_of_the_reference_decoder(small: Small, tmp_path: Path) -> None:
    some = dict(list(small.prompts.items())[:6])
    replies, rates = served(llama(small, "--exact"), tmp_path / "server.log", list(some.values()))
    expected = acceptance([cycle for key in some for cycle in small.cycles[key]], DRAFT_TOKENS).per_position
    print(rates, expected)
    for key, reply in zip(some, replies, strict=True):
        assert reply["tokens"] == small.replies[key]
        assert reply["timings"]["draft_n"] >= reply["timings"]["draft_n_accepted"]
    assert rates == pytest.approx(unconditional(expected), abs=POINTS)


def test_a_recipe_ends_in_the_served_truth(small: Small) -> None:
    found = json.loads((small.run / "measure" / "serving.json").read_text())
    print(found["acceptance"], found["candidates"], found["predictions"])
    assert found["acceptance"]["agrees"]
    assert found["candidates"]["agrees"]
    assert found["lossless"]
    assert found["compared"] == MEASURED
    assert [one["concurrency"] for one in found["predictions"]] == [1]


@pytest.mark.parametrize("fault", ["q and k not interleaved", "layers off by one"])
def test_a_wrong_conversion_is_told_by_its_candidates(
    fault: str, small: Small, reference: Reference, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = read_keys(open_gguf(small.run / "export" / "llamacpp" / GGUF_DRAFT))
    keys = {name: value for name, value in keys.items() if name != "general.architecture"}
    if fault == "layers off by one":
        keys["eagle3.target_layers"] = Value(list(reference.draft.config.aux_layers), "ARRAY", "INT32")
    else:
        monkeypatch.setattr(llamacpp, "interleaved", lambda rows, heads: rows)
    settings = ExportSettings(dtype="float32")
    llamacpp.write_file(tmp_path / GGUF_DRAFT, keys, reference.draft, reference.head, settings)
    launch = replace(llama(small, "--log-level", str(SHOWS_CANDIDATES)), draft=str(tmp_path))
    found, rates = compared(small, reference, launch, tmp_path, 3)
    print(fault, found, rates)
    assert found.share < 0.9


def test_parallel_requests_keep_their_acceptance_unless_the_backend_samples(small: Small, tmp_path: Path) -> None:
    prompts = list(small.prompts.values())[:8]
    _, ours = served(llama(small, parallel=4), tmp_path / "ours.log", prompts, 4)
    _, theirs = served(llama(small, "--backend-sampling", parallel=4), tmp_path / "theirs.log", prompts, 4)
    print(ours, theirs)
    assert theirs[0] < 0.75 * ours[0]


@contextmanager
def command_line(*words: str) -> Iterator[subprocess.Popen[str]]:
    """`draftsmith serve` as a process of its own."""
    command = [sys.executable, "-m", "draftsmith", "serve", *words]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=os.environ)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def said_until(process: subprocess.Popen[str], words: str, seconds: float = 300.0) -> list[str]:
    """What it said, up to the line with these words."""
    assert process.stderr is not None
    lines: list[str] = []
    until = time.monotonic() + seconds
    for line in process.stderr:
        lines.append(line)
        if words in line:
            return lines
        if time.monotonic() > until:
            break
    pytest.fail(f"never said {words!r}: {''.join(lines)}")


def test_serve_runs_llamacpp_with_the_draft_and_ends_cleanly(small: Small) -> None:
    port = free_port()
    where = ("--port", str(port), "--parallel", "1", "--context", "1024")
    with command_line(str(small.run), *where, "--", "--threads", "1") as process:
        lines = said_until(process, "ready at")
        assert "on another host: llama-server --model" in lines[0]
        assert "with 4 draft tokens" in lines[-1]
        reply = ask(f"http://127.0.0.1:{port}", next(iter(small.prompts.values())), 32)
        assert reply["timings"]["draft_n"] > 0
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0
    with pytest.raises(OSError):
        metrics(f"http://127.0.0.1:{port}")


def test_a_served_measurement_on_llamacpp_is_lossless_and_accepts_what_the_reference_decoder_accepts(
    small: Small, tmp_path: Path
) -> None:
    plain = launch_of(
        small.run,
        ServeSettings(engine="llamacpp", port=free_port(), parallel=2, context=1024, baseline=True),
        ("--threads", "1", "--exact"),
    )
    drafting = llama(small, "--exact", parallel=2)
    settings = MeasureSettings(limit=3, rounds=1, max_tokens=MAX_TOKENS, draft_tokens=DRAFT_TOKENS)
    with (
        running(drafting, tmp_path / "draft.log", Progress(quiet=True), 120),
        running(plain, tmp_path / "plain.log", Progress(quiet=True), 120),
    ):
        asked = ServedSettings(server=drafting.url, baseline_server=plain.url, concurrency=[1, 2])
        result = measure_served(small.run, settings, asked, Progress(quiet=True))
    keys = [prompt.key for prompt in held_out_prompts(small.run / "traces", HELD_OUT, 3).prompts]
    expected = acceptance([cycle for key in keys for cycle in small.cycles[key]], DRAFT_TOKENS)
    assert (result["lossless"], result["compared"], result["draft_tokens"]) == (True, 6, DRAFT_TOKENS)
    for level in result["levels"]:
        assert level["acceptance_from"] == "steps" and level["speedup"] > 0 and not level["disturbed"]
        assert level["acceptance_length"] == pytest.approx(expected.length, abs=POINTS)
        assert level["acceptance_per_position"][0] == pytest.approx(expected.per_position[0], abs=POINTS)


@pytest.mark.vllm
def test_serve_runs_vllm_with_the_draft(small: Small, vllm_python: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    port = free_port()
    where = (
        "--engine",
        "vllm",
        "--python",
        vllm_python,
        "--port",
        str(port),
        "--context",
        "1024",
        "--dtype",
        "float32",
    )
    with command_line("--run", str(small.run), *where, "--", "--enforce-eager", "--max-num-seqs", "4") as process:
        said_until(process, "ready at")
        prompt = next(iter(small.prompts.values()))
        body = {"model": _served_name(port), "prompt": prompt, "max_tokens": 32, "temperature": 0}
        body["return_token_ids"] = True
        url = f"http://127.0.0.1:{port}/v1/completions"
        request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=120) as reply:
            ids = json.load(reply)["choices"][0]["token_ids"]
        assert ids == next(iter(small.replies.values()))[: len(ids)]
        drafts = [line for line in metrics(f"http://127.0.0.1:{port}").splitlines() if "num_drafts_total{" in line]
        assert float(drafts[0].rpartition(" ")[2]) > 0
        process.send_signal(signal.SIGTERM)
        assert process.wait(120) == 0


@pytest.mark.vllm
def test_diagnose_finds_our_own_states_in_vllm(
    small: Small, vllm_python: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1]), prepend=os.pathsep)
    settings = ServeSettings(
        hidden_states=str(tmp_path / "states"), python=vllm_python, port=free_port(), context=1024, dtype="float32"
    )
    launch = launch_of(small.run, settings, ("--enforce-eager", "--max-num-seqs", "4"))
    connector = json.loads(launch.states[-1]) | {"kv_connector": "CpuHiddenStates"}
    connector["kv_connector_module_path"] = "cpu_hidden_states"
    launch = replace(launch, states=(*launch.states[:-1], json.dumps(connector)))
    with running(launch, tmp_path / "vllm.log", Progress(quiet=True), 300):
        asked = DiagnoseSettings(server=launch.url, engine="vllm", limit=2, draft_tokens=DRAFT_TOKENS)
        found = diagnose(small.run, asked, Progress(quiet=True))
    links = {link.name: link for link in found.links}
    states = links["engine states"]
    print(states)
    assert states.value is not None and states.value > 0.999
    assert states.suspects == ()
    layers = json.loads((small.run / "hidden" / "target.json").read_text())["layers"]
    assert all(f"output of layer {layer} (" in states.note for layer in layers)
    assert links["engine"].note == "this server hands out hidden states and does not draft"


def _served_name(port: int) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/v1/models") as reply:
        name: str = json.load(reply)["data"][0]["id"]
        return name
