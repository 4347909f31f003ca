"""A run as a chain of stages: what each is made from, in which order, what is skipped and what has gone stale.

One table says everything about a stage: its folder, its settings, its command and what it reads. Stage modules are
imported when a stage really runs, so that looking at a finished run takes well under a second.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from draftsmith import artifacts
from draftsmith.artifacts import Plan, Status
from draftsmith.errors import UserError
from draftsmith.progress import EVENTS, Progress, clock, shown
from draftsmith.recipe import (
    CaptureSettings,
    ExportSettings,
    ExtractSettings,
    ImportSettings,
    MeasureSettings,
    Recipe,
    ReportSettings,
    ServingSettings,
    Settings,
    TrainSettings,
    VocabSettings,
    arm_recipe,
)

RECIPE = "recipe.json"


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of stage."""

    command: str
    """Its name on the command line and in recipes."""
    folder: str
    settings: type[Settings]
    module: str
    reads: tuple[str, ...]
    """Folders of stages it is made from; those of OPTIONAL only where they exist."""


KINDS = (
    Kind("capture", "traces", CaptureSettings, "draftsmith.capture.engine", ()),
    Kind("import", "traces", ImportSettings, "draftsmith.data.importing", ()),
    Kind("vocab", "vocab", VocabSettings, "draftsmith.data.vocab", ("traces",)),
    Kind("extract", "hidden", ExtractSettings, "draftsmith.hidden.extract", ("traces",)),
    Kind("train", "draft", TrainSettings, "draftsmith.train.loop", ("traces", "vocab", "hidden")),
    Kind("export", "export", ExportSettings, "draftsmith.export.stage", ("traces", "hidden", "draft")),
    Kind("measure", "measure", MeasureSettings, "draftsmith.measure.stage", ("traces", "hidden", "draft")),
    Kind("report", "report", ReportSettings, "draftsmith.report.page", ()),
)
BY_COMMAND = {kind.command: kind for kind in KINDS}
CHOOSING = frozenset({"questions", "split", "limit", "held_out", "samples"})
"""What settles which questions are asked, not what comes back for one: traces of an earlier choice stay good."""
REPORTED = ("traces", "vocab", "hidden", "draft", "export", "measure")
"""The report shows whatever of these there is."""


def plan(run: Path, command: str, settings: Settings) -> Plan:
    """What the stage of `command` would be made from, now.

    Raises:
        UserError: an input is missing, with the command that makes it.
    """
    kind = BY_COMMAND[command]
    inputs = {folder: str(artifacts.manifest(run, folder)["fingerprint"]) for folder in kind.reads}
    if command == "report":
        there = [folder for folder in REPORTED if (run / folder / artifacts.MANIFEST).exists()]
        inputs = {folder: str(artifacts.manifest(run, folder)["fingerprint"]) for folder in there}
        guests = [run / "measure" / name for name in artifacts.GUESTS]
        inputs |= {guest.stem: artifacts.fingerprint_file(guest) for guest in guests if guest.exists()}
    if isinstance(settings, CaptureSettings | ImportSettings):
        inputs |= _question_inputs(settings)
    if isinstance(settings, MeasureSettings) and settings.questions is not None:
        from draftsmith.capture.sources import source_fingerprint

        inputs["questions"] = source_fingerprint(settings.questions, "train")
    if isinstance(settings, ExtractSettings | MeasureSettings) and settings.target:
        inputs["target"] = _model_fingerprint(settings.target)
    if isinstance(settings, TrainSettings) and settings.from_:
        inputs["from"] = _model_fingerprint(settings.from_)
    stage = "traces" if command == "import" else kind.folder
    values = settings.shaping()
    if stage == "traces":
        return Plan(stage, {"made_by": command, **values}, inputs, may_grow=CHOOSING)
    return Plan(stage, values, inputs)


def run_stage(
    run: Path, command: str, settings: Settings, progress: Progress, *, force: bool = False, new_run: bool = False
) -> tuple[dict[str, Any], bool]:
    """Makes one stage, or finds it made; returns its manifest and whether it was made now.

    Args: as `artifacts.build`.

    Raises:
        DraftsmithError: as the stage does; what it finished is kept.
    """
    kind = BY_COMMAND[command]
    the_plan = plan(run, command, settings)

    def make(stage: artifacts.Stage) -> dict[str, Any]:
        counts: dict[str, Any] = import_module(kind.module).build(stage, settings, progress)
        return counts

    # A report is only a view: it is remade whenever what it shows has changed.
    replace = force or command == "report"
    with artifacts.locked(run):
        progress.events = run / EVENTS
        with progress.command(command):
            later = downstream(kind.folder)
            return artifacts.build(run, the_plan, make, force=replace, new_run=new_run, invalidates=later)


def downstream(folder: str) -> tuple[str, ...]:
    """Folders of the stages that are made, directly or not, from `folder`."""
    found = {folder}
    for kind in KINDS:
        if found & set(kind.reads):
            found.add(kind.folder)
    return tuple(name for name in REPORTED if name in found and name != folder)


