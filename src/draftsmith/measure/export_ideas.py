"""What can be wrong with exported files: suspects, each with a repair of one thing in a copy of the engine's view.

With the trainer's draft at hand a part is suspect only where it differs, and the repair is the trainer's own part. A
draft by others is tried against what engines and trainers commonly confuse, and such a guess is named only if it helps.
Special suspects come before the general ones that would also restore.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from draftsmith.draft import layer_ids
from draftsmith.draft.eagle3 import DraftConfig, Eagle3Draft
from draftsmith.draft.formats import OWN_BLOCK, layer_config, named_layers
from draftsmith.draft.loading import OPTIONAL, SHAPES
from draftsmith.errors import UserError
from draftsmith.export.engine_view import View
from draftsmith.export.gguf import interleaved
from draftsmith.export.load_report import HEAD
from draftsmith.export.rope import Rope, trained_rope
from draftsmith.hidden.layers import default_layers
from draftsmith.measure.scene import Scene
from draftsmith.recipe import Engine

ROUNDING = 0.01
"""Relative distance of weights that differ by no more than their storage type."""
MATCHED_ROWS = 16384
"""Head rows that are matched against each other at most: the work grows with their square."""


Repair = Callable[[View], View]


@dataclass(frozen=True, slots=True)
class Idea:
    """A suspect before it is tried. `differs`: files show it; `needs`: layers whose states the repair reads."""

    name: str
    found: str
    change: str
    repair: Repair | None
    differs: bool
    alone: bool = False
    """Worth naming only if it restores: a guess, not a difference."""


def ideas(scene: Scene, view: View, trained: Eagle3Draft | None, refusal: str) -> Iterator[Idea]:
    """All suspects, special ones before the general ones that would also restore."""
    known = trained is not None
    yield from _layer_ideas(scene, view, trained)
    yield from _missing(view, trained, refusal)
    yield from _norm_ideas(scene, view, trained)
    yield from _rope_ideas(scene, view, trained)
    yield from _vocabulary_ideas(scene, view, trained)
    yield from _head_ideas(scene, view, trained)
    own = scene.head.embed_tokens
    if view.embedding.shape != own.shape or not _near(view.embedding, own):
        yield Idea(
            "embedding",
            "the file's embedding is not the target's, and the engine uses it",
            "export again with the target's embedding, or leave it out so that the engine shares it",
            lambda one: replace(one, embedding=own),
            True,
        )
    limit = scene.context if trained is None else min(trained.config.max_position_embeddings, scene.context)
    found = int(layer_config(view.flat).max_position_embeddings)
    if found < limit:
        yield Idea(
            "max positions too small",
            f"max_position_embeddings is {found}, the target's {scene.context}: nothing is drafted beyond",
            f"write max_position_embeddings {limit}",
            lambda one: replace(one, flat={**one.flat, "max_position_embeddings": limit}),
            True,
        )
    claimed = view.files.raw.get(OWN_BLOCK, {}).get("target_fingerprint")
    if claimed and claimed != scene.store.target["fingerprint"]:
        yield Idea(
            "wrong target",
            "by its own block the draft was exported for another target",
            "serve it with the target it was made for, or train one for this target",
            None,
            True,
        )
    if known and trained is not None:
        yield from _other_weights(view, trained)


def _layer_ideas(scene: Scene, view: View, trained: Eagle3Draft | None) -> Iterator[Idea]:
    here, depth = view.layers, scene.depth
    right = tuple(trained.config.aux_layers) if trained else None
    if here == right:
        return
    ids = named_layers(view.flat)
    other = _other_meaning(view.engine, ids, scene)
    guesses: list[tuple[str, tuple[int, ...], str]] = []
    if other is not None:
        meaning = "vLLM" if view.engine == "sglang" else "SGLang"
        guesses.append(("layer ids in another engine's meaning", other, f"ids {ids} as {meaning} means them"))
    for step in (1, -1):
        words = f"ids {ids} are one too {'low' if step > 0 else 'high'}"
        guesses.append(("layer ids off by one", tuple(layer + step for layer in here), words))
    if right is not None:
        guesses.append(("layer ids", right, f"the engine takes outputs of {list(here)}, trained on {list(right)}"))
    else:
        guesses.append(("layer ids", default_layers(depth), f"ids {ids} are not the usual ones of this target"))
    seen: set[tuple[int, ...]] = {here}
    for name, layers, words in guesses:
        if layers in seen or len({*layers}) != 3 or not all(0 <= layer < depth for layer in layers):
            continue
        seen.add(layers)
        yield Idea(
            name,
            f"{words}: outputs of layers {list(here)} are taken, not {list(layers)}",
            f"write the ids of the outputs of layers {list(layers)} as {view.engine} means them",
            lambda one, layers=layers: replace(one, layers=layers),  # type: ignore[misc]
            layers == right,
            alone=layers != right,
        )


def _other_meaning(engine: Engine, ids: list[int] | None, scene: Scene) -> tuple[int, ...] | None:
    if not ids:
        return None
    try:
        if engine == "sglang":
            return layer_ids.from_vllm(ids, scene.depth)
        return layer_ids.from_sglang(ids, scene.store.target["model_type"], scene.depth)
    except UserError:
        return None


def _missing(view: View, trained: Eagle3Draft | None, refusal: str) -> Iterator[Idea]:
    if not refusal:
        return
    lacking = sorted(SHAPES.keys() - OPTIONAL - view.files.tensors.keys())
    repair = None
    if trained is not None:
        own = _stored_as(view, trained)

        def repair(one: View) -> View:
            files = replace(one.files, tensors={**own, **one.files.tensors})
            return replace(one, files=files, refusals=())

    yield Idea(
        "draft layers missing" if lacking else "refused by the engine",
        f"not in the files: {', '.join(lacking)}" if lacking else refusal,
        "export again: the folder must hold every tensor of the draft" if lacking else "export again for this engine",
        repair,
        True,
    )


def _norm_ideas(scene: Scene, view: View, trained: Eagle3Draft | None) -> Iterator[Idea]:
    stored = view.files.tensors.get("norm.weight")
    right = trained.norm.weight.detach().cpu() if trained else scene.head.norm.cpu()
    if stored is not None and stored.shape == right.shape and not _near(stored, right):
        flat = bool((stored.float() == stored.float().flatten()[0]).all())
        yield Idea(
            "final norm",
            "its weights are all the same: the norm does nothing but scale"
            if flat
            else "its weights are not those " + ("of the trained draft" if trained else "of the target"),
            "export again with norm.weight as trained; an engine applies it before the head",
            _with_tensor("norm.weight", right),
            trained is not None,
            alone=trained is None,
        )
    flag = view.reading.norm_before_residual
    if trained is None or flag != trained.config.norm_before_residual:
        yield Idea(
            "norm_before_residual",
            f"the engine computes {flag}",
            f"write norm_before_residual {str(not flag).lower()}",
            lambda one: replace(one, reading=replace(one.reading, norm_before_residual=not flag)),
            trained is not None,
            alone=trained is None,
        )
    for name in ("norm_before_fc", "fc_norm", "norm_output"):
        if getattr(view.reading, name):
            yield Idea(
                name,
                "the engine applies a norm there",
                f"write {name} false",
                lambda one, name=name: replace(one, reading=replace(one.reading, **{name: False})),  # type: ignore[misc]
                trained is not None,
                alone=trained is None,
            )


def _rope_ideas(scene: Scene, view: View, trained: Eagle3Draft | None) -> Iterator[Idea]:
    model = dict(scene.store.target["config"].get("rope_parameters") or {})
    right = dict(trained.config.rope_parameters) if trained else model
    if not right.get("rope_theta"):
        return
    config = trained.config if trained else None
    whole = _rope(view, config, right)
    if whole is None or whole.difference(view.rope) is None:
        return
    here = dict(layer_config(view.flat).rope_parameters)
    theta, kept = here.get("rope_theta"), right["rope_theta"]
    same_theta = theta == kept
    scaling = {**right, "rope_theta": theta}
    certain = trained is not None
    whose = "training" if certain else "the target"
    for name, values, differs, words in (
        ("rope theta", {**here, "rope_theta": kept}, not same_theta, f"theta is {theta:g}, that of {whose} {kept:g}"),
        ("rope scaling", scaling, _kind(here) != _kind(right),
         f"scaling is {_kind(here)[0]}, that of {whose} {_kind(right)[0]}"),
        ("rope", right, True, f"frequencies are not those of {whose}"),
    ):  # fmt: skip
        rope = _rope(view, config, values) if differs else None
        if rope is not None and not (name == "rope" and (same_theta or _kind(here) == _kind(right))):
            yield Idea(
                name,
                words,
                f"write {right} into rope_parameters (and rope_theta, rope_scaling for older readers)",
                lambda one, rope=rope: replace(one, rope=rope),  # type: ignore[misc]
                certain,
                alone=not certain,
            )


def _kind(values: dict[str, Any]) -> tuple[str, ...]:
    """What scales, as far as it differs."""
    named = {key: value for key, value in values.items() if key not in ("rope_theta", "rope_type")}
    return (str(values.get("rope_type", "default")), str(sorted(named.items())))


def _rope(view: View, config: DraftConfig | None, values: dict[str, Any]) -> Rope | None:
    llama = layer_config(view.flat)
    if config is None:
        config = DraftConfig(
            target_vocab_size=llama.vocab_size, draft_vocab_size=1, hidden_size=llama.hidden_size, intermediate_size=1,
            num_attention_heads=llama.num_attention_heads, num_key_value_heads=llama.num_key_value_heads,
            head_dim=llama.head_dim, rms_norm_eps=1e-5, rope_parameters={}, aux_layers=(0, 1, 2), target_layers=0,
            max_position_embeddings=llama.max_position_embeddings, target_model_type="",
        )  # fmt: skip
    try:
        return trained_rope(replace(config, rope_parameters=values))
    except (KeyError, ValueError, TypeError):  # transformers' own refusals of a half-filled scaling
        return None


def _vocabulary_ideas(scene: Scene, view: View, trained: Eagle3Draft | None) -> Iterator[Idea]:
    d2t, ids = view.files.tensors.get("d2t"), view.ids
    if d2t is None or ids is None:
        return
    right = trained.target_ids(torch.arange(len(trained.d2t), device=trained.d2t.device)).cpu() if trained else None
    if right is not None and torch.equal(right, ids):
        return
    absolute, vocab = d2t.to(torch.int64), len(scene.head.embed_tokens)
    if bool((absolute >= 0).all() and (absolute < vocab).all()) and len(torch.unique(absolute)) == len(absolute):
        yield Idea(
            "d2t absolute",
            f"d2t holds ids ({absolute[:3].tolist()}, ...), which engines add to the row number",
            "write offsets: d2t[i] = target id - i",
            lambda one: replace(one, ids=absolute),
            bool(right is not None and torch.equal(absolute, right)),
            alone=right is None or not torch.equal(absolute, right),
        )
    if right is not None and len(right) == len(ids):
        yield Idea(
            "vocabulary of another run",
            f"{int((right != ids).sum())} of {len(ids)} head rows stand for other ids than in training",
            "export d2t and t2d of the draft itself: they belong to its head",
            lambda one: replace(one, ids=right),
            True,
        )
    elif right is None:
        matched = _matched_ids(scene, view)
        if matched is not None and not torch.equal(matched.sort().values, ids.sort().values):
            yield Idea(
                "vocabulary of another run",
                f"{int((matched != ids).sum())} of {len(ids)} head rows look like the target's rows of other ids",
                "export d2t and t2d of the draft itself: they belong to its head",
                lambda one: replace(one, ids=matched),
                False,
                alone=True,
            )


def _matched_ids(scene: Scene, view: View) -> Tensor | None:
    """The target ids whose head rows the draft's resemble most: a draft's head usually began as the target's rows."""
    target = scene.head.lm_head
    if view.head is None or len(view.head) > MATCHED_ROWS or view.head.shape[-1] != target.shape[-1]:
        return None
    rows = torch.nn.functional.normalize(target.float().cpu(), dim=-1)
    own = torch.nn.functional.normalize(view.head.float().cpu(), dim=-1)
    return torch.cat([(part @ rows.T).argmax(-1) for part in torch.split(own, 1024)])


