"""The second link: the trained draft on the stored states it was trained with.

No link before it gives a number to compare with, so faults show in the states, weights and vocabulary themselves, in
rows that were taught the wrong token or none, and in what the live states of the same ids would give.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from draftsmith.draft.eagle3 import Eagle3Draft
from draftsmith.draft.loss import proposals
from draftsmith.draft.unroll import unroll
from draftsmith.hidden.agreement import teach
from draftsmith.measure.links import Link, Suspect, measured
from draftsmith.measure.scene import Alive, Scene
from draftsmith.measure.stored import OWN_WORDS, Stored, dead_rows
from draftsmith.measure.walks import Walk, Words, batch_of, loss, walk, walk_of
from draftsmith.train import metrics

ALIKE, LEAST = 0.3, 8
"""Share of replies with the same second token, and replies at least, from which a first row can be judged."""
UNTAUGHT = 0.25
"""First rows hit less often than this share of what the most usual token would hit were left out of the mask."""


def training_link(scene: Scene, draft: Eagle3Draft, stored: Stored, held_out: Walk, now: Walk) -> Link:
    """The link `training`; `now` is the same draft over the same ids with live states."""
    found = []
    if stored.zero_share > 0:
        healed = walk(draft, [_healed(w, one, draft) for w, one in zip(stored.held_out, stored.alive, strict=True)],
                      scene.draft_tokens)  # fmt: skip
        found.append(
            Suspect(
                name="zero hidden states",
                link="training",
                found=f"{stored.zero_share:.1%} of the stored rows are zero or not finite",
                change="extract again (draftsmith extract --force) and train again",
                before=held_out.length,
                after=healed.length,
                restored=1.0 if healed.length > held_out.length else 0.0,
                certain=True,
            )
        )
    found += _mask_suspects(draft, stored, held_out, scene)
    rounded = rounded_norms(draft)
    if rounded:
        found.append(
            Suspect(
                name="bf16 norm weights",
                link="training",
                found=f"every value of {', '.join(rounded)} is a bf16 number while other weights are float32: they "
                "were kept or rounded in bf16 and could not learn",
                change="train with float32 master weights for all parameters",
                certain=True,
            )
        )
    lacking = sorted(one for one in scene.stop_ids if one < len(draft.t2d) and not bool(draft.t2d[one]))
    ended = [words for words in stored.held_out if words.ids[-1] in lacking]
    if lacking and ended:
        ending = walk_of(*_matches(draft, stored.held_out, scene.draft_tokens, frozenset(lacking)), scene.draft_tokens)
        found.append(
            Suspect(
                name="EOS not in the draft vocabulary",
                link="training",
                found=f"stop id {', '.join(map(str, lacking))} is not among the draft's {len(draft.d2t):,} ids, and "
                f"{len(ended)} of {len(stored.held_out)} replies end with it",
                change="make the vocabulary again (draftsmith vocab) with every stop id in it, and train again",
                before=held_out.length,
                after=ending.length,
                restored=1.0 if ending.length > held_out.length else 0.0,
                certain=True,
            )
        )
    found += _teacher_suspects(scene)
    if held_out.length <= metrics.BROKEN and not found:
        found.append(
            Suspect(
                name="untrained draft",
                link="training",
                found=f"acceptance length {held_out.length:.2f} on stored states: it predicts next to nothing",
                change="look at the loss curve and labels (draftsmith inspect); more data will not help",
                certain=True,
            )
        )
    base = measured("training", held_out, loss(now, held_out), found)
    if base.value is None:
        return base
    return replace(base, value=round(held_out.accuracy, 4), noise=None, note="share of first proposals that are right")


def _mask_suspects(draft: Eagle3Draft, stored: Stored, held_out: Walk, scene: Scene) -> list[Suspect]:
    """Rows taught the wrong token, or the first rows of replies never taught (P20)."""
    hits, early, late, first = [], [], [], []
    for words in (*stored.training, *stored.held_out):
        batch = batch_of(words, torch.float32)
        proposed = next(iter(unroll(draft, batch, 1)))
        said = proposals(draft, proposed)[0]
        right = said == batch.labels[0]
        hits.append(right[1:].float())
        first.append(float(right[0]))
        early.append((said == batch.inputs[0]).float())
        late.append((said[:-1] == batch.labels[0, 1:]).float())
    accuracy = held_out.accuracy
    found = []
    for name, share in (("early", float(torch.cat(early).mean())), ("late", float(torch.cat(late).mean()))):
        if share > accuracy + 0.1:
            found.append(
                Suspect(
                    name="mask or labels shifted",
                    link="training",
                    found=f"{share:.0%} of first proposals are the token one too {name}, {accuracy:.0%} the right one",
                    change="row p must learn token p+2 (docs: alignment); train again with labels and mask moved",
                    restored=1.0,
                    certain=True,
                )
            )
    others, ahead = float(torch.cat(hits).mean()), float(np.mean(first))
    # Replies that begin differently are hard there for any draft; where many begin alike, a taught one knows it.
    common = Counter(words.ids[words.prompt_length + 1] for words in stored.training).most_common(1)
    usual = common[0][1] / len(stored.training) if common else 0.0
    if not found and len(stored.training) >= LEAST and usual >= ALIKE and ahead < UNTAUGHT * min(usual, others):
        mended = walk_of(*_matches(draft, stored.held_out, scene.draft_tokens, frozenset(), True), scene.draft_tokens)
        found.append(
            Suspect(
                name="mask or labels shifted",
                link="training",
                found=f"the first proposal of a reply is right in {ahead:.0%}, later ones in {others:.0%}, on training "
                "replies too: the mask was not moved with the labels, so those rows were never taught",
                change="move the loss mask with the labels at every step (docs: alignment) and train again",
                before=held_out.length,
                after=mended.length,
                restored=1.0,
                certain=True,
            )
        )
    return found


def _teacher_suspects(scene: Scene) -> list[Suspect]:
    """Whether head and norm kept beside the states still give the teacher's argmax that was stored."""
    same = []
    for trace in scene.held_out[:8]:
        states = scene.states(trace)
        whole = ~dead_rows(states.final.float())
        if not whole.any():
            continue
        again = teach(scene.head, states.final[whole].to(scene.head.norm.dtype), 0.0).argmax
        same.append((again == states.argmax[whole].long()).float())
    if not same:  # every row is damaged, which is a suspect of its own
        return []
    share = float(torch.cat(same).mean())
    if share >= OWN_WORDS:
        return []
    return [
        Suspect(
            name="teacher's final norm or head",
            link="training",
            found=f"lm_head(final_norm(state)) says what was stored at extraction in only {share:.0%} of rows",
            change="extract again: norm or head beside the hidden states are not those of the target",
            restored=1.0,
            certain=True,
        )
    ]


