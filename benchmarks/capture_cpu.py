"""How much CPU does the capture client take per reply, beside the `openai` client that writes the same records?

    python benchmarks/capture_cpu.py                      # 600 and 8,192 generated ids, about 2 minutes on 2 cores
    python benchmarks/capture_cpu.py --json --rounds 5

Both clients ask the same mock engine (a process of its own), 64 requests at a time, ids returned, for the same
questions. Each run is a fresh process that first does 200 replies to warm up; the clients take turns, and the table
shows the median of the rounds. CPU time is the process's (user and system, all threads) from the first request to the
sealed Parquet, over the replies.

- draftsmith: the capture stage as a user runs it (`capture.engine.build`), journal synced in groups, traces sealed.
- openai: `openai.AsyncOpenAI` on uvloop, as it comes, with as many workers as requests at once; each reply becomes the
  same Trace by the same code, goes into the same journal, is sealed by the same code. It has no retries by class, no
  balancing, no gate and no meter to pay for.
- records: what both do without a client: the same records made again and again from one reply.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mock_capture import MockEngine, capture, settings_for, write_questions
from rich.console import Console
from rich.table import Table

from draftsmith.capture.attempt import reading_of
from draftsmith.capture.conversation import Conversation, Job
from draftsmith.capture.journal import Journal
from draftsmith.capture.questions import read_questions
from draftsmith.capture.replies import trace_of
from draftsmith.capture.rows import Question
from draftsmith.capture.sealing import question_metadata, seal
from draftsmith.target.embedded import resolve_model
from draftsmith.target.reply import Reply, Sampling
from draftsmith.target.template import Template, load_template
from mock_engine import MockConfig

CLIENTS = ("draftsmith", "openai", "records")
BUDGET = {600: 0.5, 8192: 1.0}
"""Milliseconds of CPU a reply of so many ids may cost."""
SHARE, SHARED = 0.25, 600
"""What it may cost of the `openai` client's, and at how many ids that holds."""
WARM_UP = 200


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--tokenizer", default="smollm2", help="model folder, or smollm2 (embedded)")
    parser.add_argument("--lengths", type=int, nargs="+", default=[600, 8192], help="generated ids per reply")
    parser.add_argument("--replies", type=int, default=3000, help="per run")
    parser.add_argument("--concurrency", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", action="store_true", help="print the figures as JSON instead of a table")
    options = parser.parse_args(arguments)
    options.tokenizer = resolve_model(options.tokenizer) if options.tokenizer == "smollm2" else options.tokenizer
    rows = [row for length in options.lengths for row in measure(options, length)]
    print(json.dumps(rows)) if options.json else show(rows)
    return 0


def measure(options: argparse.Namespace, length: int) -> list[dict[str, Any]]:
    """The clients' figures for replies of `length` ids, taken in turns."""
    count = options.replies
    costs: dict[str, list[float]] = {client: [] for client in CLIENTS}
    with MockEngine(MockConfig(tokenizer=options.tokenizer, length=length, thinking=True)) as target:
        for _ in range(options.rounds):
            for client in CLIENTS:
                command = [sys.executable, __file__, "--run", client, target.url, options.tokenizer]
                command += [str(count), str(options.concurrency)]
                done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
                costs[client].append(float(done.stdout) / count * 1000)
    medians = {client: statistics.median(costs[client]) for client in CLIENTS}
    return [
        {
            "ids": length,
            "client": client,
            "replies": count,
            "rounds": options.rounds,
            "cpu_ms_per_reply": round(medians[client], 3),
            "least": round(min(costs[client]), 3),
            "most": round(max(costs[client]), 3),
            "of_openai": round(medians[client] / medians["openai"], 3),
        }
        for client in CLIENTS
    ]


def show(rows: Sequence[dict[str, Any]]) -> None:
    table = Table(title="CPU per reply")
    for name in ("ids", "client", "replies", "ms per reply (least - most)", "of openai's", "wanted"):
        table.add_column(name, justify="left" if name == "client" else "right")
    for row in rows:
        budget = BUDGET.get(row["ids"])
        wanted = f"<= {budget:g} ms" if row["client"] == "draftsmith" and budget else ""
        wanted += f", <= {SHARE:g}" if wanted and row["ids"] == SHARED else ""
        spread = f"{row['cpu_ms_per_reply']:.3f} ({row['least']:.3f} - {row['most']:.3f})"
        table.add_row(
            f"{row['ids']:,}", row["client"], f"{row['replies']:,}", spread, f"{row['of_openai']:.2f}", wanted
        )
    Console().print(table)


def run(client: str, url: str, tokenizer: str, count: int, concurrency: int) -> float:
    """CPU seconds of one run of a client against the engine at `url`; in a process of its own."""
    target = MockEngine.elsewhere(url, tokenizer)
    seconds = 0.0
    for replies in (WARM_UP, count):
        with tempfile.TemporaryDirectory() as folder:
            if client == "draftsmith":
                seconds = capture(target, Path(folder) / "capture", replies, concurrency=concurrency)[0]
            else:
                seconds = by_hand(target, Path(folder), replies, concurrency, asks=client == "openai")
    return seconds


def by_hand(target: MockEngine, folder: Path, count: int, concurrency: int, *, asks: bool) -> float:
    """CPU seconds of a script around `openai.AsyncOpenAI`, or (not `asks`) of all it does but asking."""
    import openai
    import uvloop

    settings = settings_for(target, write_questions(folder / "questions.jsonl", count), concurrency=concurrency)
    template = load_template(target.config.tokenizer, {}, trust_remote_code=False)
    reading = reading_of(settings, template)
    jobs = [job_for(question, template, settings.max_tokens) for question in read_questions(settings)]
    began = time.process_time()

    async def ask_all(journal: Journal) -> None:
        client = openai.AsyncOpenAI(base_url=f"{target.url}/v1", api_key="none", max_retries=0)
        only = None if asks else reply_of(await ask(client, jobs[0]))
        left = iter(jobs)

        async def work() -> None:
            for job in left:
                reply = only or reply_of(await ask(client, job))
                journal.append(trace_of(job, reply, reading))

        await asyncio.gather(*[work() for _ in range(concurrency)])
        await client.close()

    with Journal(folder) as journal:
        uvloop.run(ask_all(journal))
        journal.sync()
        seal(journal, [job.trace_id for job in jobs], question_metadata(settings, template, reading.delimiters))
    return time.process_time() - began


def job_for(question: Question, template: Template, max_tokens: int) -> Job:
    """The question's first and only turn."""
    conversation = Conversation(question, 0, ())
    return Job(
        trace_id=conversation.trace_id,
        question=question,
        sample=0,
        messages=conversation.messages(),
        template=template,
        sampling=Sampling(max_tokens=max_tokens),
        budget=max_tokens,
    )


async def ask(client: Any, job: Job) -> Any:
    """One chat completion with all that draftsmith sends too."""
    return await client.chat.completions.create(
        model="mock",
        messages=job.messages,
        max_tokens=job.sampling.max_tokens,
        temperature=0.0,
        top_p=1.0,
        seed=0,
        presence_penalty=0.0,
        frequency_penalty=0.0,
        extra_body={"top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0, "return_token_ids": True},
    )


def reply_of(completion: Any) -> Reply:
    """The openai client's object as a Reply."""
    choice = completion.choices[0]
    return Reply(
        prompt_ids=completion.prompt_token_ids,
        generated_ids=choice.token_ids,
        finish_reason=choice.finish_reason,
        reasoning_text=getattr(choice.message, "reasoning", None),
        answer_text=choice.message.content,
        usage=completion.usage.model_dump(exclude_none=True),
        timing={"seconds": 0.0, "attempts": 1},
    )


if __name__ == "__main__":
    if sys.argv[1:2] == ["--run"]:
        print(run(*sys.argv[2:5], *map(int, sys.argv[5:])))
    else:
        sys.exit(main())
