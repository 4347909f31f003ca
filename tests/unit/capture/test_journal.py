from __future__ import annotations

import errno
import math
import os
import random
import threading
import time
from array import array
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from draftsmith.capture import journal as journal_module
from draftsmith.capture import writing
from draftsmith.capture.index import Index
from draftsmith.capture.journal import JOURNAL, Journal, restore
from draftsmith.capture.records import HEAD_BYTES, MAGIC
from draftsmith.capture.sealing import write_parts
from draftsmith.errors import UserError
from draftsmith.trace import Trace, trace_id

FIRST_LOG = "000000.log"


def name_of(name: str) -> str:
    return trace_id(name, 0, 0)


def trace(name: str, **fields: Any) -> Trace:
    ids = {"prompt_ids": [1, 2], "generated_ids": [3, 4, 5]}
    return Trace(**{"trace_id": name_of(name), "question_key": f"key {name}", **ids, **fields})


def fill(folder: Path, *names: str) -> Path:
    """A journal with a trace per name; returns its log."""
    with Journal(folder) as journal:
        for name in names:
            journal.append(trace(name))
    return folder / JOURNAL / FIRST_LOG


def names_in(journal: Journal, names: str) -> str:
    return "".join(name for name in names if journal.final(name_of(name)))


def eventually(condition: Callable[[], bool]) -> None:
    until = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < until, "the condition never came true"
        time.sleep(0.01)


@pytest.fixture
def small_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    """About four of `trace` to a segment."""
    monkeypatch.setattr(journal_module, "SEGMENT_BYTES", 700)
    monkeypatch.setattr(journal_module, "ROOMY", math.inf)


def test_what_was_appended_is_there_after_reopening_with_spans_as_tuples(tmp_path: Path) -> None:
    kept = trace("a", reasoning_span=(0, 1), answer_span=(1, 3), answer="Four", sample=3, timing='{"seconds": 1}')
    with Journal(tmp_path) as journal:
        journal.append(kept)
        assert journal.read(name_of("a")) == kept  # also before it is on the disk
    with Journal(tmp_path) as journal:
        assert journal.read(name_of("a")) == kept
        assert journal.final(name_of("a")) and not journal.final(name_of("b"))
        assert (journal.state(name_of("a")), journal.state(name_of("b"))) == ("ok", "")
        assert not journal.torn and journal.damaged == 0


def test_ids_are_kept_from_lists_and_from_arrays(tmp_path: Path) -> None:
    with Journal(tmp_path) as journal:
        journal.append(trace("a", generated_ids=array("i", [7, 8]), prompt_ids=()))
        assert (journal.read(name_of("a")).generated_ids, journal.read(name_of("a")).prompt_ids) == ([7, 8], [])


def test_unicode_line_separators_stay_inside_their_record(tmp_path: Path) -> None:  # P16
    text = "one\u2028two\u0085three\u2029four\n"
    with Journal(tmp_path) as journal:
        journal.append(trace("a", reasoning=text))
    with Journal(tmp_path) as journal:
        assert len(journal) == 1
        assert journal.read(name_of("a")).reasoning == text


def test_the_last_record_of_a_trace_wins_also_over_an_earlier_segment(tmp_path: Path, small_segments: None) -> None:
    with Journal(tmp_path) as journal:
        journal.append(trace("a", state="failed", error="HTTP 503: busy"), retry=True)
        assert not journal.final(name_of("a")) and journal.state(name_of("a")) == "failed"
        for name in "bcdefgh":
            journal.append(trace(name))
        journal.append(trace("a", answer="Four"))
    assert len(list((tmp_path / JOURNAL).iterdir())) > 1
    for _ in range(2):
        with Journal(tmp_path) as journal:
            assert len(journal) == 8 and journal.final(name_of("a"))
            assert journal.read(name_of("a")).answer == "Four"


