"""Fixtures shared by all tests: the converted embedded model, small real models, a silent progress."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from draftsmith.progress import Progress
from killed_run import KilledRun, make_killed_run

REPOSITORY = Path(__file__).parents[1]
SHARED_DATA = REPOSITORY.parent / "shared" / "data"


@pytest.fixture(autouse=True)
def _few_threads() -> None:
    torch.set_num_threads(2)


@pytest.fixture(scope="session")
def smollm2() -> str:
    """Folder of the converted SmolLM2-135M-Instruct."""
    from draftsmith.target.embedded import resolve_model

    return resolve_model("smollm2")


@pytest.fixture(scope="session")
def killed_run(smollm2: str, tmp_path_factory: pytest.TempPathFactory) -> KilledRun:
    """A small run of the whole chain, served by llama.cpp in the end; made once, in minutes."""
    os.environ["OMP_WAIT_POLICY"] = "PASSIVE"
    return make_killed_run(tmp_path_factory.mktemp("killed") / "run")


@pytest.fixture
def progress(tmp_path: Path) -> Progress:
    """A progress that prints nothing and logs to a file of its own."""
    return Progress(quiet=True, events=tmp_path / "events.jsonl")


@pytest.fixture(scope="session")
def gsm8k_test() -> Path:
    """Held-out questions that are not part of the project."""
    path = SHARED_DATA / "gsm8k_test_prompts.jsonl"
    if not path.exists():
        pytest.skip(f"{path.name} is not on this machine")
    return path
