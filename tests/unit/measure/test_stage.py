from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from draftsmith.artifacts import Plan, Stage
from draftsmith.draft.checkpoint import save_draft
from draftsmith.draft.eagle3 import DraftConfig, Eagle3Draft
from draftsmith.errors import UserError
from draftsmith.hidden.target_head import save_target_head
from draftsmith.measure import replies as replies_module
from draftsmith.measure.prompts import held_out_prompts, longest_reply, with_room
from draftsmith.measure.replies import Reply, ReplyLog, counted, first_difference
from draftsmith.measure.stage import build
from draftsmith.progress import Progress
from draftsmith.recipe import MeasureSettings
from draftsmith.target.weights import HeadWeights
from draftsmith.trace import Trace, held_out, write_traces

WORDS = [
    "<pad>",
    "<eos>",
    "<user>",
    "<bot>",
    "<think>",
    "</think>",
    "one",
    "two",
    "three",
    "plus",
    "minus",
    "times",
    "is",
    "what",
    "and",
    "then",
    "so",
]
TEMPLATE = (
    "{% for m in messages %}{{ '<user> ' if m.role == 'user' else '' }}{{ m.content }} {% endfor %}"
    "{% if add_generation_prompt %}<bot> <think>{% endif %}"
)
HIDDEN, VOCAB, SHARE = 32, 24, 0.5
QUIET = Progress(quiet=True)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run as the stages before measure leave it: a random tiny target, twelve captured questions, a random draft."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    target = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCAB,
            hidden_size=HIDDEN,
            intermediate_size=48,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=8,
            max_position_embeddings=64,
            initializer_range=0.5,  # with seed 0 no reply has two logits closer than 0.027: no near-ties in float32
            eos_token_id=1,
            bos_token_id=None,
        )
    )
    model = tmp_path / "model"
    target.save_pretrained(model)
    words = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<pad>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<eos>", pad_token="<pad>")
    tokenizer.add_tokens(["<think>", "</think>"])
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(model)

    run = tmp_path / "run"
    for stage in ("traces", "hidden", "draft/best", "measure.partial"):
        (run / stage).mkdir(parents=True)
    traces = [
        Trace(
            trace_id=f"t{i}", question_key=f"q{i}", prompt_ids=[2, 6 + i % 8, 9, 6 + i // 8, 3, 4], generated_ids=[7, 1]
        )
        for i in range(12)
    ]
    traces.append(replace(traces[0], trace_id="second turn", prompt_ids=[2, 6, 9, 6, 3, 7, 8, 2, 8, 3, 4]))
    metadata = {
        "held_out": str(SHARE),
        "max_tokens": "30",
        "stop_ids": "[1]",
        "tokenizer": str(model),
        "template_options": "{}",
        "preamble": "[]",
        "delimiters": json.dumps(
            {
                "family": "think",
                "open_ids": [[4]],
                "close_ids": [[5]],
                "open_text": "<think>",
                "close_text": "</think>",
            }
        ),
    }
    write_traces(run / "traces" / "part-00000.parquet", traces, metadata)
    weights = target.state_dict()
    save_target_head(
        run / "hidden",
        HeadWeights(
            weights["model.embed_tokens.weight"], weights["model.norm.weight"], weights["lm_head.weight"].clone()
        ),
        {"name": str(model), "config": target.config.to_dict()},
    )
    save_draft(run / "draft" / "best", random_draft())
    return run


def random_draft(vocab: int = VOCAB, hidden: int = HIDDEN) -> Eagle3Draft:
    torch.manual_seed(1)
    draft = Eagle3Draft(
        DraftConfig(
            target_vocab_size=vocab,
            draft_vocab_size=16,
            hidden_size=hidden,
            intermediate_size=48,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=8,
            rms_norm_eps=1e-5,
            rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
            max_position_embeddings=64,
            aux_layers=(0, 1, 2),
            target_layers=4,
            target_model_type="llama",
        )
    )
    draft.set_vocab(torch.zeros(16, dtype=torch.int64), torch.arange(vocab) < 16)
    return draft


def stage_of(run: Path) -> Stage:
    return Stage(run, Plan("measure", {}, {}), run / "measure.partial")


def result_of(run: Path) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((run / "measure.partial" / "result.json").read_text())
    return loaded


def rows_of(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "measure.partial" / "questions.jsonl").read_text().splitlines()]


def settings(**values: Any) -> MeasureSettings:
    return MeasureSettings(**{"dtype": "float32", "device": "cpu", "rounds": 2, "timing_questions": 2, **values})


