"""Steps that hold prompts as captured graphs, over a ladder of token counts.

Two graphs make a step: the forward pass of so many tokens in so many slices, and the draw for so many rows. The
likeliest sizes are captured before serving begins, the others in idle moments or when they are first wanted. Tokens of
a step that are nobody's belong to the scratch row. Knows layouts and rows.
"""

import functools
import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np
import torch
from torch import Tensor

from penstock.engine.runner.batch_rows import BatchRows
from penstock.engine.runner.cuda_graphs import DecodeGraphs, Forward, batch_sizes, capture, is_rehearsed
from penstock.engine.runner.layout import Layout
from penstock.engine.runner.token_draw import DrawOutcome, TokenDraw
from penstock.engine.runner.transfer import StagingRing
from penstock.kernels.attention.interface import AttentionBackend, AttentionStep, WantedTokens
from penstock.models.decoder import Decoder

log = logging.getLogger(__name__)

Size = TypeVar("Size")

# A step is captured for so many slices: programs of the attention kernels that find no slice cost little, not nothing.
_SLICE_COUNTS = (32, 64, 128, 256, 512, 1024, 2048)
# From so many tokens on, what such programs cost is lost beside the rest of the step.
_MANY_TOKENS = 1024
# Multiples of this are what paces choose where they can.
_WHOLE_TOKENS = 256
# A last layer for the tokens that are drawn from pays where a step has this many times as many.
_WANTED_TIMES = 2
# After so long no other product is tried in an idle moment.
_TRIAL_SECONDS = 0.01
# Beyond so many tokens the library's first choice is good, and trials take memory and long.
_MOST_TRIED_TOKENS = 1024


def token_counts(most: int) -> list[int]:
    """The ladder: coarse where tokens cost nothing beside the weights, then in steps of at most a fourth.

    Products take whole tiles of tokens: 448 take as long as 512, and 576 as long as 640.
    """
    ladder = [32, 64, 96, 128, 192, 256, 320, *range(384, 4096, 128), *range(4096, most, 256)]
    return [count for count in ladder if count < most] + [most]


class _Captured(Generic[Size]):
    """What was captured, by size."""

    def __init__(
        self, graphs: DecodeGraphs, body: Callable[[Size], Tensor], load_kernels: Callable[[Size], None]
    ) -> None:
        self._stream, self._pool = graphs.stream, graphs.pool
        self._body, self._load_kernels = body, load_kernels
        self._graphs: dict[Size, tuple[torch.cuda.CUDAGraph, Tensor]] = {}
        self._out_of_memory = False

    def run(self, size: Size) -> Tensor:
        """Run the body for a size. Returns what it returned, valid until the next one."""
        if not self.prepare(size):
            return self._body(size)
        graph, output = self._graphs[size]
        graph.replay()
        return output

    def prepare(self, size: Size) -> bool:
        """Capture a size, if it is not. False, from the first that finds no memory: the others then run as they are."""
        if size in self._graphs:
            return True
        if self._out_of_memory:
            return False
        self._capture(size)
        return not self._out_of_memory

    def captured(self) -> list[Size]:
        return list(self._graphs)

    def renew(self, size: Size) -> None:
        """Capture a size again: its products run another way now."""
        if not self._out_of_memory:
            self._capture(size)

    def _capture(self, size: Size) -> None:
        self._load_kernels(size)
        try:
            self._graphs[size] = capture(functools.partial(self._body, size), self._stream, self._pool)
        except torch.cuda.OutOfMemoryError:
            self._out_of_memory = True
            log.warning("no memory is left to capture more steps; those of other sizes are launched one by one")


