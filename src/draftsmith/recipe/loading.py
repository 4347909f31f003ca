"""A recipe: the settings of a whole chain, from YAML and from the command line."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import Field

from draftsmith.errors import UserError
from draftsmith.recipe.data import CaptureSettings, ImportSettings
from draftsmith.recipe.draft import ExportSettings, ExtractSettings, MeasureSettings, TrainSettings, VocabSettings
from draftsmith.recipe.serving import ServingSettings
from draftsmith.recipe.values import Settings, number, validated


class Recipe(Settings):
    """A whole chain. With `arms`, each arm is this recipe with its own overrides, run in `RUN/<arm>`, and compared."""

    description: str = ""
    run: Annotated[str, Field(description="Run folder when --run is not given.")]
    capture: CaptureSettings | None = None
    import_: ImportSettings | None = Field(default=None, alias="import")
    vocab: VocabSettings = VocabSettings()
    extract: ExtractSettings = ExtractSettings()
    train: TrainSettings = TrainSettings()
    export: ExportSettings = ExportSettings()
    measure: MeasureSettings = MeasureSettings()
    serving: ServingSettings | None = None
    arms: dict[str, dict[str, Any]] = {}


def load_recipe(path: Path, overrides: list[str] | None = None) -> Recipe:
    """Reads a YAML recipe and applies `stage.key=value` overrides (values are YAML).

    Raises:
        UserError: file missing, not YAML, an unknown key (with the nearest known one), or a value out of range.
    """
    try:
        loaded = yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{path}: expected a recipe, found no such file") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: expected YAML, found {' '.join(str(error).split())}") from None
    if not isinstance(loaded, dict):
        raise UserError(f"{path}: expected a mapping of stages, found {type(loaded).__name__}")
    for override in overrides or []:
        _override(loaded, override)
    return parse_recipe(loaded, str(path))


def parse_recipe(values: dict[str, Any], name: str) -> Recipe:
    """Validates a recipe.

    Raises:
        UserError: as `load_recipe`; `name` says where the values come from.
    """
    recipe = validated(Recipe, values, name)
    if recipe.arms:
        for arm in recipe.arms:
            arm_recipe(recipe, arm)
    elif (recipe.capture is None) == (recipe.import_ is None):
        raise UserError(
            f"{name}: expected either `capture` or `import`, found {'both' if recipe.capture else 'neither'}"
        )
    return recipe


def arm_recipe(recipe: Recipe, arm: str) -> Recipe:
    """The recipe of one arm: the shared values with the arm's own laid over them, without arms."""
    values = recipe.model_dump(by_alias=True, exclude_none=True, exclude_unset=True)
    del values["arms"]
    values["run"] = str(Path(recipe.run) / arm)
    return parse_recipe(_merged(values, recipe.arms[arm]), f"arms.{arm}")


def _override(values: dict[str, Any], text: str) -> None:
    path, equals, value = text.partition("=")
    if not equals or not path:
        raise UserError(f"--set {text}: expected stage.key=value, e.g. --set train.lr=4e-4")
    *parents, last = path.split(".")
    for part in parents:
        inner = values.setdefault(part, {})
        if not isinstance(inner, dict):
            raise UserError(f"--set {text}: {part} is a value in this recipe, not a group of settings")
        values = inner
    try:
        values[last] = number(yaml.safe_load(value))
    except yaml.YAMLError:
        raise UserError(f"--set {text}: the value is not YAML; quote it") from None


def _merged(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    result = dict(base)
    for key, value in over.items():
        both = isinstance(value, dict) and isinstance(result.get(key), dict)
        result[key] = _merged(result[key], value) if both else value
    return {key: value for key, value in result.items() if value is not None}
