"""Whether a server is what it is taken for: its engine, its model, its draft, and nobody else's requests on it.

Looked at before anything is timed, with a few short requests (which warm it up as well).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from difflib import SequenceMatcher
from typing import Any, get_args

import msgspec

from draftsmith.artifacts import read_json
from draftsmith.errors import UserError
from draftsmith.measure.counters import CountedEngine
from draftsmith.measure.load import Load, Server, run_load
from draftsmith.measure.served_bench import Bench
from draftsmith.target.endpoints import Endpoint, base_url
from draftsmith.target.models import NotReady, choose, models_of
from draftsmith.target.transport import CONNECT_SECONDS, Transport
from draftsmith.target.wire import PassingFault
from draftsmith.trace import read_traces

WARM_UP_TOKENS = 8
WARM_UP_PROMPTS = 8
SAME_MODEL, DOUBTFUL = 0.25, 0.75
"""Share of replies that begin with the same `WARM_UP_TOKENS` ids as the run's target: below the first it is another
model, below the second it is said."""
ENOUGH_PAIRS = 4
"""Questions from which on a server is refused for its replies: with fewer, a single rounding difference would do it."""
SAME_TOKENIZER = 0.5
"""Servers may put a BOS or a space before the text; another tokenizer shares next to nothing."""
SPELLED = 512
"""Characters that a server is asked to tokenise."""


async def connect(side: str, url: str, model: str | None, transport: Transport, api_key_env: str) -> tuple[Server, int]:
    """A server that answers, and its context (0: it does not say).

    Raises:
        UserError: it does not answer, offers another model, or is of no engine that can be measured.
    """
    endpoint = Endpoint(base_url(url))
    try:
        cards = await models_of(endpoint, transport, api_key_env, CONNECT_SECONDS)
    except NotReady as fault:
        raise UserError(f"{endpoint.shown}: {fault.reason}; {fault.advice}") from None
    card = choose(endpoint, cards, model)
    server = Server(
        side=side,
        endpoint=endpoint,
        engine="vllm",
        model=card.id,
        version=await _version(transport, endpoint),
        transport=transport,
    )
    engine: CountedEngine = server.counters().engine
    assert engine in get_args(CountedEngine)
    return replace(server, engine=engine), card.max_model_len or 0


async def check(server: Server, bench: Bench, say: Callable[[str], object]) -> list[str]:
    """Warms a server up and refuses what it cannot be measured as. Returns what a reader of the result should know.

    Raises:
        UserError: another tokenizer or model than the run's target; a draft server that drafts nothing; a baseline
            that drafts.
    """
    cautions: list[str] = []
    busy = server.counters()
    if busy.running or busy.waiting:
        others = (busy.running or 0) + (busy.waiting or 0)
        cautions.append(f"{server.endpoint.shown}: {others} requests of others were on the server before ours")
    await _same_tokenizer(server, bench)
    prompts = bench.prompts[:WARM_UP_PROMPTS]
    short = {p.key: replace(bench.samplings[p.key], max_tokens=WARM_UP_TOKENS, temperature=0.0) for p in prompts}
    warm = await run_load(server, prompts, short, bench.stop_ids, len(prompts), lambda: None)
    cautions += judged(server, bench, warm)
    for caution in cautions:
        say(f"measure: {caution}")
    return cautions


def judged(server: Server, bench: Bench, warm: Load) -> list[str]:
    """Refuses a server by its greedy replies; returns what a reader of the result should know.

    Raises:
        UserError: as `check`, but for the tokenizer.
    """
    _right_side(server, warm)
    return _same_model(server, bench, warm)


def _right_side(server: Server, warm: Load) -> None:
    drafts = warm.drafts
    if server.side == "draft" and not drafts:
        hint = {
            "llamacpp": "llama.cpp needs --spec-type draft-eagle3 beside -md",
            "vllm": "vLLM needs --speculative-config with method eagle3",
            "sglang": "SGLang needs --speculative-algorithm EAGLE3",
        }[server.engine]
        raise UserError(
            f"{server.endpoint.shown}: expected a server that drafts, it generated {warm.tokens} tokens without one "
            f"draft: the draft is not working; {hint} (`draftsmith serve` writes the whole command)"
        )
    if server.side == "baseline" and drafts:
        raise UserError(
            f"{server.endpoint.shown}: expected a baseline without a draft, it drafted {drafts} times; start it "
            "without one (`draftsmith serve --baseline`), or swap --server and --baseline-server"
        )


async def _same_tokenizer(server: Server, bench: Bench) -> None:
    """Refuses a server whose tokenizer spells a prompt's text otherwise than the run's; where it has no `/tokenize`,
    nothing can be told."""
    text = bench.template.decode(bench.prompts[0].ids)[:SPELLED]
    body = {"content": text, "add_special": False, "parse_special": True}
    if server.engine != "llamacpp":
        body = {"model": server.model, "prompt": text, "add_special_tokens": False}
    try:
        status, content = await server.transport.within(
            CONNECT_SECONDS, "POST", server.endpoint.at("//tokenize"), msgspec.json.encode(body)
        )
        found = msgspec.json.decode(content, type=_Tokens).tokens if status == 200 else None
    except (PassingFault, msgspec.DecodeError):
        return
    expected = bench.template.encode(text)
    likeness = SequenceMatcher(None, found, expected, autojunk=False).ratio() if found is not None else 1.0
    if likeness < SAME_TOKENIZER:
        raise UserError(
            f"{server.endpoint.shown}: its tokenizer is not the one of the run's target: {likeness:.0%} of a prompt's "
            "ids are the same; serve the model that the run's traces come from"
        )


def _same_model(server: Server, bench: Bench, warm: Load) -> list[str]:
    """Compares how replies begin with what the run's target says to the same prompts, where the run knows that."""
    known = known_replies(bench)
    pairs = [(reply.ids, known[reply.key]) for reply in warm.replies if reply.key in known]
    if not pairs:
        return [f"{server.endpoint.shown}: whether it serves the run's target could not be checked: no greedy replies"]
    heads = [(tuple(ids[:WARM_UP_TOKENS]), expected) for ids, expected in pairs]
    same = sum(head == tuple(expected[: len(head)]) for head, expected in heads)
    share = same / len(pairs)
    words = f"{same} of {len(pairs)} greedy replies begin with the same {WARM_UP_TOKENS} tokens as the run's target's"
    questions = len({reply.key for reply in warm.replies if reply.key in known})
    if share < SAME_MODEL and questions >= ENOUGH_PAIRS:
        raise UserError(
            f"{server.endpoint.shown}: serves another model than the run's target: {words}; serve "
            f"{bench.target['name'] if bench.target else 'that target'}"
        )
    if share >= DOUBTFUL:
        return []
    few = f" {questions} questions are too few to tell; ask at least {ENOUGH_PAIRS}" if share < SAME_MODEL else ""
    return [f"{server.endpoint.shown}: {words}: quantised, or another model?{few}"]


