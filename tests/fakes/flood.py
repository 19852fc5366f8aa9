"""A tenant that asks now and then beside another's flood, in virtual time on the shipped profile of an H200.

Tells what a first token waited for: the rest of the step that ran, a step launched behind it, others before it, itself.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from penstock.config import gather
from penstock.engine.builder import assemble, warm_up
from penstock.engine.messages import Submit
from penstock.engine.runner.interface import LaunchedStep, Runner
from penstock.engine.scheduler.step_plan import StepPlan, StepResult
from penstock.engine.simulated.device import make_runner
from penstock.engine.simulated.profile import read_profile
from penstock.engine.simulated.runner import Timing
from penstock.request import SamplingParams
from penstock.tools.simulator.clock import VirtualClock
from penstock.tools.simulator.server import SimulatedServer, configure
from tests.fakes.virtual_engine import percentile

FIRST_ASKED = 2.5


def h200() -> SimulatedServer:
    return configure(gather({}, environ={}), read_profile("h200-llama-8b"))


@dataclass(eq=False)
class WatchedStep(LaunchedStep):
    """A step and when it ran."""

    plan: StepPlan
    launched: float
    step: LaunchedStep
    done: float = 0.0

    @property
    def is_done(self) -> bool:
        return self.step.is_done

    def wait(self) -> StepResult:
        result = self.step.wait()
        self.done = self.launched + result.seconds
        return result


class WatchedRunner(Runner):
    """Keeps every step."""

    def __init__(self, runner: Runner, timing: Timing) -> None:
        self._runner = runner
        self._timing = timing
        self.steps: list[WatchedStep] = []

    @property
    def step_sizes(self) -> Sequence[int]:
        return self._runner.step_sizes

    def launch(self, plan: StepPlan) -> LaunchedStep:
        launched = self._timing.now()
        step = WatchedStep(plan, launched, self._runner.launch(plan))
        self.steps.append(step)
        return step

    def read_blocks(self, blocks: Sequence[int]) -> list[bytes]:
        return self._runner.read_blocks(blocks)

    def write_blocks(self, blocks: Sequence[int], contents: Sequence[bytes]) -> None:
        self._runner.write_blocks(blocks, contents)

    def close(self) -> None:
        self._runner.close()


@dataclass(frozen=True)
class Waited:
    """What one first token waited for, in seconds; all but `ttft` as the engine sees it."""

    ttft: float  # as the caller sees it
    rest: float  # of the step that ran
    behind: float  # a step that was launched already
    before: float  # steps that others had since
    own: float  # from the begin of the first step with its prompt to its first token


@dataclass(frozen=True)
class Asked:
    """What the tenant that asks now and then saw, and when the flood was over."""

    waited: list[Waited]
    flood_done: float
    num_broken_promises: int

    def ms(self, part: str, quantile: float) -> float:
        return 1e3 * percentile([getattr(item, part) for item in self.waited], quantile)


def request(name: str, arrival: float, prompt: int, answer: int) -> Submit:
    """A request of the tenant whose name is the name's first letter; no two prompts begin alike."""
    tokens = random.Random(name).choices(range(5, 5000), k=prompt)
    params = SamplingParams(max_tokens=answer, ignore_eos=True, temperature=0.0, seed=1)
    return Submit(request_id=name, prompt=tokens, params=params, arrival=arrival, tenant=name[0])


def asked_now_and_then(count: int, prompt: int, seconds: float = 0.2) -> list[Submit]:
    dice = random.Random(3)
    moments = [FIRST_ASKED + seconds * (index + dice.random()) for index in range(count)]
    return [request(f"b{index}", moment, prompt, 16) for index, moment in enumerate(moments)]


def flood(count: int, prompt: int = 1024, answer: int = 128) -> list[Submit]:
    """A hundred requests a second: three times what the device can do."""
    return [request(f"a{index}", 0.01 * index, prompt, answer) for index in range(count)]


class FloodedEngine:
    """One engine on one simulated device."""

    def __init__(self, server: SimulatedServer) -> None:
        self._host = server.profile.host
        self._clock = VirtualClock(-3600.0)
        timing = Timing(self._clock.now, self._clock.sleep)
        self._runner = WatchedRunner(make_runner(server.profile, server.config, server.spec, timing), timing)
        self._engine = assemble(server.config, server.spec, self._runner, clock=self._clock.now)
        warm_up(self._engine, server.config)
        self._clock.advance_to(0.0)
        self._numbers: dict[str, int] = {}
        self._first: dict[str, float] = {}  # when the engine had the first token
        self._flood_done = 0.0

    def run(self, submits: Sequence[Submit]) -> Asked:
        """Play the requests to their end."""
        coming = sorted(submits, key=lambda submit: submit.arrival)[::-1]
        while coming or self._engine.has_work:
            due = max(self._clock.now(), self._engine.launch_due) if self._engine.has_work else float("inf")
            if coming and (arrived := self._reaches_engine(coming[-1])) <= due:
                self._clock.advance_to(arrived)
                self._submit(coming.pop())
            else:
                self._clock.advance_to(due)
                self._step()
        steps = self._runner.steps
        begins = [max(step.launched, before.done) for before, step in pairwise(steps)]
        timed = list(zip(steps[1:], begins, strict=True))
        waited = [self._waited(item, timed) for item in submits if item.tenant == "b"]
        num_broken = sum(counts["broken"] for counts in self._engine.metrics.promises.values())
        return Asked(waited, self._flood_done, num_broken)

    def _reaches_engine(self, submit: Submit) -> float:
        return submit.arrival + self._host.arrival_ms / 1e3

    def _submit(self, submit: Submit) -> None:
        assert self._engine.submit(submit) == []
        self._numbers[submit.request_id] = next(reversed(self._engine.scheduler.requests))

    def _step(self) -> None:
        for _, event in self._engine.step():
            if event.token_ids:
                self._first.setdefault(event.request_id, self._clock.now())
            if event.finish is not None and event.request_id.startswith("a"):
                self._flood_done = self._clock.now()

    def _waited(self, submit: Submit, timed: list[tuple[WatchedStep, float]]) -> Waited:
        came, number = self._reaches_engine(submit), self._numbers[submit.request_id]
        first = self._first[submit.request_id]
        open_steps = [(step, begin) for step, begin in timed if step.launched < came < step.done]
        rest = open_steps[0][0].done - came if open_steps else 0.0
        behind = sum(step.done - begin for step, begin in open_steps[1:])
        began = next(begin for step, begin in timed if any(piece.request == number for piece in step.plan.slices))
        seen = first + self._host.delivery_ms / 1e3
        return Waited(seen - submit.arrival, rest, behind, began - came - rest - behind, first - began)
