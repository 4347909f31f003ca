from __future__ import annotations

import pytest

from draftsmith.target.metrics import queue_of

VLLM = b"""# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 60.0
vllm:num_requests_running{engine="1",model_name="m"} 4.0
vllm:num_requests_waiting{engine="0",model_name="m"} 1.6e+01
vllm:num_requests_waiting_by_reason{engine="0",reason="capacity"} 16.0
vllm:generation_tokens_total{engine="0",model_name="m"} 812345.0
"""
SGLANG = b'sglang:num_running_reqs{model_name="m",tp_rank="0"} 64.0\nsglang:num_queue_reqs{model_name="m"} 16.0\n'
LLAMACPP = b"llamacpp:requests_processing 64\nllamacpp:requests_deferred 16\nllamacpp:prompt_tokens_total 9\n"


@pytest.mark.parametrize("metrics", [VLLM, SGLANG, LLAMACPP])
def test_every_engines_queue_is_understood(metrics: bytes) -> None:
    assert queue_of(metrics, 5.0) == (64, 16, 5.0)


def test_the_share_that_waits_is_one_of_all_requests() -> None:
    queue = queue_of(SGLANG, 0.0)
    assert queue is not None and queue.share == 0.2


@pytest.mark.parametrize("text", [b"", b"<html>not found</html>", b"python_gc_objects_collected_total 3.0\n"])
def test_what_tells_of_no_queue_is_none(text: bytes) -> None:
    assert queue_of(text, 0.0) is None
