"""Stage folders: one lock per run, built beside and renamed when complete, skipped when nothing changed.

`RUN/<stage>/` exists only complete, with `manifest.json`. While it is built it is `RUN/<stage>.partial/`, with
`plan.json` saying what it is being built from; a second run with the same plan goes on from there. A plan is a stage's
settings (those that shape its result) and the fingerprints of its inputs. A finished or partial folder with another
plan is never overwritten unless the user says `--force`; the message names what changed and what it invalidates.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import platform
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

from filelock import FileLock, Timeout

from draftsmith import __version__
from draftsmith.errors import UserError

MANIFEST = "manifest.json"
PLAN = "plan.json"
PROGRESS = "progress.json"
NOTES = (PLAN, PROGRESS)
"""What a half-made folder holds besides the stage's own files."""
GUESTS = ("served.json", "served-rounds.json", "payoff.json", "serving.json", "diagnosis.json")
"""Files that other commands lay beside a stage's own: no part of it, they outlive its being made again."""
VERSIONED = ("torch", "transformers", "tokenizers", "safetensors", "datasets", "pyarrow", "numpy")


@dataclass(frozen=True, slots=True)
class Plan:
    """What a stage folder is (to be) made from."""

    stage: str
    settings: dict[str, Any]
    inputs: dict[str, str]
    """Name of an input -> fingerprint. Inputs that are stages of the same run carry the stage's name."""
    may_grow: frozenset[str] = frozenset()
    """Settings and inputs that may change under a half-made folder: what is in it is keyed by content, not position."""

    def identity(self) -> dict[str, Any]:
        """The plan as JSON types; two plans with the same identity make the same folder."""
        return {"stage": self.stage, "settings": self.settings, "inputs": self.inputs}


@dataclass(frozen=True, slots=True)
class Status:
    """How a stage stands. `changes` says, for a stale one, what differs from the plan."""

    kind: Literal["done", "partial", "stale", "missing"]
    changes: tuple[str, ...] = ()
    counts: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Stage:
    """What a stage's `build` function gets: where to write, and where its inputs are.

    `work` may hold what an earlier, interrupted attempt with the same plan left.
    """

    run: Path
    plan: Plan
    work: Path
    replaces: Path | None = None
    """The published folder this one is to replace, where they differ only in what `Plan.may_grow` names: what is in it
    may be kept."""

    def folder(self, stage: str) -> Path:
        """The published folder of another stage of this run."""
        return self.run / stage

    def note_progress(self, counts: dict[str, Any]) -> None:
        """Counts that `status` shows for a partial stage."""
        write_json(self.work / PROGRESS, counts)


def write_json(path: Path, value: Any) -> None:
    """Writes JSON atomically: a reader sees the old file or the new one, also after a power cut."""
    temporary = path.with_name(path.name + ".tmp")
    with open(temporary, "w", encoding="utf-8") as file:
        json.dump(value, file, indent=1, ensure_ascii=False, default=str)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yields a name beside `path`; what was written there becomes `path` when the block ends well: whole or not at all.

    Raises:
        OSError: no room, or the disk is failing; `path` is as it was.
    """
    beside = path.with_name(path.name + ".tmp")
    try:
        yield beside
        sync(beside)
        os.replace(beside, path)
        sync(path.parent)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise


def sync(path: Path) -> None:
    """Makes a file's content, or a folder's entries (new names, renames), survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_json(path: Path) -> Any:
    """Reads JSON.

    Raises:
        UserError: the file is missing or is not JSON.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{path}: expected a JSON file, found none") from None
    except ValueError as error:
        raise UserError(f"{path}: expected JSON, found something else ({error}); remove it and run again") from None


def fingerprint(value: Any) -> str:
    """16 hex digits over a value's canonical JSON."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()[:16]


