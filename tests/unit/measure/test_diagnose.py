from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from draftsmith.measure.diagnose import _exported
from draftsmith.recipe import DiagnoseSettings


@pytest.mark.parametrize(
    ("there", "served_by", "wanted"),
    [
        (("vllm", "llamacpp"), None, "vllm"),
        (("vllm", "llamacpp"), "llamacpp", "llamacpp"),
        (("speculators", "llamacpp"), "vllm", "speculators"),
        (("llamacpp",), "vllm", "llamacpp"),
    ],
)
def test_the_files_looked_at_are_those_that_the_server_serves(
    there: tuple[str, ...], served_by: Any, wanted: str, tmp_path: Path
) -> None:
    for engine in there:
        (tmp_path / "export" / engine).mkdir(parents=True)
    scene: Any = SimpleNamespace(run=tmp_path, settings=DiagnoseSettings())
    assert _exported(scene, served_by) == (tmp_path / "export" / wanted, wanted)
