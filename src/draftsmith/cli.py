"""The command line: one command per stage, no logic. Flags come from the settings in `recipe.py`.

Exit codes: 0 done, 1 a fault of ours, 2 a user's mistake or an unusable input, 3 stopped by a gate, 130 interrupted and
resumable.
"""

from __future__ import annotations

import json as json_library
import shlex
from pathlib import Path
from typing import Annotated, Any

from cyclopts import App, Parameter
from rich.console import Console
from rich.table import Table

from draftsmith import __version__, pipeline
from draftsmith.artifacts import Status
from draftsmith.errors import GateStop, UserError
from draftsmith.progress import Progress, harmless
from draftsmith.recipe import (
    CaptureSettings,
    DatasetSettings,
    DiagnoseSettings,
    Engine,
    ExportSettings,
    ExtractSettings,
    ImportSettings,
    InspectSettings,
    MeasureSettings,
    PayoffSettings,
    ReportSettings,
    ServedSettings,
    ServeSettings,
    Settings,
    TrainSettings,
    VocabSettings,
    load_recipe,
)

app = App(
    name="draftsmith",
    version=__version__,
    suppress_keyboard_interrupt=False,
    default_parameter=Parameter(negative_iterable=()),
    help="Turn a served reasoning model into a faster one: capture, train an EAGLE-3 draft, export, measure.",
)

Run = Annotated[Path, Parameter(help="Run folder; every stage lives in it.")]
Force = Annotated[bool, Parameter(negative=(), help="Make the stage again although other settings made what is there.")]
Json = Annotated[bool, Parameter(negative=(), help="Print the result as JSON on standard output.")]
Quiet = Annotated[bool, Parameter(negative=(), help="No progress, only the result and errors.")]
Flat = Parameter(name="*")