def _head_ideas(scene: Scene, view: View, trained: Eagle3Draft | None) -> Iterator[Idea]:
    head, ids = view.head, view.ids
    if head is None or ids is None:
        return
    ids = ids.clamp(0, len(scene.head.lm_head) - 1)
    right = trained.lm_head.weight.detach().cpu().float() if trained else scene.head.lm_head[ids].float().cpu()
    if right.shape != head.shape or (trained and _near(head, right)):
        return
    if len(head) <= MATCHED_ROWS:
        rows = torch.nn.functional.normalize(head.float().cpu(), dim=-1)
        order = (torch.nn.functional.normalize(right, dim=-1) @ rows.T).argmax(-1)
        own = torch.arange(len(order))
        moved = int((order != own).sum())
        if moved and (trained is None or len(torch.unique(order)) == len(order)):
            exact = trained is not None and _near(head[order], right)
            yield Idea(
                "head rows permuted",
                f"{moved} of {len(order)} head rows fit other ids' rows better",
                "write the head's rows in the order of d2t",
                lambda one: replace(one, head=head[order]),
                exact,
                alone=not exact,
            )
    if trained is not None:
        yield Idea(
            "head of another draft",
            "its rows are not the trained ones",
            "export again from the trained draft",
            lambda one: replace(one, head=right),
            True,
        )


