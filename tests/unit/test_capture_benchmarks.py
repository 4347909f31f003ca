"""The benchmarks of the capture client still run, and both of their clients make the same records."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mock_engine import MockConfig, MockEngine

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import capture_concurrency
import capture_cpu
import capture_memory
import capture_parallel


@pytest.fixture(scope="module")
def target(smollm2: str) -> Iterator[MockEngine]:
    with MockEngine(MockConfig(tokenizer=smollm2, length=40, thinking=True)) as engine:
        yield engine


@pytest.mark.parametrize("client", capture_cpu.CLIENTS)
def test_every_client_ends_with_sealed_records(target: MockEngine, client: str, monkeypatch: Any) -> None:
    monkeypatch.setattr(capture_cpu, "WARM_UP", 5)
    before = target.stats()["replies"]
    assert capture_cpu.run(client, target.url, target.config.tokenizer, 12, 4) > 0
    assert target.stats()["replies"] - before == {"draftsmith": 17, "openai": 17, "records": 2}[client]


def test_memory_is_read_while_replies_come(target: MockEngine, monkeypatch: Any) -> None:
    monkeypatch.setattr(capture_memory, "FIRST", 10)
    figures = capture_memory.run(target.url, target.config.tokenizer, 30, 4)
    assert set(figures["resident_mib"]) == {10, 30}
    assert 0 < figures["resident_mib"][10] <= figures["most_mib"]


def test_parallel_requests_are_all_in_flight_at_once(smollm2: str) -> None:
    cores = os.sched_getaffinity(0)
    options = argparse.Namespace(tokenizer=smollm2, ids=20, requests=60, concurrency=30, latency=0.5)
    figures = capture_parallel.measure(options)
    assert figures["most_in_flight"] == 30
    assert 0 < figures["req_s"] <= figures["ideal_req_s"]
    assert os.sched_getaffinity(0) == cores


def test_a_knee_counts_as_found_from_the_moment_the_level_stays_near_it_trials_aside() -> None:
    levels = [(0.0, 32, "start"), (4.0, 44, "raise"), (9.0, 128, "raise"), (14.0, 50, "hold"), (20.0, 64, "try up")]
    assert capture_concurrency.settled(levels, 48) == 14.0
    assert capture_concurrency.settled(levels, 100) is None
    assert capture_concurrency.in_force(levels, 10.0) == 128


def test_both_captures_of_the_knee_benchmark_end_with_every_question(target: MockEngine, tmp_path: Path) -> None:
    levels, seconds = capture_concurrency.run(target, tmp_path / "auto", 50, "auto")
    assert levels[0][1:] == (32, "start")
    assert seconds > 0
