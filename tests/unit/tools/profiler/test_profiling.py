"""The profiler measures a device whose profile is known, and must find that profile again."""

import pytest

from penstock.config import gather
from penstock.engine.config import EngineConfig, resolve
from penstock.engine.simulated.device import facts_of, make_runner
from penstock.engine.simulated.profile import Curve, DecodeCost, MixedCost, Profile
from penstock.engine.simulated.runner import Timing
from penstock.engine.simulated.step_cost import step_ms, work_of
from penstock.tools.profiler.profiling import MAX_MEDIAN_ERROR, Subject, limits_of, measure
from penstock.tools.profiler.steps import TimedStep, decode_steps, mixed_steps, random_steps
from penstock.tools.profiler.stopwatch import Stopwatch
from penstock.tools.simulator.clock import VirtualClock
from penstock.tools.simulator.server import spec_of
from tests.fakes.small_profile import small_profile

DEVICE = small_profile(
    decode=DecodeCost(
        base_ms=Curve(at=(1, 4, 32), values=(5, 6, 14)),
        context_ms=Curve(at=(1, 8, 32), values=(0.4, 0.2, 0.1)),
        graph_sizes=(1, 2, 4, 8, 12, 16, 24, 32),
    ),
    mixed=MixedCost(
        base_ms=Curve(at=(1, 64, 256), values=(8, 11, 40)),
        pair_ms=20.0,
        context_ms=0.3,
        slice_ms=0.5,
        draw_ms=Curve(at=(1, 8, 32), values=(0, 1, 2)),
        graph_tokens=(32, 64, 128, 192, 256),
    ),
)


def config_of(profile: Profile) -> EngineConfig:
    options = {"max_running": 32, "max_step_tokens": 256, "host_kv_memory": "1MiB"}
    config, _ = resolve(gather(options, environ={}), spec_of(profile), facts_of(profile))
    return config


def profiled(profile: Profile, lines: list[str]) -> Profile:
    """Profile a simulated device in virtual time."""
    config, clock = config_of(profile), VirtualClock()
    runner = make_runner(profile, config, spec_of(profile), Timing(clock.now, clock.sleep))
    stopwatch = Stopwatch(runner, config, profile.vocab_size, max_context=limits_of(config).max_context, now=clock.now)
    subject = Subject(
        device=profile.device,
        model=profile.model,
        commit="abc",
        made_at="2026-01-01",
        memory_bytes=profile.memory_bytes,
        weight_bytes=profile.weight_bytes,
        kv_token_bytes=profile.kv_token_bytes,
        vocab_size=profile.vocab_size,
        max_context_tokens=profile.max_context_tokens,
        config=config,
        graph_sizes=profile.decode.graph_sizes,
        graph_tokens=profile.mixed.graph_tokens,
    )
    return measure(stopwatch, subject, lines.append)


def test_a_known_device_is_found_again():
    lines: list[str] = []
    found = profiled(DEVICE, lines)
    assert found.fit is not None
    assert found.fit.median_error < 0.01
    assert found.fit.p90_error < 0.02
    assert found.mixed.pair_ms == pytest.approx(20.0, rel=0.1)
    assert found.mixed.context_ms == pytest.approx(0.3, rel=0.1)
    assert found.tier_block_ms == pytest.approx(DEVICE.tier_block_ms, rel=0.01)
    assert found.host.decode_launch_ms == 0
    assert not found.provisional
    assert any(line.startswith("check: ") for line in lines)


def test_what_was_found_estimates_steps_of_every_kind():
    found = profiled(DEVICE, [])
    for step in (
        TimedStep((100,)),
        TimedStep((700, 30, 200, 90, 5)),
        TimedStep(pieces=((0, 200),)),
        TimedStep((300,) * 10, ((100, 77), (0, 20))),
    ):
        shape = work_of(step.slices)
        assert step_ms(found, shape) == pytest.approx(step_ms(DEVICE, shape), rel=0.05), str(step)


def test_a_device_that_no_profile_can_describe_is_told_apart():
    clock = VirtualClock()
    config = config_of(DEVICE)
    runner = make_runner(DEVICE, config, spec_of(DEVICE), Timing(clock.now, clock.sleep))
    stopwatch = Stopwatch(runner, config, 97, max_context=512, now=lambda: clock.now() ** 1.5)
    subject = Subject(
        device="odd", model="odd", commit="", made_at="", memory_bytes=1, weight_bytes=1, kv_token_bytes=1,
        vocab_size=97, max_context_tokens=512, config=config,
    )  # fmt: skip
    found = measure(stopwatch, subject, lambda line: None)
    assert found.fit is not None
    assert found.fit.median_error > MAX_MEDIAN_ERROR


def test_only_steps_that_the_engine_could_run_are_timed():
    limits = limits_of(config_of(DEVICE))
    steps = decode_steps(limits) + mixed_steps(limits) + random_steps(limits, 20, "x")
    for step in steps:
        assert len(step.contexts) + len(step.pieces) <= 32
        assert sum(piece.num_tokens for piece in step.slices) <= 256
        assert max(piece.start + piece.num_tokens for piece in step.slices) < limits.max_context
    assert {len(step.contexts) for step in decode_steps(limits)} >= {1, 2, 4, 8, 16, 32}


def test_steps_to_check_by_are_others_than_those_made_from():
    limits = limits_of(config_of(DEVICE))
    assert not set(random_steps(limits, 30, "checked by")) & set(mixed_steps(limits))
