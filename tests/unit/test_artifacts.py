from __future__ import annotations

import errno
import json
import multiprocessing
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from draftsmith import artifacts
from draftsmith.artifacts import Plan, Stage
from draftsmith.errors import UserError


def writes(content: str = "x") -> Callable[[Stage], dict[str, Any]]:
    def make(stage: Stage) -> dict[str, Any]:
        (stage.work / "data").write_text(content)
        return {"rows": 1}

    return make


def never(stage: Stage) -> dict[str, Any]:
    raise AssertionError("the stage was made although nothing had changed")


def test_a_stage_is_published_whole_with_its_manifest(tmp_path: Path) -> None:
    manifest, made = artifacts.build(tmp_path, Plan("vocab", {"size": 4}, {"traces": "abc"}), writes())
    assert made
    assert (tmp_path / "vocab" / "data").read_text() == "x"
    assert not (tmp_path / "vocab.partial").exists()
    stored = json.loads((tmp_path / "vocab" / "manifest.json").read_text())
    assert stored == manifest
    assert stored["settings"] == {"size": 4}
    assert stored["counts"] == {"rows": 1}
    assert stored["files"] == {"data": 1}


def test_an_unchanged_stage_is_skipped(tmp_path: Path) -> None:
    plan = Plan("vocab", {"size": 4}, {})
    artifacts.build(tmp_path, plan, writes())
    _, made = artifacts.build(tmp_path, plan, never)
    assert not made


def test_a_changed_setting_is_refused_and_names_itself_and_what_it_invalidates(tmp_path: Path) -> None:
    artifacts.build(tmp_path, Plan("vocab", {"size": 4}, {}), writes())
    (tmp_path / "draft").mkdir()
    with pytest.raises(UserError, match=r"size was 4, now 8.*--force makes it again \(and with it draft\)"):
        artifacts.build(tmp_path, Plan("vocab", {"size": 8}, {}), never, invalidates=("draft", "export"))
    assert (tmp_path / "vocab" / "data").read_text() == "x"


@pytest.mark.parametrize("half_made", [False, True])
def test_a_new_run_keeps_what_is_there_under_a_dated_name(tmp_path: Path, half_made: bool) -> None:
    old = Plan("traces", {"made_by": "capture", "size": 4}, {})
    new = Plan("traces", {"made_by": "capture", "size": 8}, {})
    if half_made:
        with pytest.raises(RuntimeError, match="half way"):
            artifacts.build(tmp_path, old, half_way)
    else:
        artifacts.build(tmp_path, old, writes())
    with pytest.raises(UserError, match=r"size was 4, now 8.*keep this under another name with --new-run"):
        artifacts.build(tmp_path, new, never)
    for count in (1, 2):  # a new run of the same settings is new all the same
        _, made = artifacts.build(tmp_path, new, writes("y"), new_run=True)
        assert made and (tmp_path / "traces" / "data").read_text() == "y"
        assert len(list(tmp_path.glob("traces*.20*"))) == count
    kept = next(path for path in tmp_path.glob("traces*.20*") if (path / "data").read_text() == "x")
    assert kept.name.startswith("traces.partial.20" if half_made else "traces.20")


def half_way(stage: Stage) -> dict[str, Any]:
    (stage.work / "data").write_text("x")
    raise RuntimeError("half way")


def test_force_replaces_a_stage_made_from_other_settings(tmp_path: Path) -> None:
    artifacts.build(tmp_path, Plan("vocab", {"size": 4}, {}), writes())
    artifacts.build(tmp_path, Plan("vocab", {"size": 8}, {}), writes("y"), force=True)
    assert (tmp_path / "vocab" / "data").read_text() == "y"