def test_a_run_s_held_out_questions_are_measured_lossless_with_every_key_of_the_result(run: Path) -> None:
    counts = build(stage_of(run), settings(), QUIET)
    result = result_of(run)
    expected = [f"q{i}" for i in range(12) if held_out(f"q{i}", SHARE)]
    assert [row["key"] for row in rows_of(run)] == expected
    assert all(row["prompt_tokens"] == 6 for row in rows_of(run))  # first turns
    assert result["lossless"] is True and result["differences"] == []
    assert result["compared"] == result["questions"] == len(expected)
    assert result["draft_tokens"] == len(result["acceptance_per_position"]) == 4
    assert result["acceptance_length"] is None or 1 <= result["acceptance_length"] <= 5
    assert result["timed_identical_to_float32"] == 1.0
    assert len(result["rounds"]) == 2
    timed = rows_of(run)[:2]
    for one in result["rounds"]:
        assert one["steps"] == sum(len(row["cycles"]) for row in timed)
        assert one["baseline_steps"] == sum(len(row["ids"]) - 1 for row in timed)
    for name in ("tokens_per_second", "baseline_tokens_per_second", "speedup"):
        assert result[name] > 0
    assert result["sampling"]["temperature"] == 0 and result["sampling"]["max_tokens"] == 30
    assert (result["dtype"], result["device"]) == ("float32", "cpu")
    assert counts["questions"] == len(expected)


def test_cycles_are_told_apart_by_the_span_they_start_in(run: Path) -> None:
    build(stage_of(run), settings(), QUIET)
    for row in rows_of(run):
        closed = 5 in row["ids"]  # </think>; the prompt opened the thinking
        assert (row["answer_span"] is not None) == closed
        if not closed:
            assert row["reasoning_span"][0] == 0


def reply(cycles: list[replies_module.Cycle], **values: Any) -> Reply:
    defaults: dict[str, Any] = {
        "key": "k",
        "prompt_tokens": 3,
        "ids": (1, 2, 3),
        "finish_reason": "stop",
        "identical": True,
        "difference": None,
        "degenerate": False,
        "reasoning_span": (0, 4),
        "answer_span": (5, 9),
    }
    return Reply(**{**defaults, "cycles": tuple(cycles), **values})


def test_reasoning_and_answer_are_counted_apart_and_loops_not_at_all() -> None:
    # P42: the loop has the best acceptance and must not lift the mean.
    cycle = replies_module.Cycle
    whole = reply([cycle(1, 4, 2, 3), cycle(4, 4, 0, 1), cycle(5, 4, 3, 4)])
    loop = reply([cycle(1, 4, 4, 5)] * 50, degenerate=True)
    overall, reasoning, answer = counted([whole, loop], 4)
    assert overall.length == 8 / 3
    assert reasoning.length == 3.0  # the cycle that starts at the delimiter belongs to neither
    assert answer.length == 4.0
    assert counted([loop], 4)[0].length is None


