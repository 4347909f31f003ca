"""Two draft folders side by side: names, shapes, types and config keys, without loading a weight.

For the question "would what serves that published draft serve mine?". Whatever differs is listed; what engines do not
read (provenance, transformers' version) is left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from draftsmith.artifacts import read_json
from draftsmith.draft.formats import OWN_BLOCK, flattened
from draftsmith.export.shapes import tensors_of

IGNORED = frozenset({OWN_BLOCK, "transformers_version", "_name_or_path", "auto_map", "speculators_version"})
"""Config keys that say where a draft comes from, not what it is."""
OPTIONAL = frozenset({"embed_tokens.weight", "t2d"})
"""Tensors that engines do without: the target's embedding is shared, t2d is skipped."""
ABSENT = "absent"


@dataclass(frozen=True, slots=True)
class Difference:
    """One thing that is not the same."""

    kind: Literal["tensor", "shape", "dtype", "config"]
    name: str
    ours: str
    reference: str

    @property
    def matters(self) -> bool:
        """Whether a loader of the reference would stumble: names and shapes, not types or what it does without."""
        return self.kind == "shape" or (self.kind == "tensor" and self.name not in OPTIONAL)


@dataclass(frozen=True, slots=True)
class Comparison:
    """What `compare_drafts` found."""

    ours: str
    reference: str
    tensors: int
    """Names that both have."""
    from_config: tuple[str, ...]
    """Folders without weights, whose tensors are those their config promises."""
    differences: tuple[Difference, ...]

    @property
    def fits(self) -> bool:
        """Names and shapes are the reference's."""
        return not any(difference.matters for difference in self.differences)

    def to_json(self) -> dict[str, Any]:
        """As JSON types."""
        return {"fits": self.fits, **asdict(self)}

    def text(self) -> str:
        """For a person, a line per difference, those that matter first."""
        head = f"{self.ours} against {self.reference}: {self.tensors} tensors in both, "
        head += "names and shapes are the same" if self.fits else "NOT the same names and shapes"
        lines = [head, *(f"  {folder}: no weights, tensors as its config promises them" for folder in self.from_config)]
        for one in sorted(self.differences, key=lambda one: not one.matters):
            lines.append(f"  {one.kind:<7} {one.name}: {one.ours}, the reference has {one.reference}")
        return "\n".join(lines)


def compare_drafts(ours: Path, reference: Path) -> Comparison:
    """Compares two draft folders.

    Raises:
        UserError: a folder has no config.json, or a file that cannot be read.
    """
    left, left_read = tensors_of(ours)
    right, right_read = tensors_of(reference)
    found = [
        Difference("tensor", name, _there(name in left), _there(name in right))
        for name in sorted(left.keys() ^ right.keys())
        # What a config promises may be left out of the files, if engines do without it.
        if name not in OPTIONAL or (left_read and right_read)
    ]
    for name in sorted(left.keys() & right.keys()):
        one, two = left[name], right[name]
        if one.shape != two.shape:
            found.append(Difference("shape", name, str(list(one.shape)), str(list(two.shape))))
        if one.dtype and two.dtype and one.dtype != two.dtype:
            found.append(Difference("dtype", name, one.dtype, two.dtype))
    found += _config_differences(read_json(ours / "config.json"), read_json(reference / "config.json"))
    unread = [str(folder) for folder, read in ((ours, left_read), (reference, right_read)) if not read]
    return Comparison(str(ours), str(reference), len(left.keys() & right.keys()), tuple(unread), tuple(found))


def _config_differences(ours: Mapping[str, Any], reference: Mapping[str, Any]) -> list[Difference]:
    one, two = flattened(ours), flattened(reference)
    return [
        Difference("config", name, repr(one.get(name, ABSENT)), repr(two.get(name, ABSENT)))
        for name in sorted((one.keys() | two.keys()) - IGNORED)
        if one.get(name, ABSENT) != two.get(name, ABSENT)
    ]


def _there(present: bool) -> str:
    return "there" if present else ABSENT
