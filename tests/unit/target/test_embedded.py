from __future__ import annotations

from pathlib import Path

import pytest

from draftsmith.errors import UserError
from draftsmith.target import embedded
from draftsmith.target.embedded import resolve_model, thinking_template
from draftsmith.target.template import load_template


def test_folders_and_hub_ids_stand_for_themselves(tmp_path: Path) -> None:
    assert resolve_model(str(tmp_path)) == str(tmp_path)
    assert resolve_model("Qwen/Qwen3-8B") == "Qwen/Qwen3-8B"


def test_a_path_to_nothing_is_not_taken_for_a_hub_id() -> None:
    with pytest.raises(UserError, match="expected a model folder, found none"):
        resolve_model("./not/here")


def test_a_missing_package_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("DRAFTSMITH_CACHE", str(tmp_path))
    monkeypatch.setattr(embedded, "PACKAGE", "no_such_package_at_all")
    with pytest.raises(UserError, match="pip install"):
        resolve_model("smollm2")


def test_another_file_than_the_known_one_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("DRAFTSMITH_CACHE", str(tmp_path))
    monkeypatch.setattr(embedded, "GGUF_SHA256", "0" * 64)
    with pytest.raises(UserError, match="expected sha256 0000"):
        resolve_model("smollm2")


def test_an_unknown_template_is_refused_rather_than_left_without_thinking() -> None:
    with pytest.raises(UserError, match="found another"):
        thinking_template("{{ messages }}")


@pytest.mark.slow
def test_the_converted_models_template_opens_thinking_unless_told_not_to(smollm2: str) -> None:
    turns = [{"role": "user", "content": "hi"}]
    assert load_template(smollm2, {}, False).text(turns).endswith("<|im_start|>assistant\n<think>\n")
    assert load_template(smollm2, {"thinking": False}, False).text(turns).endswith("<|im_start|>assistant\n")
