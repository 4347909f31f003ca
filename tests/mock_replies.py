"""What a mock engine says: a pure function of the question and its configuration, so that tests can compute it.

Text is made of vocabulary entries that encode to themselves beside each other, in blocks whose JSON is ready: a reply
of 600 ids costs about 20 us. No block comes twice in a reply (up to 16,384 ids), so that it does not look like a loop.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

from jinja2 import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

BLOCK_IDS, BLOCKS = 16, 1024
REASONING_SHARE = 0.6


@dataclass(frozen=True, kw_only=True)
class MockConfig:
    """How a mock engine behaves. Faults are `mock_engine.FAULTS`, name -> probability."""

    engine: Literal["vllm", "sglang", "trtllm", "llamacpp"] = "vllm"
    tokenizer: str = ""
    """A folder with tokenizer.json and a chat template."""
    model: str = "mock"
    version: str = ""
    ids: bool = True
    """Gives ids where they are asked for, as the engine's recent versions do."""
    reasoning_field: str = ""
    """Name of the reasoning field; "": the engine's own."""
    parser: bool = True
    """Splits the reasoning off; else the text with its delimiters is the content."""
    usage: bool = True
    length: int | tuple[int, int] = 64
    """Ids of a whole reply, delimiters and stop id included; a range is drawn from by the question's hash."""
    thinking: bool = False
    think_open: str = "<think>"
    think_close: str = "</think>"
    max_model_len: int = 0
    api_key: str = ""
    seed: int = 0
    faults: Mapping[str, float] = field(default_factory=dict)
    retry_after: float = 1.0
    slow_seconds: float = 2.0
    latency: float = 0.0
    per_token: float = 0.0
    jitter: float = 0.0
    """Share by which a latency may be longer or shorter."""
    knee: int = 0
    """So many requests run at full speed, more share it (0: any number)."""
    slots: int = 0
    """So many requests run, more wait (0: any number)."""
    refuse_above: int = 0
    """So many requests in flight, more get a 429 (0: any number)."""
    keepalive: float = 5.0
    loading: float = 0.0
    """Seconds after the start in which everything is answered by 503."""
    metrics: bool = True


@dataclass(frozen=True)
class Block:
    """Some ids, their text, and both as JSON (text without the quotes)."""

    ids: list[int]
    text: str
    ids_json: bytes
    text_json: bytes


@dataclass(frozen=True)
class Said:
    """One reply in pieces."""

    opening: list[int]
    reasoning: list[Block]
    closing: list[int]
    answer: list[Block]
    ended: bool
    """The stop id came."""

    def ids(self, stop: int) -> list[int]:
        """All generated ids."""
        reasoning = [index for block in self.reasoning for index in block.ids]
        answer = [index for block in self.answer for index in block.ids]
        return [*self.opening, *reasoning, *self.closing, *answer, *([stop] if self.ended else [])]

    def ids_json(self, stop: int) -> bytes:
        """`ids` as the inside of a JSON list."""
        parts = [b"%d" % index for index in self.opening]
        parts += [block.ids_json for block in self.reasoning]
        parts += [b"%d" % index for index in self.closing]
        parts += [block.ids_json for block in self.answer]
        return b",".join([*parts, b"%d" % stop] if self.ended else parts)

    def count(self) -> int:
        """Number of generated ids."""
        words = sum(len(block.ids) for block in self.reasoning) + sum(len(block.ids) for block in self.answer)
        return len(self.opening) + words + len(self.closing) + self.ended


class Vocabulary:
    """A tokenizer folder without transformers: the engine's own ids, fast to load."""

    def __init__(self, folder: str) -> None:
        self.tokenizer = Tokenizer.from_file(str(Path(folder) / "tokenizer.json"))
        settings = json.loads((Path(folder) / "tokenizer_config.json").read_text("utf-8"))
        source = settings.get("chat_template", "")
        if (Path(folder) / "chat_template.jinja").exists():
            source = (Path(folder) / "chat_template.jinja").read_text("utf-8")
        self.source = source
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _refuse
        self.template = environment.from_string(source)
        marks = {name: settings.get(name) for name in ("bos_token", "eos_token", "pad_token", "unk_token")}
        self.marks = {name: mark["content"] if isinstance(mark, dict) else mark for name, mark in marks.items() if mark}
        self.stop: int = self.tokenizer.token_to_id(self.marks["eos_token"])
        self.words, self.blocks = self._blocks()
        self.questions: dict[str, str] = {}
        """Rendered prompt -> the question in it, for prompts that come back as ids."""

    def text(self, messages: Sequence[Mapping[str, Any]], tools: Any = None, options: Any = None) -> str:
        """The prompt as the template writes it."""
        text: str = self.template.render(
            messages=messages, tools=tools or None, add_generation_prompt=True, **self.marks, **(options or {})
        )
        return text

    def encode(self, text: str) -> list[int]:
        """Ids of text; no BOS or EOS is added."""
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids, special tokens included."""
        text: str = self.tokenizer.decode(list(ids), skip_special_tokens=False)
        return text

    def _blocks(self) -> tuple[list[Block], list[Block]]:
        spaced, bare = [], []
        special = {index for index, token in self.tokenizer.get_added_tokens_decoder().items()}
        for _, index in sorted(self.tokenizer.get_vocab().items(), key=lambda entry: entry[1]):
            text = self.decode([index])
            word = text.removeprefix(" ")
            if index in special or not (word.isascii() and word.isalpha()) or self.encode(text * 2) != [index, index]:
                continue
            (spaced if text != word else bare).append((index, text))
            if len(spaced) == 4096:
                break
        chosen = spaced if len(spaced) >= 64 else bare
        words = [_block([entry]) for entry in chosen]
        draw = random.Random(0)
        return words, [_block(draw.choices(chosen, k=BLOCK_IDS)) for _ in range(BLOCKS)]


@lru_cache(maxsize=8)
def vocabulary(folder: str) -> Vocabulary:
    """The folder's vocabulary, loaded once."""
    return Vocabulary(folder)