@dataclass(frozen=True, slots=True)
class _Places:
    """A size of step: where its numbers are in the memory that is shipped to the device."""

    num_tokens: int
    max_slices: int
    decodes: bool  # whether slices of one token may be among them
    plan_size: int  # of the attention's

    def split(self, numbers: Tensor) -> tuple[Tensor, ...]:
        """Return views: rows, positions, slice rows (int64); lengths, starts, plan (int32)."""
        tokens, slices = self.num_tokens, self.max_slices
        wide = 2 * tokens + slices
        rows, positions, slice_rows = numbers[:wide].split((tokens, tokens, slices))
        narrow = numbers[wide : self.size].view(torch.int32)
        lens, starts, plan = narrow[: 2 * slices + 1 + self.plan_size].split((slices, slices + 1, self.plan_size))
        return rows, positions, slice_rows, lens, starts, plan

    @property
    def size(self) -> int:
        """In int64."""
        return 2 * self.num_tokens + self.max_slices + -(-(2 * self.max_slices + 1 + self.plan_size) // 2)


# A step that runs nothing for anybody.
_NOTHING = Layout(
    rows=np.zeros(0, np.int64),
    positions=np.zeros(0, np.int64),
    slice_rows=np.zeros(0, np.int64),
    query_starts=np.zeros(1, np.int64),
    context_lens=np.zeros(0, np.int64),
    num_decodes=0,
    sampled=np.zeros(0, np.int64),
)


class MixedGraphs:
    """Captured steps of any slices, with at most one draw for each."""

    def __init__(
        self,
        model: Decoder,
        attention: AttentionBackend,
        rows: BatchRows,
        draw: TokenDraw,
        graphs: DecodeGraphs,
        *,
        max_running: int,
        max_step_tokens: int,
    ) -> None:
        assert attention.captures_prompts
        self._model = model
        self._attention = attention
        self._rows = rows
        self._draw = draw
        self._tuner = graphs.tuner
        self._max_draws = max_running
        self.token_counts = token_counts(max_step_tokens)
        self._slice_counts = [count for count in _SLICE_COUNTS if count < max_running] + [max_running]
        self._draw_counts = batch_sizes(max_running)
        largest = self._places(max_step_tokens, max_running).size
        # The states to draw from, the rows and positions of the draws; then what depends on the count of tokens.
        self._front = 3 * max_running
        self._inputs = torch.zeros(self._front + largest, dtype=torch.int64, device=rows.device)
        self._staging = StagingRing(self._front + largest)
        self._states = torch.zeros(max_running, model.spec.hidden_size, dtype=model.dtype, device=rows.device)
        self._forwards: _Captured[_Places] = _Captured(
            graphs,
            functools.partial(self._forward, forward=model.forward),
            self._load_forward,
        )
        self._draws: _Captured[int] = _Captured(graphs, self._draw_rows, self._load_draw)
        counts = {*self._draw_counts, *self.token_counts}
        self._untried = deque(sorted(count for count in counts if count <= _MOST_TRIED_TOKENS))
        self._upcoming: deque[_Places | int] = deque([*self._draw_counts, *self._all_places()])
        self._decode_graphs = graphs
        self._found_better = False  # of the size that is being tried
        self._stale: deque[Callable[[], None]] = deque()  # captures to make again

    def fits(self, layout: Layout) -> bool:
        return len(layout.rows) <= self.token_counts[-1] and len(layout.sampled) <= len(layout.slice_rows)

    def run(self, layout: Layout) -> DrawOutcome | None:
        """Run a step and draw for every row that is due, writing each token to its row. None: no row was."""
        num_tokens = next(count for count in self.token_counts if count >= len(layout.rows))
        places = self._places(num_tokens, len(layout.slice_rows), decodes=layout.num_decodes > 0)
        self._stage(layout, places)
        self._forwards.run(places)
        num_draws = len(layout.sampled)
        if num_draws == 0:
            return None
        size = next(count for count in self._draw_counts if count >= num_draws)
        return self._draw.outcome(self._draws.run(size), num_draws)

    @torch.inference_mode()
    def rehearse(self) -> None:
        """Go through steps of some sizes, so that their kernels are asked for: see `compiling_ahead`."""
        counts = filter(is_rehearsed, reversed(self.token_counts))
        for places in dict.fromkeys(self._places(count, 1, decodes=some) for count in counts for some in (False, True)):
            self._stage_nothing(places)
            self._load_forward(places)
        for size in filter(is_rehearsed, self._draw_counts):
            self._stage_nothing(size)
            self._load_draw(size)

    @torch.inference_mode()
    def prepare_next(self) -> bool:
        """Capture the likeliest size that is not captured yet, or no longer as it should be. False: none is left."""
        if self._stale:
            self._stale.popleft()()
            return True
        if not self._upcoming:
            return False
        size = self._upcoming.popleft()
        self._stage_nothing(size)
        if isinstance(size, _Places):
            self._forwards.prepare(size)
        else:
            self._draws.prepare(size)
        return True

    @torch.inference_mode()
    def try_products(self) -> bool:
        """Try a product that no start on this device has tried; what ran it another way is captured again.

        The next start knows. False: none is left.
        """
        if not self._untried:
            return False
        size = self._untried[0]
        self._tuner.allow(_TRIAL_SECONDS)
        self._model.tune(size, self._tuner)
        self._model.tune_logits(min(size, self._max_draws), self._tuner)
        self._found_better = self._found_better or self._tuner.num_better > 0
        if not self._tuner.num_skipped:
            self._untried.popleft()
            if self._found_better:
                self._mark_stale(size)
            self._found_better = False
        self._tuner.allow(0.0)
        self._tuner.save()
        return True

    def _mark_stale(self, size: int) -> None:
        """Have whatever was captured for so many rows captured again."""
        forwards = [places for places in self._forwards.captured() if places.num_tokens == size]
        self._stale.extend(functools.partial(self._renew_forward, places) for places in forwards)
        if size in self._draws.captured():
            self._stale.append(functools.partial(self._renew_draw, size))
        self._stale.append(functools.partial(self._decode_graphs.renew, size))

    def _renew_forward(self, places: _Places) -> None:
        self._stage_nothing(places)
        self._forwards.renew(places)

    def _renew_draw(self, size: int) -> None:
        self._stage_nothing(size)
        self._draws.renew(size)

    def _all_places(self) -> list[_Places]:
        """Every size once: those of a first prompt alone, those that decoding beside prompts wants, then the others.

        What an engine tries first teaches it what steps cost, so that none of these may take the time of a capture.
        """
        largest = self.token_counts[-1]
        counts = sorted(
            self.token_counts,
            key=lambda count: (count != largest, count > _MANY_TOKENS, count % _WHOLE_TOKENS != 0, abs(count - 256)),
        )
        alone = [self._places(count, 1, decodes=False) for count in counts if count.bit_count() == 1]
        others = [
            self._places(count, slices, decodes=decodes)
            for count in counts
            for decodes in (False, True)
            for slices in self._slice_counts
        ]
        return list(dict.fromkeys([*alone, *others]))

    def _places(self, num_tokens: int, num_slices: int, *, decodes: bool = True) -> _Places:
        """The size for so many tokens and at least so many slices."""
        if num_tokens >= _MANY_TOKENS:
            num_slices = self._max_draws
        else:
            decodes = True  # which costs little where there are none, and saves a size
        slices = min(next(count for count in self._slice_counts if count >= num_slices), num_tokens)
        return _Places(num_tokens, slices, decodes, self._attention.plan_size(num_tokens, slices))

    def _stage_nothing(self, size: _Places | int) -> None:
        """Ship a step of nobody's tokens, in so many places or with so many draws."""
        self._stage(_NOTHING, size if isinstance(size, _Places) else self._places(self.token_counts[0], 1))

    def _stage(self, layout: Layout, places: _Places) -> None:
        """Ship a step's numbers in one copy."""
        end = self._front + places.size
        with self._staging.slot() as staged:
            self._fill_front(staged.values, layout)
            views = places.split(staged.tensor[self._front : end])
            rows, positions, slice_rows, lens, starts, plan = (view.numpy() for view in views)
            num_tokens, num_slices = len(layout.rows), len(layout.slice_rows)
            rows[:num_tokens], rows[num_tokens:] = layout.rows, self._rows.scratch_row
            positions[:num_tokens], positions[num_tokens:] = layout.positions, 0
            slice_rows[:num_slices], slice_rows[num_slices:] = layout.slice_rows, self._rows.scratch_row
            lens[:num_slices], lens[num_slices:] = layout.context_lens, 0
            starts[: num_slices + 1], starts[num_slices + 1 :] = layout.query_starts, num_tokens
            plan[:] = self._attention.plan(
                layout.num_decodes,
                layout.query_starts,
                layout.context_lens,
                num_tokens=places.num_tokens,
                num_slices=places.max_slices,
            )
            self._inputs[:end].copy_(staged.tensor[:end], non_blocking=True)

    def _fill_front(self, values: np.ndarray, layout: Layout) -> None:
        states, rows, positions = values[: self._front].reshape(3, self._max_draws)
        num_draws = len(layout.sampled)
        states[:num_draws], states[num_draws:] = layout.sampled, 0
        rows[:num_draws], rows[num_draws:] = layout.rows[layout.sampled], self._rows.scratch_row
        positions[:num_draws], positions[num_draws:] = layout.positions[layout.sampled], 0

    def _forward(self, places: _Places, forward: Forward) -> Tensor:
        """A captured body: everything it reads is in persistent tensors, and so is what it leaves."""
        rows, positions, slice_rows, lens, starts, plan = places.split(
            self._inputs[self._front : self._front + places.size]
        )
        inputs = self._draw.gather(rows, positions)
        slices = places.max_slices
        wanted = self._wanted(slices) if places.num_tokens >= _WANTED_TIMES * slices else None
        self._attention.prepare(
            AttentionStep(
                num_decodes=slices if places.decodes else 0,
                query_starts=list(range(slices + 1)),
                context_lens=[self._rows.width - 1] * slices,
                slots=inputs.slots,
                block_tables=self._rows.tables.index_select(0, slice_rows),
                lens=lens,
                starts=starts,
                plan=plan,
                wanted=wanted,
            )
        )
        hidden = forward(inputs.token_ids, positions, self._attention, wanted)
        if wanted is not None:
            self._states[:slices] = hidden
            return self._states
        return torch.index_select(hidden, 0, self._inputs[: self._max_draws], out=self._states)

    def _wanted(self, count: int) -> WantedTokens:
        """The tokens that the first so many draws are made from."""
        begin = self._max_draws
        rows, positions = self._inputs[begin : begin + count], self._inputs[2 * begin : 2 * begin + count]
        lens = self._draw.gather(rows, positions).lens
        return WantedTokens(self._inputs[:count], lens, self._rows.tables.index_select(0, rows))

    def _load_forward(self, places: _Places) -> None:
        self._model.tune(places.num_tokens, self._tuner)
        self._forward(places, self._model.touch)

    def _load_draw(self, size: int) -> None:
        self._model.tune_logits(size, self._tuner)
        self._draw_rows(size)

    def _draw_rows(self, size: int) -> Tensor:
        """A captured body: logits of the states that are due, and their draws."""
        begin = self._max_draws
        rows, positions = self._inputs[begin : begin + size], self._inputs[2 * begin : 2 * begin + size]
        logits = self._model.logits(self._states[:size])
        self._draw.draw(logits, self._draw.gather(rows, positions))
        return logits
