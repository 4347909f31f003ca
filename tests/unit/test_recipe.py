from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from draftsmith.errors import UserError
from draftsmith.recipe import CaptureSettings, ExportSettings, arm_recipe, load_recipe, parse_recipe, seconds_of

CAPTURE = {"run": "runs/x", "capture": {"local": "smollm2"}}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({**CAPTURE, "trian": {}}, "unknown key trian; did you mean train?"),
        ({**CAPTURE, "train": {"epoch": 1}}, "unknown key train.epoch; did you mean epochs?"),
        ({**CAPTURE, "train": {"lr": 0}}, "train.lr: input should be greater than 0, found 0"),
        ({**CAPTURE, "vocab": {"zzz": 0}}, "unknown key vocab.zzz; known keys: size"),
        ({"run": "runs/x"}, "expected either `capture` or `import`, found neither"),
        ({**CAPTURE, "import": {}}, "found both"),
        (
            {**CAPTURE, "arms": {"a": {"train": {"epohcs": 2}}}},
            "arms.a: unknown key train.epohcs; did you mean epochs?",
        ),
        ({**CAPTURE, "capture": {"preamble": [{"role": "bot", "content": ""}]}}, "capture.preamble.0.role"),
    ],
)
def test_a_wrong_key_or_value_is_one_line_that_helps(values: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as caught:
        parse_recipe(values, "r.yaml")
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_overrides_are_yaml_values_at_dotted_places(tmp_path: Path) -> None:
    path = tmp_path / "r.yaml"
    path.write_text("run: a\ncapture: {local: smollm2}\n")
    recipe = load_recipe(path, ["train.lr=4e-4", "capture.limit=3", "export.engine=[sglang]", "train.from=drafts/a"])
    assert recipe.train.lr == 4e-4
    assert recipe.train.from_ == "drafts/a"
    assert recipe.capture is not None
    assert recipe.capture.limit == 3
    assert recipe.export.engine == ["sglang"]


@pytest.mark.parametrize("override", ["train.lr", "=3", "run.x=1", "train.lr=[1"])
def test_a_malformed_override_is_named(tmp_path: Path, override: str) -> None:
    path = tmp_path / "r.yaml"
    path.write_text("run: a\ncapture: {local: smollm2}\n")
    with pytest.raises(UserError, match="--set"):
        load_recipe(path, [override])


@pytest.mark.parametrize(("text", "found"), [("- a", "found list"), ("a: [", "expected YAML"), ("", "found NoneType")])
def test_a_file_that_is_no_recipe_is_named(tmp_path: Path, text: str, found: str) -> None:
    path = tmp_path / "r.yaml"
    path.write_text(text)
    with pytest.raises(UserError, match=found):
        load_recipe(path)


def test_arms_share_the_recipe_and_override_their_own_part() -> None:
    recipe = parse_recipe(
        {"run": "runs/p", "train": {"lr": 1e-3}, "arms": {"a": {"import": {"limit": 5}}, "b": CAPTURE | {"run": "x"}}},
        "p",
    )
    arm = arm_recipe(recipe, "a")
    assert (arm.train.lr, arm.import_ is not None, arm.capture) == (1e-3, True, None)
    assert arm.run == "runs/p/a"


def test_an_arm_can_switch_off_what_it_inherits() -> None:
    recipe = parse_recipe({**CAPTURE, "arms": {"static": {"capture": None, "import": {"limit": 5}}}}, "p")
    assert arm_recipe(recipe, "static").capture is None


def test_settings_that_only_change_speed_do_not_shape_the_result() -> None:
    slow, fast = CaptureSettings(concurrency=1, deadline=5), CaptureSettings(concurrency=64)
    assert slow.shaping() == fast.shaping()
    assert CaptureSettings(max_tokens=5).shaping() != fast.shaping()


def test_template_options_from_the_command_line_are_values_and_not_their_text() -> None:
    given = {"enable_thinking": "false", "thinking": "true", "n": "3", "reasoning_effort": "low", "kept": False}
    found = CaptureSettings(template_options=given).template_options
    assert found == {"enable_thinking": False, "thinking": True, "n": 3, "reasoning_effort": "low", "kept": False}


def test_credentials_in_a_server_url_are_used_but_never_written_down() -> None:
    url = "http://me:secret@host:8000/v1?key=secret"
    settings = CaptureSettings(server=[url, "me:secret@host", "http://[:secret@x"])
    assert settings.server[0] == url
    assert settings.model_dump()["server"][0] == url
    assert settings.model_dump(mode="json")["server"] == ["http://host:8000/v1", "http://host", "x"]
    assert "secret" not in settings.model_dump_json()


@pytest.mark.parametrize("given", [{"target_gguf": "bfloat16"}, {"gguf_tokenizer": "target.gguf"}])
def test_what_is_for_a_gguf_file_is_refused_where_none_is_written(given: dict[str, Any]) -> None:
    [name] = given
    with pytest.raises(UserError, match=f"export: {name}: expected llamacpp among the engines, found vllm, sglang"):
        ExportSettings(engine=["vllm", "sglang"], **given)
    assert ExportSettings(engine=["vllm", "llamacpp"], **given).engine == ["vllm", "llamacpp"]


@pytest.mark.parametrize(("wait", "seconds"), [("90s", 90), ("30m", 1800), ("2h", 7200), ("1.5m", 90), ("45", 45)])
def test_a_wait_is_a_number_with_a_unit(wait: str, seconds: float) -> None:
    assert seconds_of(wait) == seconds


@pytest.mark.parametrize("wait", ["", "m", "soon", "-3m", "inf", "nan", "30 minutes"])
def test_a_wait_that_is_none_is_refused_at_the_start(wait: str) -> None:
    with pytest.raises(UserError, match="wait: expected a time such as 90s, 30m or 2h, found"):
        CaptureSettings(wait=wait)