def test_an_interrupted_measurement_goes_on_with_the_replies_it_has(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build(stage_of(run), settings(), QUIET)
    whole = rows_of(run)
    path = run / "measure.partial" / "questions.jsonl"
    lines = path.read_bytes().split(b"\n")
    path.write_bytes(b"\n".join(lines[:2]) + b"\n" + lines[2][:20])  # torn in the third row
    (run / "measure.partial" / "result.json").unlink()
    seen: list[str] = []
    decode = replies_module.decode_plain

    def counting(verifier: Any, prompt_ids: Any, *rest: Any) -> Any:
        seen.append("plain")
        return decode(verifier, prompt_ids, *rest)

    monkeypatch.setattr(replies_module, "decode_plain", counting)
    build(stage_of(run), settings(), QUIET)
    assert len(seen) == len(whole) - 2
    assert rows_of(run) == whole


def test_sampled_measurement_still_proves_greedy_losslessness(run: Path) -> None:
    build(stage_of(run), settings(temperature=0.8, top_p=0.9, seed=3), QUIET)
    result = result_of(run)
    assert result["lossless"] is True
    assert result["sampling"]["temperature"] == 0.8
    assert result["timed_identical_to_float32"] is None
    first = rows_of(run)
    (run / "measure.partial" / "questions.jsonl").unlink()
    build(stage_of(run), settings(temperature=0.8, top_p=0.9, seed=3), QUIET)
    assert rows_of(run) == first


def test_given_questions_are_rendered_as_capture_would_and_only_their_first_turn_is_used(
    run: Path, tmp_path: Path
) -> None:
    source = tmp_path / "questions.jsonl"
    rows = [
        {"messages": [{"role": "user", "content": "what is one"}, {"role": "assistant", "content": "one"},
                      {"role": "user", "content": "and then"}]},
        {"messages": [{"role": "user", "content": "two plus three"}]},
        {"messages": [{"role": "user", "content": "three minus one"}]},
    ]  # fmt: skip
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    build(stage_of(run), settings(questions=str(source), limit=2, max_tokens=5), QUIET)
    assert [row["prompt_tokens"] for row in rows_of(run)] == [6, 6]  # <user> a b c <bot> <think>
    assert result_of(run)["prompts"] == str(source)
    assert all(len(row["ids"]) <= 5 for row in rows_of(run))


def test_a_difference_is_reported_with_its_place_and_how_close_it_was(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    decode = replies_module.decode_speculative

    def wrong(*args: Any) -> Any:
        found = decode(*args)
        return replace(found, ids=(*found.ids[:2], (found.ids[2] + 1) % VOCAB, *found.ids[3:]))

    monkeypatch.setattr(replies_module, "decode_speculative", wrong)
    build(stage_of(run), settings(rounds=1), QUIET)
    result = result_of(run)
    assert result["lossless"] is False
    assert len(result["differences"]) == result["compared"]
    for difference in result["differences"]:
        assert difference["index"] == 2
        assert difference["expected_logit"] >= difference["found_logit"]
        assert difference["top2_margin"] >= 0


def test_the_first_difference_may_be_an_end(run: Path) -> None:
    from draftsmith.measure.decode import Verifier
    from draftsmith.target.loading import load_model

    model = load_model(str(run.parent / "model"), torch.float32, torch.device("cpu"))
    found = first_difference(Verifier(model), [2, 3], [7, 8], [7, 8, 9])
    assert (found["index"], found["found"], found["expected"]) == (2, None, 9)
    assert found["found_logit"] is None


def test_a_draft_of_another_target_is_refused_by_name(run: Path) -> None:
    save_draft(run / "draft" / "best", random_draft(vocab=40))
    folder = run / "draft" / "best"
    head = json.loads((run / "hidden" / "target.json").read_text())
    torch.manual_seed(2)
    save_target_head(
        run / "hidden", HeadWeights(torch.randn(40, HIDDEN), torch.ones(HIDDEN), torch.randn(40, HIDDEN)), head
    )
    with pytest.raises(UserError, match=rf"{folder}: .*vocabulary 40.*has 32 and 24"):
        build(stage_of(run), settings(), QUIET)


def test_a_run_without_held_out_questions_says_what_to_do(run: Path) -> None:
    with pytest.raises(UserError, match="--held-out"):
        held_out_prompts(run / "traces", 0.0, 5)


def test_prompts_that_fill_the_context_are_left_out(run: Path) -> None:
    prompts = held_out_prompts(run / "traces", SHARE, 3).prompts
    long = replace(prompts[0], ids=(2,) * 63)
    assert with_room([*prompts, long], 64) == prompts
    with pytest.raises(UserError, match="context of 64"):
        with_room([long], 64)


def test_questions_of_the_training_split_are_left_out(run: Path, tmp_path: Path) -> None:
    from draftsmith.capture.questions import read_questions
    from draftsmith.recipe import QuestionSettings

    source = tmp_path / "known.jsonl"
    asked = [
        {"messages": [{"role": "user", "content": text}]} for text in ("one is two", "so what", "times three", "two")
    ]
    source.write_text("".join(json.dumps(row) + "\n" for row in asked))
    keys = [question.key for question in read_questions(QuestionSettings(questions=str(source)))]
    trained = next(key for key in keys if not held_out(key, SHARE))
    metadata = json.loads(json.dumps(read(run)))
    write_traces(
        run / "traces" / "part-00001.parquet",
        [Trace(trace_id="known", question_key=trained, prompt_ids=[2, 3, 4], generated_ids=[7, 8, 1])],
        metadata,
    )
    build(stage_of(run), settings(questions=str(source), rounds=1), QUIET)
    assert trained not in [row["key"] for row in rows_of(run)]
    assert result_of(run)["left_out"] == {"in_training": 1, "no_room": 0}
    assert longest_reply(run / "traces") == 3


def test_questions_that_cannot_be_asked_are_left_out(run: Path, tmp_path: Path) -> None:
    source = tmp_path / "rows.jsonl"
    rows = [{"prompt": "so what"}, {"prompt": [{"type": "image_url"}]}, {"prompt": "times three"}]
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    build(stage_of(run), settings(questions=str(source), rounds=1), QUIET)
    assert len(rows_of(run)) == 2


def read(run: Path) -> dict[str, str]:
    from draftsmith.trace import read_metadata

    return read_metadata(run / "traces")


def test_the_reply_log_gives_back_what_was_put_in(tmp_path: Path) -> None:
    log = ReplyLog(tmp_path / "rows.jsonl")
    one = reply([replies_module.Cycle(1, 4, 2, 3)], difference={"index": 3}, answer_span=None)
    log.add(one)
    assert ReplyLog(tmp_path / "rows.jsonl").replies == {"k": one}
