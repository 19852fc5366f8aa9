"""One server in virtual time: the real engine, scheduler and cache over a simulated device.

What the HTTP side would cost is a fixed time before and after, from the profile. Knows nothing of other replicas.
"""

from penstock.engine.block_feed import BlockFeed
from penstock.engine.builder import assemble, warm_up
from penstock.engine.messages import EngineStats, Submit, TokenEvent
from penstock.engine.simulated.device import make_runner
from penstock.engine.simulated.runner import Timing
from penstock.protocol.block_events import BlockChanges, BlockSnapshot
from penstock.tools.simulator.clock import VirtualClock
from penstock.tools.simulator.server import SimulatedServer

# A server warms up before it is ready, and long enough before for its last step to be over.
_WARM_UP_SECONDS = 3600.0


class VirtualReplica:
    """An engine and its own clock. Between steps it takes in whatever has arrived, as the engine process does."""

    def __init__(self, server: SimulatedServer, name: str, started_at: float = 0.0, ready_at: float = 0.0) -> None:
        self.name = name
        self.started_at = started_at
        self.ready_at = ready_at
        self.is_draining = False  # gets no new requests; those it has go on
        self.ended_at: float | None = None
        self.clock = VirtualClock(ready_at - _WARM_UP_SECONDS)
        self._runner = make_runner(server.profile, server.config, server.spec, Timing(self.clock.now, self.clock.sleep))
        self._engine = assemble(server.config, server.spec, self._runner, clock=self.clock.now)
        warm_up(self._engine, server.config)
        self._runner.busy_seconds = 0.0
        self.clock.advance_to(ready_at)
        self._blocks = BlockFeed(self._engine.scheduler.cache)

    @property
    def has_work(self) -> bool:
        return self._engine.has_work

    @property
    def num_open(self) -> int:
        """Requests that have not ended."""
        return len(self._engine.scheduler.requests)

    @property
    def next_step_at(self) -> float:
        """When it runs again; what arrives until then is taken in first."""
        return max(self.clock.now(), min(self._engine.launch_due, self._runner.free_at))

    @property
    def busy_seconds(self) -> float:
        """How long its device has run steps."""
        return self._runner.busy_seconds

    @property
    def stats(self) -> EngineStats:
        """What the engine tells of itself, as it would send it to an API worker."""
        return self._engine.stats()

    def submit(self, submit: Submit, moment: float) -> list[TokenEvent]:
        """Take in a request that reaches the engine now; a refusal is its one event."""
        self.clock.advance_to(moment)
        return [event for _, event in self._engine.submit(submit)]

    def step(self) -> list[TokenEvent]:
        """Run the engine once; the clock then shows when its step ended."""
        self.clock.advance_to(self.next_step_at)
        return [event for _, event in self._engine.step()]

    def watch_blocks(self) -> BlockSnapshot:
        """Begin to note which blocks come and go in its cache; return those that are there."""
        return self._blocks.join(b"")[1]

    def take_block_changes(self) -> BlockChanges | None:
        """Return what has changed since the last call, if somebody watches and anything has."""
        return self._blocks.take()

    def seconds_until(self, now: float) -> float:
        """How long it has been paid for: from its start, before it was ready, to its end or to now."""
        return max(0.0, (now if self.ended_at is None else self.ended_at) - self.started_at)
