"""What all settings have in common: their base, the types of their values, and errors of one line.

A field made with `runtime` changes how a stage runs, not what it makes, so changing it never invalidates a finished
folder. Unknown keys are errors that suggest the nearest key.
"""

from __future__ import annotations

import difflib
import json
import re
from typing import Annotated, Any, Literal, TypeVar
from urllib.parse import urlsplit, urlunsplit

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from draftsmith.errors import UserError

Dtype = Literal["auto", "float32", "bfloat16", "float16"]
Family = Literal["auto", "none", "think", "kimi", "gpt-oss", "custom"]
Engine = Literal["vllm", "speculators", "sglang", "llamacpp"]
DatasetFormat = Literal["speculators", "specforge", "hf"]
S = TypeVar("S", bound=BaseModel)
EXTRA = "extra_forbidden"
"""pydantic's name for an unknown key."""
UNION_MEMBER = re.compile(r"(constrained-)?(int|float|str|bool)|function-.*|.*[\[(].*")
"""What pydantic adds to the path of a wrong value for each type that it might have had."""
UNIT_SECONDS = {"s": 1.0, "m": 60.0, "h": 3600.0}


def runtime(description: str, **constraints: Any) -> Any:
    """A field that changes how a stage runs (speed, patience), not what it makes: it stays out of the plan."""
    return Field(description=description, json_schema_extra={"runtime": True}, **constraints)


class Settings(BaseModel):
    """Base of a stage's settings: frozen, and strict about unknown keys."""

    model_config = ConfigDict(extra="forbid", frozen=True, populate_by_name=True, allow_inf_nan=False)

    def shaping(self) -> dict[str, Any]:
        """The values that shape the stage's result, as JSON types, for its plan and manifest."""
        values = self.model_dump(mode="json", by_alias=True)
        for name, info in type(self).model_fields.items():
            if isinstance(info.json_schema_extra, dict) and info.json_schema_extra.get("runtime"):
                del values[info.alias or name]
        return values


def number(value: Any) -> Any:
    """YAML 1.1 reads 4e-4 as text; people mean a number."""
    if isinstance(value, str):
        try:
            return json.loads(value, parse_constant=lambda constant: constant)
        except ValueError:
            return value
    return value


def typed(options: dict[str, Any]) -> dict[str, Any]:
    """The command line gives text, and to a template the text "false" is true."""
    return {name: number(value) for name, value in options.items()}


TemplateOptions = Annotated[dict[str, Any], AfterValidator(typed)]
Levels = Annotated[
    list[Annotated[int, Field(ge=1)]], Field(min_length=1, description="Requests at a time; repeat for several.")
]


def without_credentials(url: str) -> str:
    """A URL as it may be shown and stored: no user, password or query; text that is no URL as it is."""
    try:
        parts = urlsplit(url if "://" in url else f"http://{url}")
    except ValueError:
        return url.rpartition("@")[2]
    return urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, "", ""))


def seconds_of(wait: str) -> float:
    """Seconds of a `--wait`: `90s`, `30m`, `2h`, or a plain number of seconds.

    Raises:
        UserError: it is none of these.
    """
    number, unit = (wait[:-1], wait[-1:]) if wait[-1:] in UNIT_SECONDS else (wait, "s")
    try:
        seconds = float(number) * UNIT_SECONDS[unit]
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < float("inf"):
        raise UserError(f"--wait: expected a time such as 90s, 30m or 2h, found {wait!r}")
    return seconds


def validated(kind: type[S], values: dict[str, Any], name: str) -> S:
    """`kind(**values)` with pydantic's findings turned into one line each."""
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        unknown = [_unknown_key(kind, found["loc"]) for found in error.errors() if found["type"] == EXTRA]
        wrong = [f"{where}: {wanted}, found {found!r}" for where, wanted, found in problems_of(error)]
        raise UserError("; ".join(f"{name}: {line}" for line in unknown + wrong)) from None


def problems_of(error: ValidationError) -> list[tuple[str, str, Any]]:
    """Each wrong value once: its path of keys, what was wanted (all members of a union), and what was found."""
    wanted: dict[str, list[str]] = {}
    found: dict[str, Any] = {}
    for problem in error.errors():
        if problem["type"] != EXTRA:
            where = ".".join(str(part) for part in problem["loc"] if not UNION_MEMBER.fullmatch(str(part)))
            wanted.setdefault(where, []).append(problem["msg"].lower())
            found[where] = problem["input"]
    same = "input should be "
    return [
        (where, " or ".join([words[0], *(word.removeprefix(same) for word in words[1:])]), found[where])
        for where, words in wanted.items()
    ]


def _unknown_key(kind: type[BaseModel], location: tuple[Any, ...]) -> str:
    known = _keys_at(kind, location[:-1])
    near = difflib.get_close_matches(str(location[-1]), known, n=1)
    hint = f"did you mean {near[0]}?" if near else f"known keys: {', '.join(known)}"
    return f"unknown key {'.'.join(map(str, location))}; {hint}"


def _keys_at(kind: Any, location: tuple[Any, ...]) -> list[str]:
    """The field names of the settings model that `location` leads to."""
    for part in location:
        for name, info in kind.model_fields.items():
            if part in (name, info.alias):
                inner = [info.annotation, *getattr(info.annotation, "__args__", ())]
                kind = next((a for a in inner if isinstance(a, type) and issubclass(a, BaseModel)), kind)
    return [info.alias or name for name, info in kind.model_fields.items()]
