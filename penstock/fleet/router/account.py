"""One request's account with its tenant's limits, where the gateway itself must keep it.

Penstock replicas admit and book what they answer, in the store that they share with the gateway. For servers that know
nothing of our tenants the gateway does so: nothing is counted twice, and nothing is missed. Knows nothing of HTTP.
"""

import dataclasses

from penstock.errors import ContextTooLong, EngineFailed, EngineUnavailable, Overloaded
from penstock.fleet.router.foreign_usage import need_of
from penstock.fleet.router.query import RequestHead
from penstock.metering.meter import Charge, Meter
from penstock.telemetry import RequestRecord
from penstock.tenants import Caller


class Account:
    """Without a meter it counts nothing."""

    def __init__(self, meter: Meter | None, caller: Caller, model: str, head: RequestHead) -> None:
        self._meter = meter
        self._caller = caller
        self._model = model
        self._head = head
        self._charge: Charge | None = None

    @property
    def is_kept(self) -> bool:
        """Whether somebody wants to know what the request costs."""
        return self._meter is not None

    @property
    def headers(self) -> dict[str, str]:
        """What the caller may know of its limits."""
        return self._charge.headers if self._charge is not None else {}

    async def open(self, record: RequestRecord, max_context_tokens: int | None) -> None:
        """Reserve what the request may use, unless that was done. Raises LimitReached, LimitTooSmall and others."""
        if self._meter is None or self._charge is not None:
            return
        longest = self._caller.terms.limits.longest_context
        if longest is not None:
            max_context_tokens = min(longest, max_context_tokens or longest)
        need = need_of(self._head, max_context_tokens)
        stated = self._head.most_output_tokens or 1
        if longest is not None and need.input_tokens + stated > longest:
            raise ContextTooLong(need.input_tokens + stated, longest, what="the prompt (estimated) plus its answer")
        self._charge = await self._meter.admit(self._caller, self._model, need)
        record.prompt_tokens, record.num_choices = need.input_tokens, need.num_answers

    def leave_to_replica(self) -> None:
        """The request goes to a replica that counts it, or was no request: it costs nothing here."""
        if self._charge is not None:
            self._charge.withdraw()
            self._charge = None

    async def settle(self, record: RequestRecord) -> None:
        """Book what the request cost and wait until that is written."""
        if self._charge is not None:
            await self._charge.closed(record)

    def fail(self, record: RequestRecord, status: int) -> None:
        """Book that a replica failed or refused the request. What was the caller's own mistake costs nothing."""
        if self._charge is None:
            return
        if status < 500 and status != 429:
            self.leave_to_replica()
            return
        code = Overloaded.code if status == 429 else EngineFailed.code
        self._charge.close(dataclasses.replace(record, error_code=code))

    def refuse(self, record: RequestRecord, error: Overloaded | EngineUnavailable) -> None:
        """Book that the gateway itself had no place for the request: refused where replicas are full, else an error."""
        if self._charge is not None:
            self._charge.close(dataclasses.replace(record, error_code=error.code))
        elif self._meter is not None:
            book = self._meter.book_refusal if isinstance(error, Overloaded) else self._meter.book_error
            book(self._caller.tenant, self._model)

    def lose(self) -> None:
        """Book that an answer which a replica had begun was lost: it left the account to whoever would go on."""
        if self._charge is None and self._meter is not None:
            self._meter.book_error(self._caller.tenant, self._model)

    def close(self, record: RequestRecord) -> None:
        """Book what is known, where nobody did before: the caller left, or something broke."""
        if self._charge is not None:
            self._charge.close(record)
