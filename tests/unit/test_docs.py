"""What the documentation says is true: commands parse, Python runs, YAML is a recipe, shipped recipes resolve."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest
import yaml
from cyclopts import CycloptsError

from draftsmith.cli import app
from draftsmith.pipeline import describe
from draftsmith.recipe import Recipe, arm_recipe, load_recipe, parse_recipe

ROOT = Path(__file__).parents[2]
PAGES = sorted([*(ROOT / "docs").glob("*.md"), *ROOT.glob("README.md")])
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\((?!https?:)([^)#]+)")
RECIPES = sorted((ROOT / "recipes").glob("*.yaml"))
COMMENTED_COMMAND = re.compile(r"^#     (draftsmith [^\n\\]*(?:\\\n#[^\n\\]*)*)", re.MULTILINE)


def blocks(language: str) -> list[object]:
    """All blocks of a language, as parameters named after page and number."""
    found = []
    for page in PAGES:
        texts = [text for name, text in BLOCK.findall(page.read_text()) if name == language]
        found += [pytest.param(text, id=f"{page.stem}-{number}") for number, text in enumerate(texts, start=1)]
    return found


def commands(text: str) -> list[str]:
    """The `draftsmith` lines of a block, continued lines joined."""
    return [line for line in text.replace("\\\n", " ").splitlines() if line.startswith("draftsmith ")]


def parse(line: str) -> bool:
    """Whether the command line knows what to run for a command; runs nothing, and raises for a wrong flag or value."""
    words = shlex.split(line, comments=True)[1:]
    return words == ["--help"] or callable(app.parse_args(words, print_error=False, exit_on_error=False)[0])


@pytest.mark.parametrize("text", blocks("bash"))
def test_every_command_parses(text: str) -> None:
    for line in commands(text):
        assert parse(line)


@pytest.mark.parametrize("text", blocks("python"))
def test_every_python_block_runs(text: str) -> None:
    exec(compile(text, "docs", "exec"), {})


@pytest.mark.parametrize("text", blocks("yaml"))
def test_every_yaml_block_is_a_recipe(text: str) -> None:
    assert parse_recipe(yaml.safe_load(text), "docs").run


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_link_leads_to_a_file(page: Path) -> None:
    for link in LINK.findall(page.read_text()):
        assert (page.parent / link).exists(), link


@pytest.mark.parametrize("page", [page for page in PAGES if page.stem != "README"], ids=lambda page: page.stem)
def test_every_page_answers_a_question(page: Path) -> None:
    title = page.read_text().splitlines()[0]
    assert title.startswith("# ") and title.endswith("?")


def test_a_command_that_is_wrong_would_be_noticed() -> None:
    with pytest.raises(CycloptsError):
        parse("draftsmith measure --run runs/mine --no-such-flag 1")
    with pytest.raises(CycloptsError):
        parse("draftsmith measure --run runs/mine --draft-tokens many")


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_the_commands_in_a_recipe_parse(path: Path) -> None:
    found = COMMENTED_COMMAND.findall(path.read_text())
    assert found
    for text in found:
        parse(re.sub(r"\\\n#\s*", "", text))


def test_the_recipes_are_the_ones_the_documentation_lists() -> None:
    listed = re.findall(r"^\| `([\w.-]+)` \|", (ROOT / "docs" / "recipes.md").read_text(), re.MULTILINE)
    assert sorted(listed) == [path.name.removesuffix(".yaml") for path in RECIPES]


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_every_recipe_resolves_field_by_field(path: Path) -> None:
    recipe = load_recipe(path)
    described = describe(recipe, Path(recipe.run))
    arms = described if recipe.arms else {"": described}
    for arm in arms.values():
        assert list(arm["stages"])[1:] == ["vocab", "extract", "train", "export", "measure", "report"]
    assert json.loads(json.dumps(described)) == described


def test_the_kimi_recipe_says_what_kimi_needs() -> None:
    recipe = load_recipe(ROOT / "recipes" / "kimi-k2.5.yaml")
    capture = recipe.capture
    assert capture is not None
    assert (capture.questions, capture.server) == ("mlabonne/open-perfectblend", ["http://localhost:8000"])
    assert (capture.template_options, capture.thinking) == ({"thinking": True}, "kimi")
    assert (capture.limit, capture.max_tokens, capture.concurrency, capture.deadline) == (10_000, 8192, 128, 1800)
    assert (capture.temperature, capture.top_p, capture.exact) == (1.0, 0.95, "engine")
    assert capture.trust_remote_code and recipe.train.from_


def test_the_arms_of_the_pivot_differ_only_in_whose_words_they_learn() -> None:
    recipe = load_recipe(ROOT / "recipes" / "pivot.yaml")
    static, captured = arm_recipe(recipe, "static"), arm_recipe(recipe, "captured")
    assert static.import_ is not None and captured.capture is not None
    for name in ("questions", "split", "limit", "held_out", "preamble", "template_options", "thinking"):
        assert getattr(static.import_, name) == getattr(captured.capture, name)
    assert static.train == captured.train and static.train.token_budget
    assert static.vocab == captured.vocab
    assert settings_but(static, "max_tokens") == settings_but(captured, "max_tokens")
    assert static.measure.max_tokens == captured.capture.max_tokens


def settings_but(recipe: Recipe, left_out: str) -> dict[str, object]:
    """The measure settings without one."""
    return {name: value for name, value in recipe.measure.model_dump().items() if name != left_out}