def known_replies(bench: Bench) -> dict[str, Sequence[int]]:
    """The target's own greedy replies to the prompts: of the reference measurement, else of a greedy capture."""
    folder = bench.run / "measure"
    if (folder / "questions.jsonl").exists() and _greedy(read_json(folder / "result.json").get("sampling")):
        lines = (folder / "questions.jsonl").read_text(encoding="utf-8").splitlines()
        return {row["key"]: row["ids"] for row in map(json.loads, lines)}
    prompts = {prompt.ids: prompt.key for prompt in bench.prompts}
    found: dict[str, Sequence[int]] = {}
    for trace in read_traces(bench.run / "traces"):
        key = prompts.get(tuple(trace.prompt_ids))
        if key is not None and _greedy(json.loads(trace.sampling)):
            found[key] = trace.generated_ids
    return found


def _greedy(sampling: Mapping[str, Any] | None) -> bool:
    return bool(sampling) and (sampling or {}).get("temperature") == 0


async def _version(transport: Transport, endpoint: Endpoint) -> str:
    """vLLM's and SGLang's version; "" where there is none."""
    for path in ("//version", "//server_info"):
        try:
            status, content = await transport.within(CONNECT_SECONDS, "GET", endpoint.at(path))
            if status == 200:
                return msgspec.json.decode(content, type=_Version).version
        except (PassingFault, msgspec.DecodeError):
            continue
    return ""


class _Version(msgspec.Struct):
    version: str


class _Tokens(msgspec.Struct):
    tokens: list[int]