def fingerprint_file(path: Path) -> str:
    """16 hex digits over a file's bytes."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:16]


def fingerprint_model(folder: Path) -> str:
    """16 hex digits over a model folder: its small files' bytes, its weight files' names and sizes."""
    parts = {}
    for path in sorted(folder.iterdir()):
        if path.is_file() and not path.name.startswith("."):
            size = path.stat().st_size
            parts[path.name] = fingerprint_file(path) if size < 32 << 20 else f"{size} bytes"
    return fingerprint(parts)


def manifest(run: Path, stage: str) -> dict[str, Any]:
    """The manifest of a published stage.

    Raises:
        UserError: the stage is not there, with the command that makes it.
    """
    if not (run / stage / MANIFEST).exists():
        command = {"traces": "capture", "hidden": "extract", "draft": "train"}.get(stage, stage)
        raise UserError(f"{run / stage}: not there yet; `draftsmith {command} --run {run}` makes it")
    loaded: dict[str, Any] = read_json(run / stage / MANIFEST)
    return loaded


def status(run: Path, plan: Plan) -> Status:
    """Compares what is on disk with `plan`."""
    done, partial = run / plan.stage / MANIFEST, run / f"{plan.stage}.partial"
    if done.exists():
        found = read_json(done)
        changes = _changes(found, plan)
        return Status("stale" if changes else "done", changes, found["counts"])
    if (partial / PLAN).exists():
        changes = _changes(read_json(partial / PLAN), plan, ignored=plan.may_grow)
        counts = partial / PROGRESS
        return Status("stale" if changes else "partial", changes, read_json(counts) if counts.exists() else {})
    return Status("missing")


def build(
    run: Path,
    plan: Plan,
    make: Callable[[Stage], dict[str, Any]],
    *,
    force: bool = False,
    new_run: bool = False,
    invalidates: tuple[str, ...] = (),
) -> tuple[dict[str, Any], bool]:
    """Makes one stage folder, or finds it made.

    Args:
        run: the run folder; created if need be. The caller holds its lock (`locked`).
        plan: what the stage is made from.
        make: writes into `Stage.work` and returns counts for the manifest.
        force: replace a folder that was made from another plan.
        new_run: begin anew, whatever is there; what is there gets another name.
        invalidates: stages that depend on this one, for the message.

    Returns:
        The manifest, and whether it was made now (False: skipped, nothing had changed).

    Raises:
        UserError: a folder made from another plan is in the way, or the disk is full.
    """
    final, work = run / plan.stage, run / f"{plan.stage}.partial"
    if new_run:
        _set_aside(final, work)
    found = status(run, plan)
    if found.kind == "done":
        return manifest(run, plan.stage), False
    if found.kind == "stale" and not force:
        there = [name for name in invalidates if (run / name).exists()]
        also = f" (and with it {', '.join(there)})" if there else ""
        begun = f"{final}: was made from" if final.exists() else f"{work}: was begun with"
        raise UserError(
            f"{begun} other settings or inputs: {'; '.join(found.changes)}; "
            f"--force makes it again{also}, or use another --run{_or_new_run(plan)}"
        )
    if work.exists() and not _same(work / PLAN, plan):
        shutil.rmtree(work)
    replaces = final if _same(final / MANIFEST, plan) else None
    started = time.time()
    try:
        with room_on_disk(run):
            work.mkdir(parents=True, exist_ok=True)
            write_json(work / PLAN, plan.identity())
            counts = make(Stage(run, plan, work, replaces))
            write_json(work / MANIFEST, _manifest(plan, work, counts, started))
    except BaseException:
        if _holds_nothing(work):  # so that a corrected setting is not taken for a change
            shutil.rmtree(work, ignore_errors=True)
        raise
    if final.exists():
        for guest in GUESTS:
            if (final / guest).exists():
                shutil.copy2(final / guest, work / guest)
        shutil.rmtree(final)
    os.replace(work, final)
    sync(run)
    for leftover in NOTES:  # only now: without its plan, a folder that was not renamed could not be told apart
        (final / leftover).unlink(missing_ok=True)
    return manifest(run, plan.stage), True


@contextmanager
def room_on_disk(folder: Path) -> Iterator[None]:
    """Turns a full or read-only disk into one line.

    Raises:
        UserError: a write in the block met a full disk, a quota, or a place that cannot be written.
    """
    try:
        yield
    except OSError as error:
        if error.errno == errno.EROFS:
            place = error.filename or folder
            raise UserError(
                f"{place}: cannot be written ({error.strerror}); make it writable, or choose another --run"
            ) from None
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        free = shutil.disk_usage(folder).free
        raise UserError(
            f"{folder}: no space left on the disk ({free / 2**20:.0f} MiB free); what is finished is kept, "
            "make room and run the same command again"
        ) from None


@contextmanager
def locked(run: Path) -> Iterator[None]:
    """Holds the run's lock: one writer per run folder.

    Raises:
        UserError: another process holds it, or the folder cannot be written.
    """
    try:
        run.mkdir(parents=True, exist_ok=True)
        lock = FileLock(run / ".lock", timeout=0.2)  # `busy` takes it for an instant
        lock.acquire()
    except Timeout:
        raise UserError(
            f"{run}: another draftsmith is working in this run folder; wait for it or choose another --run"
        ) from None
    except OSError as error:
        raise UserError(f"{run}: the run folder cannot be written ({error.strerror}); choose another --run") from None
    try:
        yield
    finally:
        lock.release()


def busy(run: Path) -> bool:
    """Whether a process works in the run folder, as its lock tells; also where that cannot be told."""
    if not (run / ".lock").exists():
        return False
    try:
        with FileLock(run / ".lock", timeout=0):
            return False
    except OSError:  # held (filelock's Timeout is one), or no permission to try
        return True


def _or_new_run(plan: Plan) -> str:
    """What capture has made was paid for, so it can be kept beside."""
    captured = plan.settings.get("made_by") == "capture"
    return ", or keep this under another name with --new-run" if captured else ""


def _set_aside(*folders: Path) -> None:
    """Gives folders a dated name beside; nothing is deleted."""
    date = time.strftime("%Y-%m-%dT%H-%M-%S")
    for folder in folders:
        if folder.exists():
            other = folder.with_name(f"{folder.name}.{date}")
            while other.exists():
                other = other.with_name(other.name + "+")
            os.replace(folder, other)
            sync(folder.parent)


def _changes(found: dict[str, Any], plan: Plan, ignored: frozenset[str] = frozenset()) -> tuple[str, ...]:
    """What differs between a stored plan or manifest and the plan at hand, a line each."""
    lines = []
    for part in ("settings", "inputs"):
        old, new = found.get(part, {}), json.loads(json.dumps(plan.identity()[part], default=str))
        for name in sorted((old.keys() | new.keys()) - ignored):
            if old.get(name) != new.get(name):
                lines.append(f"{name} was {old.get(name)!r}, now {new.get(name)!r}")
    return tuple(lines)


def _same(stored: Path, plan: Plan) -> bool:
    """Whether the plan (or manifest) stored there differs from `plan` in nothing but what may grow."""
    return stored.exists() and not _changes(read_json(stored), plan, ignored=plan.may_grow)


def _holds_nothing(work: Path) -> bool:
    """Whether an attempt left no work behind: just its own notes and empty files."""
    return not any(path.stat().st_size for path in work.rglob("*") if path.is_file() and path.name not in NOTES)


def _manifest(plan: Plan, work: Path, counts: dict[str, Any], started: float) -> dict[str, Any]:
    found = {str(path.relative_to(work)): path for path in sorted(work.rglob("*")) if path.is_file()}
    files = {name: path.stat().st_size for name, path in found.items() if name not in (*NOTES, MANIFEST)}
    return {
        **plan.identity(),
        "counts": counts,
        "fingerprint": fingerprint([plan.identity(), counts, files]),
        "files": files,
        "made": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "seconds": round(time.time() - started, 1),
        "versions": {"draftsmith": __version__, "python": platform.python_version(), **_versions()},
    }


def _versions() -> dict[str, str]:
    found = {}
    for name in VERSIONED:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found