def test_a_stale_stage_stays_until_its_replacement_is_whole(tmp_path: Path) -> None:
    artifacts.build(tmp_path, Plan("vocab", {"size": 4}, {}), writes())

    def fails(stage: Stage) -> dict[str, Any]:
        raise RuntimeError("half way")

    with pytest.raises(RuntimeError):
        artifacts.build(tmp_path, Plan("vocab", {"size": 8}, {}), fails, force=True)
    assert (tmp_path / "vocab" / "data").read_text() == "x"


def test_an_interrupted_stage_goes_on_from_what_it_left(tmp_path: Path) -> None:
    plan = Plan("traces", {}, {})

    def stops(stage: Stage) -> dict[str, Any]:
        (stage.work / "journal").write_text("half")
        stage.note_progress({"done": 3})
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        artifacts.build(tmp_path, plan, stops)
    found = artifacts.status(tmp_path, plan)
    assert (found.kind, found.counts) == ("partial", {"done": 3})

    def goes_on(stage: Stage) -> dict[str, Any]:
        return {"journal": (stage.work / "journal").read_text()}

    manifest, _ = artifacts.build(tmp_path, plan, goes_on)
    assert manifest["counts"] == {"journal": "half"}


def test_an_input_that_may_grow_does_not_invalidate_a_half_made_folder(tmp_path: Path) -> None:  # P15
    def stops(stage: Stage) -> dict[str, Any]:
        (stage.work / "journal").write_text("half")
        raise KeyboardInterrupt

    grows = frozenset({"questions"})
    with pytest.raises(KeyboardInterrupt):
        artifacts.build(tmp_path, Plan("traces", {}, {"questions": "one"}, grows), stops)
    grown = Plan("traces", {}, {"questions": "two"}, grows)
    assert artifacts.status(tmp_path, grown).kind == "partial"
    artifacts.build(tmp_path, grown, writes())
    assert artifacts.manifest(tmp_path, "traces")["inputs"] == {"questions": "two"}
    assert artifacts.status(tmp_path, Plan("traces", {}, {"questions": "three"}, grows)).kind == "stale"


def test_an_attempt_that_made_nothing_does_not_stand_in_the_way_of_a_corrected_one(tmp_path: Path) -> None:
    def refused(stage: Stage) -> dict[str, Any]:
        (stage.work / "journal").touch()
        stage.note_progress({"done": 0})
        raise UserError("no such model")

    with pytest.raises(UserError, match="no such model"):
        artifacts.build(tmp_path, Plan("traces", {"model": "wrong"}, {}), refused)
    artifacts.build(tmp_path, Plan("traces", {"model": "right"}, {}), writes())


def test_a_half_made_folder_with_other_settings_is_called_begun_not_made(tmp_path: Path) -> None:
    def stops(stage: Stage) -> dict[str, Any]:
        (stage.work / "journal").write_text("half")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        artifacts.build(tmp_path, Plan("traces", {"model": "a"}, {}), stops)
    with pytest.raises(UserError, match=r"traces\.partial: was begun with other .*model was 'a', now 'b'"):
        artifacts.build(tmp_path, Plan("traces", {"model": "b"}, {}), never)
    assert (tmp_path / "traces.partial" / "journal").read_text() == "half"


def test_what_an_interrupted_forced_attempt_left_is_gone_on_from(tmp_path: Path) -> None:
    artifacts.build(tmp_path, Plan("traces", {"model": "old"}, {}), writes())
    plan = Plan("traces", {"model": "new"}, {})

    def stops(stage: Stage) -> dict[str, Any]:
        assert stage.replaces is None
        (stage.work / "journal").write_text("paid for")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        artifacts.build(tmp_path, plan, stops, force=True)

    def goes_on(stage: Stage) -> dict[str, Any]:
        return {"journal": (stage.work / "journal").read_text()}

    manifest, _ = artifacts.build(tmp_path, plan, goes_on, force=True)
    assert manifest["counts"] == {"journal": "paid for"}


