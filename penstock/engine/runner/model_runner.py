"""Runs plans on one device: rows in, one forward pass, sampled tokens out.

Knows tensors, rows and blocks. Knows nothing of queues, clients or text.
"""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from penstock.engine.runner.batch_rows import BatchRows
from penstock.engine.runner.cuda_graphs import DecodeGraphs
from penstock.engine.runner.interface import LaunchedStep, Runner, StepFailed
from penstock.engine.runner.kv_pool import KvPool
from penstock.engine.runner.layout import Layout, plain_decode
from penstock.engine.runner.mixed_graphs import MixedGraphs
from penstock.engine.runner.prompt_scores import PendingScores, score_prompt
from penstock.engine.runner.token_draw import DrawOutcome
from penstock.engine.runner.transfer import to_device
from penstock.engine.sampling.row_parameters import RowParameters
from penstock.engine.sampling.sampler import Sampled, Sampler
from penstock.engine.scheduler.step_plan import RowSlice, SliceResult, StepPlan, StepResult
from penstock.kernels.attention.interface import AttentionBackend, AttentionStep
from penstock.models.decoder import Decoder

T = TypeVar("T")


@dataclass(slots=True)
class Pending:
    """A step's outcome on its way to the host."""

    plan: StepPlan
    sampled: Sampled | None
    prompt_scores: dict[int, PendingScores]  # by slice
    started: float

    def read(self) -> StepResult:
        """Turn the outcome into plain Python. The host tensors must have arrived."""
        tokens: list[int] = []
        broken: list[bool] = []
        logprobs = {}
        if self.sampled is not None:
            tokens = self.sampled.tokens.tolist()
            broken = (~torch.isfinite(self.sampled.best_logits)).tolist()
            logprobs = self.sampled.read_logprobs(tokens)
        if not logprobs and not self.prompt_scores and all([piece.num_samples == 1 for piece in self.plan.slices]):
            results = [SliceResult([token], failed=bad) for token, bad in zip(tokens, broken, strict=True)]
            return StepResult(self.plan.number, results, time.monotonic() - self.started)
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
            if index in self.prompt_scores:
                result.prompt_logprobs = self.prompt_scores[index].read()
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
    """One model on one device. `launch` returns while the step runs: in a thread on a CPU, in a stream on a GPU."""

    def __init__(
        self,
        model: Decoder,
        attention: AttentionBackend,
        kv_pool: KvPool,
        rows: BatchRows,
        parameters: RowParameters,
        sampler: Sampler,
        graphs: DecodeGraphs | None = None,
        mixed_graphs: MixedGraphs | None = None,
        *,
        threads: int,
    ) -> None:
        self._model = model
        self._attention = attention
        self._kv_pool = kv_pool
        self._rows = rows
        self._parameters = parameters
        self._sampler = sampler
        self._graphs = graphs
        self._mixed_graphs = mixed_graphs
        self._thread = None
        if rows.device.type == "cpu":
            self._thread = ThreadPoolExecutor(1, "penstock-step", torch.set_num_threads, (threads,))
            # Now, not with the first step: threads that begin later have as many as were set last, by whichever thread.
            self._thread.submit(torch.get_num_threads).result()

    @property
    def step_sizes(self) -> Sequence[int]:
        return () if self._mixed_graphs is None else self._mixed_graphs.token_counts

    def launch(self, plan: StepPlan) -> LaunchedStep:
        if self._thread is not None:
            return _ThreadStep(self._thread.submit(self._run, plan))
        return _StreamStep(self, plan)

    def read_blocks(self, blocks: Sequence[int]) -> list[bytes]:
        def read() -> list[bytes]:
            return [self._kv_pool.read(block) for block in blocks]

        return self._in_order(read)

    def write_blocks(self, blocks: Sequence[int], contents: Sequence[bytes]) -> None:
        def write() -> None:
            for block, content in zip(blocks, contents, strict=True):
                self._kv_pool.write(block, content)

        self._in_order(write)

    def use_idle_moment(self) -> bool:
        graphs = self._mixed_graphs
        if graphs is None or not (graphs.prepare_next() or graphs.try_products()):
            return False
        torch.cuda.synchronize()  # or a request that comes now would wait for several moments' work
        return True

    def close(self) -> None:
        if self._thread is not None:
            self._thread.shutdown()

    def _in_order(self, action: Callable[[], T]) -> T:
        """Do something after every launched step: on a GPU the stream sees to that."""
        return action() if self._thread is None else self._thread.submit(action).result()

    def _run(self, plan: StepPlan) -> StepResult:
        return self.execute(plan).read()

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> Pending:
        """Do a step's work, or queue it on the stream."""
        started = time.monotonic()
        self._update_rows(plan)
        decode = plain_decode(plan.slices) if self._graphs is not None else None
        if decode is not None:
            return Pending(plan, self._decode(*decode), {}, started)
        layout = Layout.of(plan.slices)
        if self._mixed_graphs is not None and self._mixed_graphs.fits(layout) and not self._scores_prompts(plan):
            return Pending(plan, self._mixed(self._mixed_graphs, layout), {}, started)
        hidden = self._forward(layout)
        prompt_scores = self._score_prompts(plan, layout, hidden)
        if len(layout.sampled) < len(hidden):
            hidden = hidden.index_select(0, to_device(layout.sampled, hidden.device))
        if len(hidden) == 0:
            return Pending(plan, None, prompt_scores, started)
        logits = self._model.logits(hidden)
        sampled = self._sample(logits, layout.rows[layout.sampled], layout.positions[layout.sampled] + 1)
        return Pending(plan, sampled, prompt_scores, started)

    def _decode(self, rows: np.ndarray, positions: np.ndarray) -> Sampled:
        """Run one token of each row in a captured step, which also draws the next."""
        assert self._graphs is not None
        return self._finish_draw(self._graphs.run(rows, positions), rows, positions)

    def _mixed(self, graphs: MixedGraphs, layout: Layout) -> Sampled | None:
        """Run any slices in captured steps."""
        outcome = graphs.run(layout)
        if outcome is None:
            return None
        return self._finish_draw(outcome, layout.rows[layout.sampled], layout.positions[layout.sampled])

    def _finish_draw(self, outcome: DrawOutcome, rows: np.ndarray, positions: np.ndarray) -> Sampled:
        if self._parameters.is_plain[rows].all():
            return outcome.to_host()
        # Some rows ask for more than a plain draw: draw again, over what the graph wrote.
        return self._sample(outcome.logits, rows, positions + 1)

    def _scores_prompts(self, plan: StepPlan) -> bool:
        params = self._parameters.params
        asking = [piece for piece in plan.slices if params[piece.row].prompt_logprobs is not None]
        return any(self._num_scored(piece) > 0 for piece in asking)

    def _sample(self, logits: Tensor, rows: np.ndarray, positions: np.ndarray) -> Sampled:
        """Draw the tokens at these positions and write them to their rows."""
        sampled = self._sampler.sample(logits, rows, positions)
        self._rows.write(rows, positions, sampled.tokens)
        return sampled.to_host()

    def _update_rows(self, plan: StepPlan) -> None:
        self._kv_pool.wipe(plan.wipes)
        self._kv_pool.copy(plan.tier_copies)
        for start in plan.row_starts:
            self._rows.start(start)
            self._parameters.start(start)
        self._rows.assign(plan.block_assignments)
        self._rows.write_drafts(plan.slices)

    def _forward(self, layout: Layout) -> Tensor:
        rows = self._rows
        device = rows.device
        on_device = device.type != "cpu"
        num_blocks = -(-int(layout.context_lens.max()) // rows.block_tokens)
        self._attention.prepare(
            AttentionStep(
                num_decodes=layout.num_decodes,
                query_starts=layout.query_starts.tolist(),
                context_lens=layout.context_lens.tolist(),
                slots=rows.slots(layout.rows, layout.positions),
                block_tables=rows.tables_of(layout.slice_rows, num_blocks),
                lens=to_device(layout.context_lens.astype(np.int32), device) if on_device else None,
                starts=to_device(layout.query_starts.astype(np.int32), device) if on_device else None,
            )
        )
        token_ids = rows.read(layout.rows, layout.positions)
        return self._model.forward(token_ids, to_device(layout.positions, device), self._attention)

    def _score_prompts(self, plan: StepPlan, layout: Layout, hidden: Tensor) -> dict[int, PendingScores]:
        """Score the prompt tokens that follow each position of the slices that asked for it."""
        found = {}
        for index, piece in enumerate(plan.slices):
            count = self._num_scored(piece)
            if count <= 0:
                continue
            positions = np.arange(piece.start + 1, piece.start + 1 + count)
            targets = self._rows.read(np.full_like(positions, piece.row), positions).long()
            begin = int(layout.query_starts[index])
            num_top = self._parameters.params[piece.row].prompt_logprobs or 0
            found[index] = score_prompt(self._model.logits, hidden[begin : begin + count], targets, num_top)
        return found

    def _num_scored(self, piece: RowSlice) -> int:
        """Of how many of a slice's positions the next token is one of a prompt that is to be scored."""
        if self._parameters.params[piece.row].prompt_logprobs is None:
            return 0
        last = int(self._parameters.num_prompt_tokens[piece.row]) - 1
        return min(piece.start + piece.num_tokens, last) - piece.start


class _ThreadStep(LaunchedStep):
    """A step that runs in the runner's thread."""

    def __init__(self, future: "Future[StepResult]") -> None:
        self._future = future

    @property
    def is_done(self) -> bool:
        return self._future.done()

    def wait(self) -> StepResult:
        try:
            return self._future.result()
        except Exception as error:
            raise StepFailed("the step raised") from error


class _StreamStep(LaunchedStep):
    """A step whose kernels are queued on the device; an error in queueing is told at `wait`, as in a thread."""

    def __init__(self, runner: ModelRunner, plan: StepPlan) -> None:
        self._failure: Exception | None = None
        try:
            self._pending = runner.execute(plan)
        except Exception as error:  # noqa: BLE001 - whatever a step raises, only its own requests end
            self._failure = error
        self._done = torch.cuda.Event()
        self._done.record()

    @property
    def is_done(self) -> bool:
        return bool(self._done.query())

    def wait(self) -> StepResult:
        if self._failure is not None:
            raise StepFailed("the step raised") from self._failure
        self._done.synchronize()
        return self._pending.read()
