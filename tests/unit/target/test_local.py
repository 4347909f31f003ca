from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from draftsmith.errors import UserError
from draftsmith.recipe import CaptureSettings
from draftsmith.target.kv import new_cache
from draftsmith.target.loading import load_model
from draftsmith.target.local import Job, LocalTarget, load_local, shared_prefix
from draftsmith.target.reply import Reply, Sampling
from tiny_target import save_tiny_target

PROMPTS = [[9] * 6 + [20 + n, 30 + n] + [40] * (n % 5) for n in range(13)]


def target(folder: Path, batch_size: int, **changes: object) -> LocalTarget:
    save_tiny_target(folder)
    values = {"local": str(folder), "batch_size": batch_size, "dtype": "float32", "device": "cpu", **changes}
    return load_local(CaptureSettings(**values))  # type: ignore[arg-type]


def jobs(sampling: Sampling) -> Iterator[Job | None]:
    for number, prompt in enumerate(PROMPTS):
        yield number, prompt, sampling


def run(local: LocalTarget, sampling: Sampling) -> dict[object, Reply]:
    return dict(local.generate(jobs(sampling), lambda: False))


def test_batched_greedy_replies_equal_those_of_transformers(tmp_path: Path) -> None:
    local = target(tmp_path / "m", batch_size=4)  # refills and merges several times
    replies = run(local, Sampling(max_tokens=12))
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "m", dtype=torch.float32)
    for number, prompt in enumerate(PROMPTS):
        expected = model.generate(
            torch.tensor([prompt]), max_new_tokens=12, do_sample=False, eos_token_id=sorted(local.template.stop_ids)
        )[0, len(prompt) :].tolist()
        assert list(replies[number].generated_ids) == expected
        assert list(replies[number].prompt_ids) == prompt


def test_sampled_replies_depend_on_the_seed_and_not_on_the_batch(tmp_path: Path) -> None:
    sampling = Sampling(max_tokens=8, temperature=1.0, top_p=0.9, seed=5)
    alone = run(target(tmp_path / "m", batch_size=1), sampling)
    together = run(target(tmp_path / "m", batch_size=13), sampling)
    other = run(target(tmp_path / "m", batch_size=13), Sampling(max_tokens=8, temperature=1.0, top_p=0.9, seed=6))
    assert {k: list(r.generated_ids) for k, r in alone.items()} == {
        k: list(r.generated_ids) for k, r in together.items()
    }
    assert any(list(r.generated_ids) != list(other[k].generated_ids) for k, r in alone.items())


def test_a_reply_says_whether_it_stopped_or_was_cut(tmp_path: Path) -> None:
    local = target(tmp_path / "m", batch_size=8)
    free = run(local, Sampling(max_tokens=6))
    stop = free[0].generated_ids[3]
    at = list(free[0].generated_ids).index(stop) + 1
    assert free[0].finish_reason == "length"
    local.template = type(local.template)(
        **{
            **{f: getattr(local.template, f) for f in local.template.__dataclass_fields__},
            "stop_ids": frozenset({int(stop)}),
        }
    )
    ended = run(local, Sampling(max_tokens=6))
    assert (ended[0].finish_reason, list(ended[0].generated_ids)) == ("stop", list(free[0].generated_ids)[:at])
    exactly = run(local, Sampling(max_tokens=at))
    assert exactly[0].finish_reason == "stop"


def test_stop_takes_no_new_jobs_and_finishes_those_in_flight(tmp_path: Path) -> None:
    local = target(tmp_path / "m", batch_size=4)
    seen: dict[object, Reply] = {}
    for key, reply in local.generate(jobs(Sampling(max_tokens=5)), lambda: bool(seen)):
        seen[key] = reply
    assert sorted(seen) == [0, 1, 2, 3]
    assert all(len(reply.generated_ids) == 5 for reply in seen.values())


def test_jobs_that_become_ready_later_are_taken_in(tmp_path: Path) -> None:
    local = target(tmp_path / "m", batch_size=4)
    done: list[object] = []

    def waiting() -> Iterator[Job | None]:
        yield "first", PROMPTS[0], Sampling(max_tokens=3)
        while "first" not in done:
            yield None
        yield "second", PROMPTS[1], Sampling(max_tokens=3)

    for key, _ in local.generate(waiting(), lambda: False):
        done.append(key)
    assert done == ["first", "second"]


def test_the_shared_prefix_leaves_every_prompt_a_token_of_its_own() -> None:
    assert shared_prefix([[1, 2, 3], [1, 2, 4], [1, 2]]) == 1
    assert shared_prefix([[1, 2], [1, 2]]) == 1
    assert shared_prefix([[1, 2, 3]]) == 0
    assert shared_prefix([[1], [2]]) == 0


def test_a_folder_without_weights_is_named(tmp_path: Path) -> None:
    folder = save_tiny_target(tmp_path / "m")
    (folder / "model.safetensors").unlink()
    with pytest.raises(UserError, match="expected weights"):
        load_model(str(folder), torch.float32, torch.device("cpu"))


def test_a_folder_without_config_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"expected a model folder with config\.json"):
        load_model(str(tmp_path), torch.float32, torch.device("cpu"))


def test_a_model_that_keeps_other_state_than_keys_and_values_is_refused() -> None:
    config = type("Config", (), {"layer_types": ["full_attention", "linear_attention"], "model_type": "qwen3_next"})
    with pytest.raises(UserError, match="qwen3_next: .*found linear_attention"):
        new_cache(config)
