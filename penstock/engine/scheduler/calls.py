"""Calls with several answers while their requests come in: the first stands for all, and the others follow it.

A client sends the requests of one call in a row. What became of the first becomes of the others: a call is taken whole
or not at all. Knows nothing of why one was refused.
"""

from dataclasses import dataclass

from penstock.engine.scheduler.request_state import RequestState
from penstock.errors import PenstockError


@dataclass(slots=True)
class Call:
    """A call of which some requests have not come yet."""

    num_coming: int
    refusal: PenstockError | None  # of its first request
    tier: int
    keeps_pace: bool  # or else has moved here, where its time per token cannot be kept


class Calls:
    """The call of each client that is not there as a whole."""

    def __init__(self) -> None:
        self._coming: dict[bytes, Call] = {}

    def followed(self, request: RequestState) -> Call | None:
        """Return the call that the request belongs to without being its first; None if there is none."""
        call = self._coming.get(request.client)
        if not request.follows_call or call is None:
            self._coming.pop(request.client, None)
            return None
        call.num_coming -= 1
        if call.num_coming == 0:
            del self._coming[request.client]
        return call

    def begin(self, request: RequestState, refusal: PenstockError | None) -> None:
        """The first request of a call was taken in, or refused."""
        if request.call_answers > 1:
            keeps_pace = not request.has_lost_pace
            self._coming[request.client] = Call(request.call_answers - 1, refusal, request.level[0], keeps_pace)

    def forget(self, client: bytes) -> None:
        """The client is gone."""
        self._coming.pop(client, None)

    def num_coming(self, tier: int) -> int:
        """Requests that have not come yet and have been promised a place."""
        return sum([call.num_coming for call in self._coming.values() if call.tier == tier and call.refusal is None])
