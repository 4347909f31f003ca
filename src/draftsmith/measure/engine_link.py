"""The links inside a running engine: what it accepts, alone and with several requests at a time; its hidden states.

The same prompts go to the server as ids, greedily. What it says is put before our own target, so that an engine that
says other words (quantised, another model) is told from one that drafts worse behind the same words. Costs two passes
of the prompts through the server, one after another and four at a time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from draftsmith.draft.eagle3 import Eagle3Draft
from draftsmith.measure.acceptance import BROKEN_LENGTH
from draftsmith.measure.counters import CountedEngine
from draftsmith.measure.engine_states import UNREADABLE, states_link
from draftsmith.measure.export_link import Exported
from draftsmith.measure.links import Link, Suspect, measured, skipped
from draftsmith.measure.load import Load, Server, run_load
from draftsmith.measure.prompts import Prompt
from draftsmith.measure.scene import Alive, Scene
from draftsmith.measure.served_checks import connect
from draftsmith.measure.served_result import steps_agree
from draftsmith.measure.streaming import Streamed, cycles
from draftsmith.measure.walks import Walk, loss, shared, walk
from draftsmith.recipe import DiagnoseSettings
from draftsmith.target.reply import Sampling
from draftsmith.target.transport import Transport

TOGETHER = 4
"""Requests at a time in the second pass: enough for a batch, few enough for any server."""
OWN_WORDS = 0.95
"""Our float32 target says at least this share of what a bf16 engine with the same weights says."""


@dataclass(frozen=True, slots=True)
class Served:
    """What a server did with the prompts."""

    server: Server
    alone: Load
    together: Load


def engine_of(settings: DiagnoseSettings) -> CountedEngine | None:
    """Which engine `--server` is; None where no server is given.

    Raises:
        UserError: as `engine_links`.
    """

    async def asked(url: str) -> CountedEngine:
        async with Transport(settings.api_key_env, kept=False) as transport:
            server, _ = await connect("draft", url, settings.model, transport, settings.api_key_env)
            return server.engine

    return None if settings.server is None else asyncio.run(asked(settings.server))


def engine_links(
    scene: Scene,
    settings: DiagnoseSettings,
    draft: Eagle3Draft | None,
    export: Exported | None,
    replies: Sequence[Alive],
    say: Callable[[str], None],
) -> list[Link]:
    """The links `engine states` and `engine`; skipped, and said so, where they cannot be measured.

    Raises:
        UserError: the server does not answer, or is of no engine that counts drafts.
    """
    if settings.server is None:
        return [skipped(name, "no --server given") for name in ("engine states", "engine")]
    return asyncio.run(_measured(scene, settings, settings.server, draft, export, replies, say))


async def _measured(
    scene: Scene,
    settings: DiagnoseSettings,
    url: str,
    draft: Eagle3Draft | None,
    export: Exported | None,
    replies: Sequence[Alive],
    say: Callable[[str], None],
) -> list[Link]:
    async with Transport(settings.api_key_env, kept=False) as transport:
        server, context = await connect("draft", url, settings.model, transport, settings.api_key_env)
        states = states_link(scene, server, replies[0], export)
        if hands_out_states(states):
            return [states, skipped("engine", "this server hands out hidden states and does not draft")]
        say(f"{url}: {len(replies)} prompts, one after another and {TOGETHER} at a time")
        room = context or scene.context
        samplings = {
            one.key: Sampling(max_tokens=max(2, min(len(one.reply), room - len(one.prompt))), temperature=0.0)
            for one in replies
        }
        prompts = [Prompt(one.key, one.prompt) for one in replies]
        alone, together = [
            await run_load(server, prompts, samplings, scene.stop_ids, level, lambda: None) for level in (1, TOGETHER)
        ]
    return [states, _counted(scene, Served(server, alone, together), draft, export, replies)]


def hands_out_states(states: Link) -> bool:
    """Whether the server was started to hand out hidden states, read here or not. vLLM then drafts nothing, and counts
    as drafts what it copies out."""
    return states.value is not None or UNREADABLE in states.note


def _counted(
    scene: Scene, served: Served, draft: Eagle3Draft | None, export: Exported | None, replies: Sequence[Alive]
) -> Link:
    alone, together = served.alone, served.together
    engine = served.server.engine
    if not _drafted(alone):
        silent = Suspect(
            name="the engine drafts nothing",
            link="engine",
            found=f"its counters did not move over {alone.tokens} tokens",
            change="start it with the draft and its algorithm: " + HINTS[engine],
            restored=1.0,
            certain=True,
        )
        return skipped("engine", "nothing was drafted", [silent])
    k = len(alone.counted.per_position) or scene.draft_tokens
    one_by_one, at_once = (_walked(load, served.server, k) for load in (alone, together))
    found = []
    crowd = loss(one_by_one, at_once)
    if crowd.fell == "yes":
        found.append(
            Suspect(
                name="several requests at a time",
                link="engine",
                found=f"acceptance length is {one_by_one.length:.2f} one request at a time, {at_once.length:.2f} with "
                f"{TOGETHER} together, over the same prompts",
                change=CROWDED[engine],
                before=at_once.length,
                after=one_by_one.length,
                restored=1.0,
                certain=True,
            )
        )
    said = [Alive(one.key, one.prompt, reply.ids) for one, reply in zip(replies, alone.replies, strict=True)]
    best = _expected(scene, draft, export, replies, k)
    fall = None
    if best is not None:
        before, after = shared([best, one_by_one])
        fall = loss(before, after)
        found += _dead_draft(before, after, engine)
        found += _other_words(scene, said, before, after)
    note = f"{at_once.length:.2f} with {TOGETHER} requests at a time"
    if crowd.fell == "cannot tell":
        note += f" (cannot tell whether that is less: {crowd.questions} questions)"
    if k != scene.draft_tokens:
        note += f"; the engine drafts {k} tokens, compared at {k}"
    return measured("engine", one_by_one, fall, found, note)


def _expected(
    scene: Scene, draft: Eagle3Draft | None, export: Exported | None, replies: Sequence[Alive], k: int
) -> Walk | None:
    """What the draft the engine loads does over the reference replies, at the engine's own chain length."""
    if export is not None and export.served is not None:
        scene.look(replies, export.served.layers)
        words = [one.words(export.served.layers) for one in replies]
        return walk(export.served.draft, words, k, export.served.limit)
    if draft is None:
        return None
    scene.look(replies, draft.config.aux_layers)
    return walk(draft, [one.words(draft.config.aux_layers) for one in replies], k)


