"""Twenty faults, planted one at a time into a copy of a good run: diagnosis names the link and the suspect."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import planted
from counting_run import captured, exported, learned, write_questions
from counting_target import save_counting_target
from draftsmith.errors import UserError
from draftsmith.measure.diagnose import diagnose
from draftsmith.measure.links import Diagnosis
from draftsmith.pipeline import run_stage
from draftsmith.progress import Progress
from draftsmith.recipe import DiagnoseSettings, ExportSettings
from planted import Bed

pytestmark = pytest.mark.slow

FAULTS: list[tuple[Callable[[Bed], Any], str, str]] = [
    (planted.layer_ids_one_up, "export", "layer ids off by one"),  # P31
    (planted.layer_ids_as_sglang, "export", "layer ids in another engine's meaning"),  # P31
    (planted.final_norm_skipped, "export", "final norm"),
    (planted.residual_flipped, "export", "norm_before_residual"),
    (planted.rope_theta_changed, "export", "rope theta"),  # P38
    (planted.rope_scaling_dropped, "export", "rope scaling"),  # P38
    (planted.d2t_absolute, "export", "d2t absolute"),  # P27
    (planted.vocabulary_of_another_run, "export", "vocabulary of another run"),  # P29
    (planted.head_rows_permuted, "export", "head rows permuted"),
    (planted.embedding_random, "export", "embedding"),  # P37
    (planted.layers_missing, "export", "draft layers missing"),
    (planted.positions_too_few, "export", "max positions too small"),
    (planted.norms_in_bf16, "training", "bf16 norm weights"),
    (planted.mask_unshifted, "training", "mask or labels shifted"),  # P20
    (planted.labels_unshifted, "training", "mask or labels shifted"),
    (planted.eos_not_in_vocabulary, "training", "EOS not in the draft vocabulary"),
    (planted.rows_zero, "training", "zero hidden states"),
    (planted.states_stale, "live", "stale hidden states"),
    (planted.target_wrong, "live", "wrong target"),
    (planted.text_static, "data", "static text"),
    (planted.thinking_off, "data", "thinking mode"),  # P23
]


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)  # tensors here are too small to share


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Bed:
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("good")
    (folder / "early").mkdir()
    target = save_counting_target(folder / "target", folder / "early")
    bed = Bed(folder / "run", target, folder / "early")
    captured(bed.run, target, write_questions(folder / "questions.jsonl", 5))
    learned(bed.run, target)
    exported(bed.run)
    return bed


@pytest.fixture
def bed(good: Bed, tmp_path: Path) -> Bed:
    shutil.copytree(good.run, tmp_path / "run")
    return Bed(tmp_path / "run", good.target, good.early)


def diagnosed(run: Path, **settings: Any) -> Diagnosis:
    return diagnose(run, DiagnoseSettings(**settings), Progress(quiet=True))


def test_a_clean_run_is_called_clean(good: Bed) -> None:
    found = diagnosed(good.run)
    assert (found.link, found.suspect, found.clean) == (None, None, True), found.verdict
    lengths = [link.value for link in found.links if link.value is not None and link.name != "training"]
    assert len(lengths) == 4 and min(lengths) > 2.5


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"server": "http://127.0.0.1:9"}, "http://127.0.0.1:9"),
        ({"questions": "nope.jsonl"}, "nope.jsonl"),
        ({"draft": "nope"}, "nope/config.json"),
    ],
)
def test_what_is_not_there_is_said_before_the_target_speaks(
    settings: dict[str, str], problem: str, good: Bed, monkeypatch: pytest.MonkeyPatch
) -> None:
    def speaks(*_: object) -> None:
        raise AssertionError("the target spoke first")

    monkeypatch.setattr("draftsmith.measure.diagnose.speak", speaks)
    with pytest.raises(UserError) as refused:
        diagnosed(good.run, **settings)
    assert problem in str(refused.value)


@pytest.mark.parametrize(("plant", "link", "suspect"), FAULTS, ids=[fault[0].__name__ for fault in FAULTS])
def test_a_planted_fault_is_found(plant: Callable[[Bed], Any], link: str, suspect: str, bed: Bed) -> None:
    settings = plant(bed) or {}
    found = diagnosed(bed.run, **settings)
    assert (found.link, found.suspect) == (link, suspect), found.verdict


BY_OTHERS = [fault for fault in FAULTS if fault[1] == "export"]


@pytest.mark.parametrize(("plant", "link", "suspect"), BY_OTHERS, ids=[fault[0].__name__ for fault in BY_OTHERS])
def test_a_fault_in_a_draft_by_others_is_found_by_trying(
    plant: Callable[[Bed], Any], link: str, suspect: str, bed: Bed
) -> None:
    plant(bed)
    shutil.move(bed.folder, bed.run / "theirs")
    shutil.rmtree(bed.run / "draft")
    found = diagnosed(bed.run, draft=str(bed.run / "theirs"))
    assert (found.link, found.suspect) == (link, suspect), found.verdict


def test_a_checkpoint_of_the_speculators_library_is_measured_like_our_own(good: Bed, bed: Bed) -> None:
    speculators = pytest.importorskip("speculators", reason="the speculators library is not installed")
    from speculators.models.eagle3.core import Eagle3DraftModel

    run_stage(
        bed.run, "export", ExportSettings(engine=["speculators"], dtype="float32"), Progress(quiet=True), force=True
    )
    folder = bed.run / "export" / "speculators"
    config = speculators.SpeculatorModelConfig.from_pretrained(str(folder))
    config.transformer_layer_config._attn_implementation = "eager"
    model = Eagle3DraftModel.from_pretrained(str(folder), config=config, dtype=torch.float32)
    model.save_pretrained(bed.run / "theirs")
    theirs = diagnosed(bed.run, draft=str(bed.run / "theirs"))
    ours = {link.name: link.value for link in diagnosed(good.run).links}
    assert {link.name: link.value for link in theirs.links}["export"] == pytest.approx(ours["export"])
    assert theirs.clean, theirs.verdict