def _stored_as(view: View, trained: Eagle3Draft) -> dict[str, Tensor]:
    """The trained weights in the order that this engine's files keep them in: llama.cpp interleaves q and k."""
    own = {name: value.detach().cpu() for name, value in trained.trained().items()}
    if view.reading.pairwise_rope:
        heads = {"q_proj": trained.config.num_attention_heads, "k_proj": trained.config.num_key_value_heads}
        for part, count in heads.items():
            name = f"layers.0.self_attn.{part}.weight"
            own[name] = interleaved(own[name], count)
    return own


def _other_weights(view: View, trained: Eagle3Draft) -> Iterator[Idea]:
    own = _stored_as(view, trained)
    special = ("norm.weight", HEAD)
    differ = [
        name
        for name, value in own.items()
        if name not in special and name in view.files.tensors and not _near(view.files.tensors[name], value)
    ]
    if differ:
        yield Idea(
            "weights of another draft",
            f"{len(differ)} tensors are not the trained ones ({', '.join(differ[:3])}{', ...' if differ[3:] else ''})",
            "export again from the trained draft",
            lambda one: replace(
                one, files=replace(one.files, tensors={**one.files.tensors, **{name: own[name] for name in differ}})
            ),
            True,
        )


def _with_tensor(name: str, value: Tensor) -> Repair:
    return lambda one: replace(one, files=replace(one.files, tensors={**one.files.tensors, name: value}))


def _near(one: Tensor, other: Tensor) -> bool:
    if one.shape != other.shape:
        return False
    left, right = one.float().cpu(), other.float().cpu()
    return float((left - right).norm()) <= ROUNDING * float(right.norm())
