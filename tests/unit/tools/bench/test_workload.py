"""Workloads are the same work every time: named ones equal the reference, shifted ones keep their structure."""

import importlib.util
import itertools
from pathlib import Path
from types import ModuleType

import pytest

from penstock.errors import ConfigError
from penstock.tools.bench.catalogue import CPU_BATCHES, WORKLOADS, named_workload, prefill_twin, steady_steps
from penstock.tools.bench.offline_bench import with_prefill_twins
from penstock.tools.bench.request_body import words_of
from penstock.tools.bench.shape import Length, parse_shape
from penstock.tools.bench.workload import VOCABULARY_TOKENS, SeededPrompt, Workload

REFERENCE = Path(__file__).resolve().parents[5] / "shared" / "bench" / "workloads.py"


def ids_of(workload: Workload) -> list[list[int]]:
    return [list(workload.token_ids(request)) for request in workload.requests]


def outputs_of(workload: Workload) -> list[int]:
    return [request.max_tokens for request in workload.requests]


@pytest.fixture(scope="module")
def reference() -> ModuleType:
    if not REFERENCE.exists():
        pytest.skip("the reference workloads (../shared/bench/workloads.py) are not here")
    spec = importlib.util.spec_from_file_location("reference_workloads", REFERENCE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# The largest make millions of tokens; the same two functions make them all.
@pytest.mark.parametrize("name", ["mixed256", "mixed256b", "prefill32x2048", "first8", "decode1", "decode64"])
def test_offline_workloads_equal_the_reference(reference: ModuleType, name: str) -> None:
    workload = named_workload(name)
    prompts, outputs = reference.OFFLINE[name]()
    assert ids_of(workload) == prompts
    assert outputs_of(workload) == outputs


def test_every_workload_of_the_reference_has_its_name_here(reference: ModuleType) -> None:
    assert set(WORKLOADS) == {*reference.OFFLINE, *reference.ONLINE, *(f"cpu{batch}" for batch in CPU_BATCHES)}


def test_online_workloads_have_the_references_sizes_and_arrivals(reference: ModuleType) -> None:
    for name, wanted in reference.ONLINE.items():
        named = WORKLOADS[name]
        assert named.shape.count == wanted["count"]
        assert named.rate == wanted["rate"]
        assert named.concurrency == wanted.get("concurrency")
        assert named.shape.input == Length(wanted.get("input", 1024), wanted.get("input", 1024))
        assert named.shape.output == Length(128, 128)
        assert named.shape.shared == wanted.get("shared", 0)


def test_a_shared_prefix_is_shared_and_the_rest_is_not() -> None:
    prompts = ids_of(named_workload("shared_prefix").limited(5))
    assert all(prompt[:1792] == prompts[0][:1792] for prompt in prompts)
    assert all(len(prompt) == 2048 for prompt in prompts)
    assert len({tuple(prompt[1792:]) for prompt in prompts}) == 5


@pytest.mark.parametrize("batch", CPU_BATCHES)
def test_cpu_workloads_are_small_greedy_and_at_once(batch: int) -> None:
    workload = named_workload(f"cpu{batch}")
    assert [len(prompt) for prompt in ids_of(workload)] == [125] * batch
    assert outputs_of(workload) == [64] * batch
    assert workload.temperature == 0.0
    assert not workload.is_timed


def test_an_unknown_name_lists_those_there_are() -> None:
    with pytest.raises(ConfigError, match=r"give one of: mixed256, .*cpu16"):
        named_workload("mixed")


def test_a_decode_workload_is_compared_with_its_prefill() -> None:
    assert prefill_twin("decode64") == "first64"
    assert prefill_twin("mixed256") is None
    assert steady_steps("decode64") == 256
    assert with_prefill_twins(["decode8", "mixed256", "first8"]) == ["first8", "decode8", "mixed256"]


@pytest.mark.parametrize(
    ("text", "inputs", "outputs"),
    [("3x5+2", {5}, {2}), ("50x2-4+1-2", {2, 3, 4}, {1, 2})],
)
def test_a_shape_spells_count_input_and_output(text: str, inputs: set[int], outputs: set[int]) -> None:
    requests = parse_shape(text).requests()
    assert {request.prompt.num_tokens for request in requests} == inputs
    assert {request.max_tokens for request in requests} == outputs


@pytest.mark.parametrize(
    "text", ["", "3x5", "x5+2", "0x5+2", "3x0+2", "3x5+0", "3x5-4+2", "3x5-0+2", "3x5+3-2", "3x5+2-0", "3x5+2 tokens"]
)
def test_a_shape_that_means_nothing_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="COUNTxINPUT"):
        parse_shape(text)


def test_a_shape_of_more_tokens_than_memory_holds_is_refused() -> None:
    with pytest.raises(ConfigError, match="at most 100,000,000 tokens in all"):
        parse_shape("1000000000x1-1024+1")


def test_a_shared_prefix_must_be_shorter_than_the_prompts() -> None:
    with pytest.raises(ConfigError, match="shortest prompt"):
        parse_shape("3x5-9+2", shared=5)


def test_poisson_arrivals_start_at_once_and_have_their_rate() -> None:
    workload = Workload(name="w", requests=parse_shape("4000x1+1").requests()).at_rate(20.0)
    starts = [request.start_seconds for request in workload.requests]
    assert starts[0] == 0.0
    assert starts == sorted(starts)
    gaps = [after - before for before, after in itertools.pairwise(starts)]
    assert sum(gaps) / len(gaps) == pytest.approx(1 / 20, rel=0.05)
    # An exponential's deviation is its mean; equal gaps would have none.
    assert (sum(gap * gap for gap in gaps) / len(gaps)) ** 0.5 == pytest.approx(2**0.5 / 20, rel=0.1)


def test_another_seed_gives_other_arrivals() -> None:
    workload = Workload(name="w", requests=parse_shape("5x1+1").requests())
    assert workload.at_rate(1.0, 1) == workload.at_rate(1.0, 1)
    assert workload.at_rate(1.0, 1) != workload.at_rate(1.0, 2)


def test_a_shift_changes_every_token_and_no_prefix() -> None:
    workload = named_workload("shared_prefix").limited(3)
    before, after = ids_of(workload), ids_of(workload.shifted(17))
    assert all(one != other for one, other in zip(before[0], after[0], strict=True))
    assert all(0 <= token < VOCABULARY_TOKENS for token in after[0])
    assert after[0][:1792] == after[1][:1792]
    assert ids_of(workload.shifted(17).shifted(-17)) == before


def test_equal_seeds_are_equal_blocks() -> None:
    first, second = SeededPrompt((1, 2), 700).token_ids(), SeededPrompt((1, 3), 600).token_ids()
    assert (len(first), len(second)) == (700, 600)
    assert first[:512] == second[:512]
    assert first[512:600] != second[512:600]


def test_text_has_a_word_for_each_token_and_keeps_prefixes() -> None:
    text = words_of([5, 6, 7, 10000])
    assert len(text.split()) == 4
    assert words_of([5, 6, 8]).startswith(words_of([5, 6]))