@pytest.mark.parametrize("cut", [1, 2, 40, 100])
def test_a_torn_tail_is_cut_off_and_the_next_record_follows_cleanly(tmp_path: Path, cut: int) -> None:
    path = fill(tmp_path, "a", "b")
    os.truncate(path, path.stat().st_size - cut)
    with Journal(tmp_path) as journal:
        assert journal.torn
        assert names_in(journal, "abc") == "a"
        journal.append(trace("c"))
    with Journal(tmp_path) as journal:
        assert not journal.torn
        assert names_in(journal, "abc") == "ac"


def test_a_tail_of_zeros_as_a_power_cut_leaves_it_is_cut_off(tmp_path: Path) -> None:
    path = fill(tmp_path, "a")
    size = path.stat().st_size
    os.truncate(path, size + 5000)
    with Journal(tmp_path) as journal:
        assert journal.torn and journal.damaged == 0 and names_in(journal, "a") == "a"
    assert path.stat().st_size == size


def test_garbage_alone_is_an_empty_journal(tmp_path: Path) -> None:
    (tmp_path / JOURNAL).mkdir()
    (tmp_path / JOURNAL / FIRST_LOG).write_bytes(MAGIC + b"and no more")
    with Journal(tmp_path) as journal:
        assert journal.torn and len(journal) == 0
    assert (tmp_path / JOURNAL / FIRST_LOG).stat().st_size == 0


@pytest.mark.parametrize("place", range(0, HEAD_BYTES, 3))
def test_a_flipped_byte_costs_its_own_record_only_wherever_it_is(tmp_path: Path, place: int) -> None:
    path = fill(tmp_path, "a", "b", "c")
    raw = bytearray(path.read_bytes())
    for flipped in (raw.index(MAGIC, 1) + place, raw.index(b"key b") + 4):
        raw[flipped] ^= 1
        path.write_bytes(raw)
        with Journal(tmp_path) as journal:
            assert names_in(journal, "abc") == "ac"
            assert journal.damaged == 1 and not journal.torn
            assert journal.read(name_of("c")).question_key == "key c"
        raw[flipped] ^= 1


def test_closed_logs_become_parquet_and_give_the_same_traces(tmp_path: Path, small_segments: None) -> None:
    made = [
        trace(
            f"{number}",
            generated_ids=list(range(number)),
            reasoning_span=(0, number) if number % 2 else None,
            answer_span=None if number % 3 else (1, 2),
            answer="ü\u2028" * number,
            state="rejected" if number % 5 == 0 else "cut_in_answer",
        )
        for number in range(40)
    ]
    with Journal(tmp_path) as journal:
        for one in made:
            journal.append(one, retry=one.sample == 99)
        eventually(lambda: len(list((tmp_path / JOURNAL).glob("*.parquet"))) > 3)
        assert [journal.read(one.trace_id) for one in made] == made
    with Journal(tmp_path) as journal:
        assert [journal.read(one.trace_id) for one in made] == made
        assert [journal.state(one.trace_id) for one in made] == [one.state for one in made]


def test_closed_logs_are_packed_once_the_disk_has_little_room_for_more(
    tmp_path: Path, small_segments: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal_module, "ROOMY", 0)
    with Journal(tmp_path) as journal:
        for name in "abcdefghijkl":
            journal.append(trace(name))
        assert journal.sync()
        logs = sorted((tmp_path / JOURNAL).glob("*.log"))
        assert len(logs) > 2 and not journal.packing
        monkeypatch.setattr(journal_module, "ROOMY", math.inf)
        for name in "mnopq":
            journal.append(trace(name))
        eventually(lambda: not any(log.exists() for log in logs[:-1]))
        assert names_in(journal, "abcdefghijklmnopq") == "abcdefghijklmnopq"


