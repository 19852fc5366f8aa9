"""Blocks whose content is known, looked at again and again: if it changes, the KV cache holds what it should not.

A prompt of nobody's is run once, and what it left in its blocks is remembered by a digest. A named block is never
written again, so whatever the device or the precision, its bytes must stay. Where they did not, every block's name is
taken away, so that nobody is served from the cache as it was, and that is told until a look finds what it should.
Knows nothing of sockets; its own requests and events never leave the engine process.
"""

import hashlib
import logging
import time
from collections.abc import Callable

from penstock.engine import own_requests
from penstock.engine.engine import Engine
from penstock.engine.messages import Submit, TokenEvent
from penstock.engine.scheduler.scheduler import Addressed
from penstock.errors import EngineFailed
from penstock.request import SamplingParams

log = logging.getLogger("penstock.canary")

# No worker has this name.
_CLIENT = own_requests.CANARY.encode()

_NUM_BLOCKS = 2
_RETRY_SECONDS = 1.0
_MAX_ERRORS = 3

FAULT = "a block of the KV cache changed though nobody wrote to it; the cache was emptied and is being watched anew"


class Canary:
    """Looks every `interval_seconds`. `tick` between steps, and give each step's events to `sift`."""

    def __init__(self, engine: Engine, interval_seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.fault: str | None = None  # why the engine should not be trusted now
        self.num_failures = 0
        self._engine = engine
        self._interval_seconds = interval_seconds
        self._clock = clock
        self._due = clock() + interval_seconds
        self._asked = False
        self._num_errors = 0  # in a row
        self._expected: list[bytes] = []  # each block's digest
        config, block_tokens = engine.scheduler.config, engine.scheduler.cache.block_tokens
        # Whole blocks and the one token that is always computed.
        length = min(_NUM_BLOCKS * block_tokens + 1, config.max_context_tokens - 1)
        self.prompt = [(7 + 13 * place) % config.vocab_size for place in range(length)]

    def tick(self) -> None:
        """Look when it is time to; run the prompt first if its blocks are not there, or no more."""
        if self._asked or self._clock() < self._due:
            return
        blocks = self.find_blocks()
        if self._expected and len(blocks) == len(self._expected):
            self._look(blocks)
            return
        self._asked = True
        params = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
        submit = Submit(
            request_id="canary", prompt=self.prompt, params=params, arrival=time.monotonic(), tenant=own_requests.CANARY
        )
        self.sift(self._engine.submit(submit, _CLIENT))

    def sift(self, events: list[Addressed]) -> list[Addressed]:
        """Take the canary's own events out of a step's."""
        if not self._asked:
            return events
        for client, event in events:
            if client == _CLIENT and event.finish is not None:
                self._learn(event)
        return [addressed for addressed in events if addressed[0] != _CLIENT]

    def find_blocks(self) -> list[int]:
        """Return the blocks that hold the prompt now."""
        cache = self._engine.scheduler.cache
        return cache.find_prefix(cache.open(tenant=own_requests.CANARY, adapter=""), self.prompt)

    def _look(self, blocks: list[int]) -> None:
        if self._digests(blocks) == self._expected:
            self.fault = None
            self._due = self._clock() + self._interval_seconds
        else:
            self._fail()

    def _learn(self, event: TokenEvent) -> None:
        """The prompt has run: remember what it left."""
        self._asked = False
        self._due = self._clock() + self._interval_seconds
        if event.error_code is not None:
            self._note_error(event.error_code)
            return
        self._num_errors = 0
        self._expected = self._digests(self.find_blocks())
        if self.fault is not None:
            self._due = self._clock() + min(_RETRY_SECONDS, self._interval_seconds)

    def _note_error(self, code: str) -> None:
        """Refused, as anybody's request may be, or failed, as a neighbour's may make it: once teaches nothing."""
        self._num_errors += code == EngineFailed.code
        if self._num_errors >= _MAX_ERRORS:
            self._fail()
        elif self._num_errors:
            self._due = self._clock() + min(_RETRY_SECONDS, self._interval_seconds)

    def _fail(self) -> None:
        self.num_failures += 1
        self.fault = FAULT
        self._expected = []
        self._due = self._clock() + min(_RETRY_SECONDS, self._interval_seconds)
        self._engine.scheduler.cache.forget_all()
        log.error("%s", FAULT)

    def _digests(self, blocks: list[int]) -> list[bytes]:
        return [
            hashlib.blake2b(content, digest_size=16).digest() for content in self._engine.runner.read_blocks(blocks)
        ]