def _dead_draft(best: Walk, found: Walk, engine: CountedEngine) -> list[Suspect]:
    """Acceptance length 1 means broken, never that more data is needed (contract 8, P40)."""
    if found.length > BROKEN_LENGTH or best.length <= BROKEN_LENGTH:
        return []
    return [
        Suspect(
            name="the draft is not working",
            link="engine",
            found=f"the engine drafts and accepts next to nothing ({found.length:.2f}), where the same files give "
            f"{best.length:.2f} outside it",
            change="check that it runs EAGLE-3 and no other algorithm, and that the aux states reach the draft: "
            + HINTS[engine],
            before=found.length,
            after=best.length,
            restored=1.0,
            certain=True,
        )
    ]


def _other_words(scene: Scene, said: Sequence[Alive], best: Walk, found: Walk) -> list[Suspect]:
    """Whether the engine's target is another one than ours, as far as its words tell."""
    said = [one for one in said if len(one.reply) > 1]
    if not said:
        return []
    scene.look(said, ())
    share = float(np.average([one.agreement for one in said], weights=[len(one.reply) for one in said]))
    if share >= OWN_WORDS:
        return []
    return [
        Suspect(
            name="quantised or other target",
            link="engine",
            found=f"the run's target, in float32, says {share:.0%} of what the engine says greedily",
            change="serve the target that the draft was trained on, at its own precision; or capture and train on the "
            "served one",
            before=found.length,
            after=best.length,
            restored=0.5 if best.length > found.length else 0.0,
            certain=share < 0.5,
        )
    ]


def _walked(load: Load, server: Server, k: int) -> Walk:
    """The engine's own steps as a walk; where it does not show them, its counts are spread over the replies."""
    shown = [_steps(reply, server, k) for reply in load.replies]
    # Parts of a stream can be merged on the way, and then look like fewer and longer steps. SGLang counts no drafts to
    # hold against; what it tells of each reply is a count already.
    if server.engine != "sglang" and not steps_agree(shown, load.counted.drafts):
        shown = [None] * len(shown)
    mean = load.counted.length or 1.0
    emitted = [len(reply.ids) - 1 for reply in load.replies]
    steps = [
        own if own is not None else max(1, round(tokens / mean)) if tokens else 0
        for own, tokens in zip(shown, emitted, strict=True)
    ]
    cells = np.array(emitted, np.int64)
    rates = tuple(load.counted.conditional)
    keys = tuple(reply.key for reply in load.replies)
    return Walk(keys, cells, np.array(steps, np.int64), cells, np.zeros_like(cells), rates)


def _steps(reply: Streamed, server: Server, k: int) -> int | None:
    if server.engine == "sglang":
        return reply.verified
    found = cycles(reply, server.engine, k)
    return None if found is None else len(found)


def _drafted(load: Load) -> bool:
    return load.counted.drafts > 0 or any(reply.verified for reply in load.replies)


HINTS: dict[CountedEngine, str] = {
    "vllm": '--speculative-config \'{"method": "eagle3", "model": DRAFT, "num_speculative_tokens": 3}\'',
    "sglang": "--speculative-algorithm EAGLE3 --speculative-draft-model-path DRAFT",
    "llamacpp": "-md DRAFT --spec-type draft-eagle3 (without the type it loads the draft and says nothing)",
}
CROWDED: dict[CountedEngine, str] = {
    "llamacpp": "start llama.cpp with --no-spec-draft-backend-sampling, as `draftsmith serve` does: "
    "its draft's backend sampling mixes up requests that run together",
    "vllm": "look at the batch: padding or graph sizes; compare with --enforce-eager, and report it to vLLM",
    "sglang": "compare with --disable-cuda-graph and fewer running requests, and report it to SGLang",
}
