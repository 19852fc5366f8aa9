"""How long something takes on a device, found by trying it. Knows tensors only."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

_MOST_RUNS = 16
_CYCLES = 2_000_000  # of the fastest clock, in a millisecond


def milliseconds(
    run: Callable[[Tensor, Tensor], Tensor], x: Tensor, weights: Sequence[Tensor], *, trial: float, launch: float
) -> float:
    """Return the time of one run on x and a weight, from as many in a row as take about `trial` milliseconds.

    `launch` is the most that the host takes for one, also in milliseconds: the device waits until all are launched.
    Several weights come from memory and not from the cache. Must not be called during a capture.
    """
    run(x, weights[0])
    count = 1
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    while True:
        torch.cuda._sleep(int(launch * (count + 1) * _CYCLES))
        begin.record()
        for index in range(count):
            run(x, weights[index % len(weights)])
        end.record()
        end.synchronize()
        taken: float = begin.elapsed_time(end)
        if taken >= trial / 2 or count == _MOST_RUNS:
            return taken / count
        count = min(max(int(trial * count / taken), 2), _MOST_RUNS)
