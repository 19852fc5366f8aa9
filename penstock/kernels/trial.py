"""How long something takes on a device, found by trying it. Knows tensors only."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

_CYCLES = 2_000_000  # of the fastest clock, in a millisecond


def milliseconds(
    run: Callable[[Tensor, Tensor], Tensor], x: Tensor, weights: Sequence[Tensor], *, count: int, launch: float
) -> float:
    """Return the time of one run on x and a weight, from so many in a row.

    `launch` is the most that the host takes for one, in milliseconds: the device waits until all are launched. Several
    weights come from memory and not from the cache. Must not be called during a capture.
    """
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda._sleep(int(launch * (count + 1) * _CYCLES))
    begin.record()
    for index in range(count):
        run(x, weights[index % len(weights)])
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / count
