from __future__ import annotations

import errno
import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from draftsmith.capture import journal as journal_module
from draftsmith.capture.journal import JOURNAL, Journal, restore
from draftsmith.trace import Trace


def trace(name: str, **fields: object) -> Trace:
    return Trace(trace_id=name, question_key=f"key {name}", prompt_ids=[1, 2], generated_ids=[3, 4, 5], **fields)


def fill(folder: Path, *names: str) -> None:
    with Journal(folder) as journal:
        for name in names:
            journal.append(trace(name))


def test_what_was_appended_is_there_after_reopening_with_spans_as_tuples(tmp_path: Path) -> None:
    kept = trace("a", reasoning_span=(0, 1), answer_span=(1, 3), answer="Four", error="")
    with Journal(tmp_path) as journal:
        journal.append(kept)
    with Journal(tmp_path) as journal:
        assert journal.read("a") == kept
        assert journal.final("a") and not journal.final("b")
        assert not journal.torn and journal.damaged == 0


def test_unicode_line_separators_stay_inside_their_record(tmp_path: Path) -> None:  # P16
    text = "one\u2028two\u0085three\u2029four"
    with Journal(tmp_path) as journal:
        journal.append(trace("a", reasoning=text))
    raw = (tmp_path / JOURNAL).read_bytes()
    assert text.encode() in raw and raw.count(b"\n") == 1
    with Journal(tmp_path) as journal:
        assert len(journal) == 1
        assert journal.read("a").reasoning == text


def test_the_last_record_of_a_trace_wins(tmp_path: Path) -> None:
    with Journal(tmp_path) as journal:
        journal.append(trace("a", state="failed", error="HTTP 503: busy"), retry=True)
        assert not journal.final("a")
        journal.append(trace("a", answer="Four"))
    with Journal(tmp_path) as journal:
        assert len(journal) == 1 and journal.final("a")
        assert journal.read("a").answer == "Four"


@pytest.mark.parametrize("cut", [1, 2, 40])
def test_a_torn_tail_is_cut_off_and_the_next_record_follows_cleanly(tmp_path: Path, cut: int) -> None:
    fill(tmp_path, "a", "b")
    path = tmp_path / JOURNAL
    os.truncate(path, path.stat().st_size - cut)
    with Journal(tmp_path) as journal:
        assert journal.torn
        assert journal.final("a") and not journal.final("b")
        journal.append(trace("c"))
    with Journal(tmp_path) as journal:
        assert not journal.torn
        assert list(journal.index) == ["a", "c"]


def test_garbage_alone_is_an_empty_journal(tmp_path: Path) -> None:
    (tmp_path / JOURNAL).write_bytes(b'{"crc":12,"entry"')
    with Journal(tmp_path) as journal:
        assert journal.torn and len(journal) == 0
    assert (tmp_path / JOURNAL).stat().st_size == 0


def test_a_flipped_byte_costs_its_own_record_only(tmp_path: Path) -> None:
    fill(tmp_path, "a", "b", "c")
    path = tmp_path / JOURNAL
    raw = bytearray(path.read_bytes())
    raw[raw.index(b"key b") + 4] ^= 1
    path.write_bytes(raw)
    with Journal(tmp_path) as journal:
        assert list(journal.index) == ["a", "c"]
        assert journal.damaged == 1 and not journal.torn
        assert journal.read("c").question_key == "key c"


def test_a_full_disk_leaves_the_journal_at_its_last_whole_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(file: int, data: bytes, offset: int) -> int:
        if offset > before:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(file, data[:7], offset)

    real = os.pwrite
    journal = Journal(tmp_path)
    journal.append(trace("a"))
    before = journal.end
    monkeypatch.setattr(journal_module.os, "pwrite", full)
    with pytest.raises(OSError, match="No space left"):
        journal.append(trace("b"))
    assert not journal.final("b")
    monkeypatch.undo()
    journal.append(trace("c"))
    journal.close()
    with Journal(tmp_path) as journal:
        assert list(journal.index) == ["a", "c"] and not journal.torn and journal.damaged == 0


def test_a_journal_is_restored_from_finished_traces_whole_or_not_at_all(tmp_path: Path) -> None:
    def breaks() -> Iterator[Trace]:
        yield trace("a")
        raise RuntimeError("half way")

    with pytest.raises(RuntimeError, match="half way"):
        restore(tmp_path, breaks())
    assert not (tmp_path / JOURNAL).exists()
    assert restore(tmp_path, [trace("a"), trace("b")]) == 2
    assert [path.name for path in tmp_path.iterdir()] == [JOURNAL]
    with Journal(tmp_path) as journal:
        assert journal.final("a") and journal.read("b") == trace("b")


def test_each_line_is_json_that_other_tools_can_read(tmp_path: Path) -> None:
    fill(tmp_path, "a")
    line = json.loads((tmp_path / JOURNAL).read_text(encoding="utf-8"))
    assert line["entry"]["trace"]["generated_ids"] == [3, 4, 5]
