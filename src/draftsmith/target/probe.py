"""What does this server return? At most a dozen short requests that settle it before hours of capture depend on it.

One request finds the dialect that gives ids (a server that gives none costs up to four more); the others run at once:
an easy question with room to think, the same one cut short, a text that is hard to tokenise, and a few sampled tokens.
What the answers mean is judged in `findings`. A healthy server takes a few seconds.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec

from draftsmith.target.dialect import LOGGED, LOGGED_IDS, PLAIN, Asked, Chat, Dialect, Generate, LlamaCpp
from draftsmith.target.endpoints import Endpoint
from draftsmith.target.findings import (
    CUT_TOKENS,
    DRAWN_TOKENS,
    Finding,
    Intent,
    Prompt,
    Seen,
    cut_findings,
    option_findings,
    prompt_findings,
    reasoning_findings,
    sampling_findings,
    thinking_option,
    thinks,
    where_ids_part,
)
from draftsmith.target.reply import Reply, Sampling
from draftsmith.target.server import ServerTarget
from draftsmith.target.wire import ChatFailed, PassingFault, refusal, tokens_of
from draftsmith.trace import IdsSource

EASY = "A gardener has 12 pots and buys 7 more. How many pots does the gardener have now?"
OPEN = "Invent a name for a colour that nobody has seen yet."
HARD = (
    "Repeat this: 1234567 0.001 1e-9  two   three    four\ttab\n\nnew\n\n\nlines \n end "
    "\U0001f600\U0001f469\u200d\U0001f467 中文分词 日本語 한국어 Ünïcödé <think> </think> [INST] don't  I'LL_x  "
)
"""Digits, runs of spaces, tab, newlines, joined emoji, scripts without spaces, delimiters, spaces at the end."""
QUESTIONS = frozenset({EASY, OPEN, HARD})
"""The probe's own questions, so that tests and logs can tell them from a user's."""
EASY_TOKENS = 384
TRIES, WAIT_SECONDS = 3, 1.0
PROBE_SECONDS = 300.0
"""Patience for one of the probe's requests."""
DIALECTS: Mapping[str, tuple[Dialect, ...]] = {
    "vllm": (Chat(), LOGGED_IDS),
    "sglang": (Chat(), Generate()),
    "llamacpp": (LlamaCpp(),),
    "tensorrt_llm": (Chat(),),
}
"""By what the model list says owns the model; anything else tries most of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What one server is like."""

    url: str
    model: str
    engine: str
    version: str
    max_model_len: int | None
    dialect: Dialect
    ids_source: IdsSource
    """The best that this server can give."""
    thinks: bool
    """The test reply held reasoning."""
    findings: tuple[Finding, ...]
    easy: Reply
    greedy: Reply
    hard: Reply

    @property
    def fatal(self) -> tuple[Finding, ...]:
        """What must stop a capture."""
        return tuple(finding for finding in self.findings if finding.level == "fatal")

    def as_json(self) -> dict[str, Any]:
        """For scripts."""
        return {
            "url": self.url,
            "model": self.model,
            "engine": self.engine,
            "version": self.version,
            "max_model_len": self.max_model_len,
            "dialect": self.dialect.name,
            "ids_source": self.ids_source,
            "thinks": self.thinks,
            "findings": [{"level": f.level, "about": f.about, "text": f.text} for f in self.findings],
            "fatal": bool(self.fatal),
        }


@dataclass(frozen=True, slots=True)
class Line:
    """One server of a target, asked directly. Passing faults are met with a few tries."""

    target: ServerTarget
    endpoint: Endpoint
    bodies: dict[str, bytes] = field(default_factory=dict)
    """The last reply's bytes by question, for looking at fields that a Reply does not keep."""

    async def ask(self, dialect: Dialect, asked: Asked, name: str = "") -> Reply:
        """One generation.

        Raises:
            ChatFailed: refused, or every try met a passing fault.
        """
        for attempt in range(TRIES):
            try:
                return await dialect.ask(self._post(name), self.target.model or "", asked)
            except PassingFault as fault:
                if attempt + 1 == TRIES:
                    raise ChatFailed(f"{fault.reason}, {TRIES} tries", passing=True) from None
                await asyncio.sleep(min(10.0, max(fault.retry_after, WAIT_SECONDS)))
        raise AssertionError

    async def json(self, path: str) -> dict[str, Any]:
        """The object that a GET answers; empty where it answers none."""
        try:
            status, content = await self.target.get(path, self.endpoint)
            found = json.loads(content) if status == 200 else None
        except (PassingFault, ValueError):
            return {}
        return found if isinstance(found, dict) else {}

    async def tokenize(self, text: str) -> list[int] | None:
        """The server's `/tokenize` of rendered text, special tokens recognised and none added; None: it has none."""
        body = {"model": self.target.model, "prompt": text, "add_special_tokens": False}  # vLLM, SGLang
        body |= {"content": text, "add_special": False, "parse_special": True}  # llama.cpp
        try:
            status, content = await self.target.post("//tokenize", msgspec.json.encode(body), self.endpoint)
            return tokens_of(content) if status == 200 else None
        except PassingFault:
            return None

    def _post(self, name: str) -> Any:
        async def post(path: str, body: bytes) -> bytes:
            status, content = await self.target.post(path, body, self.endpoint, PROBE_SECONDS)
            if status != 200:
                raise refusal(status, {}, content)
            if path == "/chat/completions":
                self.bodies[name] = content
            return content

        return post


