from __future__ import annotations

from pathlib import Path

import pytest

from kill_drill import drill


@pytest.mark.slow
def test_a_capture_killed_a_dozen_times_ends_with_every_question_once_and_true(tmp_path: Path) -> None:
    found = drill(tmp_path, questions=150, kills=12, concurrency=8, fault_rate=0.1, seed=3, seconds=(0.2, 0.9))
    assert found.faults == []
    assert found.kills == 12
    assert found.states.total() == 150 and found.states["ok"] > 100
