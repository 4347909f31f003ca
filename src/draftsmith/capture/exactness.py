"""How exact a reply's ids are: the engine's own, else rendered and verified against the server's counts, else rendered.

Ids the target gave are kept as they are. Where it gave none, the prompt is what the template renders, and the reply is
rebuilt from what its tokens spell (logprobs), else from its text fields and the delimiters; what the server tells of
tokens or counts then decides between `rendered_verified` and `rendered`. What cannot be trained on honestly is a
problem with a reason, never a guess.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Literal

from draftsmith.target.reply import Reply
from draftsmith.target.template import Template
from draftsmith.target.thinking import Delimiters, opened_by_prompt
from draftsmith.trace import IdsSource

Exactness = Literal["engine", "verified", "any"]
RANK: Mapping[IdsSource, int] = {"rendered": 0, "rendered_verified": 1, "engine": 2}
LEAST: Mapping[Exactness, int] = {"any": 0, "verified": 1, "engine": 2}
NOT_EXACT, REASONING_LOST = "ids not exact", "reasoning lost"
"""Classes of rejection (what stands before the colon of an `error`) that the gate knows a cure for."""
LEAST_GENERATED = 2
"""The first generated id comes from the target itself, so one id alone gives the draft nothing to learn."""


def with_ids(
    reply: Reply, render: Callable[[], Sequence[int]], template: Template, delimiters: Delimiters | None
) -> Reply:
    """The reply with prompt and generated ids, and where they come from.

    Args:
        reply: as the target gave it.
        render: our own prompt ids; called only where the target gave none.
        template: the target's.
        delimiters: the target's; None: it does not think.
    """
    if reply.prompt_ids and reply.generated_ids:
        return reply
    prompt_ids = reply.prompt_ids or render()
    exact = bool(reply.prompt_ids) or reply.usage.get("prompt_tokens") == len(prompt_ids)
    generated = reply.generated_ids
    if not generated:
        fields = _text(reply, delimiters, opened_by_prompt(delimiters, template, prompt_ids))
        # What the tokens spell comes before any parser; but not every server writes them as text.
        for text in ("".join(reply.spelled), fields) if reply.spelled else (fields,):
            generated = _encoded(text, reply, template)
            if verified := _verified(reply, generated, template):
                break
        exact = exact and verified
    source: IdsSource = "rendered_verified" if exact else "rendered"
    return replace(reply, prompt_ids=prompt_ids, generated_ids=generated, ids_source=source)


def misspelled(spelled: Sequence[str], ids: Sequence[int], template: Template) -> str:
    """Where the server's tokens (as texts) and our ids for the same text first part, for people; "" if nowhere.

    A token that holds a part of a character has no text of its own, and servers write stop tokens in ways of their own:
    those are taken as equal.
    """
    for at, index in enumerate(ids):
        ours = template.decode([index])
        if at == len(spelled):
            if index in template.stop_ids:
                return ""
            return f"at token {at} the server has nothing more, we have {index} {ours!r}"
        if spelled[at] != ours and "\ufffd" not in ours and index not in template.stop_ids:
            return f"at token {at} the server has {spelled[at]!r}, we have {index} {ours!r}"
    return (
        f"at token {len(ids)} the server has {spelled[len(ids)]!r}, we have nothing more" if spelled[len(ids) :] else ""
    )


def problem(reply: Reply, template: Template, exact: Exactness, delimiters: Delimiters | None, opened: bool) -> str:
    """Why a reply (from `with_ids`) cannot be kept, as `class: detail`; empty if it can.

    Args:
        reply: with its ids.
        template: the target's.
        exact: least exactness that the user wants.
        delimiters: the target's.
        opened: whether the prompt opened the reasoning.
    """
    rebuilt = reply.ids_source != "engine"
    if rebuilt and reply.tool_calls:
        return "tool call without ids: its text cannot be rebuilt from the parsed call"
    if rebuilt and delimiters and not reply.reasoning_text:
        lost = _lost_reasoning(reply, delimiters, opened)
        if lost:
            return f"{REASONING_LOST}: {lost}"
    if RANK[reply.ids_source] < LEAST[exact]:
        usage, where = reply.usage, misspelled(reply.spelled, reply.generated_ids, template) if reply.spelled else ""
        return (
            f"{NOT_EXACT}: the server gave no token ids; rendered {len(reply.prompt_ids)} + "
            f"{len(reply.generated_ids)} ids, its usage says {usage.get('prompt_tokens', 'nothing')} + "
            f"{usage.get('completion_tokens', 'nothing')}{'; ' if where else ''}{where}"
        )
    return too_short(reply.prompt_ids, reply.generated_ids)


def _lost_reasoning(reply: Reply, delimiters: Delimiters, opened: bool) -> str:
    """How the reasoning of a rebuilt reply without a reasoning field was lost; empty if nothing says that it was."""
    if delimiters.close_text in (reply.answer_text or "") or _holds(reply.generated_ids, delimiters.close_ids):
        return ""
    counted = reply.usage.get("completion_tokens")
    uncounted = counted - len(reply.generated_ids) if isinstance(counted, int) else 0
    unclosed = opened and reply.finish_reason == "stop"
    if reply.unread and (unclosed or uncounted > 0):
        return f"the server puts it into the field {reply.unread[0]!r}, which draftsmith does not read"
    if unclosed:
        return "the prompt opened it, the reply has no reasoning field and no closing delimiter"
    return ""


def _holds(ids: Sequence[int], ways: Sequence[tuple[int, ...]]) -> bool:
    return any(tuple(ids[i : i + len(way)]) == way for way in ways for i in range(len(ids)))


def too_short(prompt_ids: Sequence[int], generated_ids: Sequence[int]) -> str:
    """Why nothing can be supervised, or everything would be (P18); empty for a trace that has both parts."""
    if prompt_ids and len(generated_ids) >= LEAST_GENERATED:
        return ""
    return f"too short: nothing to train on in {len(prompt_ids)} + {len(generated_ids)} ids"


def _encoded(text: str, reply: Reply, template: Template) -> list[int]:
    """A reply's ids from its text, with the stop id where the target ended it."""
    ids, stop = template.encode(text), template.tokenizer.eos_token_id
    ended = reply.finish_reason in ("stop", "tool_calls") and stop is not None
    return [*ids, stop] if ended and ids[-1:] != [stop] else ids


def _verified(reply: Reply, ids: Sequence[int], template: Template) -> bool:
    """Whether ids are the server's as far as it tells: token by token, or by their number."""
    if reply.spelled:
        return not misspelled(reply.spelled, ids, template)
    return reply.usage.get("completion_tokens") == len(ids)


def _text(reply: Reply, delimiters: Delimiters | None, opened: bool) -> str:
    """The reply as one text, the way the target must have written it. No closing delimiter is invented (P03)."""
    reasoning, answer = reply.reasoning_text, reply.answer_text or ""
    if not reasoning or delimiters is None:
        return (reasoning or "") + answer
    opening = "" if opened else delimiters.open_text
    return opening + reasoning + (delimiters.close_text + answer if answer else "")
