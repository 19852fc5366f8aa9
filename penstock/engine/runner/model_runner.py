"""Runs plans on one device: rows in, one forward pass, sampled tokens out.

Knows tensors, rows and blocks. Knows nothing of queues, clients or text.
"""

import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from penstock.engine.runner.batch_rows import BatchRows
from penstock.engine.runner.interface import LaunchedStep, Runner, StepFailed
from penstock.engine.runner.kv_pool import KvPool
from penstock.engine.sampling.row_parameters import RowParameters
from penstock.engine.sampling.sampler import Sampled, Sampler
from penstock.engine.scheduler.step_plan import RowSlice, SliceResult, StepPlan, StepResult
from penstock.kernels.attention.interface import AttentionBackend, AttentionStep
from penstock.models.decoder import Decoder

# Prompt log-probabilities need logits of every position: so many at a time, to bound memory.
_LOGIT_ROWS = 128


@dataclass(slots=True)
class Layout:
    """Where a step's tokens are. All arrays are on the host."""

    rows: np.ndarray  # [tokens] int64
    positions: np.ndarray  # [tokens] int64
    slice_rows: np.ndarray  # [slices] int64
    query_starts: list[int]  # [slices + 1]
    context_lens: list[int]  # [slices]
    num_decodes: int
    sampled: np.ndarray  # [draws] int64: which tokens of the batch are followed by a draw

    @classmethod
    def of(cls, slices: list[RowSlice]) -> "Layout":
        count = len(slices)
        slice_rows = np.fromiter((piece.row for piece in slices), np.int64, count)
        starts = np.fromiter((piece.start for piece in slices), np.int64, count)
        sizes = np.fromiter((piece.num_tokens for piece in slices), np.int64, count)
        draws = np.fromiter((piece.num_samples for piece in slices), np.int64, count)
        ends = np.cumsum(sizes)
        offsets = ends - sizes
        total = int(ends[-1])
        positions = np.arange(total) - np.repeat(offsets - starts, sizes)
        draw_ends = np.cumsum(draws)
        sampled = np.arange(int(draw_ends[-1])) + np.repeat(ends - draw_ends, draws)
        return cls(
            rows=np.repeat(slice_rows, sizes),
            positions=positions,
            slice_rows=slice_rows,
            query_starts=[0, *ends.tolist()],
            context_lens=(starts + sizes).tolist(),
            num_decodes=int(np.count_nonzero(sizes == 1)),
            sampled=sampled,
        )


@dataclass(slots=True)
class Pending:
    """A step's outcome, still on the device."""

    plan: StepPlan
    sampled: Sampled | None
    prompt_logprobs: dict[int, Tensor]  # by slice
    started: float

    def read(self) -> StepResult:
        """Bring the outcome to the host. Blocks until the device is done."""
        if self.sampled is None:
            tokens: list[int] = []
            broken: list[bool] = []
            logprobs = {}
        else:
            tokens = self.sampled.tokens.tolist()
            broken = (~torch.isfinite(self.sampled.best_logits)).tolist()
            logprobs = self.sampled.read_logprobs(tokens)
        results = []
        draw = 0
        for index, piece in enumerate(self.plan.slices):
            result = SliceResult([])
            if piece.num_samples:
                result.token_ids = _accepted(tokens[draw : draw + piece.num_samples], piece.drafts)
                result.failed = any(broken[draw : draw + piece.num_samples])
                if draw in logprobs:
                    result.logprobs = [logprobs[draw + i] for i in range(len(result.token_ids))]
                draw += piece.num_samples
            if index in self.prompt_logprobs:
                result.prompt_logprobs = self.prompt_logprobs[index].tolist()
            results.append(result)
        return StepResult(self.plan.number, results, time.monotonic() - self.started)


def _accepted(drawn: list[int], drafts: tuple[int, ...]) -> list[int]:
    """Keep draws as long as the guess that each was conditioned on was right."""
    accepted = drawn[:1]
    for guess, token in zip(drafts, drawn[1:], strict=True):
        if guess != accepted[-1]:
            break
        accepted.append(token)
    return accepted


