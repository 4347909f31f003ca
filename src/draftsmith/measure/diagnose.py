"""Why is acceptance low? A chain of measuring points over the same held-out replies, each compared with the next.

    data -> trained draft on stored states -> simulated chain -> reference decoder on the live target
         -> exported files as the engine reads them -> the engine's hidden states -> the engine's counters

The first link where acceptance falls beyond noise is named, and with it the suspect whose repair, applied to a copy in
memory, gives back most. Nothing on disk is changed but `RUN/measure/diagnosis.json`. Costs the target in float32, one
speculative decode per question, and a draft forward per suspect.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import get_args

from draftsmith.artifacts import read_json, write_json
from draftsmith.draft.checkpoint import load_weights
from draftsmith.draft.eagle3 import Eagle3Draft
from draftsmith.draft.formats import OWN_BLOCK, format_of
from draftsmith.draft.loading import read_any_draft
from draftsmith.errors import UserError
from draftsmith.export.engine_view import look
from draftsmith.export.launching import GGUF_DRAFT
from draftsmith.measure.counters import CountedEngine
from draftsmith.measure.engine_link import engine_links, engine_of
from draftsmith.measure.export_link import Exported, export_suspects, open_export
from draftsmith.measure.links import Diagnosis, Link, concluded, measured, skipped
from draftsmith.measure.prompts import Prompt, question_prompts
from draftsmith.measure.scene import Alive, Scene, set_up
from draftsmith.measure.served import draft_fingerprint
from draftsmith.measure.stored import Spoken, look_at_stored, speak
from draftsmith.measure.trained_links import trained_links
from draftsmith.measure.walks import walk
from draftsmith.progress import Progress
from draftsmith.recipe import DiagnoseSettings, Engine, MeasureSettings

RESULT = "diagnosis.json"
BEFORE_EXPORT = ("data", "training", "chain", "live")


def diagnose(run: Path, settings: DiagnoseSettings, progress: Progress) -> Diagnosis:
    """Measures the chain of a run and names the guilty link; writes `RUN/measure/diagnosis.json`.

    Raises:
        UserError: no draft, traces or hidden states, a target or draft that cannot be read, a server that does not
            answer.
    """
    say: Callable[[str], None] = lambda text: progress.say(f"diagnose: {text}")  # noqa: E731
    served_by = engine_of(settings)
    scene = set_up(run, settings)
    draft, unread = _reference(scene)
    folder, engine = _exported(scene, served_by)
    if folder is not None:
        look(folder, engine, scene.store.target, scene.head)  # what cannot be read is said before the target speaks
    asked = _asked(scene)
    links: list[Link] = []
    replies = [Alive(t.trace_id, tuple(t.prompt_ids), tuple(t.generated_ids)) for t in scene.held_out]
    if draft is None:
        links += [skipped(name, unread) for name in BEFORE_EXPORT]
    else:
        say(f"{len(scene.held_out)} held-out replies: stored states and the live target")
        prompts = [(trace.trace_id, tuple(trace.prompt_ids)) for trace in scene.held_out]
        spoken = speak(scene, prompts, draft, draft.config.aux_layers)
        links += _trained(scene, draft, spoken, asked, say)
        replies = spoken.alive
    export = None
    if folder is None:
        links.append(skipped("export", f"nothing is exported in {run / 'export'}"))
    else:
        say(f"{folder} as {engine} reads it, and what would put it right")
        link, export = _export(scene, draft, folder, engine, replies)
        links.append(link)
    links += engine_links(scene, settings, draft, export, replies, say)
    found = concluded(links, scene.draft_tokens, len(scene.held_out), engine)
    (run / "measure").mkdir(exist_ok=True)
    about = {"draft": draft_fingerprint(run), "of": settings.draft}
    write_json(run / "measure" / RESULT, {**found.to_json(), **about})
    return found


def _reference(scene: Scene) -> tuple[Eagle3Draft | None, str]:
    """The draft as it should be: the trained one, or another's as we read it; None, and why, where it is unreadable."""
    if scene.trained is not None:
        return scene.trained, ""
    if scene.settings.draft is None:
        raise UserError(f"{scene.run}: expected a trained draft (draft/best) or --draft DIR, found neither")
    facts = scene.store.target
    try:
        found = read_any_draft(
            Path(scene.settings.draft), target_layers=facts["num_layers"], target_model_type=facts["model_type"]
        )
        draft = Eagle3Draft(found.config)
        draft.set_embedding(scene.head.embed_tokens.float())
        load_weights(draft, {"lm_head.weight": scene.head.lm_head, **found.tensors}, scene.settings.draft)
    except UserError as error:
        return None, str(error)
    return draft.float().to(scene.device).eval(), ""


