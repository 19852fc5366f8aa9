"""Whether the load generator kept up: a generator that is itself the bottleneck measures itself.

Knows nothing of servers or workloads.
"""

import asyncio
import time
from array import array
from collections.abc import Callable, Sequence

import numpy

from penstock.tools.bench.document import GeneratorHealth

SAMPLE_SECONDS = 0.01
MAX_LAG_MS = 10.0
MAX_LATE_MS = 20.0
MAX_CPU_SHARE = 0.9


class HealthWatch:
    """Samples the event loop's lag and the process's CPU time while a run lasts."""

    def __init__(
        self, *, now: Callable[[], float] = time.perf_counter, cpu_now: Callable[[], float] = time.process_time
    ) -> None:
        self._now = now
        self._cpu_now = cpu_now
        self._lags = array("d")
        self._started = now()
        self._cpu_started = cpu_now()
        self._task = asyncio.create_task(self._sample())

    async def stop(self, late_seconds: Sequence[float]) -> GeneratorHealth:
        """End the watch and judge. `late_seconds`: how long after its time each timed request left."""
        self._task.cancel()
        await asyncio.wait([self._task])
        wall_seconds = self._now() - self._started
        cpu_seconds = self._cpu_now() - self._cpu_started
        return judge(
            lag_ms=_p99(self._lags) * 1000,
            max_lag_ms=max(self._lags, default=0.0) * 1000,
            late_ms=_p99(late_seconds) * 1000,
            cpu_share=cpu_seconds / wall_seconds if wall_seconds > 0 else 0.0,
        )

    async def _sample(self) -> None:
        while True:
            before = self._now()
            await asyncio.sleep(SAMPLE_SECONDS)
            self._lags.append(max(0.0, self._now() - before - SAMPLE_SECONDS))


def judge(*, lag_ms: float, max_lag_ms: float, late_ms: float, cpu_share: float) -> GeneratorHealth:
    """Return the figures with a sentence for each that is too high."""
    warnings = []
    if lag_ms > MAX_LAG_MS:
        warnings.append(f"its event loop ran {lag_ms:.1f} ms late (p99; {MAX_LAG_MS:g} ms is fine)")
    if late_ms > MAX_LATE_MS:
        warnings.append(f"requests left {late_ms:.1f} ms after their time (p99; {MAX_LATE_MS:g} ms is fine)")
    if cpu_share > MAX_CPU_SHARE:
        warnings.append(f"it used {cpu_share:.0%} of a CPU core ({MAX_CPU_SHARE:.0%} is fine)")
    return GeneratorHealth(
        loop_lag_p99_ms=lag_ms,
        loop_lag_max_ms=max_lag_ms,
        late_send_p99_ms=late_ms,
        cpu_share=cpu_share,
        warnings=warnings,
    )


def _p99(values: Sequence[float]) -> float:
    return float(numpy.percentile(values, 99)) if len(values) else 0.0