async def probe_server(line: Line, intent: Intent, max_model_len: int | None, engine: str) -> Verdict:
    """Asks one server everything and judges the answers.

    Args:
        line: the server.
        intent: what the capture is going to ask for.
        max_model_len: as the server states it.
        engine: what the model list says owns the model.

    Raises:
        ChatFailed: the server refuses a plain question.
    """
    template = intent.template
    easy, hard, flipped = (_prompt(intent, EASY), _prompt(intent, HARD), _flipped(intent))
    room = EASY_TOKENS if max_model_len is None else max(CUT_TOKENS, min(EASY_TOKENS, max_model_len - len(easy.ids)))
    cut_asked = _asked(intent, EASY, Sampling(max_tokens=CUT_TOKENS))
    dialect, cut = await _dialect(line, cut_asked, engine)

    async def ask(name: str, asked: Asked) -> Reply:
        return await line.ask(dialect, asked, name)

    def drawn(seed: int, top_k: int = 0) -> Asked:
        return _asked(intent, OPEN, Sampling(max_tokens=DRAWN_TOKENS, temperature=2.0, seed=seed, top_k=top_k))

    switched = replace(cut_asked, template_options=_flip(template.options, template.template_text()))
    failures: list[ChatFailed] = []
    try:
        async with asyncio.TaskGroup() as group:
            start = group.create_task
            easy_reply = start(ask("easy", _asked(intent, EASY, Sampling(max_tokens=room))))
            hard_reply = start(ask("hard", _asked(intent, HARD, Sampling(max_tokens=1))))
            calm = start(ask("calm", _asked(intent, OPEN, Sampling(max_tokens=DRAWN_TOKENS))))
            narrow = start(ask("narrow", drawn(1, top_k=1)))
            draws = [start(ask("drawn", drawn(seed))) for seed in (1, 2, 1)]
            other = start(ask("switched", switched)) if flipped else None
            about = start(_about(line, engine))
            tokens = start(line.tokenize(template.text(_messages(intent, HARD))))
    except* ChatFailed as group_of:
        failures += [failure for failure in group_of.exceptions if isinstance(failure, ChatFailed)]
    if failures:
        raise failures[0]
    ours = isinstance(dialect, Generate)
    seen = Seen(
        easy=easy_reply.result(),
        cut=cut,
        hard=hard_reply.result(),
        calm=calm.result(),
        narrow=narrow.result(),
        drawn=[draw.result() for draw in draws],
        fields=_message(line.bodies.get("easy", b"")),
        switched=other.result() if other else None,
        tokenized=None if seen_by_id(hard_reply.result()) and not ours else tokens.result(),
    )
    name, version = about.result()
    source: IdsSource = "engine" if seen_by_id(cut) else "rendered_verified" if cut.usage or cut.spelled else "rendered"
    context = f", context {max_model_len:,} ids" if max_model_len else ", context length not stated"
    return Verdict(
        url=line.endpoint.shown,
        model=line.target.model or "",
        engine=name,
        version=version,
        max_model_len=max_model_len,
        dialect=dialect,
        ids_source=source,
        thinks=thinks(intent, seen.easy, easy),
        findings=(
            Finding("ok" if max_model_len else "note", "server", f"{name} {version}".strip() + context),
            _ids_finding(dialect, source),
            *prompt_findings(seen, intent, easy, hard),
            *option_findings(seen, intent, easy, flipped),
            *reasoning_findings(seen, intent, easy),
            *cut_findings(seen, intent, easy),
            *sampling_findings(seen, intent),
        ),
        easy=seen.easy,
        greedy=seen.calm,
        hard=seen.hard,
    )


