from __future__ import annotations

from dataclasses import replace

import pytest

from draftsmith.errors import UserError
from draftsmith.measure.counters import Counters, counters_of, difference, read_counters, total
from speaking_server import SpeakingServer

VLLM = b"""# HELP vllm:spec_decode_num_drafts_total Number of spec decoding drafts.
# TYPE vllm:spec_decode_num_drafts_total counter
vllm:spec_decode_num_drafts_total{engine="0",model_name="m"} 100.0
vllm:spec_decode_num_drafts_total{engine="1",model_name="m"} 400.0
vllm:spec_decode_num_drafts_created{engine="0",model_name="m"} 1.76e+09
vllm:spec_decode_num_draft_tokens_total{engine="0",model_name="m"} 1500.0
vllm:spec_decode_num_accepted_tokens_total{engine="0",model_name="m"} 640.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="0"} 350.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="2"} 105.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="1"} 185.0
vllm:spec_decode_num_accepted_tokens_per_pos_created{engine="0",model_name="m",position="1"} 1.76e+09
vllm:generation_tokens_total{engine="0",model_name="m"} 1200.0
vllm:num_requests_running{engine="0",model_name="m"} 2.0
vllm:num_requests_waiting{engine="0",model_name="m"} 1.0
"""


def test_vllm_counters_are_summed_over_ranks_and_creation_times_are_no_counts() -> None:  # P41
    found = counters_of(VLLM)
    assert found == Counters(
        engine="vllm",
        drafts=500,
        draft_tokens=1500,
        accepted=640,
        per_position=(350, 185, 105),
        generated=1200,
        running=2,
        waiting=1,
    )
    assert found.length == pytest.approx(2.28)
    assert found.unconditional == pytest.approx([0.70, 0.37, 0.21])
    assert found.conditional == pytest.approx([0.70, 0.37 / 0.70, 0.21 / 0.37])


@pytest.mark.parametrize("value", [b"-nan", b"NaN", b"+Inf"])
def test_a_value_that_is_no_number_is_passed_over(value: bytes) -> None:
    other = b"vllm:spec_decode_num_draft_tokens_total " + value + b"\n"
    waiting = b'vllm:num_requests_waiting{engine="1"} ' + value + b"\n"
    assert counters_of(other + waiting + VLLM) == counters_of(VLLM)


def test_the_draft_that_never_gets_a_token_accepted_has_length_one_and_no_reached_second_position() -> None:  # P40
    found = Counters(engine="vllm", drafts=500, draft_tokens=1500, accepted=0, per_position=(0, 0, 0))
    assert (found.length, found.conditional) == (1.0, [0.0, None, None])


def test_a_difference_counts_what_came_in_between_also_at_positions_that_were_new() -> None:
    before = Counters(engine="llamacpp", drafts=10, draft_tokens=30, accepted=6, per_position=(6,), generated=16)
    after = Counters(
        engine="llamacpp", drafts=14, draft_tokens=42, accepted=12, per_position=(9, 2, 1), generated=26, running=1
    )
    found = difference(after, before)
    assert (found.drafts, found.draft_tokens, found.accepted, found.generated) == (4, 12, 6, 10)
    assert (found.per_position, found.running) == ((3, 2, 1), 1)


def test_counters_that_went_back_mean_another_server() -> None:
    before = Counters(engine="vllm", drafts=10, generated=100)
    with pytest.raises(UserError, match="started anew"):
        difference(replace(before, drafts=2), before)


def test_differences_add_up() -> None:
    one = Counters(engine="vllm", drafts=2, draft_tokens=6, accepted=3, per_position=(2, 1), generated=5)
    other = Counters(engine="vllm", drafts=1, draft_tokens=3, accepted=1, per_position=(1,), generated=None)
    found = total([one, other])
    assert (found.drafts, found.draft_tokens, found.accepted, found.per_position) == (3, 9, 4, (3, 1))
    assert found.generated is None


def test_sglang_gives_its_own_mean_and_where_the_metric_lacks_its_server_info_does() -> None:
    with SpeakingServer("sglang", lambda ids: [1], lambda text: []) as server:
        assert read_counters(server.url).mean_length == 2.1
        server.drafts = 1
        found = read_counters(server.url + "/v1")
    assert (found.engine, found.length, found.per_position) == ("sglang", 1.9, ())


def test_a_server_without_an_engines_metrics_is_named() -> None:
    with SpeakingServer("other", lambda ids: [1], lambda text: []) as server:
        server.metrics = lambda: "process_cpu_seconds_total 12\n"  # type: ignore[method-assign]
        with pytest.raises(UserError, match="expected the metrics of vLLM, SGLang or llama.cpp"):
            read_counters(server.url)
