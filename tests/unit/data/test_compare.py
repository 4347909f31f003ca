from __future__ import annotations

import runpy
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from draftsmith.data.compare import Pair, compare_traces, first_difference, logit_margins
from draftsmith.errors import UserError
from draftsmith.trace import Trace, write_traces

ROOT = Path(__file__).parents[3]


def traces(folder: Path, replies: dict[str, tuple[Sequence[int], Sequence[int]]]) -> Path:
    folder.mkdir()
    rows = [
        Trace(trace_id=id, question_key=id, prompt_ids=prompt, generated_ids=generated)
        for id, (prompt, generated) in replies.items()
    ]
    rows.append(Trace(trace_id="f", question_key="f", prompt_ids=[len(rows)], state="failed"))
    write_traces(folder / "part.parquet", rows, {})
    return folder


def pair(prompt: list[int], left: list[int], right: list[int]) -> Pair:
    return Pair(
        left=Trace(trace_id="a", question_key="a", prompt_ids=prompt, generated_ids=left),
        right=Trace(trace_id="a", question_key="a", prompt_ids=prompt, generated_ids=right),
        prompt_at=None,
        generated_at=first_difference(left, right),
    )


@pytest.mark.parametrize(
    ("left", "right", "position"),
    [([1, 2, 3], [1, 2, 3], None), ([1, 2, 3], [1, 9, 3], 1), ([1, 2], [1, 2, 3], 2), ([], [], None)],
)
def test_the_first_difference_is_found(left: list[int], right: list[int], position: int | None) -> None:
    assert first_difference(left, right) == position


def test_traces_are_paired_by_id_and_only_trainable_ones_count(tmp_path: Path) -> None:
    left = traces(tmp_path / "left", {"a": ([1], [2, 3]), "b": ([1], [2, 3, 4]), "c": ([1, 1], [5]), "d": ([1], [2])})
    right = traces(tmp_path / "right", {"c": ([1, 7], [5]), "b": ([1], [2, 9, 4]), "a": ([1], [2, 3]), "e": ([1], [2])})
    found = compare_traces(left, right)
    assert [(pair.left.trace_id, pair.prompt_at, pair.generated_at) for pair in found.pairs] == [
        ("a", None, None),
        ("b", None, 1),
        ("c", 1, None),
    ]
    assert (found.only_left, found.only_right) == (("d",), ("e",))
    assert found.share_identical == pytest.approx(1 / 3)


def test_a_folder_without_traces_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="nothing"):
        compare_traces(traces(tmp_path / "left", {}), tmp_path / "nothing")


def test_the_margin_is_how_far_the_worse_choice_lies_below_the_best() -> None:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2
    )
    model = LlamaForCausalLM(config).eval()
    prompt, said = [3, 4, 5], [6, 7]
    logits = model(torch.tensor([prompt + said])).logits[0, -1].detach()
    best, second, third = logits.topk(3).indices.tolist()
    margins = logit_margins(
        model,
        [
            pair(prompt, [*said, best, 1], [*said, second, 2]),
            pair(prompt, [*said, second], [*said, third]),
            pair(prompt, [*said, best], [*said, best]),
            pair(prompt, said, [*said, best]),
        ],
    )
    assert margins[:2] == pytest.approx([float(logits[best] - logits[second]), float(logits[best] - logits[third])])
    assert margins[2:] == [None, None]


def test_the_script_says_what_differs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main = runpy.run_path(str(ROOT / "benchmarks" / "parity.py"))["main"]
    left = traces(tmp_path / "left", {"a": ([1], [2, 3]), "b": ([1], [2, 3, 4])})
    right = traces(tmp_path / "right", {"a": ([1], [2, 3]), "b": ([1], [2, 9, 4])})
    assert main([str(left), str(left)]) == 0
    assert "2 of 2 replies identical" in capsys.readouterr().out
    assert main([str(left), str(right)]) == 1
    said = capsys.readouterr().out
    assert "1 of 2 replies identical (50.0%)" in said
    row = next(line for line in said.splitlines() if " b " in line)
    assert [cell.strip() for cell in row.strip("│").split("│")] == ["b", "-", "1", "3", "9", "-", "-", "-"]
    assert main([str(left), str(tmp_path / "nothing")]) == 2
    assert "expected Parquet trace files" in capsys.readouterr().err