async def compare_server(line: Line, intent: Intent, first: Verdict) -> list[Finding]:
    """Whether a further server serves the same model in the same way as the first: two requests.

    Raises:
        ChatFailed: the server refuses a plain question.
    """
    greedy, hard = await asyncio.gather(
        line.ask(first.dialect, _asked(intent, OPEN, Sampling(max_tokens=DRAWN_TOKENS))),
        line.ask(first.dialect, _asked(intent, HARD, Sampling(max_tokens=1))),
    )
    shown = line.endpoint.shown
    if seen_by_id(hard) != seen_by_id(first.hard):
        text = f"{shown} gives {'no ' if seen_by_id(first.hard) else ''}token ids, unlike {first.url}"
        return [Finding("fatal", "servers", f"{text}; serve all with one engine and version")]
    if where := where_ids_part(intent.template, hard.prompt_ids, first.hard.prompt_ids):
        text = f"{shown} has another tokenizer or template than {first.url}, {where}"
        return [Finding("fatal", "servers", f"{text}; all servers must serve the same model")]
    if not (where := where_ids_part(intent.template, greedy.generated_ids, first.greedy.generated_ids)):
        return [Finding("ok", "servers", f"{shown} renders and answers as {first.url} does")]
    if greedy.generated_ids[:1] != first.greedy.generated_ids[:1]:
        text = f"{shown} starts another greedy reply than {first.url}, {where}"
        return [Finding("fatal", "servers", f"{text}; are the weights the same?")]
    text = f"{shown} parts from the greedy reply of {first.url} {where}"
    return [Finding("warning", "servers", f"{text}; rounding does that, other weights or quantisation do too")]


def seen_by_id(reply: Reply) -> bool:
    """Whether a reply came with its own ids, prompt and generated."""
    return bool(reply.prompt_ids and reply.generated_ids)


async def _dialect(line: Line, asked: Asked, engine: str) -> tuple[Dialect, Reply]:
    """The dialect that gives the most, and its reply; the last refusal where none is answered."""
    ways = DIALECTS.get(engine, (Chat(), LlamaCpp(), LOGGED_IDS))
    best: tuple[int, Dialect, Reply] | None = None
    refused: ChatFailed | None = None
    for dialect in (*ways, LOGGED, PLAIN):
        if best is not None and dialect is PLAIN:
            break
        try:
            reply = await line.ask(dialect, asked)
        except ChatFailed as failure:
            if failure.passing and not failure.reason.startswith("HTTP 404"):
                raise
            refused = failure
            continue
        if seen_by_id(reply):
            return dialect, reply
        worth = 2 * bool(reply.generated_ids) + bool(reply.spelled)
        if best is None or worth > best[0]:
            best = worth, dialect, reply
    if best is None:
        assert refused is not None
        raise refused
    return best[1], best[2]


async def _about(line: Line, engine: str) -> tuple[str, str]:
    """Engine and version in its own words."""
    if engine == "llamacpp":
        return "llama.cpp", str((await line.json("//props")).get("build_info") or "")
    if engine == "sglang":
        info = await line.json("//get_server_info") or await line.json("//server_info")
        return engine, str(info.get("version") or "")
    return engine, str((await line.json("//version")).get("version") or "")


def _ids_finding(dialect: Dialect, source: IdsSource) -> Finding:
    if source == "engine":
        return Finding("ok", "token ids", f"the engine's own, by {dialect.name}")
    if source == "rendered_verified":
        text = f"none come back; replies are tokenised here and checked against the server's counts ({dialect.name})"
        return Finding("warning", "token ids", f"{text}; vLLM >= 0.10.2, SGLang and llama.cpp give exact ones")
    text = "none come back, nor token counts: what is captured can't be verified"
    return Finding("warning", "token ids", f"{text}; serve with vLLM >= 0.10.2, SGLang or llama.cpp")


def _messages(intent: Intent, question: str) -> list[Mapping[str, Any]]:
    return [*intent.preamble, {"role": "user", "content": question}]


def _asked(intent: Intent, question: str, sampling: Sampling) -> Asked:
    messages = _messages(intent, question)
    return Asked(
        messages=messages,
        tools=(),
        sampling=sampling,
        template_options=intent.template.options,
        prompt_ids=lambda: intent.template.render(messages),
    )


def _prompt(intent: Intent, question: str) -> Prompt:
    messages = _messages(intent, question)
    bare = replace(intent.template, options={})
    return Prompt(ids=intent.template.render(messages), otherwise=bare.render(messages))


def _flipped(intent: Intent) -> Prompt | None:
    """The easy prompt with the thinking option flipped, against the usual one; None: there is no such option."""
    options = _flip(intent.template.options, intent.template.template_text())
    if options == intent.template.options:
        return None
    messages = _messages(intent, EASY)
    other = replace(intent.template, options=options)
    return Prompt(ids=other.render(messages), otherwise=intent.template.render(messages))


def _flip(options: Mapping[str, Any], source: str) -> dict[str, Any]:
    """The options with thinking switched the other way; as they are where the template has no such option."""
    name = thinking_option(source)
    return {**options, name: not options.get(name, True)} if name else dict(options)


def _message(content: bytes) -> dict[str, Any]:
    """The message of a chat completion, as it came."""
    if not content:
        return {}
    found: Sequence[dict[str, Any]] = json.loads(content)["choices"]
    message: dict[str, Any] = found[0]["message"]
    return message
