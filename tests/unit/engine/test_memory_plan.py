"""Memory is planned before anything is loaded, and what does not fit is refused with what would."""

import dataclasses
import re

import pytest

from penstock.config import gather
from penstock.engine.config import DeviceFacts, resolve
from penstock.errors import ConfigError
from penstock.models.spec import LayerSpec, ModelSpec, RopeSpec

GIB = 2**30
GPU = DeviceFacts(
    kind="cuda",
    name="a GPU",
    num_threads=4,
    free_bytes=80 * GIB,
    fast_dtypes=("bfloat16", "float16", "float32"),
    attention_backends={name: ("triton",) for name in ("bfloat16", "float16", "float32")},
)
LLAMA_8B = ModelSpec(
    family="llama",
    vocab_size=128256,
    hidden_size=4096,
    intermediate_size=14336,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    max_position=131072,
    norm_eps=1e-5,
    layers=(LayerSpec(),) * 32,
    ropes=(RopeSpec(theta=500000.0, rotary_dim=128),),
)
CPU = dataclasses.replace(
    GPU, kind="cpu", name="a CPU", fast_dtypes=("float32",), attention_backends={"float32": ("reference",)}
)


def plan(free_bytes: int = 80 * GIB, **options: object):
    facts = dataclasses.replace(GPU, free_bytes=free_bytes)
    return resolve(gather(options, environ={}), LLAMA_8B, facts)[0].memory


def refusal(free_bytes: int, **options: object) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        plan(free_bytes, **options)
    return caught.value


def test_the_parts_leave_something_over():
    found = plan()
    assert 14 * GIB < found.weight_bytes < 17 * GIB
    assert found.kv_bytes > 55 * GIB
    assert 0 <= found.rest_bytes < 0.05 * found.free_bytes


def test_a_simulated_devices_graphs_are_stated_as_they_are_counted():
    facts = dataclasses.replace(GPU, is_simulated=True)
    found = resolve(gather({}, environ={}), LLAMA_8B, facts)[0].memory
    lost_bytes = found.free_bytes * 0.02
    assert found.graph_bytes == plan().graph_bytes > 0
    assert found.rest_bytes == pytest.approx(lost_bytes, abs=found.kv_bytes / found.num_blocks + 1)


def test_it_says_how_many_requests_fit():
    found = plan(max_context_tokens=8192)
    assert found.num_requests(8192) == found.kv_bytes // (8192 * 131072)
    assert found.num_requests(64) == 256
    assert ("requests of 8192 tokens", f"{found.num_requests(8192)} at once") in found.rows()


def test_a_model_that_does_not_fit_is_named_with_both_numbers():
    assert "14.96 GiB" in str(refusal(12 * GIB)) and "12.00 GiB" in str(refusal(12 * GIB))


def test_float32_weights_that_do_not_fit_are_offered_in_bfloat16():
    assert "--precision bfloat16" in str(refusal(24 * GIB, precision="float32"))


@pytest.mark.parametrize(
    ("free_gib", "options", "option"),
    [
        (24, {"max_context_tokens": 131072}, "max_context_tokens"),
        (24, {"kv_memory": "20GiB"}, "kv_memory"),
        (20, {"max_step_tokens": 65536}, "max_step_tokens"),
    ],
)
def test_the_value_that_a_refusal_offers_fits(free_gib, options, option):
    text = str(refusal(free_gib * GIB, **options))
    offered = re.search(r"give ([\d.]+(?:GiB|MiB)?) or less", text)
    assert offered is not None, text
    value = offered[1] if option == "kv_memory" else int(offered[1])
    assert plan(free_gib * GIB, **{**options, option: value}).rest_bytes >= 0


def least_for(**options: object) -> int:
    """Free memory for so large steps and hardly any KV beside the weights."""
    low, high = 15 * GIB, 80 * GIB
    while high - low > 2**20:
        middle = (low + high) // 2
        try:
            plan(middle, **options)
            high = middle
        except ConfigError:
            low = middle
    return high


def test_smaller_steps_are_offered_where_steps_of_so_many_requests_do_not_fit_and_requests_follow():
    free_bytes = least_for(max_running=40, max_step_tokens=40)
    offered = re.search(r"--max-step-tokens: 8192 .*; give (\d+) or less$", str(refusal(free_bytes)))
    assert offered is not None
    assert plan(free_bytes, max_step_tokens=int(offered[1])).max_running == int(offered[1]) > 20


def test_fewer_requests_and_smaller_steps_are_offered_where_neither_alone_fits():
    free_bytes = least_for(max_running=40, max_step_tokens=40)
    text = str(refusal(free_bytes, max_running=100))
    offered = re.search(r"--max-running: 100 .*; give (\d+), and --max-step-tokens (\d+)$", text)
    assert offered is not None
    assert plan(free_bytes, max_running=int(offered[1]), max_step_tokens=int(offered[2])).max_running > 20


def test_a_model_that_leaves_no_room_for_a_request_is_named():
    free_bytes = least_for(max_running=1, max_step_tokens=1) - 2 * 2**20
    assert str(refusal(free_bytes)).startswith("--model: ")


@pytest.mark.parametrize("options", [{"kv_memory": "0"}, {"kv_memory": "1KiB", "max_context_tokens": 4096}])
def test_a_cache_too_small_for_any_request_is_refused_with_one_that_does(options):
    offered = re.search(r"--kv-memory: .*; give (\S+) or more$", str(refusal(80 * GIB, **options)))
    assert offered is not None
    assert plan(**{**options, "kv_memory": offered[1]}).num_blocks >= 1


def test_a_cache_that_the_device_cannot_hold_is_not_offered():
    text = str(refusal(24 * GIB, max_context_tokens=131072, kv_memory="2GiB"))
    assert text.endswith("; give 16384 or less")


def test_of_a_host_more_is_offered_than_it_gives_by_itself():
    options = {"max_context_tokens": 131072}
    with pytest.raises(ConfigError, match=r"--kv-memory: 'auto' .*; give (\S+) or more$") as caught:
        resolve(gather(options, environ={}), LLAMA_8B, CPU)
    offered = str(caught.value).split()[-3]
    found, _ = resolve(gather({**options, "kv_memory": offered}, environ={}), LLAMA_8B, CPU)
    assert found.memory.max_context_tokens == 131072


def test_a_larger_kv_cache_is_offered_where_it_was_the_limit():
    text = str(refusal(80 * GIB, max_context_tokens=65536, kv_memory="2GiB"))
    offered = re.search(r"--kv-memory: '2GiB' .*; give (\S+) or more$", text)
    assert offered is not None
    assert plan(max_context_tokens=65536, kv_memory=offered[1]).max_context_tokens == 65536
