"""A server that speaks like vLLM, llama.cpp or SGLang to whoever measures it: streams of ids, and counters that move.

It answers a prompt with the same ids each time, in steps as a draft would make them: `plan` says how many drafts each
step accepted, over and over. Raw HTTP in a thread of the test's own process.
"""

from __future__ import annotations

import itertools
import json
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Say = Callable[[tuple[int, ...]], Sequence[int]]
"""Prompt ids -> generated ids, stop id included."""


@dataclass
class SpeakingServer:
    """Used as a context manager; `url` is its base URL."""

    engine: str
    say: Say
    tokenize: Callable[[str], list[int]]
    plan: tuple[int, ...] = ()
    """Accepted drafts of one step after the other; empty: it does not draft."""
    draft_tokens: int = 3
    behind_the_end: bool = True
    """Its counters also count what was accepted behind a reply's end, as engines' do."""
    foreign: int = 0
    """Tokens that it generates for others with each request."""
    running: int = 0
    waiting: int = 0
    context: int = 512
    cut: bool = False
    """It breaks off before a reply has ended."""
    asked: list[dict[str, Any]] = field(default_factory=list)
    drafts: int = 0
    accepted: list[int] = field(default_factory=list)
    generated: int = 0

    def __enter__(self) -> SpeakingServer:
        self.lock = threading.Lock()
        self.accepted = [0] * self.draft_tokens
        handler = type("Handler", (_Handler,), {"server_of": self})
        self.http = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self.thread = threading.Thread(target=self.http.serve_forever, daemon=True)
        self.thread.start()
        self.url = f"http://127.0.0.1:{self.http.server_address[1]}"
        return self

    def __exit__(self, *_: object) -> None:
        self.http.shutdown()
        self.http.server_close()
        self.thread.join()

    def steps(self, ids: Sequence[int]) -> list[tuple[list[int], int]]:
        """The reply in steps: what each emitted, and how many drafts it accepted. The first one is the prompt's."""
        found, at = [(list(ids[:1]), 0)], 1
        for accepted in itertools.cycle(self.plan or (0,)):
            if at >= len(ids):
                return found
            found.append((list(ids[at : at + accepted + 1]), accepted))
            at += accepted + 1
        raise AssertionError

    def count(self, steps: Sequence[tuple[list[int], int]]) -> None:
        with self.lock:
            self.generated += sum(len(ids) for ids, _ in steps) + self.foreign
            if not self.plan:
                return
            for ids, accepted in steps[1:]:
                self.drafts += 1
                for position in range(accepted if self.behind_the_end else min(accepted, len(ids) - 1)):
                    self.accepted[position] += 1

    def metrics(self) -> str:
        if self.engine == "sglang":
            length = "sglang:spec_accept_length 1.9\n" if self.drafts else ""
            return f"sglang:num_running_reqs {self.running}\nsglang:generation_tokens_total {self.generated}\n{length}"
        generated = "vllm:generation_tokens_total" if self.engine == "vllm" else "llamacpp:tokens_predicted_total"
        running = "vllm:num_requests_running" if self.engine == "vllm" else "llamacpp:requests_processing"
        waiting = "vllm:num_requests_waiting" if self.engine == "vllm" else "llamacpp:requests_deferred"
        lines = [f"{generated} {self.generated}.0", f"{running} {self.running}", f"{waiting} {self.waiting}"]
        if self.plan or self.engine == "llamacpp":
            name = f"{self.engine}:spec_decode_num"
            lines += [f"{name}_drafts_total {self.drafts}", f"{name}_drafts_created 1.7e9"]
            lines += [f"{name}_draft_tokens_total {self.drafts * self.draft_tokens}"]
            lines += [f"{name}_accepted_tokens_total {sum(self.accepted)}"]
            lines += [
                f'{name}_accepted_tokens_per_pos_total{{engine="0",position="{position}"}} {count}'
                for position, count in enumerate(self.accepted)
                if count or self.engine == "vllm"
            ]
        return "\n".join(lines) + "\n"


class _Handler(BaseHTTPRequestHandler):
    server_of: SpeakingServer

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        server = self.server_of
        if self.path == "/v1/models":
            card: dict[str, Any] = {"id": "toy", "owned_by": server.engine, "max_model_len": server.context}
            self.reply(json.dumps({"data": [card]}))
        elif self.path == "/metrics":
            self.reply(server.metrics())
        elif self.path == "/server_info":
            self.reply(json.dumps({"version": "0.5.23", "internal_states": [{"avg_spec_accept_length": 2.1}]}))
        else:
            self.send_error(404)

    def do_POST(self) -> None:
        server = self.server_of
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path == "/tokenize":
            self.reply(json.dumps({"tokens": server.tokenize(body.get("content") or body["prompt"])}))
            return
        server.asked.append(body)
        prompt = body.get("input_ids") or body["prompt"]
        most = body.get("max_tokens") or body.get("n_predict") or body["sampling_params"]["max_new_tokens"]
        ids = list(server.say(tuple(prompt)))
        finish = "stop" if len(ids) <= most else "length"
        steps = server.steps(ids[:most])
        server.count(steps)
        events = {"vllm": _vllm, "llamacpp": _llamacpp, "sglang": _sglang}[server.engine](steps, server, finish)
        events = events[: 1 if server.cut else None]
        self.reply("".join(f"data: {json.dumps(event)}\n\n" for event in events) + "data: [DONE]\n\n")

    def reply(self, text: str) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(text.encode())))
        self.end_headers()
        self.wfile.write(text.encode())


def _vllm(steps: Sequence[tuple[list[int], int]], server: SpeakingServer, finish: str) -> list[dict[str, Any]]:
    ends = [*[None] * (len(steps) - 1), finish]
    return [{"choices": [{"token_ids": ids, "finish_reason": end}]} for (ids, _), end in zip(steps, ends, strict=True)]


def _llamacpp(steps: Sequence[tuple[list[int], int]], server: SpeakingServer, finish: str) -> list[dict[str, Any]]:
    events: list[dict[str, Any]] = []
    drafted = accepted = 0
    for number, (ids, taken) in enumerate(steps):
        if number and server.plan:
            drafted, accepted = drafted + server.draft_tokens, accepted + taken
        counts = {"draft_n": drafted, "draft_n_accepted": accepted} if drafted else {}
        events += [{"tokens": [token], "timings": {"predicted_ms": float(number), **counts}} for token in ids]
    return [*events, {"tokens": [], "stop": True, "stop_type": "eos" if finish == "stop" else "limit"}]


def _sglang(steps: Sequence[tuple[list[int], int]], server: SpeakingServer, finish: str) -> list[dict[str, Any]]:
    events: list[dict[str, Any]] = []
    so_far: list[int] = []
    for number, (ids, _) in enumerate(steps):
        so_far = so_far + ids
        meta: dict[str, Any] = {"completion_tokens": len(so_far), "finish_reason": None}
        if server.plan:
            meta["spec_verify_ct"] = number
        events.append({"output_ids": so_far, "meta_info": meta})
    events[-1]["meta_info"]["finish_reason"] = {"type": finish}
    return events
