from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from draftsmith.data.vocab import Vocab, make_vocab
from draftsmith.draft.checkpoint import save_draft
from draftsmith.draft.eagle3 import Eagle3Draft
from draftsmith.errors import UserError
from draftsmith.hidden.target_head import TargetHead
from draftsmith.train.start import draft_config, fresh_draft, warm_draft, with_vocab
from toy_training import HIDDEN, VOCAB, train_settings

KEPT = [3, 7, 8, 20, 21, 40]
TARGET: dict[str, Any] = {
    "name": "toy",
    "config": {
        "hidden_size": HIDDEN,
        "intermediate_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "max_position_embeddings": 256,
        "eos_token_id": 2,
    },
    "layers": [0, 1, 2],
    "num_layers": 4,
    "model_type": "llama",
}


def vocab(ids: list[int] = KEPT, size: int = VOCAB) -> Vocab:
    return make_vocab(np.array(ids), size)


def head() -> TargetHead:
    generator = torch.Generator().manual_seed(1)
    embedding = torch.randn(VOCAB, HIDDEN, generator=generator).bfloat16()
    return TargetHead(embedding, 1 + torch.rand(HIDDEN, generator=generator), embedding, 1e-5)


def checkpoint(folder: Path) -> Path:
    folder.mkdir()
    save_draft(folder, fresh_draft(TARGET, head(), vocab(), train_settings()))
    return folder


def test_a_fresh_draft_speaks_with_the_targets_head_norm_and_embedding() -> None:
    target = head()
    draft = fresh_draft(TARGET, target, vocab(), train_settings())
    assert torch.equal(draft.lm_head.weight, target.lm_head[torch.tensor(KEPT)].float())
    assert torch.equal(draft.norm.weight, target.norm)
    assert draft.embed_tokens.weight.data_ptr() == target.embed_tokens.data_ptr()
    assert "embed_tokens.weight" not in draft.trained()
    assert all(parameter.dtype == torch.float32 for parameter in draft.trained().values())


def test_the_seed_decides_every_weight() -> None:
    first, again, other = (fresh_draft(TARGET, head(), vocab(), train_settings(seed=seed)) for seed in (5, 5, 6))
    for name, parameter in first.trained().items():
        assert torch.equal(parameter, again.get_parameter(name))
    assert not torch.equal(first.fc.weight, other.fc.weight)


def test_an_embedding_with_more_rows_than_the_tokenizer_has_ids_is_no_obstacle() -> None:
    draft = fresh_draft(TARGET, head(), vocab(size=VOCAB - 10), train_settings())
    assert draft.config.target_vocab_size == VOCAB and draft.t2d.nonzero().flatten().tolist() == KEPT
    with pytest.raises(UserError, match="another tokenizer"):
        fresh_draft(TARGET, head(), vocab(size=VOCAB + 1), train_settings())


def test_a_target_with_latent_attention_gets_plain_heads_of_128_and_a_rope_that_engines_read() -> None:
    rope = {"rope_type": "yarn", "rope_theta": 5e4, "factor": 64.0, "mscale": 1.0, "mscale_all_dim": 1.0}
    kimi = {**TARGET, "config": {**TARGET["config"], "kv_lora_rank": 8, "head_dim": 64, "rope_parameters": rope}}
    config = draft_config(kimi, VOCAB, 6, train_settings())
    assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (4, 4, 128)
    assert config.rope_parameters == {"rope_type": "yarn", "rope_theta": 5e4, "factor": 64.0}


def test_the_rope_scaling_of_the_target_is_kept() -> None:
    # P38
    rope = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "original_max_position_embeddings": 8192}
    rope |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    config = draft_config(
        {**TARGET, "config": {**TARGET["config"], "rope_parameters": rope}}, VOCAB, 6, train_settings()
    )
    assert config.rope_parameters == rope


@pytest.mark.parametrize(
    ("changes", "shape"), [({}, (4, 2)), ({"heads": 8}, (8, 2)), ({"heads": 1}, (1, 1)), ({"kv_heads": 4}, (4, 4))]
)
def test_heads_default_to_the_targets(changes: dict[str, int], shape: tuple[int, int]) -> None:
    config = draft_config(TARGET, VOCAB, 6, train_settings(**changes))
    assert (config.num_attention_heads, config.num_key_value_heads) == shape


