"""A prompt whose answer is known, asked again and again: if the answer changes, the KV cache holds what it should not.

The first answer is computed, later ones come from cached blocks, as any shared prefix would; how far the second is from
the first tells how exact this device and precision are. A wrong answer takes every block's name away, so that nobody is
served from the cache as it was, and is told until an answer is right again. Knows nothing of sockets; its own requests
and events never leave the engine process.
"""

import logging
import time
from collections.abc import Callable

from penstock.engine.engine import Engine
from penstock.engine.messages import Submit, TokenEvent
from penstock.engine.scheduler.scheduler import Addressed
from penstock.errors import EngineFailed
from penstock.request import MAX_LOGPROBS, SamplingParams

log = logging.getLogger("penstock.canary")

# Names that no caller can have: the prompt's blocks are shared with nobody.
_CLIENT = b"\x00canary"
_TENANT = "\x00canary"

_NUM_COMPARED = 5  # of the likeliest tokens
# Between log-probabilities, at the least: steps of other sizes and chunks round otherwise.
_TOLERANCE = 0.25
_MAX_TOLERANCE = 2.0
_MARGIN = 4.0  # times the distance between the first two answers
_RETRY_SECONDS = 1.0
_MAX_ERRORS = 3

FAULT = "the KV cache changed the answer to a known prompt; it was emptied, and the prompt is being tried again"


class Canary:
    """Asks every `interval_seconds`. `tick` between steps, and give each step's events to `sift`."""

    def __init__(self, engine: Engine, interval_seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.fault: str | None = None  # why the engine should not be trusted now
        self.num_failures = 0
        self._engine = engine
        self._interval_seconds = interval_seconds
        self._clock = clock
        self._due = clock() + interval_seconds
        self._asked = False
        self._num_errors = 0  # in a row
        self._expected: dict[int, float] | None = None
        self._tolerance: float | None = None
        config, block_tokens = engine.scheduler.config, engine.scheduler.cache.block_tokens
        # Two whole blocks and the one token that is always computed.
        length = min(2 * block_tokens + 1, config.max_context_tokens - 1)
        self.prompt = [(7 + 13 * place) % config.vocab_size for place in range(length)]

    def tick(self) -> None:
        """Ask when it is time to."""
        if self._asked or self._clock() < self._due:
            return
        self._asked = True
        params = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True, logprobs=MAX_LOGPROBS)
        submit = Submit(
            request_id="canary", prompt=self.prompt, params=params, arrival=time.monotonic(), tenant=_TENANT
        )
        self.sift(self._engine.submit(submit, _CLIENT))

    def sift(self, events: list[Addressed]) -> list[Addressed]:
        """Take the canary's own events out of a step's."""
        if not self._asked:
            return events
        for client, event in events:
            if client == _CLIENT and event.finish is not None:
                self._judge(event)
        return [addressed for addressed in events if addressed[0] != _CLIENT]

    def find_blocks(self) -> list[int]:
        """Return the blocks that hold the prompt now."""
        cache = self._engine.scheduler.cache
        return cache.find_prefix(cache.open(tenant=_TENANT, adapter=""), self.prompt)

    def _judge(self, event: TokenEvent) -> None:
        self._asked = False
        self._due = self._clock() + self._interval_seconds
        if event.logprobs is None:
            self._note_no_answer(event)
            return
        self._num_errors = 0
        found = dict(event.logprobs[0].top)
        if self._expected is None:
            self._expected = dict(event.logprobs[0].top[:_NUM_COMPARED])
            self._due = self._clock()
            return
        distance = max(abs(found.get(token, -1e9) - known) for token, known in self._expected.items())
        if self._tolerance is None:
            self._tolerance = max(_TOLERANCE, min(_MARGIN * distance, _MAX_TOLERANCE))
        if distance <= self._tolerance:
            self.fault = None
        else:
            self._fail()

    def _note_no_answer(self, event: TokenEvent) -> None:
        """Refused, as anybody's request may be, or failed, as a neighbour's may make it: once teaches nothing."""
        self._num_errors += event.error_code == EngineFailed.code
        if self._num_errors >= _MAX_ERRORS:
            self._fail()
        elif self._num_errors:
            self._due = self._clock() + min(_RETRY_SECONDS, self._interval_seconds)

    def _fail(self) -> None:
        self.num_failures += 1
        self.fault = FAULT
        self._due = self._clock() + min(_RETRY_SECONDS, self._interval_seconds)
        self._engine.scheduler.cache.forget_all()
        log.error("%s", FAULT)