def test_a_forced_stage_is_told_which_folder_differs_only_in_what_may_grow(tmp_path: Path) -> None:
    grows = frozenset({"questions", "limit"})
    artifacts.build(tmp_path, Plan("traces", {"limit": 1}, {"questions": "one"}, grows), writes())
    found = []

    def make(stage: Stage) -> dict[str, Any]:
        found.append((stage.replaces, stage.replaces and (stage.replaces / "data").read_text()))
        return {}

    artifacts.build(tmp_path, Plan("traces", {"limit": 2}, {"questions": "two"}, grows), make, force=True)
    artifacts.build(tmp_path, Plan("traces", {"limit": 2, "seed": 1}, {"questions": "two"}, grows), make, force=True)
    assert found == [(tmp_path / "traces", "x"), (None, None)]


def test_a_whole_folder_whose_publishing_was_cut_off_is_not_taken_for_another_plans(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(artifacts.shutil, "rmtree", killed)
        artifacts.build(tmp_path, Plan("vocab", {"size": 4}, {}), writes())
        artifacts.build(tmp_path, Plan("vocab", {"size": 8}, {}), writes("y"), force=True)
    assert (tmp_path / "vocab.partial" / "data").read_text() == "y"

    def make(stage: Stage) -> dict[str, Any]:
        assert not list(stage.work.glob("data"))
        return writes("z")(stage)

    manifest, _ = artifacts.build(tmp_path, Plan("vocab", {"size": 16}, {}), make, force=True)
    assert manifest["files"] == {"data": 1}
    assert sorted(path.name for path in (tmp_path / "vocab").iterdir()) == ["data", "manifest.json"]


def test_changed_inputs_make_a_stage_stale(tmp_path: Path) -> None:
    artifacts.build(tmp_path, Plan("vocab", {}, {"traces": "one"}), writes())
    found = artifacts.status(tmp_path, Plan("vocab", {}, {"traces": "two"}))
    assert found.kind == "stale"
    assert found.changes == ("traces was 'one', now 'two'",)


def test_a_full_disk_is_one_line_and_keeps_the_work(tmp_path: Path) -> None:  # P33
    def fills(stage: Stage) -> dict[str, Any]:
        (stage.work / "shard").write_text("whole")
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(UserError, match="no space left on the disk"):
        artifacts.build(tmp_path, Plan("hidden", {}, {}), fills)
    assert (tmp_path / "hidden.partial" / "shard").read_text() == "whole"


def test_a_disk_that_is_full_before_the_stage_begins_is_one_line_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(artifacts, "write_json", full)
    with pytest.raises(UserError, match="no space left on the disk"):
        artifacts.build(tmp_path, Plan("vocab", {}, {}), never)


def _hold(run: Path, holding: Any, release: Any) -> None:
    with artifacts.locked(run):
        holding.set()
        release.wait(30)


def test_a_second_process_on_the_same_run_is_refused(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    holding, release = context.Event(), context.Event()
    other = context.Process(target=_hold, args=(tmp_path, holding, release))
    other.start()
    assert holding.wait(60)
    with pytest.raises(UserError, match="another draftsmith is working in this run folder"), artifacts.locked(tmp_path):
        pass
    release.set()
    other.join(30)
    with artifacts.locked(tmp_path):
        assert other.exitcode == 0


def test_a_missing_stage_names_the_command_that_makes_it(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="draftsmith extract --run"):
        artifacts.manifest(tmp_path, "hidden")


def test_a_run_folder_that_cannot_be_made_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot be written"), artifacts.locked(tmp_path / "file" / "run"):
        pass


def test_a_model_fingerprint_sees_changed_small_files_and_resized_weights(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"1234")
    before = artifacts.fingerprint_model(tmp_path)
    (tmp_path / "config.json").write_text('{"a": 1}')
    assert artifacts.fingerprint_model(tmp_path) != before


def test_broken_json_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text("{")
    with pytest.raises(UserError, match=r"a\.json: expected JSON"):
        artifacts.read_json(tmp_path / "a.json")
