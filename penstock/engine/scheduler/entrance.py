"""Whether a call that arrives is let in: whole or not at all, and looked at once.

Joins the queue's places with the forecasts, and counts refusals, one for a call. Queues nothing. Knows nothing of
steps.
"""

from collections.abc import Callable
from functools import cache

from penstock.engine.scheduler import promises
from penstock.engine.scheduler.calls import Calls
from penstock.engine.scheduler.foresight import Foresight
from penstock.engine.scheduler.load import Load
from penstock.engine.scheduler.placement import Placement
from penstock.engine.scheduler.queue_places import QueuePlaces
from penstock.engine.scheduler.request_state import RequestState
from penstock.engine.scheduler.rows import Rows
from penstock.errors import DeadlineExceeded, Overloaded, PenstockError
from penstock.request import Targets

# Where nothing is foreseen.
_GUESSED_SECONDS = 1.0


class Entrance:
    """Where requests come in."""

    def __init__(
        self,
        placement: Placement,
        foresight: Foresight | None,
        *,
        max_running: int,
        max_waiting: int,
        clock: Callable[[], float],
    ) -> None:
        self._placement = placement
        self._foresight = foresight
        self._calls = Calls()
        self._places = QueuePlaces(placement, max_running=max_running, max_waiting=max_waiting)
        self._clock = clock
        self._rows, self._rows_version = Rows((), placement.lengths), -1
        self._mean_answer: float | None = None
        self._mean_answer_of = (-1, 0)  # version, and how many waited

    def admit(self, request: RequestState) -> None:
        """Raise if there is no place for the request's call, or if it would be too late."""
        call = self._calls.followed(request)
        if call is not None:
            if call.refusal is not None:
                raise call.refusal.with_traceback(None)
            if not call.keeps_pace:
                self._lose_pace(request)
            return
        if self._foresight is not None and request.is_promised:
            self._foresight.pace.note_stated_time()
        try:
            self._check_call(request)
        except PenstockError as error:
            self._calls.begin(request, error)
            raise
        self._calls.begin(request, None)

    def forget_client(self, client: bytes) -> None:
        """Keep no places for what a client has not sent: it is gone."""
        self._calls.forget_client(client)

    def forget_call(self, client: bytes, first: str) -> None:
        """Keep no places for the rest of the call that this request stands for, where it stands for one."""
        self._calls.forget(client, first)

    def load(self, request: RequestState | None = None) -> Load:
        """What the engine has taken on, as the request finds it."""
        placement = self._placement
        if self._rows_version != placement.version:
            self._rows, self._rows_version = Rows(placement.running, placement.lengths), placement.version
        return Load(
            running=placement.running,
            rows=self._rows,
            version=placement.version,
            waiting=placement.waiting,
            num_free_rows=len(placement.free_rows),
            num_blocks=placement.cache.pool.num_blocks,
            num_free_blocks=placement.num_unpromised_blocks,
            block_tokens=placement.cache.block_tokens,
            lengths=placement.lengths,
            mean_waiting_answer=self._mean_waiting_answer,
            may_displace=cache(lambda num_rows: request is not None and placement.yields_rows(request, num_rows)),
        )

    def _mean_waiting_answer(self) -> float | None:
        waiting, lengths = self._placement.waiting, self._placement.lengths
        if self._mean_answer_of != (self._placement.version, len(waiting)):
            self._mean_answer_of = (self._placement.version, len(waiting))
            answers = [lengths.expected_left(other) for other in waiting]
            self._mean_answer = sum(answers) / len(answers) if answers else None
        return self._mean_answer

    def _check_call(self, request: RequestState) -> None:
        now, load, refused = self._clock(), self.load(request), self._placement.metrics.num_refused
        admission = None if self._foresight is None else self._foresight.admission
        unreachable = None
        if admission is not None:
            admission.note_arrival(request, now)
            unreachable = admission.find_unreachable(request, load, now)
        if unreachable is not None:
            refused["unreachable"] += 1
            raise unreachable
        if request.deadline is not None and request.deadline <= now:
            refused["deadline"] += 1
            raise DeadlineExceeded("the deadline had passed before the request could start; give it more time")
        no_place = self._places.find(request, self._calls.num_coming(request.level[0]))
        if no_place is not None:
            refused["queue_full"] += 1
            seconds = _GUESSED_SECONDS
            if admission is not None:
                seconds = admission.full_queue_seconds(request, load, no_place.num_endings, now)
            message = f"{no_place.message}; try again after the time in Retry-After"
            raise Overloaded(message, retry_after_seconds=seconds)
        if self._foresight is not None:
            self._check_terms(request, load, self._foresight, now)

    def _check_terms(self, request: RequestState, load: Load, foresight: Foresight, now: float) -> None:
        forecast = foresight.admission.forecast(request, load, now)
        request.predicted_ttft = forecast.ttft_seconds if foresight.model.is_trusted else None
        if request.has_moved:
            # Its beginning has been sent: late is better than never, and it is no worse than best effort.
            if not foresight.admission.keeps_pace(request, forecast):
                self._lose_pace(request)
            return
        request.predicted_answer = forecast.answer_seconds
        reason = foresight.admission.check(request, forecast)
        if reason is not None:
            self._placement.metrics.num_refused[reason] += 1
            raise foresight.admission.refusal(reason, request, forecast, load, now)

    def _lose_pace(self, request: RequestState) -> None:
        """Take a request without the time per token that another server promised it, and count that."""
        promises.note_lost_pace(self._placement.metrics, request)
        request.targets, request.has_lost_pace = Targets(request.targets.ttft_seconds), True
