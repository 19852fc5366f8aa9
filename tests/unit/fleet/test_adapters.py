"""What each kind of server tells of itself is read as it writes it."""

import contextlib
from dataclasses import replace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from penstock.fleet.adapters.interface import Load
from penstock.fleet.adapters.registry import ADAPTERS

METRICS = {
    "penstock": """# TYPE penstock_total_running_requests gauge
penstock_total_running_requests 3.0
penstock_total_queued_requests 2.0
penstock_kv_cache_utilization 0.5
penstock_predicted_queue_seconds 0.25
# TYPE penstock_prompt_tokens counter
penstock_prompt_tokens_total 100.0
penstock_generated_tokens_total 40.0
penstock_work_seconds_total 1.5
penstock_promises_total{kind="ttft",outcome="kept"} 7.0
penstock_promises_total{kind="time_per_token",outcome="kept"} 6.0
penstock_promises_total{kind="time_per_token",outcome="broken"} 1.0
penstock_refused_requests_total{reason="ttft"} 2.0
penstock_refused_requests_total{reason="queue_full"} 3.0
penstock_refused_requests_total{reason="unreachable"} 90.0
""",
    "vllm": """# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 1.0
vllm:num_requests_running{engine="1",model_name="m"} 2.0
vllm:num_requests_waiting{engine="0",model_name="m"} 2.0
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.9
vllm:kv_cache_usage_perc{engine="1",model_name="m"} 0.1
vllm:prompt_tokens_total{engine="0",model_name="m"} 60.0
vllm:prompt_tokens_total{engine="1",model_name="m"} 40.0
vllm:generation_tokens_total{engine="0",model_name="m"} 40.0
vllm:num_requests_running_unlike 9.0
""",
    "sglang": """sglang:num_running_reqs{model_name="m"} 3.0
sglang:num_queue_reqs{model_name="m"} 2.0
sglang:token_usage{model_name="m"} 0.5
sglang:prompt_tokens_total{model_name="m"} 100.0
sglang:generation_tokens_total{model_name="m"} 40.0
""",
    "llama.cpp": """llamacpp:requests_processing 3
llamacpp:requests_deferred 2
llamacpp:kv_cache_usage_ratio 0.5
llamacpp:prompt_tokens_total 100
llamacpp:tokens_predicted_total 40
""",
    "tgi": """tgi_batch_current_size 3
tgi_queue_size 2
tgi_request_input_length_sum 100
tgi_request_generated_tokens_sum 40
""",
}
MODELS = {
    "penstock": b'{"data": [{"id": "m", "max_context_tokens": 512}]}',
    "vllm": b'{"data": [{"id": "m", "max_model_len": 512}]}',
    "sglang": b'{"data": [{"id": "m", "max_model_len": 512}]}',
    "llama.cpp": b'{"models": [], "data": [{"id": "m", "meta": {"n_ctx_train": 512}}]}',
    "tgi": b'{"data": [{"id": "m"}]}',
}


@pytest.mark.parametrize("kind", ADAPTERS.names)
def test_the_load_is_read(kind):
    expected = Load(3.0, 2.0, 0.0 if kind == "tgi" else 0.5, prompt_tokens=100.0, generated_tokens=40.0)
    if kind == "penstock":
        expected = replace(expected, queue_seconds=0.25, work_seconds=1.5, num_kept=13.0, num_missed=6.0)
    assert ADAPTERS.load(kind).load(METRICS[kind]) == expected


@pytest.mark.parametrize("kind", ADAPTERS.names)
def test_the_models_are_read(kind):
    (model,) = ADAPTERS.load(kind).models(MODELS[kind])
    assert (model.name, model.max_context_tokens) == ("m", None if kind == "tgi" else 512)


def test_the_caches_of_a_servers_engines_are_one():
    lines = [f'vllm:cache_config_info{{engine="{number}",block_size="16",num_gpu_blocks="100"}} 1' for number in (0, 1)]
    assert ADAPTERS.load("vllm").load("\n".join(lines)).kv_tokens == 3200


def test_a_server_without_metrics_has_no_load():
    assert ADAPTERS.load("llama.cpp").load("") == Load()


@example('{model="a", ="b"} 1')
@example(" " + "9" * 400)
@given(st.text(alphabet='{}",=\\ \t#a_1.\x00', max_size=30))
def test_no_line_of_metrics_raises_anything_but_value_error(rest):
    with contextlib.suppress(ValueError):
        ADAPTERS.load("vllm").load(f"vllm:num_requests_running{rest}\n")


@pytest.mark.parametrize("value", ["NaN", "+Inf", "-1", "1e999"])
def test_numbers_that_no_load_can_have_are_refused(value):
    with pytest.raises(ValueError, match="no load"):
        ADAPTERS.load("vllm").load(f"vllm:num_requests_running {value}\n")


def test_more_metrics_of_one_name_than_a_server_has_are_refused_unread():
    lines = "".join(f'vllm:num_requests_running{{model_name="{number}"}} 1\n' for number in range(3000))
    with pytest.raises(ValueError, match="so many"):
        ADAPTERS.load("vllm").load(lines)


def test_more_models_than_a_server_has_are_refused():
    entries = ",".join(f'{{"id": "{number}"}}' for number in range(5000))
    with pytest.raises(ValueError, match="so many"):
        ADAPTERS.load("vllm").models(f'{{"data": [{entries}]}}'.encode())


@pytest.mark.parametrize("length", ["-1", "true", '"9"'])
def test_what_can_be_no_context_is_not_taken_for_one(length):
    body = f'{{"data": [{{"id": "m", "max_model_len": {length}}}]}}'.encode()
    assert ADAPTERS.load("vllm").models(body)[0].max_context_tokens is None


@pytest.mark.parametrize("body", [b"[]", b"{", b'{"data": {}}', b'"x"', b"[" * 5000 + b"]" * 5000])
def test_what_is_no_list_of_models_is_refused(body):
    with pytest.raises(ValueError):
        ADAPTERS.load("vllm").models(body)


def test_only_penstock_is_asked_for_frames():
    assert [kind for kind in ADAPTERS.names if ADAPTERS.load(kind).can_frame] == ["penstock"]
