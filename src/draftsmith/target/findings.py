"""What a server's answers to the probe mean for a capture: pure judgements, one plain sentence each.

Ids decide wherever there are any; texts and token counts are for servers that give none. A finding is fatal only where
everything captured would be worthless, or where something the user asked for has no effect.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from draftsmith.target.reply import Reply, Sampling
from draftsmith.target.template import Template
from draftsmith.target.thinking import ENDED, THINKING_OPTIONS, Delimiters, opened_by_prompt, split, thinking_wanted

Level = Literal["ok", "note", "warning", "fatal"]
MARKS = (
    ("<think>", "</think>"),
    ("[THINK]", "[/THINK]"),
    ("<seed:think>", "</seed:think>"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
    ("◁think▷", "◁/think▷"),
    ("<reasoning>", "</reasoning>"),
    ("<|channel|>analysis<|message|>", "<|channel|>final<|message|>"),
)
"""Delimiters seen in the wild, to name what replies hold instead of those that were expected."""
KNOWN_FIELDS = frozenset({"role", "content", "reasoning", "reasoning_content", "refusal"})
CUT_TOKENS, DRAWN_TOKENS = 8, 16
"""Budgets of the probe's short replies."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at: what it means for a capture, and what to do about it."""

    level: Level
    about: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Intent:
    """What the capture is going to ask for."""

    template: Template
    delimiters: Delimiters | None
    sampling: Sampling
    preamble: Sequence[Mapping[str, Any]] = ()

    @property
    def thinks(self) -> bool | None:
        """What the template options say about thinking; None: nothing."""
        return thinking_wanted(self.template.options)


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """A prompt as we render it: with the user's options, and without them (or with the thinking option flipped)."""

    ids: Sequence[int]
    otherwise: Sequence[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """What the server answered. `easy` and `cut` are the same question with a large and a tiny budget."""

    easy: Reply
    cut: Reply
    hard: Reply
    calm: Reply
    drawn: Sequence[Reply]
    """At temperature 2 with seeds 1, 2 and 1."""
    narrow: Reply
    """At temperature 2 and top-k 1."""
    fields: Mapping[str, Any] = field(default_factory=dict)
    """The message of `easy` as it came; empty where the reply was no chat completion."""
    switched: Reply | None = None
    """`cut` with the template's thinking option flipped; None: it has none."""
    tokenized: Sequence[int] | None = None
    """The server's `/tokenize` of our rendering of `hard`; None: it has none."""


def thinking_option(source: str) -> str:
    """The option by which a chat template switches thinking; "" where it reads none of the known ones."""
    return next((name for name in THINKING_OPTIONS if reads(source, name)), "")


def reads(source: str, name: str) -> bool:
    """Whether a chat template's source mentions a variable."""
    return re.search(rf"\b{re.escape(name)}\b", source) is not None


def where_ids_part(template: Template, theirs: Sequence[int], ours: Sequence[int]) -> str:
    """Where two id sequences part, for people: index, both ids, both texts, what stands before; "" if nowhere."""
    at = next((i for i, (one, other) in enumerate(zip(theirs, ours, strict=False)) if one != other), None)
    if at is None and len(theirs) == len(ours):
        return ""
    at = min(len(theirs), len(ours)) if at is None else at
    before = template.decode(ours[max(0, at - 8) : at])

    def shown(ids: Sequence[int]) -> str:
        return f"{ids[at]} {template.decode(ids[at : at + 1])!r}" if at < len(ids) else "nothing more"

    return f"at token {at}, after {before!r}: the server has {shown(theirs)}, we have {shown(ours)}"


def prompt_findings(seen: Seen, intent: Intent, easy: Prompt, hard: Prompt) -> list[Finding]:
    """Do the server's tokenizer and template agree with ours, and is BOS doubled (P09)?"""
    template, found = intent.template, []
    for reply, ours in ((seen.easy, easy.ids), (seen.hard, hard.ids)):
        bos, ids = template.tokenizer.bos_token_id, reply.prompt_ids or ours
        if bos is not None and list(ids[:2]) == [bos, bos]:
            text = f"the prompt starts with two BOS ids ({bos}): the template prints one and the tokenizer adds another"
            return [Finding("fatal", "prompt", f"{text}; correct the tokenizer's add_bos_token or the template")]
        if reply.prompt_ids and (where := where_ids_part(template, reply.prompt_ids, ours)):
            return [_parted(intent, reply.prompt_ids, ours, where)]
        counted = reply.usage.get("prompt_tokens", len(ours))
        if not reply.prompt_ids and counted != len(ours):
            where = f"the server counts {counted} ids where {template.name} renders {len(ours)}"
            text = f"{where}; give the server's own tokenizer with --tokenizer, and its template options"
            found.append(Finding("warning", "prompt", text))
    if seen.tokenized is not None and (where := where_ids_part(template, seen.tokenized, hard.ids)):
        return [Finding("fatal", "prompt", f"another tokenizer than the server's, {where}; correct --tokenizer")]
    if found:
        return found[:1]
    how = "by id" if seen.hard.prompt_ids or seen.tokenized is not None else "by count only"
    if not seen.hard.prompt_ids and seen.tokenized is None and "prompt_tokens" not in seen.hard.usage:
        return [Finding("warning", "prompt", "the server tells nothing that our tokenizer could be compared with")]
    kinds = "digits, runs of spaces, newlines, emoji, CJK and delimiters"
    return [Finding("ok", "prompt", f"our tokenizer and template agree with the server's {how}, on {kinds} too")]


def option_findings(seen: Seen, intent: Intent, easy: Prompt, flipped: Prompt | None) -> list[Finding]:
    """Do template options take effect (P05)?"""
    options, source = intent.template.options, intent.template.template_text()
    unread = [name for name in options if not reads(source, name)]
    if unread:
        spelled = unread[0].replace("-", "_")
        known = spelled if reads(source, spelled) else thinking_option(source)
        hint = f"; it reads {known}" if known else ""
        text = f"option {unread[0]} has no effect: the chat template never reads it{hint}; correct --template-options"
        return [Finding("fatal", "template options", text)]
    if options:
        took = _took(seen.easy, easy)
        shown = ", ".join(f"{name}={value}" for name, value in options.items())
        if took is False:
            text = f"{shown} has no effect: the server renders the prompt without it; is chat_template_kwargs allowed?"
            return [Finding("fatal", "template options", text)]
        level: Level = "ok" if took else "note"
        return [Finding(level, "template options", f"{shown} {'took' if took else 'cannot be seen to take'} effect")]
    if seen.switched is None or flipped is None:
        return [Finding("note", "template options", "none given, and the template has none for thinking")]
    took = _took(seen.switched, flipped)
    if took is None:
        return [Finding("note", "template options", "none given; whether the server passes them on cannot be seen")]
    level = "ok" if took else "warning"
    return [Finding(level, "template options", f"none given; the server {'honours' if took else 'ignores'} them")]


def reasoning_findings(seen: Seen, intent: Intent, easy: Prompt) -> list[Finding]:
    """Where does reasoning come, between which delimiters, and does it come when it should (P01, P05)?"""
    template, delimiters, reply = intent.template, intent.delimiters, seen.easy
    prompt_ids = reply.prompt_ids or easy.ids
    text = _text(template, reply)
    where = next((name for name in ("reasoning", "reasoning_content") if seen.fields.get(name)), "")
    marks = next((pair for pair in MARKS if pair[1] in text), None)
    if delimiters is None:
        opening = _opening(intent, prompt_ids)
        if where or marks or opening:
            what = f"delimiters {marks[0]} {marks[1]}" if marks else f"the prompt ends in {opening}"
            what = f"field {where}" if where else what
            text = f"the target thinks ({what}), but no think delimiters are set: all of a reply counts as its answer"
            return [Finding("warning", "reasoning", f"{text}; give --thinking think (or custom with both delimiters)")]
        return [Finding("note", "reasoning", "no thinking mode in the template: all of a reply is its answer")]
    opened = opened_by_prompt(delimiters, template, prompt_ids)
    if seen_state := _reasoning_state(intent, reply, prompt_ids):
        if intent.thinks is False:
            text = "replies hold reasoning although the template options switch it off"
            text += "; the server ignores them, or the preamble's examples show reasoning all the same"
            return [Finding("fatal", "reasoning", text)]
        ids = len(delimiters.close_ids[0]) if delimiters.close_ids else 0
        way = "one id" if ids == 1 else f"{ids} ids"
        by = "the prompt" if opened else "the reply"
        shown = f"{delimiters.open_text} opened by {by}, {delimiters.close_text} is {way}"
        comes = f"in the field {where}" if where else "inside content"
        comes += ", told by its ids" if reply.generated_ids else ""
        if seen_state == "unclosed":
            text = f"the reply ended inside its thinking: {shown}, and nothing closed it"
            return [Finding("warning", "reasoning", f"{text}; a model without a thinking mode needs worked examples")]
        return [Finding("ok", "reasoning", f"comes {comes}; {shown}")]
    if intent.thinks is False:
        return [Finding("ok", "reasoning", "switched off, and none comes")]
    if marks and marks != (delimiters.open_text, delimiters.close_text):
        text = f"replies think between {marks[0]} and {marks[1]}, expected {delimiters.open_text}"
        cure = f"give --thinking custom --think-open '{marks[0]}' --think-close '{marks[1]}'"
        return [Finding("fatal", "reasoning", f"{text} and {delimiters.close_text}; {cure}")]
    if reply.finish_reason not in ENDED and text and not reply.generated_ids:
        text = "the test reply was cut before its reasoning could be told from its answer"
        return [Finding("warning", "reasoning", f"{text}; without token ids that may happen often")]
    if intent.thinks or opened:
        asked = "was asked for" if intent.thinks else "is opened by the prompt"
        text = f"no reasoning seen although it {asked}: neither a reasoning field nor {delimiters.close_text} comes"
        unknown = next((name for name in seen.fields if name not in KNOWN_FIELDS and _worded(seen.fields[name])), "")
        text += f" (the field {unknown} holds text that nobody reads)" if unknown else ""
        cure = "look at the server's reasoning parser and template options, or serve with an engine that gives ids"
        return [Finding("fatal", "reasoning", f"{text}; {cure}")]
    text = f"none seen in the test reply, and nothing asks for it ({delimiters.close_text} never comes)"
    return [Finding("warning", "reasoning", f"{text}; if the target should think, set its template option")]


def thinks(intent: Intent, reply: Reply, easy: Prompt) -> bool:
    """Whether a reply to the easy question holds reasoning, begun and closed or cut."""
    return intent.delimiters is not None and _reasoning_state(intent, reply, reply.prompt_ids or easy.ids) == "seen"


def cut_findings(seen: Seen, intent: Intent, easy: Prompt) -> list[Finding]:
    """Is a reply that was cut inside its thinking told from an answer (P03)? Is the budget kept?"""
    reply, delimiters = seen.cut, intent.delimiters
    count = len(reply.generated_ids or reply.spelled) or reply.usage.get("completion_tokens", 0)
    found = []
    if count > CUT_TOKENS:
        text = f"max_tokens has no effect: asked for {CUT_TOKENS} tokens at most, got {count}"
        found.append(Finding("warning", "sampling", f"{text}; the deadline will be all that ends a long reply"))
    if delimiters is None or reply.finish_reason in ENDED or count > CUT_TOKENS:
        return found
    prompt_ids = reply.prompt_ids or easy.ids
    if reply.generated_ids:
        state = split(delimiters, intent.template, prompt_ids, reply.generated_ids, reply.finish_reason).state
        if state == "cut_in_reasoning":
            found.append(Finding("ok", "cut replies", "a reply cut inside its thinking is told by its ids"))
        return found
    if opened_by_prompt(delimiters, intent.template, prompt_ids):
        place = "a reasoning field" if reply.reasoning_text else "content" if reply.answer_text else "no field at all"
        text = f"a reply cut inside its thinking comes in {place}; it is told by the missing {delimiters.close_text}"
        found.append(Finding("ok" if place != "no field at all" else "warning", "cut replies", text))
    return found


def sampling_findings(seen: Seen, intent: Intent) -> list[Finding]:
    """Do temperature, seed and top-k take effect, and does greedy repeat itself?"""
    first, second, again = map(_said, seen.drawn)
    calm, wanted = _said(seen.calm), intent.sampling
    found, good = [], []
    if first == second == calm:
        level: Level = "fatal" if wanted.temperature > 0 else "warning"
        text = "temperature has no effect: at 2.0, replies with different seeds equal the greedy one"
        found.append(Finding(level, "sampling", f"{text}; the server overrides sampling values"))
    elif first == second:
        text = "seed has no effect: different seeds give one reply, so several samples of a question would be alike"
        found.append(Finding("warning", "sampling", text))
    else:
        good.append("temperature")
        if first == again:
            good.append("seed")
        else:
            found.append(Finding("note", "sampling", "sampled replies do not repeat under their seed on this server"))
    narrow = _said(seen.narrow)
    if first != second and narrow == calm:
        good.append("top_k")
    elif first != second and first == again == narrow:
        level = "fatal" if wanted.top_k else "warning"
        text = "top_k has no effect: at 1, a sampled reply is the same as without it"
        found.append(Finding(level, "sampling", f"{text}; the server overrides sampling values"))
    short, long = _said(seen.cut), _said(seen.easy)
    if short and long[: len(short)] == short:
        good.append("greedy repeats itself")
    elif short:
        text = "two greedy replies to one question differ: temperature 0 is ignored, or kernels round differently"
        found.append(Finding("note", "sampling", f"{text} from batch to batch (usual in bfloat16)"))
    return [Finding("ok", "sampling", f"in effect: {', '.join(good)}"), *found] if good else found


def _parted(intent: Intent, theirs: Sequence[int], ours: Sequence[int], where: str) -> Finding:
    """What it means that the server's own prompt ids are not those that we render."""
    template, opening = intent.template, _opening(intent, ours)
    if opening and not _opening(intent, theirs):
        text = f"the server's prompt lacks the {opening} that the template ends in"
        cure = (
            "it ignores template options, or it is llama.cpp, which takes a template that uses enable_thinking but "
            "never message.reasoning_content for one that does not think: mention message.reasoning_content in it"
        )
        return Finding("fatal", "prompt", f"{text} ({where}); {cure}")
    if template.encode(template.decode(theirs)) == list(theirs):
        text = f"the server renders another prompt than {template.name} does, {where}"
        return Finding("warning", "prompt", f"{text}; its own ids are kept, but check --tokenizer and template options")
    return Finding("fatal", "prompt", f"another tokenizer than the server's, {where}; correct --tokenizer")


def _opening(intent: Intent, prompt_ids: Sequence[int]) -> str:
    """The opening delimiter that a prompt ends in, one known from elsewhere where the target is to have none; or ""."""
    if intent.delimiters is not None:
        opened = opened_by_prompt(intent.delimiters, intent.template, prompt_ids)
        return intent.delimiters.open_text if opened else ""
    tail = intent.template.decode(prompt_ids[-8:]).rstrip()
    return next((opening for opening, _ in MARKS if tail.endswith(opening)), "")


def _took(reply: Reply, prompt: Prompt) -> bool | None:
    """Whether a reply's prompt was rendered our way, and not the other; None: cannot be told."""
    if prompt.ids == prompt.otherwise:
        return None
    if reply.prompt_ids:
        return list(reply.prompt_ids) != list(prompt.otherwise)
    counted = reply.usage.get("prompt_tokens")
    if counted is None or len(prompt.ids) == len(prompt.otherwise):
        return None
    return True if counted == len(prompt.ids) else False if counted == len(prompt.otherwise) else None


def _reasoning_state(intent: Intent, reply: Reply, prompt_ids: Sequence[int]) -> Literal["", "seen", "unclosed"]:
    """Whether a reply holds reasoning, as far as its ids or fields tell."""
    delimiters = intent.delimiters
    assert delimiters is not None
    if not reply.generated_ids:
        closed = delimiters.close_text in _text(intent.template, reply)
        return "seen" if reply.reasoning_text or closed else ""
    parts = split(delimiters, intent.template, prompt_ids, reply.generated_ids, reply.finish_reason)
    if parts.state == "cut_in_reasoning":
        return "unclosed" if reply.finish_reason in ENDED else "seen"
    return "seen" if parts.reasoning is not None else ""


def _worded(value: Any) -> bool:
    return isinstance(value, str) and value.strip() != ""


def _text(template: Template, reply: Reply) -> str:
    if reply.generated_ids:
        return template.decode(reply.generated_ids)
    return "".join(reply.spelled) or (reply.reasoning_text or "") + (reply.answer_text or "")


def _said(reply: Reply) -> Sequence[Any]:
    """What can be compared of two replies: ids, else tokens, else the text."""
    return list(reply.generated_ids or reply.spelled or (reply.reasoning_text or "") + (reply.answer_text or ""))
