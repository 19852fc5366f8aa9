"""A workload run in virtual time, measured as `penstock bench serve` measures a server.

Minutes of load take seconds, and the same work gives the same figures every time. Knows nothing of terminals or files.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field

from penstock.config import Sourced
from penstock.engine.config import EngineConfig, resolve
from penstock.engine.messages import Submit, TokenEvent
from penstock.engine.simulated.device import facts_of
from penstock.engine.simulated.profile import Profile
from penstock.models.spec import ModelSpec
from penstock.request import SamplingParams
from penstock.tools.bench.client import Measurement
from penstock.tools.bench.document import Report, Run, new_report
from penstock.tools.bench.summary import ServiceLevel, summarise
from penstock.tools.bench.workload import PlannedRequest, Workload
from penstock.tools.simulator.replica import Replica


@dataclass(frozen=True, slots=True)
class SimulatedServer:
    """What is simulated: a profile, and an engine configured for it."""

    profile: Profile
    config: EngineConfig
    spec: ModelSpec
    num_replicas: int = 1


def configure(sourced: Sourced, profile: Profile, *, num_replicas: int = 1) -> SimulatedServer:
    """Resolve options for the profiled model, as a server on that device would."""
    spec = spec_of(profile)
    config, _ = resolve(sourced, spec, facts_of(profile))
    return SimulatedServer(profile, config, spec, num_replicas)


def spec_of(profile: Profile) -> ModelSpec:
    """The profiled model, as far as a scheduler sees it: its sizes are in the profile, and nothing runs its layers."""
    return ModelSpec(
        family="simulated",
        vocab_size=profile.vocab_size,
        hidden_size=0,
        intermediate_size=0,
        num_heads=0,
        num_kv_heads=0,
        head_dim=0,
        max_position=profile.max_context_tokens,
        norm_eps=0.0,
        layers=(),
        ropes=(),
        eos_token_ids=(profile.vocab_size - 1,),
    )


def simulate(
    server: SimulatedServer, workloads: Sequence[Workload], level: ServiceLevel, *, ignore_eos: bool = True
) -> Report:
    """Run the workloads one after the other, each on a server that has just started."""
    runs = [simulate_run(server, workload, level, ignore_eos=ignore_eos) for workload in workloads]
    profile = server.profile
    return new_report(
        runs,
        target=f"{server.num_replicas} × simulated {profile.device}",
        model=profile.model,
        prompts="token ids",
        ignored_end_of_text=ignore_eos,
    )


def simulate_run(server: SimulatedServer, workload: Workload, level: ServiceLevel, *, ignore_eos: bool = True) -> Run:
    """Run one workload in virtual time."""
    return summarise(workload, _Simulation(server, workload, ignore_eos).run(), level)


@dataclass(slots=True)
class _Open:
    """A request under way."""

    planned: PlannedRequest
    measurement: Measurement
    num_tokens: int = 0


@dataclass(slots=True)
class _Simulation:
    """One run. Arrivals are taken in order of time; the replica that is furthest behind runs next."""

    server: SimulatedServer
    workload: Workload
    ignore_eos: bool
    replicas: list[Replica] = field(init=False)
    _arrivals: list[tuple[float, int]] = field(init=False)  # a heap: when a client sends which request
    _next_index: int = field(init=False)
    _open: dict[str, _Open] = field(default_factory=dict)
    _measured: dict[int, tuple[PlannedRequest, Measurement]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        server, requests = self.server, self.workload.requests
        self.replicas = [Replica(server.profile, server.config, server.spec) for _ in range(server.num_replicas)]
        # A closed loop begins with so many, and sends the next when one has ended.
        self._next_index = min(len(requests), self.workload.concurrency or len(requests))
        self._arrivals = [(requests[index].start_seconds, index) for index in range(self._next_index)]
        heapq.heapify(self._arrivals)

    def run(self) -> list[tuple[PlannedRequest, Measurement]]:
        """Return every request's measurement, in the order of the workload."""
        host = self.server.profile.host
        arrival_seconds, event_seconds = host.arrival_ms / 1e3, host.event_ms / 1e3
        while True:
            busy = min(
                (item for item in self.replicas if item.has_work), key=lambda item: item.next_step_at, default=None
            )
            if self._arrivals and (busy is None or self._arrivals[0][0] + arrival_seconds <= busy.next_step_at):
                self._send(*heapq.heappop(self._arrivals), arrival_seconds)
            elif busy is not None:
                for index, event in enumerate(busy.step()):
                    self._take(event, busy.clock.now() + index * event_seconds)
            else:
                return [self._measured[index] for index in sorted(self._measured)]

    def _send(self, sent: float, index: int, arrival_seconds: float) -> None:
        planned = self.workload.requests[index]
        replica = min(self.replicas, key=lambda item: item.num_open)
        vocab_size = self.server.spec.vocab_size
        submit = Submit(
            request_id=str(index),
            # A model smaller than the workloads' vocabulary has its tokens used again and again instead.
            prompt=[token % vocab_size for token in self.workload.token_ids(planned)],
            params=SamplingParams(
                max_tokens=planned.max_tokens,
                temperature=self.workload.temperature,
                ignore_eos=self.ignore_eos,
                seed=index,
            ),
            arrival=sent,
        )
        self._open[submit.request_id] = _Open(planned, Measurement(sent, input_tokens=planned.prompt.num_tokens))
        for event in replica.submit(submit, sent + arrival_seconds):
            self._take(event, max(replica.clock.now(), sent + arrival_seconds))

    def _take(self, event: TokenEvent, moment: float) -> None:
        """Measure an event as the client would."""
        request = self._open[event.request_id]
        seen = moment + self.server.profile.host.delivery_ms / 1e3
        measurement = request.measurement
        if event.token_ids:
            measurement.token_times.append(seen)
            request.num_tokens += len(event.token_ids)
            measurement.cached_tokens = max(measurement.cached_tokens or 0, event.num_cached_tokens)
        if event.finish is None:
            return
        measurement.ended, measurement.output_tokens = seen, request.num_tokens
        if event.error is not None:
            measurement.fail(event.error_code or "error", event.error)
        index = int(event.request_id)
        self._measured[index] = (request.planned, measurement)
        del self._open[event.request_id]
        if self._next_index < len(self.workload.requests) and self.workload.concurrency is not None:
            heapq.heappush(self._arrivals, (seen, self._next_index))
            self._next_index += 1