def test_a_log_left_by_a_kill_while_it_was_packed_is_packed_by_the_next_run(
    tmp_path: Path, small_segments: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(Journal, "_pack", lambda self, log: None)
        fill(tmp_path, *"abcdefghijkl")
    logs = sorted((tmp_path / JOURNAL).glob("*.log"))
    logs[0].with_suffix(".parquet.tmp").write_bytes(b"half")
    with Journal(tmp_path) as journal:
        eventually(lambda: len(list((tmp_path / JOURNAL).glob("*.log"))) == 1)
        assert names_in(journal, "abcdefghijkl") == "abcdefghijkl"
    # Killed after the rename, before the log was removed: the Parquet file is the one that counts.
    logs[0].write_bytes(b"")
    with Journal(tmp_path) as journal:
        assert names_in(journal, "abcdefghijkl") == "abcdefghijkl"
    assert not logs[0].exists() and not list((tmp_path / JOURNAL).glob("*.tmp"))


def test_a_closed_segment_that_is_cut_off_is_set_aside_and_only_its_traces_are_asked_again(
    tmp_path: Path, small_segments: None
) -> None:  # P34
    fill(tmp_path, *"abcdefghijkl")
    with Journal(tmp_path):
        eventually(lambda: len(list((tmp_path / JOURNAL).glob("*.log"))) == 1)
    second = sorted((tmp_path / JOURNAL).glob("*.parquet"))[1]
    os.truncate(second, second.stat().st_size * 6 // 10)
    with Journal(tmp_path) as journal:
        assert journal.set_aside == [second.with_suffix(".damaged")]
        assert names_in(journal, "abcdefghijkl") == "abcdijkl"
        journal.append(trace("e"))
    with Journal(tmp_path) as journal:
        assert names_in(journal, "abcdefghijkl") == "abcdeijkl"


def test_appending_does_not_wait_for_a_full_disk_and_nothing_is_lost_once_there_is_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = threading.Event()
    full.set()
    real = os.pwrite

    def pwrite(file: int, data: Any, offset: int) -> int:
        if full.is_set():
            if offset == 0:
                real(file, data[:7], offset)  # a part may still go in
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(file, data, offset)

    monkeypatch.setattr(writing.os, "pwrite", pwrite)
    monkeypatch.setattr(writing, "RETRY_SECONDS", 0.01)
    with Journal(tmp_path) as journal:
        journal.append(trace("a"))
        eventually(lambda: journal.writer.full is not None)
        journal.append(trace("b"))
        assert not journal.sync() and "No space left on device" in journal.complaint()
        assert journal.fault is None and journal.writer.backlog > 0
        full.clear()
        eventually(journal.sync)
        assert journal.writer.backlog == 0 and journal.complaint() == ""
        journal.append(trace("c"))
    assert journal.lost == 0
    with Journal(tmp_path) as journal:
        assert names_in(journal, "abc") == "abc" and not journal.torn and journal.damaged == 0


def test_what_a_full_disk_kept_from_being_written_is_counted_when_the_journal_closes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(tmp_path, "a")

    def pwrite(file: int, data: Any, offset: int) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(writing.os, "pwrite", pwrite)
    journal = Journal(tmp_path)
    journal.append(trace("b"))
    journal.append(trace("c"))
    journal.close()
    assert journal.lost == 2
    monkeypatch.undo()
    with Journal(tmp_path) as journal:
        assert names_in(journal, "abc") == "a"


def test_records_whose_sync_failed_are_written_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # After a failed sync the system may have dropped the pages and counts them as clean.
    failures = iter([OSError(errno.ENOSPC, "No space left on device")])
    real, written = os.pwrite, []

    def fdatasync(file: int) -> None:
        for failure in failures:
            raise failure

    def pwrite(file: int, data: Any, offset: int) -> int:
        written.append(bytes(data))
        return real(file, data, offset)

    monkeypatch.setattr(writing.os, "fdatasync", fdatasync)
    monkeypatch.setattr(writing.os, "pwrite", pwrite)
    monkeypatch.setattr(writing, "RETRY_SECONDS", 0.01)
    with Journal(tmp_path) as journal:
        journal.append(trace("a"))
        eventually(journal.sync)
    assert len(written) == 2 and written[0] == written[1]


def test_any_other_fault_ends_the_writing_and_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def pwrite(file: int, data: Any, offset: int) -> int:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(writing.os, "pwrite", pwrite)
    with Journal(tmp_path) as journal:
        journal.append(trace("a"))
        eventually(lambda: journal.fault is not None)
        assert not journal.sync()
    assert journal.fault is not None and journal.fault.errno == errno.EROFS and journal.lost == 1


def test_a_journal_that_cannot_be_written_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(tmp_path, "a")
    monkeypatch.setattr(journal_module.os, "access", lambda path, mode: False)
    with pytest.raises(
        UserError, match=r"journal: the journal cannot be written \(it is read-only\); make it writable"
    ):
        Journal(tmp_path)


def test_records_are_synced_at_least_once_a_second(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced = threading.Event()
    monkeypatch.setattr(writing, "SYNC_SECONDS", 0.05)
    monkeypatch.setattr(writing.os, "fdatasync", lambda file: synced.set())
    with Journal(tmp_path) as journal:
        journal.append(trace("a"))
        assert synced.wait(30)


def test_forgotten_records_are_not_final_until_they_come_again(tmp_path: Path) -> None:
    with Journal(tmp_path) as journal:
        for name in "abc":
            journal.append(trace(name))
        assert journal.forget(0, range(1, 2)) == 1
        assert names_in(journal, "abc") == "ac" and journal.state(name_of("b")) == ""
        with pytest.raises(KeyError):
            journal.read(name_of("b"))
        journal.append(trace("b"))
        assert names_in(journal, "abc") == "abc"


def test_everything_can_be_asked_again_by_the_next_run(tmp_path: Path) -> None:
    with Journal(tmp_path) as journal:
        journal.append(trace("a"))
        journal.append(trace("b"))
        journal.ask_all_again()
    with Journal(tmp_path) as journal:
        assert names_in(journal, "ab") == "" and journal.state(name_of("a")) == "ok"
        journal.append(trace("b"))
    with Journal(tmp_path) as journal:
        assert names_in(journal, "ab") == "b"


def test_a_journal_is_restored_from_sealed_parts_whole_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "old").mkdir()
    failed = trace("c", state="failed", error="HTTP 400: as told")
    parts = write_parts(tmp_path / "old", [trace("a"), trace("b", reasoning_span=(0, 1)), failed], {"target": "toy"})
    with monkeypatch.context() as patch:
        patch.setattr(journal_module.os, "replace", breaks_down)
        with pytest.raises(RuntimeError, match="half way"):
            restore(tmp_path, parts, frozenset({"ok"}))
    assert not (tmp_path / JOURNAL).exists()
    assert restore(tmp_path, parts, frozenset({"ok"})) == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == [JOURNAL, "old"]
    with Journal(tmp_path) as journal:
        assert names_in(journal, "abc") == "ab"
        assert journal.read(name_of("b")) == trace("b", reasoning_span=(0, 1))
        journal.append(trace("c"))
    with Journal(tmp_path) as journal:
        assert names_in(journal, "abc") == "abc"


def breaks_down(*_: object) -> Iterator[None]:
    raise RuntimeError("half way")


def test_closed_segments_are_plain_parquet_keyed_by_trace_id(tmp_path: Path, small_segments: None) -> None:
    fill(tmp_path, *"abcdefgh")
    with Journal(tmp_path):
        eventually(lambda: len(list((tmp_path / JOURNAL).glob("*.log"))) == 1)
    table = pq.read_table(sorted((tmp_path / JOURNAL).glob("*.parquet"))[0])
    assert table["trace_id"].to_pylist() == [name_of(name) for name in "abcd"]
    assert table["retry"].to_pylist() == [False] * 4


def test_the_index_keeps_every_key_through_growth_in_a_bounded_room() -> None:
    rng = random.Random(0)
    keys = {rng.randbytes(12): number for number in range(1, 5001)}
    index = Index()
    for key, number in keys.items():
        index.put(key, number)
    assert {key: index.get(key) for key in keys} == keys
    assert index.get(rng.randbytes(12)) == 0
    assert set(index) == set(keys) and len(index) == 5000
    full = Index(expected=100_000)
    assert sum(part.itemsize * len(part) for part in (full.high, full.low, full.values)) <= 60 * 100_000
    before = full.values
    for number in range(1, 100_001):
        full.put(number.to_bytes(12, "little"), number)
    assert full.values is before
