"""From flags to workloads."""

from pathlib import Path

import pytest

from penstock.errors import ConfigError
from penstock.tools.bench.selection import Arrivals, Work


def test_workloads_are_named_with_commas() -> None:
    assert [item.name for item in Work(names="cpu1, cpu4").workloads()] == ["cpu1", "cpu4"]


def test_offline_decode_workloads_bring_their_twins() -> None:
    assert [item.name for item in Work(names="decode1").offline_workloads()] == ["first1", "decode1"]


def test_limit_temperature_and_seed_apply() -> None:
    (plain,) = Work(names="cpu4").workloads()
    (changed,) = Work(names="cpu4", limit=2, temperature=0.5, seed=3).workloads()
    assert len(changed.requests) == 2
    assert changed.temperature == 0.5
    assert changed.token_ids(changed.requests[0]) != plain.token_ids(plain.requests[0])


@pytest.mark.parametrize(
    "work", [Work(), Work(names="cpu1", shape="1x1+1"), Work(shape="1x1+1", trace=Path("x"))], ids=repr
)
def test_exactly_one_kind_of_work_is_wanted(work: Work) -> None:
    with pytest.raises(ConfigError, match="give one of --workload, --shape or --trace"):
        work.workloads()


def test_shared_tokens_belong_to_a_shape() -> None:
    with pytest.raises(ConfigError, match="give --shape too"):
        Work(names="cpu1", shared_tokens=4).workloads()


def test_speed_belongs_to_a_trace() -> None:
    with pytest.raises(ConfigError, match="give --trace too"):
        Work(names="cpu1", speed=2.0).workloads()


@pytest.mark.parametrize(
    ("arrivals", "option"),
    [(Arrivals(rate=2.0), "--rate"), (Arrivals(rates="1,2"), "--rates"), (Arrivals(concurrency=4), "--concurrency")],
    ids=repr,
)
def test_speed_is_refused_beside_what_replaces_the_times_of_a_trace(arrivals: Arrivals, option: str) -> None:
    with pytest.raises(ConfigError, match=f"--speed: 2.0 is not usable; leave it out: {option} replaces"):
        arrivals.workloads(Work(trace=Path("any.csv"), speed=2.0))


def test_a_list_of_nothing_is_refused() -> None:
    with pytest.raises(ConfigError, match="--workload: ',' is not usable"):
        Work(names=",").workloads()
    with pytest.raises(ConfigError, match="--rates"):
        Arrivals(rates=" , ").apply(Work(names="cpu1").workloads())


def test_arrivals_as_the_workload_says_are_the_default() -> None:
    workloads = Work(names="rate10").workloads()
    assert Arrivals().apply(workloads) == workloads
    assert workloads[0].rate == 10


def test_a_rate_a_sweep_and_a_concurrency_replace_them() -> None:
    workloads = Work(shape="3x4+2").workloads()
    assert [item.rate for item in Arrivals(rate=2.0).apply(workloads)] == [2.0]
    assert [item.rate for item in Arrivals(rates="1,2,4").apply(workloads)] == [1.0, 2.0, 4.0]
    assert [item.concurrency for item in Arrivals(concurrency=2).apply(workloads)] == [2]


@pytest.mark.parametrize("arrivals", [Arrivals(rate=1.0, concurrency=2), Arrivals(rate=1.0, rates="1,2")], ids=repr)
def test_only_one_way_to_arrive_is_taken(arrivals: Arrivals) -> None:
    with pytest.raises(ConfigError, match="only one"):
        arrivals.apply([])


@pytest.mark.parametrize("rates", ["0", "1,fast", "-1", "nan", "inf"])
def test_a_rate_is_a_number_over_zero(rates: str) -> None:
    with pytest.raises(ConfigError, match="give a number over 0"):
        Arrivals(rates=rates).apply(Work(shape="1x1+1").workloads())
