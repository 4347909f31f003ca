"""The shipped recipes, as files: `recipes/` at the top of the repository is this folder."""

from __future__ import annotations

from pathlib import Path

from draftsmith.errors import UserError


def recipe_path(name: str) -> Path:
    """The file of a shipped recipe.

    Raises:
        UserError: there is none of that name; lists those there are.
    """
    path = Path(__file__).parent / f"{name}.yaml"
    if not path.exists():
        known = ", ".join(sorted(file.stem for file in path.parent.glob("*.yaml")))
        raise UserError(f"{name}: expected a shipped recipe, found none; there are {known}")
    return path
