"""The command line: one command per stage, no logic. Flags come from the settings in `recipe.py`.

Exit codes: 0 done, 1 a fault of ours, 2 a user's mistake or an unusable input, 3 stopped by a gate, 130 interrupted and
resumable.
"""

from __future__ import annotations

import json as json_library
from pathlib import Path
from typing import Annotated, Any

from cyclopts import App, Parameter
from rich.console import Console
from rich.table import Table

from draftsmith import __version__, pipeline
from draftsmith.artifacts import Status
from draftsmith.progress import Progress, harmless
from draftsmith.recipe import (
    CaptureSettings,
    ExportSettings,
    ExtractSettings,
    ImportSettings,
    MeasureSettings,
    ReportSettings,
    Settings,
    TrainSettings,
    VocabSettings,
    load_recipe,
)

app = App(
    name="draftsmith",
    version=__version__,
    suppress_keyboard_interrupt=False,
    help="Turn a served reasoning model into a faster one: capture, train an EAGLE-3 draft, export, measure.",
)

Run = Annotated[Path, Parameter(help="Run folder; every stage lives in it.")]
Force = Annotated[bool, Parameter(negative=(), help="Make the stage again although other settings made what is there.")]
Json = Annotated[bool, Parameter(negative=(), help="Print the result as JSON on standard output.")]
Quiet = Annotated[bool, Parameter(negative=(), help="No progress, only the result and errors.")]
Flat = Parameter(name="*")


@app.command
def capture(
    *,
    run: Run,
    settings: Annotated[CaptureSettings, Flat] = CaptureSettings(),
    force: Force = False,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Questions in, traces out: what the target itself thinks and answers, token-exact."""
    _stage(run, "capture", settings, force, json, quiet)


@app.command(name="import")
def import_(
    *,
    run: Run,
    settings: Annotated[ImportSettings, Flat] = ImportSettings(),
    force: Force = False,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """A dataset's own answers as traces, to compare a draft trained on static text with one trained on captures."""
    _stage(run, "import", settings, force, json, quiet)


@app.command
def vocab(
    *,
    run: Run,
    settings: Annotated[VocabSettings, Flat] = VocabSettings(),
    force: Force = False,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """The draft vocabulary, from what the target says most."""
    _stage(run, "vocab", settings, force, json, quiet)


@app.command
def extract(
    *,
    run: Run,
    settings: Annotated[ExtractSettings, Flat] = ExtractSettings(),
    force: Force = False,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """The target's hidden states over the traces."""
    _stage(run, "extract", settings, force, json, quiet)


@app.command
def train(
    *,
    run: Run,
    settings: Annotated[TrainSettings, Flat] = TrainSettings(),
    force: Force = False,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """The EAGLE-3 draft, from scratch or from another one."""
    _stage(run, "train", settings, force, json, quiet)


@app.command
def export(
    *,
    run: Run,
    settings: Annotated[ExportSettings, Flat] = ExportSettings(),
    force: Force = False,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """The draft as the serving engine loads it, checked against the trainer's logits."""
    _stage(run, "export", settings, force, json, quiet)


@app.command
def measure(
    *,
    run: Run,
    settings: Annotated[MeasureSettings, Flat] = MeasureSettings(),
    force: Force = False,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Acceptance length, losslessness and speed on held-out questions."""
    _stage(run, "measure", settings, force, False, quiet)
    _results({"": run}, json)


@app.command
def report(*, run: Run, json: Json = False, quiet: Quiet = False) -> None:
    """One self-contained HTML page about the run."""
    _stage(run, "report", ReportSettings(), False, json, quiet)


@app.command
def status(run: Run, *, json: Json = False) -> None:
    """Every stage of a run: done, partial (how far), stale (because of what) or missing."""
    found = pipeline.run_status(run)
    if json:
        print(json_library.dumps({name: _as_json(state) for name, state in found.items()}))
        return
    table = Table(box=None, pad_edge=False)
    for heading in ("stage", "state", "what"):
        table.add_column(heading)
    for name, state in found.items():
        table.add_row(name, state.kind, harmless("; ".join(state.changes) or pipeline.summary(state.counts)))
    Console(highlight=False).print(table, markup=False)


@app.command(name="run")
def run_(
    recipe: Annotated[Path, Parameter(help="Recipe (YAML).")],
    *,
    run: Annotated[Path | None, Parameter(help="Run folder; default: the recipe's.")] = None,
    set: Annotated[list[str], Parameter(negative=(), help="Override, e.g. --set train.lr=4e-4; repeat.")] = [],
    dry_run: Annotated[
        bool, Parameter(negative=(), help="Show every resolved setting; read and load nothing.")
    ] = False,
    force: Force = False,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """The whole chain from a recipe; what is finished is skipped, what was interrupted goes on."""
    loaded = load_recipe(recipe, set)
    folder = run or Path(loaded.run)
    if dry_run:
        print(json_library.dumps(pipeline.describe(loaded, folder), indent=1, ensure_ascii=False))
        return
    pipeline.run_recipe(loaded, folder, Progress(quiet=quiet), force=force)
    arms = {arm: folder / arm for arm in loaded.arms} or {"": folder}
    _results(arms, json)
    if not json:
        print(f"report: {folder / 'report' / 'report.html'}")


@app.command
def demo(
    *,
    run: Run = Path("runs/demo"),
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """The whole chain on the embedded model, with questions of the project's own."""
    from draftsmith.recipes import recipe_path

    run_(recipe_path("smollm2"), run=run, json=json, quiet=quiet)


def _stage(run: Path, command: str, settings: Settings, force: bool, json: bool, quiet: bool) -> None:
    progress = Progress(quiet=quiet)
    manifest, made = pipeline.run_stage(run, command, settings, progress, force=force)
    if json:
        print(json_library.dumps(manifest, ensure_ascii=False))
    else:
        folder = run / pipeline.BY_COMMAND[command].folder
        progress.say(
            f"{folder}: {'done' if made else 'already done, skipped'} ({pipeline.summary(manifest['counts'])})"
        )


def _results(arms: dict[str, Path], json: bool) -> None:
    from draftsmith.measure.summary import comparison_table, result_table

    files = {arm: folder / "measure" / "result.json" for arm, folder in arms.items()}
    if json:
        results = {arm: json_library.loads(file.read_text(encoding="utf-8")) for arm, file in files.items()}
        print(json_library.dumps(results if len(arms) > 1 else next(iter(results.values()))))
    elif len(arms) > 1:
        Console().print(comparison_table(files))
    else:
        Console().print(result_table(next(iter(files.values()))))


def _as_json(state: Status) -> dict[str, Any]:
    return {"state": state.kind, "changes": list(state.changes), "counts": state.counts}
