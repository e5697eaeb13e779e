"""The numbers out of vLLM's metrics. The text is that of vLLM 0.32, shortened."""

from __future__ import annotations

import pytest

from counterpoint.inference.clients.capacity import Observation
from counterpoint.inference.clients.load_report import read_load

TEXT = b"""# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="a model"} 64.0
vllm:num_requests_running{engine="1",model_name="a model"} 60.0
# HELP vllm:num_requests_waiting Number of requests waiting to be processed.
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{engine="0",model_name="a model"} 9.0
vllm:num_requests_waiting{engine="1",model_name="a model"} 3.0
# HELP vllm:kv_cache_usage_perc KV-cache usage. 1 means 100 percent usage.
# TYPE vllm:kv_cache_usage_perc gauge
vllm:kv_cache_usage_perc{engine="0",model_name="a model"} 0.25
vllm:kv_cache_usage_perc{engine="1",model_name="a model"} 0.3125
# HELP vllm:num_preemptions_total Cumulative number of preemption from the engine.
# TYPE vllm:num_preemptions_total counter
vllm:num_preemptions_total{engine="0",model_name="a model"} 2.0
vllm:num_preemptions_total{engine="1",model_name="a model"} 1e+01
# HELP vllm:prompt_tokens_total Number of prefill tokens processed.
# TYPE vllm:prompt_tokens_total counter
vllm:prompt_tokens_total{engine="0",model_name="a model"} 300.0
vllm:prompt_tokens_total{engine="1",model_name="a model"} 200.0
# HELP vllm:generation_tokens_total Number of generation tokens processed.
# TYPE vllm:generation_tokens_total counter
vllm:generation_tokens_total{engine="0",model_name="a model"} 4.0
vllm:generation_tokens_total{engine="1",model_name="a model"} 3.0
# HELP vllm:num_preemptions_created Cumulative number of preemption from the engine.
# TYPE vllm:num_preemptions_created gauge
vllm:num_preemptions_created{engine="0",model_name="a model"} 1.75e+09
"""

BY_REASON = b"""vllm:num_requests_waiting_by_reason{engine="0",model_name="a model",reason="capacity"} 4.0
vllm:num_requests_waiting_by_reason{engine="0",model_name="a model",reason="deferred"} 5.0
vllm:num_requests_waiting_by_reason{engine="1",model_name="a model",reason="capacity"} 1.0
vllm:num_requests_waiting_by_reason{engine="1",model_name="a model",reason="deferred"} 2.0
"""


def test_all_engines_count_together() -> None:
    assert read_load(TEXT) == Observation(
        cache_use=0.3125, running=124, waiting=12, preemptions=12, held=136, tokens=507
    )


def test_requests_that_wait_for_their_adapters_slot_do_not_count() -> None:
    assert read_load(memoryview(TEXT + BY_REASON)) == Observation(0.3125, 124, 5, 12, 136, 507)
    assert read_load((TEXT + BY_REASON)[:-1]) == Observation(0.3125, 124, 5, 12, 136, 507), (
        "the last line may lack its end"
    )


@pytest.mark.parametrize(
    "text", [b"", b"<html>", TEXT.replace(b"kv_cache_usage", b"gpu_cache_usage"), TEXT.replace(b" 64.0", b" many")]
)
def test_what_is_not_vllms_tells_nothing(text: bytes) -> None:
    assert read_load(text) is None
