"""The engine loop's body: requests in, one step at a time, events out.

Joins scheduler and runner. Knows nothing of sockets, text or tensors.
"""

import logging
from collections.abc import Sequence

from penstock.engine.messages import EngineStats, Submit, TokenEvent
from penstock.engine.metrics import EngineMetrics
from penstock.engine.runner.interface import LaunchedStep, Runner, StepFailed
from penstock.engine.scheduler.scheduler import Addressed, Scheduler
from penstock.engine.scheduler.step_plan import StepPlan
from penstock.errors import InvalidParameter, Overloaded, PenstockError, RequestError
from penstock.request import FinishReason

log = logging.getLogger(__name__)


class Engine:
    """One model being served, one step ahead of itself."""

    def __init__(self, scheduler: Scheduler, runner: Runner) -> None:
        self.scheduler = scheduler
        self.runner = runner
        self.raises_failures = False  # a failed step is the caller's to tell, instead of the end of its requests only
        self._in_flight: tuple[StepPlan, LaunchedStep] | None = None
        self._numbers: dict[tuple[bytes, str], int] = {}

    @property
    def metrics(self) -> EngineMetrics:
        return self.scheduler.metrics

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_requests or self._in_flight is not None

    @property
    def launch_due(self) -> float:
        """Until when it does not pay to `step` again: requests that come until then are in the next one. 0.0: now.

        By what is foreseen: where `is_step_done` sooner, it pays.
        """
        return self.scheduler.launch_due

    @property
    def is_step_done(self) -> bool:
        """Whether the step that `step` would settle next is done."""
        return self._in_flight is not None and self._in_flight[1].is_done

    def submit(self, submit: Submit, client: bytes = b"") -> list[Addressed]:
        """Queue a request. A refusal is its one and only event."""
        key = (client, submit.request_id)
        try:
            if key in self._numbers:
                raise InvalidParameter("request_id", submit.request_id, "a request of this id is still running")
            self._numbers[key] = self.scheduler.add(submit, client).number
        except PenstockError as error:
            return [(client, _refusal(submit.request_id, error))]
        return []

    def abort(
        self, client: bytes, request_ids: list[str], reason: FinishReason = FinishReason.ABORT
    ) -> list[Addressed]:
        """End these requests, if they still run, and wait for no more of the calls that they stand for."""
        for name in request_ids:
            self.scheduler.entrance.forget_call(client, name)
        numbers = [self._numbers[client, name] for name in request_ids if (client, name) in self._numbers]
        ended = [self.scheduler.abort(number, reason) for number in numbers]
        return self._forget_finished([event for event in ended if event is not None])

    def drop_client(self, client: bytes) -> None:
        """End every request of a client that is gone; nobody is left to hear of it."""
        self.scheduler.entrance.forget_client(client)
        self.abort(client, [name for owner, name in self._numbers if owner == client])

    def step(self) -> list[Addressed]:
        """Launch the next forward pass, then settle the one before it. What ran out of time is in neither."""
        late = self._forget_finished(self.scheduler.end_late())
        plan = self.scheduler.next_step()
        launched = (plan, self.runner.launch(plan)) if plan.has_work else None
        if launched is not None:
            self.scheduler.note_launch()
        settling, self._in_flight = self._in_flight, launched
        return late + self._forget_finished(self._settle(*settling)) if settling else late

    def export_prefix(
        self, tokens: Sequence[int], *, tenant: str = "", adapter: str = "", num_public_tokens: int = 0
    ) -> list[bytes]:
        """Return the KV of the leading whole blocks of `tokens`, as far as they are cached here."""
        cache = self.scheduler.cache
        guest = cache.open(tenant=tenant, adapter=adapter, num_public_tokens=num_public_tokens)
        return self.runner.read_blocks(cache.find_prefix(guest, tokens))

    def import_prefix(
        self,
        tokens: Sequence[int],
        contents: Sequence[bytes],
        *,
        tenant: str = "",
        adapter: str = "",
        num_public_tokens: int = 0,
    ) -> int:
        """Cache what another engine of the same model exported; return how many tokens are now found here."""
        cache = self.scheduler.cache
        guest = cache.open(tenant=tenant, adapter=adapter, num_public_tokens=num_public_tokens)
        planted = cache.plant_prefix(guest, tokens, len(contents))
        self.runner.write_blocks(list(planted.values()), [contents[index] for index in planted])
        num_tokens = len(guest.blocks) * cache.block_tokens
        cache.free(guest)
        return num_tokens

    def stats(self) -> EngineStats:
        """Everything the engine knows about itself, at this moment."""
        scheduler, metrics, pool = self.scheduler, self.metrics, self.scheduler.cache.pool
        return EngineStats(
            num_running=len(scheduler.running),
            num_waiting=len(scheduler.waiting),
            num_blocks=pool.num_blocks,
            num_used_blocks=pool.num_held,
            num_cached_blocks=pool.num_named,
            num_steps=metrics.num_steps,
            last_step_monotonic=metrics.last_step_monotonic,
            prompt_tokens=metrics.prompt_tokens,
            generated_tokens=metrics.generated_tokens,
            work_seconds=metrics.work_seconds,
            queue_seconds=scheduler.queue_seconds,
            prefix_query_tokens=metrics.prefix_query_tokens,
            prefix_hit_tokens=metrics.prefix_hit_tokens,
            num_preemptions=metrics.num_preemptions,
            num_finished=dict(metrics.num_finished),
            num_refused=dict(metrics.num_refused),
            promises={kind: dict(counts) for kind, counts in metrics.promises.items()},
            cost_model_error=scheduler.cost_model_error,
            ttft_prediction_error=metrics.ttft_error.median,
            drafted_tokens=metrics.drafted_tokens,
            accepted_tokens=metrics.accepted_tokens,
            histograms=metrics.histograms(),
        )

    def _settle(self, plan: StepPlan, launched: LaunchedStep) -> list[Addressed]:
        try:
            result = launched.wait()
        except StepFailed:
            if self.raises_failures:
                raise
            log.exception("step %d failed; its %d requests end with an error", plan.number, len(plan.slices))
            return self.scheduler.fail(plan.number)
        return self.scheduler.commit(result)

    def _forget_finished(self, events: list[Addressed]) -> list[Addressed]:
        for client, event in events:
            if event.finish is not None:
                del self._numbers[client, event.request_id]
        return events


def _refusal(request_id: str, error: PenstockError) -> TokenEvent:
    return TokenEvent(
        request_id=request_id,
        finish=FinishReason.ERROR,
        error_code=error.code,
        error=str(error),
        error_param=error.param if isinstance(error, RequestError) else None,
        retry_after_seconds=error.retry_after_seconds if isinstance(error, Overloaded) else None,
    )
