"""A workload run in virtual time, measured as `penstock bench serve` measures a server.

Minutes of load take seconds, and the same work gives the same figures every time. Knows nothing of terminals or files.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import msgspec

from penstock.engine.messages import Submit, TokenEvent
from penstock.errors import EngineUnavailable, Overloaded
from penstock.fleet.config import DEFAULT_HOLD_SECONDS
from penstock.fleet.router.query import RequestHead, RouteQuery
from penstock.protocol.prompt_note import PromptNote
from penstock.request import SamplingParams
from penstock.tools.bench.client import Measurement
from penstock.tools.bench.document import FleetFigures, Report, Run, new_report
from penstock.tools.bench.summary import ServiceLevel, summarise
from penstock.tools.bench.workload import PlannedRequest, Workload
from penstock.tools.simulator.agenda import Agenda
from penstock.tools.simulator.fleet import MODEL, Placed, VirtualFleet
from penstock.tools.simulator.infinite_cache import InfiniteCache
from penstock.tools.simulator.replica import VirtualReplica
from penstock.tools.simulator.server import SimulatedServer


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
    simulation = Simulation(server, workload, ignore_eos=ignore_eos)
    run = summarise(workload, simulation.run(), level)
    return run if server.num_replicas == 1 else msgspec.structs.replace(run, fleet=simulation.figures())


@dataclass(slots=True)
class _Open:
    """A request under way."""

    planned: PlannedRequest
    measurement: Measurement
    query: RouteQuery
    placed: Placed | None = None  # None while it is held for want of a replica
    num_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Ticks:
    """Something done at a fixed interval of virtual time, from the first moment on: an autoscaler, say."""

    seconds: float
    do: Callable[[float, VirtualFleet], None]


class Simulation:
    """One run. Whatever is due is done in the order of time; the replica that is furthest behind runs next."""

    def __init__(
        self,
        server: SimulatedServer,
        workload: Workload,
        *,
        ignore_eos: bool = True,
        ticks: Ticks | None = None,
        hold_seconds: float = DEFAULT_HOLD_SECONDS,
    ) -> None:
        """`hold_seconds`: how long a request waits for a first replica to be ready."""
        self._server = server
        self._workload = workload
        self._ignore_eos = ignore_eos
        self._hold_seconds = hold_seconds
        self._agenda = Agenda()
        self.fleet = VirtualFleet(server, self._agenda)
        self._open: dict[str, _Open] = {}
        self._held: dict[str, Submit] = {}
        self._measured: dict[int, tuple[PlannedRequest, Measurement]] = {}
        # A closed loop begins with so many, and sends the next when one has ended.
        self._next_index = min(len(workload.requests), workload.concurrency or len(workload.requests))
        if ticks is not None:
            self._repeat(0.0, ticks.seconds, lambda: ticks.do(self.fleet.now, self.fleet))
        self._repeat(0.0, self.fleet.pool.health.probe_seconds, self.fleet.probe)
        for index in range(self._next_index):
            self._send_at(workload.requests[index].start_seconds, index)

    def run(self) -> list[tuple[PlannedRequest, Measurement]]:
        """Return every request's measurement, in the order of the workload."""
        event_seconds = self._server.profile.host.event_ms / 1e3
        while len(self._measured) < len(self._workload.requests):
            busy = self.fleet.furthest_behind()
            if busy is None or self._agenda.is_due(busy.next_step_at):
                self._agenda.run_next()
                self._place_held()
                self.fleet.num_held = len(self._held)
                continue
            for index, event in enumerate(self.fleet.step(busy)):
                self._take(event, busy.clock.now() + index * event_seconds)
        return [self._measured[index] for index in sorted(self._measured)]

    def figures(self) -> FleetFigures:
        """Return how the replicas shared the work."""
        replicas = (*self.fleet.replicas, *self.fleet.ended)
        stats = [replica.stats for replica in replicas]
        return FleetFigures(
            policy=self._server.policy,
            busy_seconds=[replica.busy_seconds for replica in replicas],
            work_seconds=[item.work_seconds for item in stats],
            computed_tokens=[item.prefix_query_tokens - item.prefix_hit_tokens for item in stats],
            replica_seconds=self.fleet.replica_seconds,
            infinite_cache_tokens=self._most_found(),
        )

    def _most_found(self) -> int:
        cache = InfiniteCache(self._server.config.block_tokens)
        for planned, _ in sorted(self._measured.values(), key=lambda item: item[1].sent):
            cache.see(self._workload.token_ids(planned))
        return cache.hit_tokens

    def _repeat(self, moment: float, seconds: float, action: Callable[[], None]) -> None:
        def again() -> None:
            action()
            self._repeat(moment + seconds, seconds, action)

        self._agenda.add(moment, again)

    def _send_at(self, sent: float, index: int) -> None:
        self._agenda.add(sent + self._server.profile.host.arrival_ms / 1e3, partial(self._arrive, sent, index))

    def _arrive(self, sent: float, index: int) -> None:
        planned = self._workload.requests[index]
        vocab_size = self._server.spec.vocab_size
        prompt = list(self._workload.token_ids(planned))
        if max(prompt, default=0) >= vocab_size:
            # A model smaller than the workloads' vocabulary has its tokens used again and again instead.
            prompt = [token % vocab_size for token in prompt]
        submit = Submit(
            request_id=str(index),
            prompt=prompt,
            params=SamplingParams(
                max_tokens=planned.max_tokens,
                temperature=self._workload.temperature,
                ignore_eos=self._ignore_eos,
                seed=index,
            ),
            arrival=sent,
            targets=self._server.targets,
            deadline_seconds=self._server.targets.deadline_seconds,
        )
        query = RouteQuery(RequestHead(model=MODEL, prompt=prompt), model=MODEL, tenant="")
        measurement = Measurement(sent, input_tokens=planned.prompt.num_tokens)
        self._open[submit.request_id] = _Open(planned, measurement, query)
        self._place(submit)

    def _place(self, submit: Submit) -> None:
        """Send a request where the policy says, and elsewhere what a full replica refuses."""
        request, fleet = self._open[submit.request_id], self.fleet
        refused: dict[VirtualReplica, TokenEvent] = {}
        while (placed := fleet.place(request.query, refused)) is not None:
            request.placed = placed
            events = placed.replica.submit(submit, fleet.now)
            if not events or events[0].error_code != Overloaded.code:
                for event in events:
                    self._take(event, max(placed.replica.clock.now(), fleet.now))
                return
            fleet.release(placed)
            request.placed = None
            refused[placed.replica] = events[0]
        if refused:
            self._take(next(iter(refused.values())), fleet.now)
        else:
            self._hold(submit)

    def _hold(self, submit: Submit) -> None:
        """Have a request wait for a first replica; the gateway gives up after a time."""
        if submit.request_id not in self._held:
            self._held[submit.request_id] = submit
            self._agenda.add(self.fleet.now + self._hold_seconds, partial(self._give_up, submit.request_id))

    def _place_held(self) -> None:
        if self._held and self.fleet.num_ready:
            held, self._held = self._held, {}
            for submit in held.values():
                self._place(submit)

    def _give_up(self, request_id: str) -> None:
        if self._held.pop(request_id, None) is not None:
            self._end(request_id, self.fleet.now, EngineUnavailable.code, "no replica was ready in time")

    def _take(self, event: TokenEvent, moment: float) -> None:
        """Measure an event as the client would."""
        request = self._open[event.request_id]
        measurement = request.measurement
        if event.token_ids:
            if not request.num_tokens and request.placed is not None:
                note = event.prompt or PromptNote(request.planned.prompt.num_tokens, event.num_cached_tokens)
                self._agenda.add(moment, partial(self.fleet.note_first_token, request.placed, note))
            measurement.token_times.append(moment + self._server.profile.host.delivery_ms / 1e3)
            request.num_tokens += len(event.token_ids)
            measurement.cached_tokens = max(measurement.cached_tokens or 0, event.num_cached_tokens)
        if event.finish is not None:
            error = None if event.error is None else event.error_code or "error"
            self._end(event.request_id, moment, error, event.error or "")

    def _end(self, request_id: str, moment: float, error: str | None, text: str) -> None:
        request = self._open.pop(request_id)
        measurement = request.measurement
        seen = moment + self._server.profile.host.delivery_ms / 1e3
        measurement.ended, measurement.output_tokens = seen, request.num_tokens
        if error is not None:
            measurement.fail(error, text)
        if request.placed is not None:
            # The gateway learns it then, not while the step that ends it still runs.
            self._agenda.add(moment, partial(self.fleet.release, request.placed))
        self._measured[int(request_id)] = (request.planned, measurement)
        if self._next_index < len(self._workload.requests) and self._workload.concurrency is not None:
            self._send_at(seen, self._next_index)
            self._next_index += 1
