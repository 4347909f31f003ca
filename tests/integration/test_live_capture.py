"""A capture from a real vLLM server goes through kills and a crash of the server, complete and exact."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

from real_servers import Vllm

pytestmark = [pytest.mark.slow, pytest.mark.vllm]

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "capture_live.py"
QUESTIONS = 48
PROBES = 12
INTERRUPTIONS, CONCURRENCY = 3, 16


def test_a_client_killed_twice_and_a_server_that_crashes_lose_and_double_nothing(
    vllm: Vllm, smollm2: str, tmp_path: Path
) -> None:
    benchmark = runpy.run_path(str(BENCHMARK))
    before = benchmark["finished"](vllm)
    paid = benchmark["disturbed_capture"](vllm, tmp_path, QUESTIONS, smollm2, before)
    figures = benchmark["checked"](tmp_path, smollm2)
    assert (figures["questions"], figures["doubled"], figures["exact"]) == (QUESTIONS, 0, QUESTIONS)
    assert figures["with_reasoning"] > QUESTIONS // 2
    assert paid <= QUESTIONS + INTERRUPTIONS * (CONCURRENCY + PROBES)
