"""What the probe says of real servers."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from draftsmith.__main__ import main
from draftsmith.capture.probing import probe_command
from draftsmith.progress import Progress
from draftsmith.recipe import CaptureSettings, load_recipe
from draftsmith.target.embedded import GGUF_NAME, OPENED, PACKAGE
from draftsmith.target.probe import Verdict
from real_servers import llamacpp

pytestmark = pytest.mark.slow

RECIPE = Path(__file__).parents[2] / "recipes" / "smollm2.yaml"


def look(url: str, tokenizer: str, **changes: Any) -> Verdict:
    """The probe with the recipe's worked examples, by which the embedded model thinks."""
    recipe = load_recipe(RECIPE).capture
    assert recipe is not None
    shared = {"local": None, "server": [url], "tokenizer": tokenizer, "exact": "engine"}
    settings = CaptureSettings.model_validate(recipe.model_dump() | shared | changes)
    return probe_command(settings, Progress(quiet=True))


def texts(verdict: Verdict, about: str) -> list[tuple[str, str]]:
    return [(finding.level, finding.text) for finding in verdict.findings if finding.about == about]


@pytest.mark.vllm
def test_vllm_is_fit_and_its_reasoning_field_is_found(vllm_server: str, smollm2: str) -> None:
    verdict = look(vllm_server, smollm2)
    assert not verdict.fatal
    assert (verdict.engine, verdict.max_model_len, verdict.ids_source) == ("vllm", 1024, "engine")
    assert texts(verdict, "token ids") == [("ok", "the engine's own, by chat")]
    assert texts(verdict, "prompt")[0][0] == texts(verdict, "template options")[0][0] == "ok"
    level, text = texts(verdict, "reasoning")[0]
    assert level == "ok" and text.startswith(
        "comes in the field reasoning, told by its ids; <think> opened by the prompt"
    )
    assert [level for level, _ in texts(verdict, "cut replies")] == ["ok"]
    in_effect = texts(verdict, "sampling")[0]
    assert in_effect[0] == "ok" and "temperature" in in_effect[1]


@pytest.mark.vllm
def test_the_command_says_it_for_scripts_and_by_its_exit_code(
    vllm_server: str, smollm2: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["probe", vllm_server, "--tokenizer", smollm2, "--json", "--template-options.thinking", "false"]
    assert main(words) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["dialect"], found["fatal"]) == ("chat", False)
    options = next(f for f in found["findings"] if f["about"] == "template options")
    assert options == {"level": "ok", "about": "template options", "text": "thinking=False took effect"}
    assert main(["probe", vllm_server, "--tokenizer", smollm2, "--template-options.enable_thinking", "false"]) == 3
    said = capsys.readouterr()
    assert "it reads thinking" in said.out and "not fit for a capture" in said.err


def test_llamacpp_is_fit_and_gives_exact_ids(llamacpp_server: str, smollm2: str) -> None:
    verdict = look(llamacpp_server, smollm2)
    assert not verdict.fatal
    assert (verdict.engine, verdict.max_model_len, verdict.ids_source) == ("llama.cpp", 1024, "engine")
    assert texts(verdict, "token ids") == [("ok", "the engine's own, by llamacpp")]
    assert texts(verdict, "prompt")[0][0] == "ok"
    assert texts(verdict, "reasoning")[0][0] == "ok"


@pytest.mark.parametrize("mentions_reasoning", [False, True])
def test_llamacpp_drops_the_opening_of_a_template_that_never_mentions_reasoning_content(
    smollm2: str, tmp_path: Path, mentions_reasoning: bool
) -> None:
    pytest.importorskip("xllamacpp", reason="llama.cpp is not installed (extra llamacpp)")
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        pytest.skip(f"{PACKAGE} is not installed")
    folder = thinking_folder(smollm2, tmp_path, mentions_reasoning)
    model = Path(spec.submodule_search_locations[0]) / GGUF_NAME
    options = ("--model", str(model), "--slots", "4", "--chat-template", str(folder / "chat_template.jinja"))
    with llamacpp(tmp_path, *options) as url:
        verdict = look(url, str(folder))
    if not mentions_reasoning:
        assert "the server's prompt lacks the <think>" in verdict.fatal[0].text
        assert "mention message.reasoning_content in it" in verdict.fatal[0].text
        return
    assert not verdict.fatal
    assert texts(verdict, "reasoning")[0][1].startswith("comes in the field reasoning_content")


def thinking_folder(smollm2: str, folder: Path, mentions_reasoning: bool) -> Path:
    """The embedded model's tokenizer with an `enable_thinking` template, as many reasoning models have it."""
    folder = folder / "tokenizer"
    folder.mkdir()
    for file in Path(smollm2).iterdir():
        if file.name != "chat_template.jinja":
            (folder / file.name).symlink_to(file)
    template = (Path(smollm2) / "chat_template.jinja").read_text()
    template = template.replace(
        "thinking is not defined or thinking", "enable_thinking is not defined or enable_thinking"
    )
    assert OPENED[: OPENED.index("{% endif %}")] in template and "enable_thinking" in template
    if mentions_reasoning:
        turn = "{{'<|im_start|>' + message['role'] + '\n' + message['content']"
        assert turn in template
        thought = (
            "{% if message.reasoning_content %}{{ '<think>\n' + message.reasoning_content + '</think>\n' }}{% endif %}"
        )
        template = template.replace(
            turn, "{{'<|im_start|>' + message['role'] + '\n'}}" + thought + "{{ message['content']"
        )
    (folder / "chat_template.jinja").write_text(template)
    return folder
