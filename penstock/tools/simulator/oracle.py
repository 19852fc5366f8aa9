"""The cheapest schedule of replicas for a workload known in advance: what an autoscaler is measured against.

How much device time the workload takes is known, second by second, from a run before. Time is cut into windows, and
each has as many replicas ready as its work needs where every replica works the same part of its time; a dip that costs
less to sit out than another start is filled. The larger that part, the fewer the replicas: the largest at which the
whole workload, run on the schedule, still keeps its service level is searched by halving. Every replica is started in
time to be ready when its window begins, and the start is paid for. Knows nothing of terminals.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from penstock.tools.bench.summary import ServiceLevel
from penstock.tools.bench.workload import Workload
from penstock.tools.simulator.scaling import ScaledRun, ScheduledSize, run_scaled
from penstock.tools.simulator.server import SimulatedServer

WINDOW_SECONDS = 5.0
# The parts of their time that are tried: more than all of it goes for as long as a queue may grow.
_LOW, _HIGH = 0.85, 1.05
_PRECISION = 0.015

Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Oracle:
    """A schedule, and what came of it."""

    schedule: tuple[int, ...]  # replicas ready in each window
    utilization: float
    run: ScaledRun


def find_oracle(
    server: SimulatedServer,
    workload: Workload,
    level: ServiceLevel,
    work: Sequence[float],
    *,
    start_seconds: float,
    attainment: float = 0.99,
    on_progress: Progress = lambda _: None,
) -> Oracle | None:
    """Return the cheapest schedule found that keeps the level for this part of the requests; None where none does.

    `work` is the device time that the workload takes in each second, as a `ScaledRun` tells it.
    """

    def attempt(utilization: float) -> Oracle:
        schedule = schedule_for(work, utilization, start_seconds)
        scaler = ScheduledSize(schedule, WINDOW_SECONDS, start_seconds)
        first = replace(server, num_replicas=schedule[0])
        run = run_scaled("oracle", first, workload, level, scaler, start_seconds)
        on_progress(
            f"working {utilization:.1%} of the time: {run.attainment:.2%} within, "
            f"{run.replica_seconds:.0f} replica-seconds, {schedule}"
        )
        return Oracle(schedule, utilization, run)

    kept: list[Oracle] = []
    low, high = _LOW, _HIGH
    while high - low > _PRECISION:
        found = attempt((low + high) / 2)
        if found.run.attainment >= attainment:
            kept.append(found)
            low = found.utilization
        else:
            high = found.utilization
    if not kept and (found := attempt(_LOW)).run.attainment >= attainment:
        kept.append(found)
    return min(kept, key=lambda item: item.run.replica_seconds, default=None)


def schedule_for(work: Sequence[float], utilization: float, start_seconds: float) -> tuple[int, ...]:
    """Return how many replicas each window needs if each works this part of its time."""
    size = round(WINDOW_SECONDS)
    windows = [work[begin : begin + size] for begin in range(0, len(work), size)]
    needed = [max(1, math.ceil(sum(window) / len(window) / utilization - 1e-9)) for window in windows]
    return _without_dips(needed, math.floor(start_seconds / WINDOW_SECONDS))


def _without_dips(needed: Sequence[int], longest: int) -> tuple[int, ...]:
    """Keep replicas over dips of up to `longest` windows: to start them again would cost as much."""
    kept = list(needed)
    for begin in range(1, len(kept)):
        if kept[begin] >= kept[begin - 1]:
            continue
        after = kept[begin : begin + longest + 1]
        level = min(kept[begin - 1], max(after))
        end = next(index for index, count in enumerate(after) if count == max(after))
        for index in range(begin, begin + end):
            kept[index] = max(kept[index], level)
    return tuple(kept)
