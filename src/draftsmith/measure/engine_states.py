"""The link `engine states`: what a vLLM with a hidden-states connector hands out, layer by layer beside our own target.

vLLM answers with the path of a safetensors file on its own host and writes it afterwards, under a lock that ends with
the writing (vllm/distributed/kv_transfer/kv_connector/v1/example_hidden_states_connector.py). Nothing of it is removed.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from draftsmith.measure.export_link import Exported
from draftsmith.measure.links import Link, Suspect, skipped
from draftsmith.measure.load import Server
from draftsmith.measure.scene import Alive, Scene
from draftsmith.target.direct import ask

LINK = "engine states"
UNREADABLE = "cannot be read here"
"""Of a link's note: the server hands out states, but not to this host."""
SAME_STATES = 0.05
"""Relative distance of an engine's hidden states from ours; bf16 stays below."""
ANSWER_SECONDS, WRITTEN_SECONDS, LOOK_SECONDS = 60.0, 30.0, 0.1


def states_link(scene: Scene, server: Server, prompt: Alive, export: Exported | None) -> Link:
    """The engine's hidden states of one prompt beside ours; skipped, with the reason, where it hands none out."""
    if server.engine != "vllm":
        return skipped(LINK, f"{server.engine} hands out no hidden states")
    path = _path(server, prompt)
    if isinstance(path, str):
        return skipped(LINK, path)
    found = _load(path)
    if found is None:
        return skipped(LINK, f"{path}, which vLLM names, {UNREADABLE}: run this on the server's own host")
    return _compared(scene, found, export.view.layers if export else scene.store.target["layers"])


def _compared(scene: Scene, found: Mapping[str, Tensor], wanted: list[int] | tuple[int, ...]) -> Link:
    """`found`: token_ids [T] and hidden_states [T or more, layers, H]; `wanted`: layers (0-based) the draft reads."""
    ids = found["token_ids"].tolist()
    ours = Alive("", tuple(ids[:-1]), tuple(ids[-1:]))
    scene.look([ours], range(scene.depth))
    states = found["hidden_states"][: len(ids) - 1].float()
    columns = [_nearest(states[:, column], ours, scene.depth) for column in range(states.shape[1])]
    said = ", ".join(f"output of layer {layer} ({distance:.1%} off)" for layer, distance in columns)
    taken, worst = [layer for layer, _ in columns], max(distance for _, distance in columns)
    suspect = None
    if worst > SAME_STATES:
        suspect = _sure(
            name="quantised or other target",
            found=f"the engine's states are nearest to {said}",
            change="serve the target that the draft was trained on, at its own precision",
        )
    elif not {*wanted} <= {*taken} and len(taken) >= len(wanted):
        suspect = _sure(
            name="layer ids",
            found=f"the engine hands out {said}; the draft reads outputs of {list(wanted)}",
            change="give the engine the draft's own layer ids",
        )
    return Link(
        name=LINK,
        value=round(1 - worst, 4),
        questions=1,
        noise=None,
        loss=None,
        note=f"nearest to {said}",
        suspects=(suspect,) if suspect else (),
    )


def _sure(name: str, found: str, change: str) -> Suspect:
    return Suspect(name=name, link=LINK, found=found, change=change, restored=1.0, certain=True)


def _nearest(states: Tensor, ours: Alive, depth: int) -> tuple[int, float]:
    """Our layer that is nearest to an engine's states [tokens, H], and its relative distance."""
    own = [ours.states[layer].cpu() for layer in range(depth)]
    distances = [float((states - one).norm() / one.norm()) for one in own]
    best = int(np.argmin(distances))
    return best, distances[best]


def _path(server: Server, prompt: Alive) -> Path | str:
    """Where vLLM says that it puts the states of the prompt, or why that is not known."""
    body = {"model": server.model, "prompt": list(prompt.prompt), "max_tokens": 1, "temperature": 0.0}
    asked = json.dumps(body).encode()
    try:
        answer = ask(server.endpoint.at("/completions"), ANSWER_SECONDS, server.transport.authorization, asked)
        found = json.loads(answer).get("kv_transfer_params") or {}
    except (OSError, ValueError) as error:
        return f"expected the server's answer to a prompt, found none ({error})"
    path = found.get("hidden_states_path")
    return Path(path) if path else "this vLLM was not started with a hidden-states connector"


def _load(path: Path) -> dict[str, Tensor] | None:
    """The file, as soon as it is written whole; None if it is not after WRITTEN_SECONDS."""
    until = time.monotonic() + WRITTEN_SECONDS
    while time.monotonic() < until:
        try:
            with _written(path):
                tensors: dict[str, Tensor] = load_file(path)
                return tensors
        except (OSError, SafetensorError):
            time.sleep(LOOK_SECONDS)
    return None


@contextmanager
def _written(path: Path) -> Iterator[None]:
    """Raises OSError while vLLM holds the file's lock; one that makes no locks has written when the file is whole."""
    lock = path.with_name(f"{path.name}.lock")
    if not lock.exists():
        yield
        return
    import fcntl  # vLLM serves on Linux only

    with open(lock, "rb") as file:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        yield