def run_recipe(recipe: Recipe, run: Path, progress: Progress, *, force: bool = False) -> None:
    """Runs a recipe's chain (or each of its arms' chains) in `run`; finished stages are skipped.

    Raises:
        DraftsmithError: as the first stage that stops; the same command goes on from there.
    """
    if recipe.arms:
        for arm in recipe.arms:
            progress.say(f"== arm {arm} ==")
            run_recipe(arm_recipe(recipe, arm), run / arm, progress, force=force)
        from draftsmith.report.compare import compare_page

        progress.say(f"report: {compare_page(run, list(recipe.arms))}")
        return
    with artifacts.locked(run), artifacts.room_on_disk(run):
        artifacts.write_json(run / RECIPE, recipe.model_dump(mode="json", by_alias=True, exclude_none=True))
    for command, settings in chain(recipe):
        if command == "report" and recipe.serving is not None:  # the page shows what is served as well
            _serve(recipe, recipe.serving, run, progress)
        manifest, made = run_stage(run, command, settings, progress, force=force)
        took = f"done in {clock(manifest['seconds'])}" if made else "already done, skipped"
        progress.say(f"{command}: {took} ({summary(manifest['counts'])})")


def _serve(recipe: Recipe, settings: ServingSettings, run: Path, progress: Progress) -> None:
    from draftsmith.measure.serving_view import finished

    found = finished(run, settings, recipe.measure)
    how = "already done, skipped" if found else "done"
    if found is None:
        from draftsmith.measure.serving import serve_and_measure

        found = serve_and_measure(run, settings, recipe.measure, progress)
    same = {True: "outputs equal the baseline's", False: "outputs differ from the baseline's", None: "not compared"}
    progress.say(f"serving: {how} ({settings.engine}, {same[found['lossless']]})")


def chain(recipe: Recipe) -> Iterator[tuple[str, Settings]]:
    """The stages of a recipe without arms, in order, with their settings."""
    if recipe.capture is not None:
        yield "capture", recipe.capture
    if recipe.import_ is not None:
        yield "import", recipe.import_
    yield "vocab", recipe.vocab
    yield "extract", recipe.extract
    yield "train", recipe.train
    yield "export", recipe.export
    yield "measure", recipe.measure
    yield "report", ReportSettings()


def run_status(run: Path) -> dict[str, Status]:
    """Every stage of a run: done, partial, stale (and why) or missing.

    The settings to compare with are the recipe's, where the run was made by one, else those of the stage itself: then
    only its inputs can have changed.

    Raises:
        UserError: no such folder.
    """
    if not run.is_dir():
        raise UserError(f"{run}: expected a run folder, found none")
    wanted: dict[str, Callable[[], Plan]] = {}
    if (run / RECIPE).exists():
        recipe = Recipe.model_validate(artifacts.read_json(run / RECIPE))
        wanted = {BY_COMMAND[c].folder: _planner(run, c, s) for c, s in chain(recipe)}
    return {folder: _stage_status(run, folder, wanted.get(folder)) for folder in (*REPORTED, "report")}


def summary(counts: dict[str, Any]) -> str:
    """A manifest's plain counts in one line."""
    plain = [(name, value) for name, value in counts.items() if isinstance(value, int | float | str)]
    return ", ".join(f"{name.replace('_', ' ')} {shown(value)}" for name, value in plain[:8])


def _planner(run: Path, command: str, settings: Settings) -> Callable[[], Plan]:
    return lambda: plan(run, command, settings)


def _stage_status(run: Path, folder: str, wanted: Callable[[], Plan] | None) -> Status:
    stored = next(
        (
            path
            for path in (run / folder / artifacts.MANIFEST, run / f"{folder}.partial" / artifacts.PLAN)
            if path.exists()
        ),
        None,
    )
    if stored is None:
        return Status("missing")
    values = artifacts.read_json(stored)
    if wanted is None:
        settings = dict(values["settings"])
        command = settings.pop("made_by", None) or next(k.command for k in KINDS if k.folder == folder)
        wanted = _planner(run, command, BY_COMMAND[command].settings.model_validate(settings))
    try:
        return artifacts.status(run, wanted())
    except UserError as error:  # an input is gone, so this cannot be told to be up to date
        return Status("stale", (str(error),), values.get("counts", {}))


def _question_inputs(settings: CaptureSettings | ImportSettings) -> dict[str, str]:
    from draftsmith.capture.sources import source_fingerprint

    inputs = {"questions": source_fingerprint(settings.questions, settings.split)}
    if settings.tokenizer:
        inputs["tokenizer"] = _model_fingerprint(settings.tokenizer)
    if isinstance(settings, CaptureSettings):
        if settings.local is None and not settings.server:
            raise UserError("capture: expected --server URL or --local MODEL, found neither")
        if settings.local is not None and settings.server:
            raise UserError("capture: expected either --server or --local, found both")
        inputs["target"] = _model_fingerprint(settings.local) if settings.local else f"served {settings.model}"
    return inputs


def _model_fingerprint(name: str) -> str:
    """Of a folder: its content; of the embedded model or a hub id: its name."""
    from draftsmith.target.embedded import EMBEDDED, GGUF_SHA256

    folder = Path(name).expanduser()
    if name == EMBEDDED:
        return GGUF_SHA256[:16]
    return artifacts.fingerprint_model(folder) if folder.is_dir() else name


def describe(recipe: Recipe, run: Path) -> dict[str, Any]:
    """What `run --dry-run` shows: every stage with its resolved settings; nothing is read or downloaded."""
    if recipe.arms:
        return {arm: describe(arm_recipe(recipe, arm), run / arm) for arm in recipe.arms}
    stages = {command: json.loads(settings.model_dump_json(by_alias=True)) for command, settings in chain(recipe)}
    return {"run": str(run), "stages": stages}