class ModelRunner(Runner):
    """One model on one device. On a CPU the forward pass runs in a thread of its own, so that `launch` returns."""

    def __init__(
        self,
        model: Decoder,
        attention: AttentionBackend,
        kv_pool: KvPool,
        rows: BatchRows,
        parameters: RowParameters,
        eos_token_ids: tuple[int, ...],
    ) -> None:
        self._model = model
        self._attention = attention
        self._kv_pool = kv_pool
        self._rows = rows
        self._parameters = parameters
        self._sampler = Sampler(parameters, eos_token_ids)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="penstock-step")

    def launch(self, plan: StepPlan) -> LaunchedStep:
        return _ThreadStep(self._thread.submit(self._run, plan))

    def close(self) -> None:
        self._thread.shutdown()

    def _run(self, plan: StepPlan) -> StepResult:
        return self._execute(plan).read()

    @torch.inference_mode()
    def _execute(self, plan: StepPlan) -> Pending:
        started = time.monotonic()
        self._update_rows(plan)
        layout = Layout.of(plan.slices)
        hidden = self._forward(layout)
        sampled = None
        if len(layout.sampled):
            chosen = hidden if len(layout.sampled) == len(hidden) else hidden[torch.from_numpy(layout.sampled)]
            rows = layout.rows[layout.sampled]
            drawn_at = layout.positions[layout.sampled] + 1
            sampled = self._sampler.sample(self._model.logits(chosen), rows, drawn_at)
            self._rows.write(rows, drawn_at, sampled.tokens)
        return Pending(plan, sampled, self._prompt_logprobs(plan, layout, hidden), started)

    def _update_rows(self, plan: StepPlan) -> None:
        self._kv_pool.copy(plan.tier_copies)
        for start in plan.row_starts:
            self._rows.start(start)
            self._parameters.start(start)
        self._rows.assign(plan.block_assignments)
        self._rows.write_drafts(plan.slices)

    def _forward(self, layout: Layout) -> Tensor:
        rows = self._rows
        num_blocks = -(-max(layout.context_lens) // rows.block_tokens)
        self._attention.prepare(
            AttentionStep(
                num_decodes=layout.num_decodes,
                query_starts=layout.query_starts,
                context_lens=layout.context_lens,
                slots=rows.slots(layout.rows, layout.positions),
                block_tables=rows.tables_of(layout.slice_rows, num_blocks),
            )
        )
        token_ids = rows.read(layout.rows, layout.positions)
        positions = torch.from_numpy(layout.positions).to(rows.device, non_blocking=True)
        return self._model.forward(token_ids, positions, self._attention)

    def _prompt_logprobs(self, plan: StepPlan, layout: Layout, hidden: Tensor) -> dict[int, Tensor]:
        """Score the prompt tokens that follow each position of the slices that asked for it."""
        found = {}
        for index, piece in enumerate(plan.slices):
            params = self._parameters.params[piece.row]
            last = min(piece.start + piece.num_tokens, int(self._parameters.num_prompt_tokens[piece.row]) - 1)
            if not params.prompt_logprobs or last <= piece.start:
                continue
            positions = np.arange(piece.start + 1, last + 1)
            targets = self._rows.read(np.full_like(positions, piece.row), positions).long()
            begin = layout.query_starts[index]
            found[index] = self._score(hidden[begin : begin + len(positions)], targets)
        return found

    def _score(self, hidden: Tensor, targets: Tensor) -> Tensor:
        """Return log p(target) at each position. hidden: [n, hidden]; targets: [n] int64."""
        pieces = []
        for states, wanted in zip(hidden.split(_LOGIT_ROWS), targets.split(_LOGIT_ROWS), strict=True):
            logprobs = torch.log_softmax(self._model.logits(states), dim=-1)
            pieces.append(logprobs.gather(1, wanted[:, None])[:, 0])
        return torch.cat(pieces)


class _ThreadStep(LaunchedStep):
    def __init__(self, future: "Future[StepResult]") -> None:
        self._future = future

    def wait(self) -> StepResult:
        try:
            return self._future.result()
        except Exception as error:  # noqa: BLE001: whatever a step raises, only its own requests end
            raise StepFailed("the step raised") from error
