"""A run as diagnosis looks at it: its traces and stored states, and its target alive in float32.

Everything is over the same few held-out questions (and as many of the training ones): what was stored of them, what the
target computes over the same ids now, and what it says to the same prompts with the draft at its side. States of any
layer are computed once per reply and kept, so that layer ids can be tried.

Costs: the target once in float32, one forward pass per reply and set of layers, and one speculative decode per prompt.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from draftsmith.draft.checkpoint import load_draft
from draftsmith.draft.eagle3 import Eagle3Draft
from draftsmith.errors import UserError
from draftsmith.hidden.store import HiddenStore, States
from draftsmith.hidden.target_head import TargetHead, load_target_head
from draftsmith.measure.prompts import longest_reply
from draftsmith.measure.walks import Words
from draftsmith.recipe import DiagnoseSettings
from draftsmith.target.device import pick_device
from draftsmith.target.embedded import resolve_model
from draftsmith.target.loading import load_model, text_config
from draftsmith.target.states import StateTap
from draftsmith.target.template import Template, load_template
from draftsmith.target.thinking import Delimiters, delimiters_from_json
from draftsmith.trace import Trace, held_out, read_metadata, read_traces

EMBEDDING = -1
"""The layer id of the embedding's output, where an engine would take it."""


@dataclass(slots=True)
class Alive:
    """One prompt and reply, with the target's states over them as they are asked for.

    `states[layer]` [n-1, H] of tokens 0..n-2; `argmax` [n-1] is the target's own next token after each.
    """

    key: str
    prompt: tuple[int, ...]
    reply: tuple[int, ...]
    states: dict[int, Tensor] = field(default_factory=dict)
    argmax: Tensor | None = None

    @property
    def agreement(self) -> float:
        """Share of the reply that the target itself says, greedily, behind what stands before."""
        assert self.argmax is not None
        said = self.argmax[len(self.prompt) - 1 :]
        return float((said == torch.tensor(self.reply, device=said.device)).float().mean())

    def words(self, layers: Sequence[int]) -> Words:
        """The reply with these layers' states, in this order."""
        aux = torch.cat([self.states[layer] for layer in layers], dim=-1)
        return Words(self.key, (*self.prompt, *self.reply), len(self.prompt), aux)


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """What every link is measured on."""

    run: Path
    settings: DiagnoseSettings
    metadata: dict[str, str]
    store: HiddenStore
    head: TargetHead
    trained: Eagle3Draft | None
    """RUN/draft/best; None where there is none or another draft is asked about."""
    model: Any
    target: str
    template: Template | None
    delimiters: Delimiters | None
    held_out: list[Trace]
    training: list[Trace]
    draft_tokens: int

    @property
    def device(self) -> torch.device:
        """Where the target lives."""
        device: torch.device = self.model.device
        return device

    @property
    def depth(self) -> int:
        """Layers of the target."""
        return int(text_config(self.model).num_hidden_layers)

    @property
    def stop_ids(self) -> frozenset[int]:
        """Ids that end a reply."""
        return frozenset(json.loads(self.metadata["stop_ids"]))

    @property
    def max_tokens(self) -> int:
        """Budget of a reply, capture's."""
        return int(self.metadata.get("max_tokens", 0)) or longest_reply(self.run / "traces")

    @property
    def context(self) -> int:
        """Positions the target was made for."""
        return int(text_config(self.model).max_position_embeddings)

    def stored(self, trace: Trace) -> Words:
        """A trace with its stored states."""
        states = self.store.get(trace.trace_id)
        ids = (*trace.prompt_ids, *trace.generated_ids)
        return Words(trace.trace_id, ids, len(trace.prompt_ids), states.aux.float().to(self.device))

    def states(self, trace: Trace) -> States:
        """What is stored of a trace."""
        return self.store.get(trace.trace_id)

    @torch.inference_mode()
    def look(self, replies: Iterable[Alive], layers: Sequence[int]) -> None:
        """Computes the states of these layers over the replies, where they are not there yet."""
        for one in replies:
            missing = sorted({*layers} - {*one.states})
            if not missing and one.argmax is not None:
                continue
            ids = torch.tensor([[*one.prompt, *one.reply][:-1]], device=self.device)
            taps = [layer for layer in missing if layer != EMBEDDING]
            with StateTap(self.model, taps) as tap:
                output = self.model(ids)
                width = text_config(self.model).hidden_size
                parts = torch.split(tap.aux()[0], width, dim=-1) if taps else ()
                one.states.update(zip(taps, (part.clone() for part in parts), strict=True))
            if EMBEDDING in missing:
                one.states[EMBEDDING] = self.model.get_input_embeddings()(ids)[0]
            one.argmax = output.logits[0].argmax(-1)


def set_up(run: Path, settings: DiagnoseSettings) -> Scene:
    """Reads the run and loads its target.

    Raises:
        UserError: the run lacks traces or hidden states, nothing is held out, or the target is not there.
    """
    traces = run / "traces"
    metadata = read_metadata(traces)
    store, head = HiddenStore(run / "hidden"), load_target_head(run / "hidden")
    device = pick_device(settings.device)
    share = float(metadata["held_out"])
    kept, training = _chosen(traces, store, share, settings.limit)
    if not kept:
        raise UserError(
            f"{traces}: no held-out reply with hidden states to look at (held_out {share:g}); "
            "capture with a larger --held-out or more questions"
        )
    trained = None
    if settings.draft is None and (run / "draft" / "best").is_dir():
        trained = load_draft(run / "draft" / "best", head, torch.device("cpu"), torch.float32)
        trained.set_embedding(head.embed_tokens.float())
        trained = trained.to(device)
    name = resolve_model(settings.target or store.target["name"])
    options = json.loads(metadata.get("template_options", "{}"))
    delimiters = delimiters_from_json(metadata.get("delimiters", "null"))
    template = None
    if delimiters is not None or settings.questions:
        template = load_template(metadata["tokenizer"], options, settings.trust_remote_code)
    model = load_model(name, torch.float32, device, trust_remote_code=settings.trust_remote_code)
    _check_target(model, head, name)
    return Scene(
        run=run,
        settings=settings,
        metadata=metadata,
        store=store,
        head=head,
        trained=trained,
        model=model,
        target=name,
        template=template,
        delimiters=delimiters,
        held_out=kept,
        training=training,
        draft_tokens=settings.draft_tokens,
    )


def _check_target(model: Any, head: TargetHead, name: str) -> None:
    config = text_config(model)
    found, expected = (config.vocab_size, config.hidden_size), tuple(head.embed_tokens.shape)
    if found != expected:
        raise UserError(
            f"{name}: wrong target: its vocabulary and hidden size are {found}, the run's hidden states and draft were "
            f"made with {expected}; give the target of the run with --target"
        )


def _chosen(traces: Path, store: HiddenStore, share: float, limit: int) -> tuple[list[Trace], list[Trace]]:
    """At most `limit` held-out and training traces each, one per question, with at least three generated ids."""
    parts: tuple[dict[str, Trace], dict[str, Trace]] = {}, {}
    for trace in read_traces(traces):
        part = parts[0] if held_out(trace.question_key, share) else parts[1]
        usable = trace.trace_id in store.trace_ids and len(trace.generated_ids) > 2 and trace.prompt_ids
        if usable and len(part) < limit:
            part.setdefault(trace.question_key, trace)
        if all(len(one) == limit for one in parts):
            break
    return list(parts[0].values()), list(parts[1].values())