def _trained(
    scene: Scene, draft: Eagle3Draft, spoken: Spoken, asked: list[Prompt], say: Callable[[str], None]
) -> list[Link]:
    if scene.trained is None:  # what its files say and what was trained cannot be told apart
        why = "a draft by others: all that is known of it are its files"
        return [*(skipped(name, why) for name in BEFORE_EXPORT[:3]), measured("live", spoken.walk)]
    if tuple(draft.config.aux_layers) != tuple(scene.store.target["layers"]):
        raise UserError(
            f"{scene.run}: the draft reads outputs of layers {list(draft.config.aux_layers)}, stored are those of "
            f"{list(scene.store.target['layers'])}; extract and train again"
        )
    replies = None
    if asked:
        say(f"the questions asked: {scene.settings.questions}")
        replies = speak(scene, [(one.key, one.ids) for one in asked], draft, draft.config.aux_layers)
    return trained_links(scene, draft, look_at_stored(scene), spoken, replies)


def _asked(scene: Scene) -> list[Prompt]:
    """`--questions`, rendered as they are asked; none where none were given."""
    if scene.settings.questions is None:
        return []
    assert scene.template is not None
    template = scene.template
    if scene.settings.template_options:
        template = replace(template, options={**template.options, **scene.settings.template_options})
    asking = MeasureSettings(questions=scene.settings.questions, limit=scene.settings.limit)
    share = float(scene.metadata["held_out"])
    return question_prompts(asking, template, scene.metadata, scene.run / "traces", share).prompts


def _export(
    scene: Scene, draft: Eagle3Draft | None, folder: Path, engine: Engine, replies: list[Alive]
) -> tuple[Link, Exported]:
    export = open_export(scene, folder, engine, replies)
    best = export.walk
    if draft is not None:
        scene.look(replies, draft.config.aux_layers)
        best = walk(draft, [one.words(draft.config.aux_layers) for one in replies], scene.draft_tokens)
    fall, suspects = export_suspects(scene, export, scene.trained, replies, best)
    note = export.refusal and f"would not run: {export.refusal}"
    return measured("export", export.walk, fall, suspects, note), export


def _exported(scene: Scene, served_by: CountedEngine | None) -> tuple[Path | None, Engine]:
    """The folder to look at and the engine that reads it: the server's, where there is one and it was exported for."""
    settings = scene.settings
    if settings.draft is not None:
        return Path(settings.draft), settings.engine or _engine_of(Path(settings.draft))
    there: list[Engine] = [engine for engine in get_args(Engine) if (scene.run / "export" / engine).is_dir()]
    served = [engine for engine in there if served_by == ("vllm" if engine == "speculators" else engine)]
    first: Engine = next(iter([*served, *there]), "vllm")
    engine = settings.engine or first
    folder = scene.run / "export" / engine
    if settings.engine is not None and not folder.is_dir():
        raise UserError(f"{folder}: not exported; `draftsmith export --run {scene.run} --engine {engine}` does it")
    return (folder if folder.is_dir() else None), engine


def _engine_of(folder: Path) -> Engine:
    if (folder / GGUF_DRAFT).exists():
        return "llamacpp"
    raw = read_json(folder / "config.json")
    own = raw.get(OWN_BLOCK, {}).get("format")
    return "speculators" if format_of(raw) == "speculators" else "sglang" if own == "sglang" else "vllm"
