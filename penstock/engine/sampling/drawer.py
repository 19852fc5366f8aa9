"""The draw itself, on a CPU with torch's operations and on CUDA in one kernel.

Knows logits and numbers; nothing of rows or requests.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from penstock.engine.runner.transfer import to_device
from penstock.kernels import sampling


@dataclass(frozen=True, slots=True)
class Draws:
    """What decides each draw, on the host. [n] each."""

    temperatures: np.ndarray  # float32; 0 takes the best token
    seeds: np.ndarray  # int64
    positions: np.ndarray  # int64


@dataclass(frozen=True, slots=True)
class Filters:
    """Which part of the vocabulary each draw may come from, on the device. [n] each."""

    top_k: Tensor  # int64, 0: no limit
    top_p: Tensor  # float32
    min_p: Tensor  # float32


class Drawer(ABC):
    """Draws one token per row of logits, [n, vocab]; returns tokens, [n] int64, and highest logits, [n] float32."""

    @abstractmethod
    def draw(self, logits: Tensor, draws: Draws) -> tuple[Tensor, Tensor]:
        """Draw from the whole vocabulary."""

    @abstractmethod
    def draw_filtered(self, logits: Tensor, draws: Draws, filters: Filters) -> tuple[Tensor, Tensor]:
        """Draw from what the filters leave. No row is greedy."""


class CpuDrawer(Drawer):
    """A greedy batch costs one reduction."""

    def draw(self, logits: Tensor, draws: Draws) -> tuple[Tensor, Tensor]:
        best, tokens = sampling.best(logits)
        random = np.flatnonzero(draws.temperatures)
        if len(random):
            index = torch.from_numpy(random)
            picked = logits if len(random) == len(logits) else logits[index]
            tokens[index] = sampling.draw(picked, *_tensors(draws, random))
        return tokens, best

    def draw_filtered(self, logits: Tensor, draws: Draws, filters: Filters) -> tuple[Tensor, Tensor]:
        best, _ = sampling.best(logits)
        settings = _tensors(draws, np.arange(len(logits)))
        return sampling.draw_filtered(logits, *settings, filters.top_k, filters.top_p, filters.min_p), best


def _tensors(draws: Draws, chosen: np.ndarray) -> tuple[Tensor, Tensor, Tensor]:
    """Temperatures, seeds and positions of the chosen draws."""
    temperatures, seeds, positions = (
        torch.from_numpy(values[chosen]) for values in (draws.temperatures, draws.seeds, draws.positions)
    )
    return temperatures, seeds, positions


class CudaDrawer(Drawer):
    """One launch for a step's rows, greedy or not."""

    def __init__(self, max_draws: int, device: torch.device) -> None:
        from penstock.kernels.triton.sampling import SamplingWorkspace

        self._device = device
        self._max_draws = max_draws
        self._workspace: SamplingWorkspace = SamplingWorkspace.of(max_draws, device)

    def draw(self, logits: Tensor, draws: Draws) -> tuple[Tensor, Tensor]:
        from penstock.kernels.triton.sampling import sample

        assert len(logits) <= self._max_draws
        return sample(logits, *self._to_device(draws), self._workspace)

    def draw_filtered(self, logits: Tensor, draws: Draws, filters: Filters) -> tuple[Tensor, Tensor]:
        from penstock.kernels.triton.sampling import sample_filtered

        return sample_filtered(logits, *self._to_device(draws), filters.top_k, filters.top_p, filters.min_p)

    def _to_device(self, draws: Draws) -> tuple[Tensor, Tensor, Tensor]:
        integers = to_device(np.stack([draws.seeds, draws.positions]), self._device)
        return to_device(draws.temperatures, self._device), integers[0], integers[1]


def make_drawer(max_draws: int, device: torch.device) -> Drawer:
    """The drawer for a device; `max_draws` bounds the draws of one step."""
    return CudaDrawer(max_draws, device) if device.type == "cuda" else CpuDrawer()