def say(
    question: str,
    config: MockConfig,
    *,
    opened: bool = False,
    thinks: bool | None = None,
    max_tokens: int = 1 << 30,
    sample: int = 0,
    cut_in_thinking: bool = False,
) -> Said:
    """The reply to a question; `sample` is the request's seed where its temperature is not 0."""
    words = vocabulary(config.tokenizer)
    draw = int.from_bytes(_digest(f"reply/{config.seed}/{sample}/{question}")[:16], "little")
    low, high = (config.length, config.length) if isinstance(config.length, int) else config.length
    length = low + draw % (high - low + 1)
    thinks = config.thinking if thinks is None else thinks
    opening, closing = _marks(config) if thinks else ([], [])
    opening = [] if opened else opening
    body = max(2, length - len(opening) - len(closing) - 1)
    thought = int(body * REASONING_SHARE) if thinks else 0
    if cut_in_thinking:
        thought, max_tokens = body, min(max_tokens, len(opening) + body)
    left = max_tokens
    opening = opening[:left]
    left -= len(opening)
    thought = min(thought, left)
    left -= thought
    closing = closing[:left]
    left -= len(closing)
    answered = min(body - thought if not cut_in_thinking else 0, left)
    left -= answered
    first, step = draw >> 40, ((draw >> 64) | 1)
    used = thought // BLOCK_IDS
    return Said(
        opening,
        _pieces(words, first, step, 0, thought),
        closing,
        _pieces(words, first, step, used, answered),
        left > 0 and not cut_in_thinking,
    )


def reply_ids(
    question: str, config: MockConfig, *, opened: bool = False, max_tokens: int = 1 << 30, sample: int = 0
) -> list[int]:
    """The generated ids of a good reply to `question`.

    Args:
        question: text of the last user turn.
        config: of the engine.
        opened: the prompt ends in the opening delimiter.
        max_tokens: of the request.
        sample: the request's seed where its temperature is not 0.
    """
    said = say(question, config, opened=opened, max_tokens=max_tokens, sample=sample)
    return said.ids(vocabulary(config.tokenizer).stop)


def fault_of(question: str, nth: int, config: MockConfig) -> str:
    """What befalls the nth request (from 1) for a question; "" for a plain reply."""
    if not config.faults:
        return ""
    drawn = int.from_bytes(_digest(f"fault/{config.seed}/{nth}/{question}")[:8], "little") / 2**64
    for name, share in config.faults.items():
        drawn -= share
        if drawn < 0:
            return name
    return ""


def seconds_of(question: str, nth: int, count: int, config: MockConfig) -> float:
    """How long the nth request for a question takes a server that runs it at full speed."""
    seconds = config.latency + config.per_token * count
    if not seconds or not config.jitter:
        return seconds
    drawn = int.from_bytes(_digest(f"jitter/{config.seed}/{nth}/{question}")[:8], "little") / 2**63 - 1
    return seconds * (1 + config.jitter * drawn)


def json_text(text: str) -> bytes:
    """Text as the inside of a JSON string."""
    return json.dumps(text, ensure_ascii=False).encode("utf-8", "surrogatepass")[1:-1]


def _pieces(words: Vocabulary, first: int, step: int, used: int, count: int) -> list[Block]:
    whole, rest = divmod(count, BLOCK_IDS)
    blocks = [words.blocks[(first + step * i) % BLOCKS] for i in range(used, used + whole)]
    spread = len(words.words)
    return blocks + [words.words[(first + step * i) % spread] for i in range(used, used + rest)]


@lru_cache(maxsize=8)
def _marks_of(folder: str, opening: str, closing: str) -> tuple[list[int], list[int]]:
    return vocabulary(folder).encode(opening), vocabulary(folder).encode(closing)


def _marks(config: MockConfig) -> tuple[list[int], list[int]]:
    return _marks_of(config.tokenizer, config.think_open, config.think_close)


def _block(entries: Sequence[tuple[int, str]]) -> Block:
    ids, text = [index for index, _ in entries], "".join(text for _, text in entries)
    return Block(ids, text, ",".join(map(str, ids)).encode(), json_text(text))


def _digest(text: str) -> bytes:
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()


def _tojson(value: Any, indent: int | None = None, **_: Any) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _refuse(message: str) -> None:
    raise TemplateError(message)