def test_impossible_shapes_and_foreign_configs_are_refused() -> None:
    with pytest.raises(UserError, match=r"train: expected a number of heads that divides .* found 7; set --heads"):
        draft_config(TARGET, VOCAB, 6, train_settings(heads=7))
    with pytest.raises(UserError, match="multiple of kv_heads, found 4 and 3"):
        draft_config(TARGET, VOCAB, 6, train_settings(kv_heads=3))
    foreign = {**TARGET, "config": {**TARGET["config"], "rms_norm_eps": None}}
    with pytest.raises(UserError, match="toy: its config lacks rms_norm_eps"):
        draft_config(foreign, VOCAB, 6, train_settings())


def test_a_warm_start_keeps_weights_and_vocabulary_of_the_checkpoint_and_says_so(tmp_path: Path) -> None:
    # P29: the checkpoint keeps 3, 7, 8, ...; what the new data would keep does not matter.
    source = checkpoint(tmp_path / "old")
    draft, notes = warm_draft(TARGET, head(), train_settings(**{"from": str(source)}))
    assert draft.target_ids(torch.arange(len(KEPT))).tolist() == KEPT
    before = fresh_draft(TARGET, head(), vocab(), train_settings())
    for name, parameter in before.trained().items():
        assert torch.equal(draft.get_parameter(name), parameter)
    assert any("vocabulary of 6 ids is kept" in note for note in notes)


def test_the_best_checkpoint_of_a_draft_stage_is_found_by_the_stage_folder(tmp_path: Path) -> None:
    checkpoint(tmp_path / "best")
    draft, _ = warm_draft(TARGET, head(), train_settings(**{"from": str(tmp_path)}))
    assert draft.config.draft_vocab_size == len(KEPT)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": 64}, r"hidden size 64, but the target toy has 32"),
        ({"target_vocab_size": 100}, r"target vocabulary 100, but the target toy has 64"),
        (
            {"aux_layers": (0, 1, 3)},
            r"aux layers \(outputs of\) \[0, 1, 3\].*has \[0, 1, 2\]; .*--layers 0 1 3",
        ),
    ],
)
def test_a_checkpoint_of_another_target_is_refused_naming_both(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    draft = Eagle3Draft(replace(fresh_draft(TARGET, head(), vocab(), train_settings()).config, **changes))
    ids = torch.tensor(KEPT)
    draft.set_vocab(ids - torch.arange(len(ids)), torch.zeros_like(draft.t2d).index_fill_(0, ids, True))
    (tmp_path / "old").mkdir()
    save_draft(tmp_path / "old", draft)
    with pytest.raises(UserError, match=message):
        warm_draft(TARGET, head(), train_settings(**{"from": str(tmp_path / "old")}))


def test_a_shape_that_contradicts_the_checkpoint_is_refused(tmp_path: Path) -> None:
    source = checkpoint(tmp_path / "old")
    with pytest.raises(UserError, match=r"train.heads: 8 was asked for, but .* has 4"):
        warm_draft(TARGET, head(), train_settings(**{"from": str(source), "heads": 8}))


def test_a_missing_checkpoint_is_named() -> None:
    with pytest.raises(UserError, match=r"\./nowhere: expected a draft folder or a hub id"):
        warm_draft(TARGET, head(), train_settings(**{"from": "./nowhere"}))


def test_a_rebuilt_head_keeps_the_rows_of_ids_in_both_vocabularies() -> None:
    # P29
    draft = fresh_draft(TARGET, head(), vocab([3, 7, 8]), train_settings())
    with torch.no_grad():
        draft.lm_head.weight.normal_()
        draft.fc.weight.normal_()
    rebuilt, kept = with_vocab(draft, head(), vocab([3, 7, 9, 10]))
    assert kept == 2 and rebuilt.target_ids(torch.arange(4)).tolist() == [3, 7, 9, 10]
    assert torch.equal(rebuilt.lm_head.weight[:2], draft.lm_head.weight[:2])
    assert torch.equal(rebuilt.lm_head.weight[2:], head().lm_head[[9, 10]].float())
    assert torch.equal(rebuilt.fc.weight, draft.fc.weight)
    assert rebuilt.config.draft_vocab_size == 4