@app.command
def probe(
    url: Annotated[str, Parameter(help="Base URL of an OpenAI-compatible server.")],
    *,
    settings: Annotated[CaptureSettings, Flat] = CaptureSettings(),
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """What a server returns, and whether a capture from it can be trusted; takes the flags the capture will have."""
    from draftsmith.capture import probing

    asked = settings.model_copy(update={"server": [url, *settings.server]})
    verdict = probing.probe_command(asked, Progress(quiet=quiet or json))
    print(json_library.dumps(verdict.as_json(), ensure_ascii=False) if json else probing.screen(verdict))
    if verdict.fatal:
        raise GateStop(f"{verdict.url}: not fit for a capture: {verdict.fatal[0].text}")


@app.command
def capture(
    *,
    run: Run,
    settings: Annotated[CaptureSettings, Flat] = CaptureSettings(),
    new_run: Annotated[
        bool, Parameter(negative=(), help="Begin anew; what is there is kept under a dated name beside.")
    ] = False,
    force: Force = False,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Questions in, traces out: what the target itself thinks and answers, token-exact."""
    _stage(run, "capture", settings, force, json, quiet, new_run)


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
def inspect(
    path: Annotated[Path, Parameter(help="Run or traces folder, or another tool's JSONL, Parquet or folder.")],
    *,
    settings: Annotated[InspectSettings, Flat] = InspectSettings(),
    html: Annotated[Path | None, Parameter(help="Also write one self-contained page.")] = None,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """How much training data there is, how exact and how long it is, and what is wrong with it."""
    from draftsmith.data import inspect as data_inspect
    from draftsmith.report import inspection

    found = data_inspect.inspect(path, settings, Progress(quiet=quiet or json))
    if html is not None:
        inspection.write_inspection_page(html, found)
    if json:
        print(json_library.dumps(found.as_json(), ensure_ascii=False))
    else:
        inspection.print_inspection(found, Console(highlight=False))


@app.command(name="export-dataset")
def export_dataset(
    *,
    out: Annotated[Path, Parameter(help="Folder to make.")],
    run: Annotated[Path | None, Parameter(help="Run folder whose traces are written.")] = None,
    traces: Annotated[Path | None, Parameter(help="Traces folder, instead of --run.")] = None,
    settings: Annotated[DatasetSettings, Flat] = DatasetSettings(),
    force: Annotated[bool, Parameter(negative=(), help="Replace a dataset that is there.")] = False,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Traces as training data of speculators or SpecForge, or as a Hugging Face dataset with a card."""
    from draftsmith.data import exporting

    progress = Progress(quiet=quiet or json)
    counts = exporting.export_dataset(exporting.traces_folder(run, traces), out, settings, progress, force=force)
    if json:
        print(json_library.dumps(counts))
    else:
        progress.say(f"{out}: done ({pipeline.summary(counts)})")


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


export_app = App(name="export")
app.command(export_app)


@export_app.default
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


@export_app.command
def check(
    path: Annotated[Path, Parameter(help="Run folder, whose exports are checked again, or anybody's draft folder.")],
    *,
    engine: Annotated[
        Engine | None, Parameter(help="By whose rules; default: the format that the folder is in.")
    ] = None,
    run: Annotated[Path | None, Parameter(help="Run folder, for its target's head and held-out rows.")] = None,
    compare: Annotated[Path | None, Parameter(help="Draft folder whose names, shapes and config are wanted.")] = None,
    json: Json = False,
) -> None:
    """What an engine reads, assumes, ignores and drops of a draft, and whether it computes what was trained."""
    from draftsmith.export import checking

    found = checking.check_path(path, engine, run, compare)
    print(json_library.dumps(found.to_json(), ensure_ascii=False) if json else found.text())
    if found.faults:
        raise UserError(found.verdict)


@app.command
def measure(
    *,
    run: Run,
    settings: Annotated[MeasureSettings, Flat] = MeasureSettings(),
    served: Annotated[ServedSettings, Flat] = ServedSettings(),
    force: Force = False,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Acceptance length, losslessness and speed on held-out questions; with --server, on engines that serve them."""
    if served.server or served.baseline_server:
        from draftsmith.measure import served as measured
        from draftsmith.measure.summary import served_table

        result = measured.measure_served(run, settings, served, Progress(quiet=quiet or json))
        if json:
            print(json_library.dumps(result, ensure_ascii=False))
        else:
            Console(highlight=False).print(served_table(result), markup=False)
        return
    from draftsmith.measure.results_view import print_results

    _stage(run, "measure", settings, force, False, quiet)
    print_results({"": run}, json)


@app.command
def diagnose(
    run: Run,
    *,
    settings: Annotated[DiagnoseSettings, Flat] = DiagnoseSettings(),
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Which link of the chain makes acceptance low, and what to change: measured link by link, with suspects tried."""
    from draftsmith.measure import diagnose as diagnosing
    from draftsmith.measure.diagnosis_words import print_diagnosis

    found = diagnosing.diagnose(run, settings, Progress(quiet=quiet or json))
    if json:
        print(json_library.dumps(found.to_json(), ensure_ascii=False))
    else:
        print_diagnosis(found, Console(highlight=False))


@app.command
def payoff(
    *,
    run: Run,
    settings: Annotated[PayoffSettings, Flat] = PayoffSettings(),
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """What a draft would gain, from step times and acceptance: by draft tokens and requests at a time."""
    from draftsmith.measure.paying import payoff_table, work_out

    found = work_out(run, settings, Progress(quiet=quiet or json))
    if json:
        print(json_library.dumps(found, ensure_ascii=False))
        return
    Console(highlight=False).print(payoff_table(found), markup=False)
    for line in (*found["words"], found["bigger_target"], *found["cautions"]):
        print(line)
    print(f"(acceptance: {found['acceptance_from']}; steps: {found['steps_from']})")


@app.command
def report(*, run: Run, json: Json = False, quiet: Quiet = False) -> None:
    """One self-contained HTML page about the run."""
    _stage(run, "report", ReportSettings(), False, json, quiet)


@app.command
def serve(
    run: Run,
    *extra: Annotated[str, Parameter(help="After --: further arguments for the engine, as it knows them.")],
    settings: Annotated[ServeSettings, Flat] = ServeSettings(),
    dry_run: Annotated[bool, Parameter(negative=(), help="Print the command and start nothing.")] = False,
    quiet: Quiet = False,
) -> None:
    """An engine with the run's target and draft, until Ctrl-C; --baseline serves the target alone."""
    from draftsmith.serve import commands, process

    launch = commands.launch_of(run, settings, extra)
    if dry_run:
        print(shlex.join(commands.command(launch)))
    else:
        process.serve(launch, run / commands.log_name(launch), Progress(quiet=quiet), settings.wait)


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


@app.command
def watch(run: Annotated[Path, Parameter(help="Run folder that something works in.")], *, json: Json = False) -> None:
    """What works in a run folder right now, followed from another terminal; --json prints how it stands, once."""
    from draftsmith import watching

    if json:
        print(json_library.dumps(watching.look(run)))
    else:
        watching.follow(run, Console(highlight=False))


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
    from draftsmith.measure.results_view import print_results, print_served

    loaded = load_recipe(recipe, set)
    folder = run or Path(loaded.run)
    if dry_run:
        print(json_library.dumps(pipeline.describe(loaded, folder), indent=1, ensure_ascii=False))
        return
    pipeline.run_recipe(loaded, folder, Progress(quiet=quiet), force=force)
    arms = {arm: folder / arm for arm in loaded.arms} or {"": folder}
    print_results(arms, json)
    if not json:
        print_served(arms)
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


def _stage(
    run: Path, command: str, settings: Settings, force: bool, json: bool, quiet: bool, new_run: bool = False
) -> None:
    progress = Progress(quiet=quiet)
    manifest, made = pipeline.run_stage(run, command, settings, progress, force=force, new_run=new_run)
    if json:
        print(json_library.dumps(manifest, ensure_ascii=False))
    else:
        folder = run / pipeline.BY_COMMAND[command].folder
        progress.say(
            f"{folder}: {'done' if made else 'already done, skipped'} ({pipeline.summary(manifest['counts'])})"
        )


def _as_json(state: Status) -> dict[str, Any]:
    return {"state": state.kind, "changes": list(state.changes), "counts": state.counts}
