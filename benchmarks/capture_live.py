"""A capture from a real vLLM server through two kills of the client and a crash of the server: complete and exact?

    python benchmarks/capture_live.py --vllm-python .vllm-venv/bin/python --questions 300

The client is killed (SIGKILL) after a quarter and after half of the replies, the server after three quarters; it is
started again at once, which takes half a minute in which the client waits. Then every trace is checked: one per
question, ids of the engine's own, the prompt as the template renders it, spans as the delimiters split the ids, and the
reply's text tokenised again. Prints a table; the exit status is 0 if nothing is missing, doubled or inexact, else 1.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from pathlib import Path

REPOSITORY = Path(__file__).parents[1]
sys.path.insert(0, str(REPOSITORY / "tests"))

from draftsmith.artifacts import read_json  # noqa: E402
from draftsmith.recipe import CaptureSettings, load_recipe  # noqa: E402
from draftsmith.target.embedded import resolve_model  # noqa: E402
from draftsmith.target.template import load_template  # noqa: E402
from draftsmith.target.thinking import find_delimiters, split  # noqa: E402
from draftsmith.trace import TRAINABLE, read_traces  # noqa: E402
from real_servers import Vllm  # noqa: E402

ALL = frozenset({"ok", "cut_in_reasoning", "cut_in_answer", "rejected", "failed"})
CONCURRENCY = 16
PROBES = 9
"""Generations that a client asks for before its first question."""
PATIENCE = 1800.0
CLIENT = """
import sys
from pathlib import Path
from draftsmith.pipeline import run_stage
from draftsmith.progress import Progress
from draftsmith.recipe import CaptureSettings
run_stage(Path(sys.argv[1]), "capture", CaptureSettings.model_validate_json(sys.argv[2]), Progress())
"""
Figures = dict[str, int]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--vllm-python", type=Path, required=True, help="interpreter of an environment with vLLM")
    parser.add_argument("--questions", type=int, default=300)
    options = parser.parse_args()
    model = resolve_model("smollm2")
    with tempfile.TemporaryDirectory() as folder:
        server = Vllm(str(options.vllm_python.absolute()), model, Path(folder))
        server.start()
        try:
            server.ready()
            started = time.monotonic()
            paid = disturbed_capture(server, Path(folder) / "run", options.questions, model)
            seconds = time.monotonic() - started
        finally:
            server.stop()
        figures = checked(Path(folder) / "run", model) | {"probes_and_paid_twice": paid - options.questions}
    for name, value in figures.items():
        print(f"{name.replace('_', ' '):<28} {value:>8,}")
    print(f"{'seconds':<28} {seconds:>8,.0f}")
    return 0 if figures["exact"] == figures["questions"] == options.questions else 1


def disturbed_capture(server: Vllm, run: Path, questions: int, model: str, before: int = 0) -> int:
    """The recipe's capture with all disturbances.

    Returns how many generations the server finished for it, the probe's included; `before`: those it had finished when
    this began.
    """
    recipe = load_recipe(REPOSITORY / "recipes" / "smollm2.yaml").capture
    assert recipe is not None
    changes = {"local": None, "server": [server.url], "tokenizer": model, "limit": questions, "max_tokens": 96}
    changes |= {"exact": "engine", "concurrency": CONCURRENCY}
    settings = CaptureSettings.model_validate(recipe.model_dump() | changes)
    command = [sys.executable, "-c", CLIENT, str(run), settings.model_dump_json(by_alias=True)]
    for starts, share in enumerate((0.25, 0.5, 0.75), start=1):
        client = subprocess.Popen(command, cwd=REPOSITORY)
        try:
            _wait(server, before + PROBES * starts + share * questions, client)
            if share == 0.75:
                paid = finished(server) - before
                server.kill()
                server.start()
                assert client.wait(PATIENCE) == 0, "the client did not survive the server's restart"
        finally:
            client.kill()
            client.wait()
    return paid + finished(server)


def finished(server: Vllm) -> int:
    """Generations that the running server has finished."""
    with urllib.request.urlopen(f"{server.url}/metrics", timeout=30) as response:
        text = response.read().decode()
    return int(sum(map(float, re.findall(r"^vllm:request_success_total\{.*\} (\S+)$", text, re.MULTILINE))))


def checked(run: Path, model: str) -> Figures:
    """Every trace held against the tokenizer, the template and the delimiters."""
    template = load_template(model, {}, trust_remote_code=False)
    delimiters = find_delimiters(template, "think")
    found: Counter[str] = Counter()
    seen: Counter[str] = Counter()
    for trace in read_traces(run / "traces", ALL):
        seen[trace.trace_id] += 1
        parts = split(delimiters, template, trace.prompt_ids, trace.generated_ids, trace.finish_reason)
        usage = json.loads(trace.usage)
        exact = (
            trace.state in TRAINABLE
            and trace.ids_source == "engine"
            and list(trace.prompt_ids) == template.render(json.loads(trace.messages))
            and (usage["prompt_tokens"], usage["completion_tokens"])
            == (len(trace.prompt_ids), len(trace.generated_ids))
            and (parts.reasoning, parts.answer, parts.state) == (trace.reasoning_span, trace.answer_span, trace.state)
        )
        found["exact"] += exact
        found["same_ids_from_text"] += template.encode(template.decode(trace.generated_ids)) == list(
            trace.generated_ids
        )
        found["with_reasoning"] += trace.reasoning_span is not None
        found["generated_ids"] += len(trace.generated_ids)
    assert read_json(run / "traces" / "manifest.json")["counts"]["traces"] == seen.total()
    return {
        "questions": len(seen),
        "doubled": seen.total() - len(seen),
        "exact": found["exact"],
        "same_ids_from_text": found["same_ids_from_text"],
        "with_reasoning": found["with_reasoning"],
        "generated_ids": found["generated_ids"],
    }


def _wait(server: Vllm, count: float, client: subprocess.Popen[bytes]) -> None:
    """Until the server has finished so many generations."""
    until = time.monotonic() + PATIENCE
    while finished(server) < count:
        assert client.poll() is None, f"the client ended early with status {client.returncode}"
        assert time.monotonic() < until, "it never came so far"
        time.sleep(0.2)


if __name__ == "__main__":
    sys.exit(main())
