"""Calls with several answers while their requests come in: the first stands for all, and the others follow it.

The others name the first; those of several calls may come in turn. What became of the first becomes of the others: a
call is taken whole or not at all. Knows nothing of why one was refused.
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
    """The calls that are not there as a whole."""

    def __init__(self) -> None:
        self._coming: dict[tuple[bytes, str], Call] = {}  # by client and first request

    def followed(self, request: RequestState) -> Call | None:
        """Return the call that the request belongs to without being its first; None if there is none."""
        if request.follows is None:
            return None
        call = self._coming.get((request.client, request.follows))
        if call is None:
            return None
        call.num_coming -= 1
        if call.num_coming == 0:
            self.forget(request.client, request.follows)
        return call

    def begin(self, request: RequestState, refusal: PenstockError | None) -> None:
        """The first request of a call was taken in, or refused."""
        if request.call_answers > 1:
            keeps_pace = not request.has_lost_pace
            call = Call(request.call_answers - 1, refusal, request.level[0], keeps_pace)
            self._coming[request.client, request.request_id] = call

    def forget(self, client: bytes, first: str) -> None:
        """Nothing more comes of this call."""
        self._coming.pop((client, first), None)

    def forget_client(self, client: bytes) -> None:
        """The client is gone."""
        for owner, first in [key for key in self._coming if key[0] == client]:
            self.forget(owner, first)

    def num_coming(self, tier: int) -> int:
        """Requests that have not come yet and have been promised a place."""
        return sum([call.num_coming for call in self._coming.values() if call.tier == tier and call.refusal is None])