def rounded_norms(draft: Eagle3Draft) -> list[str]:
    """Norm weights that are bf16 numbers throughout while the projections are not (contract 6)."""
    weights = draft.trained()
    grid = {name: bool((w.detach().bfloat16().float() == w.detach()).all()) for name, w in weights.items()}
    norms = [name for name in grid if "norm" in name]
    others = [name for name in grid if name not in norms]
    # A draft stored in bf16 tells nothing, and a single norm at its first value has another story.
    return norms if all(grid[name] for name in norms) and not any(grid[name] for name in others) else []


def _matches(
    draft: Eagle3Draft, replies: Sequence[Words], k: int, granted: frozenset[int], first: bool = False
) -> tuple[list[str], list[np.ndarray[tuple[int, ...], np.dtype[np.bool_]]]]:
    """Hits of a walk, with some granted: labels in a set, or the proposals made at a reply's first row."""
    keys, matches = [], []
    for words in replies:
        if words.supervised <= 0:
            continue
        found = metrics.chain_matches(draft, batch_of(words, torch.float32), k)[0].cpu().numpy()
        labels = np.array(words.ids[words.prompt_length + 1 :])
        for row, step in np.argwhere(~found):
            if row + step < len(labels) and (int(labels[row + step]) in granted or (first and row == 0)):
                found[row, step] = True
        keys.append(words.key)
        matches.append(found)
    return keys, matches


def _healed(words: Words, alive: Alive, draft: Eagle3Draft) -> Words:
    """The stored states with the live ones where they are damaged."""
    now = alive.words(draft.config.aux_layers).aux
    return replace(words, aux=torch.where(dead_rows(words.aux)[:, None], now, words.aux))
