"""Counts the promises that were kept and those that were not.

A request that states targets and is accepted, not as best effort, has been promised them. Changes metrics only.
"""

from penstock.engine.metrics import EngineMetrics
from penstock.engine.scheduler.request_state import RequestState


def note_first_token(metrics: EngineMetrics, request: RequestState, now: float) -> None:
    taken = now - request.arrival
    if request.predicted_ttft is not None and taken > 0.0:
        metrics.ttft_error.add(abs(request.predicted_ttft - taken) / taken)
    target = request.targets.ttft_seconds
    if target is not None and not request.best_effort:
        _count(metrics, "ttft", taken <= target)


def note_end(metrics: EngineMetrics, request: RequestState) -> None:
    """The request drew its last token."""
    target = request.targets.time_per_token_seconds
    first, last = request.first_token_at, request.last_token_at
    if target is not None and not request.best_effort and first is not None and last is not None:
        num_gaps = request.num_drawn_tokens - 1
        if num_gaps > 0:
            _count(metrics, "time_per_token", (last - first) / num_gaps <= target)
    if request.deadline_seconds is not None and not request.best_effort:
        _count(metrics, "deadline", True)


def note_lost_pace(metrics: EngineMetrics, request: RequestState) -> None:
    """The request goes on without the time per token that it was promised elsewhere."""
    if request.targets.time_per_token_seconds is not None and not request.best_effort:
        _count(metrics, "time_per_token", False)


def note_deadline(metrics: EngineMetrics, request: RequestState) -> None:
    """The request's time ran out before its end."""
    if not request.best_effort:
        _count(metrics, "deadline", False)
    target = request.targets.ttft_seconds
    if target is not None and not request.best_effort and request.first_token_at is None:
        _count(metrics, "ttft", False)


def _count(metrics: EngineMetrics, kind: str, kept: bool) -> None:
    metrics.promises[kind]["kept" if kept else "broken"] += 1
