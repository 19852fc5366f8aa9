"""Steps are launched just before the device is free: late comers are still in them, and it does not stand still."""

import random

from penstock.engine.scheduler.cost_model import CostModel, StepShape
from penstock.engine.scheduler.launch_moment import LaunchMoment
from penstock.engine.scheduler.step_plan import RowSlice, StepPlan
from penstock.engine.scheduler.step_times import StepTimes
from tests.fakes.virtual_engine import H200_LLAMA_8B, VirtualClock, VirtualEngine, request


def decoding_engine(seconds=H200_LLAMA_8B.seconds):
    """An engine whose 64 rows have decoded for a while."""
    engine = VirtualEngine(seconds, known=H200_LLAMA_8B)
    engine.run([request(f"r{index}", 0.0, prompt=200, answer=2000) for index in range(64)], until=2.0)
    return engine


def test_a_request_that_comes_while_a_step_runs_is_in_the_next():
    engine = decoding_engine()
    step = H200_LLAMA_8B.seconds(engine.runner.shapes[-1])
    arrival = engine.clock.now + 0.5 * step
    outcome = engine.run([request("late", arrival, prompt=100, answer=1)], until=arrival + 10 * step)["late"]
    own = max(H200_LLAMA_8B.seconds(shape) for shape in engine.runner.shapes if shape.prompt_tokens == 100)
    assert outcome.ttft <= 0.6 * step + own


def test_the_device_hardly_ever_stands_still_though_steps_take_now_more_now_less():
    dice, ran = random.Random(1), [0.0]

    def noisy(shape: StepShape) -> float:
        seconds = H200_LLAMA_8B.seconds(shape) * dice.gauss(1.0, 0.05)
        ran[0] += seconds
        return seconds

    engine = decoding_engine(noisy)
    ran[0], began = 0.0, engine.clock.now
    engine.run([], until=began + 5.0)
    assert ran[0] >= 0.998 * (engine.clock.now - began)


def test_nothing_waits_before_enough_steps_have_been_seen():
    clock = VirtualClock()
    times = StepTimes(CostModel(H200_LLAMA_8B), clock)
    moment = LaunchMoment(times, clock)
    plan = StepPlan(0)
    plan.slices.append(RowSlice(0, 0, 100, 1, 1))
    seconds = H200_LLAMA_8B.seconds(StepShape(1, 101))
    dues = []
    for _ in range(60):
        moment.begin()
        times.launch(plan)
        moment.end()
        dues.append(moment.due() - clock.now)
        clock.now += seconds
        times.settle(seconds, clock.now)
    assert all(due <= 0.0 for due in dues[:40])
    assert 0.9 * seconds < dues[-1] <= seconds


def test_the_host_has_the_time_that_launching_takes_it():
    clock = VirtualClock()
    times = StepTimes(CostModel(H200_LLAMA_8B), clock)
    moment = LaunchMoment(times, clock)
    plan = StepPlan(0)
    plan.slices.append(RowSlice(0, 0, 100, 1, 1))
    seconds, host = H200_LLAMA_8B.seconds(StepShape(1, 101)), 0.001
    for _ in range(60):
        moment.begin()
        clock.now += host
        times.launch(plan)
        moment.end()
        due = moment.due() - clock.now
        clock.now += seconds
        times.settle(seconds, clock.now)
    assert 0.9 * seconds - host < due <= seconds - host


def test_a_host_that_is_late_begins_sooner_the_next_time():
    clock = VirtualClock()
    times = StepTimes(CostModel(H200_LLAMA_8B), clock)
    moment = LaunchMoment(times, clock)
    plan = StepPlan(0)
    plan.slices.append(RowSlice(0, 0, 100, 1, 1))
    seconds, late, dues = H200_LLAMA_8B.seconds(StepShape(1, 101)), 0.001, []
    moment.begin()
    times.launch(plan)
    moment.end()
    for _ in range(400):
        done = clock.now + seconds
        dues.append(done - moment.due())
        clock.now = max(clock.now, moment.due()) + (late if moment.due() else 0.0)
        moment.begin()
        moment.end()
        clock.now = max(clock.now, done)
        times.settle(seconds, clock.now)
        times.launch(plan)
    assert 0.99 * late < dues[-1] < 2 * late
