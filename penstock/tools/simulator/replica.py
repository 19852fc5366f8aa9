"""One server in virtual time: the real engine, scheduler and cache over a simulated device.

What the HTTP side would cost is a fixed time before and after, from the profile. Knows nothing of other replicas.
"""

from penstock.engine.builder import assemble
from penstock.engine.config import EngineConfig
from penstock.engine.messages import Submit, TokenEvent
from penstock.engine.simulated.device import make_runner
from penstock.engine.simulated.profile import Profile
from penstock.engine.simulated.runner import Timing
from penstock.models.spec import ModelSpec
from penstock.tools.simulator.clock import VirtualClock


class Replica:
    """An engine and its own clock. Between steps it takes in whatever has arrived, as the engine process does."""

    def __init__(self, profile: Profile, config: EngineConfig, spec: ModelSpec) -> None:
        self.clock = VirtualClock()
        runner = make_runner(profile, config, spec, Timing(self.clock.now, self.clock.sleep))
        self._engine = assemble(config, spec, runner, clock=self.clock.now)

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
        return max(self.clock.now(), self._engine.launch_due)

    def submit(self, submit: Submit, moment: float) -> list[TokenEvent]:
        """Take in a request that reaches the engine now; a refusal is its one event."""
        self.clock.advance_to(moment)
        return [event for _, event in self._engine.submit(submit)]

    def step(self) -> list[TokenEvent]:
        """Run the engine once; the clock then shows when its step ended."""
        self.clock.advance_to(self.next_step_at)
        return [event for _, event in self._engine.step()]
