"""An OpenAI-compatible server that plays engines and their faults, in a thread of the test's own process."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from aiohttp import web

from draftsmith.target.template import Template

Shape = Literal["reasoning", "reasoning_content", "tags", "neither", "cut_in_content"]


@dataclass(frozen=True)
class Says:
    """What the model says to one prompt."""

    answer: str = "Four"
    reasoning: str | None = "two and two"
    finish: str = "stop"
    ids: list[int] | None = None
    """Generated ids, where they are not simply those of the text."""
    closed: bool = True
    tool_calls: list[dict[str, Any]] | None = None
    """What the server's tool parser reads off the answer."""


@dataclass(frozen=True)
class Fault:
    """What happens instead of a reply (or before one: `silent` with status 200)."""

    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes | None = None
    silent: float = 0.0
    hang: bool = False
    reset: bool = False
    cut_transfer: bool = False


@dataclass(frozen=True)
class Request:
    question: str
    """Text of the last user turn."""
    at: float
    body: dict[str, Any]
    headers: dict[str, str]


@dataclass
class FaultServer:
    """Serves `says` of the prompt's last user text in one engine's shape; `fault(text, nth)` comes first."""

    template: Template | None = None
    says: Callable[[str, dict[str, Any]], Says] = lambda text, body: Says()
    fault: Callable[[str, int], Fault | None] = lambda text, nth: None
    shape: Shape = "reasoning"
    ids: Literal["vllm", "sglang", "none"] = "vllm"
    usage: bool = True
    models: tuple[str, ...] = ("toy",)
    max_model_len: int | None = None
    enforce_length: bool = True
    api_key: str = ""
    prefix: str = "/v1"
    models_status: int = 200
    requests: list[Request] = field(default_factory=list)
    replied: Counter[str] = field(default_factory=Counter)
    port: int = 0
    """0: any free one."""

    def __enter__(self) -> FaultServer:
        ready = threading.Event()
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self._run, args=(ready,), daemon=True)
        self.thread.start()
        assert ready.wait(10)
        return self

    def __exit__(self, *_: object) -> None:
        """Ends it; fine if it has ended."""
        if self.loop.is_closed():
            return
        self.loop.call_soon_threadsafe(self.over.set)
        self.thread.join(10)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def questions(self) -> Counter[str]:
        """How often each question was sent."""
        return Counter(request.question for request in self.requests)

    def wait_for(self, condition: Callable[[], bool], seconds: float = 30.0) -> None:
        until = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < until, "the condition never came true"
            time.sleep(0.01)

    def _run(self, ready: threading.Event) -> None:
        asyncio.set_event_loop(self.loop)
        self.loop.run_until_complete(self._serve(ready))
        self.loop.close()

    async def _serve(self, ready: threading.Event) -> None:
        self.over = asyncio.Event()
        app = web.Application(client_max_size=1 << 26)
        app.router.add_get(self.prefix + "/models", self._models)
        app.router.add_post(self.prefix + "/chat/completions", self._chat)
        app.router.add_get("/version", self._version)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", self.port, reuse_address=True)
        await site.start()
        self.port = runner.addresses[0][1]
        ready.set()
        await self.over.wait()
        await runner.cleanup()

    async def _version(self, request: web.Request) -> web.Response:
        return web.json_response({"version": "0.32.0"})

    async def _models(self, request: web.Request) -> web.Response:
        if self.models_status != 200:
            return web.json_response({"error": {"message": "loading"}}, status=self.models_status)
        if not self._authorised(request):
            return web.json_response({"error": "Unauthorized"}, status=401)
        cards = [{"id": name, "owned_by": "vllm", "max_model_len": self.max_model_len} for name in self.models]
        return web.json_response({"object": "list", "data": cards})

    def _authorised(self, request: web.Request) -> bool:
        return not self.api_key or request.headers.get("Authorization") == f"Bearer {self.api_key}"

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        question = next(m["content"] for m in reversed(body["messages"]) if m["role"] == "user")
        self.requests.append(Request(question, time.monotonic(), body, dict(request.headers)))
        fault = self.fault(question, self.questions()[question])
        if fault is not None:
            if fault.silent:
                await asyncio.sleep(fault.silent)
            if fault.hang:
                await self.over.wait()
            if fault.reset:
                assert request.transport is not None
                request.transport.abort()
                return web.Response()
            if fault.status != 200 or fault.body is not None:
                text = fault.body if fault.body is not None else b'{"error": {"message": "as told"}}'
                return web.Response(status=fault.status, headers=fault.headers, body=text)
        prompt = self._template(body).render(body["messages"], body.get("tools", ()))
        wanted = len(prompt) + body["max_tokens"]
        if self.max_model_len is not None and self.enforce_length and wanted > self.max_model_len:
            message = (
                f"This model's maximum context length is {self.max_model_len} tokens. However, your request has "
                f"{len(prompt)} input tokens and asks for {body['max_tokens']}. Please reduce the length."
            )
            return web.json_response({"error": {"message": message, "code": 400}}, status=400)
        content = json.dumps(self._completion(body, prompt, self.says(question, body)), ensure_ascii=False).encode()
        if fault is not None and fault.cut_transfer:
            response = web.StreamResponse(headers={"Content-Length": str(len(content))})
            await response.prepare(request)
            await response.write(content[: len(content) // 2])
            assert request.transport is not None
            request.transport.abort()
            return response
        self.replied[question] += 1
        return web.Response(body=content, content_type="application/json")

    def _template(self, body: dict[str, Any]) -> Template:
        """The template with the options the request asks for on its top level, and no others."""
        assert self.template is not None
        from dataclasses import replace

        return replace(self.template, options=body.get("chat_template_kwargs", {}))

    def _completion(self, body: dict[str, Any], prompt: list[int], says: Says) -> dict[str, Any]:
        template = self._template(body)
        opened = template.decode(prompt).endswith("<think>")
        thought = says.reasoning is not None
        text = ("" if opened or not thought else "<think>") + (says.reasoning or "")
        text += ("</think>" if thought and says.closed else "") + says.answer
        ids = says.ids if says.ids is not None else template.encode(text)
        ended = says.finish in ("stop", "tool_calls") and says.ids is None
        ids = [*ids, template.tokenizer.eos_token_id] if ended else ids
        message: dict[str, Any] = {"role": "assistant", "content": says.answer or None}
        if self.shape in ("reasoning", "reasoning_content"):
            message[self.shape] = says.reasoning
        elif self.shape in ("tags", "cut_in_content"):
            message["content"] = text
        if says.tool_calls:
            message |= {"content": None, "tool_calls": says.tool_calls}
        choice: dict[str, Any] = {"index": 0, "message": message, "finish_reason": says.finish}
        completion: dict[str, Any] = {"id": "x", "object": "chat.completion", "choices": [choice]}
        if self.ids == "vllm" and body.get("return_token_ids"):
            completion["prompt_token_ids"], choice["token_ids"] = prompt, ids
        elif self.ids == "sglang" and body.get("return_token_ids"):
            choice["prompt_token_ids"], choice["response_token_ids"] = prompt, ids
        if self.usage:
            completion["usage"] = {"prompt_tokens": len(prompt), "completion_tokens": len(ids)}
        return completion
