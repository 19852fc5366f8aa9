"""The real engine in virtual time: a runner that takes as long as a cost function says, and a clock that jumps."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from penstock.block_hash import BlockHasher
from penstock.engine.cache.kv_cache import KvCache
from penstock.engine.engine import Engine
from penstock.engine.messages import Submit, TokenEvent
from penstock.engine.metrics import EngineMetrics
from penstock.engine.runner.interface import LaunchedStep, Runner
from penstock.engine.scheduler.cost_model import StepCosts, StepShape
from penstock.engine.scheduler.foresight import Foresight
from penstock.engine.scheduler.scheduler import Scheduler, SchedulerConfig
from penstock.engine.scheduler.step_plan import SliceResult, StepPlan, StepResult
from penstock.engine.scheduler.step_times import shape_of
from penstock.request import FinishReason, SamplingParams

VOCAB = 50_000

# An 8B model in bfloat16 on one H200, in seconds.
H200_LLAMA_8B = StepCosts(
    fixed=3.9e-3,
    prompt_step=0.6e-3,
    prompt_pair=0.0,
    row=9.5e-6,
    context_token=31e-9,
    tokens_beyond=((250, 22.5e-6),),
)


class VirtualClock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class VirtualStep(LaunchedStep):
    def __init__(self, clock: VirtualClock, plan: StepPlan, done: float) -> None:
        self._clock, self._plan, self._launched, self._done = clock, plan, clock.now, done

    @property
    def is_done(self) -> bool:
        return self._clock.now >= self._done

    def wait(self) -> StepResult:
        self._clock.now = max(self._clock.now, self._done)
        slices = [SliceResult([7] if piece.num_samples else []) for piece in self._plan.slices]
        return StepResult(self._plan.number, slices, self._done - self._launched)


class VirtualRunner(Runner):
    """Runs one step after another, each for as long as `seconds` says."""

    def __init__(self, clock: VirtualClock, seconds: Callable[[StepShape], float]) -> None:
        self._clock = clock
        self._seconds = seconds
        self._free_at = 0.0
        self.shapes: list[StepShape] = []

    def launch(self, plan: StepPlan) -> LaunchedStep:
        shape = shape_of(plan)
        self.shapes.append(shape)
        self._free_at = max(self._clock.now, self._free_at) + self._seconds(shape)
        return VirtualStep(self._clock, plan, self._free_at)

    def read_blocks(self, blocks: Sequence[int]) -> list[bytes]:
        raise NotImplementedError

    def write_blocks(self, blocks: Sequence[int], contents: Sequence[bytes]) -> None:
        raise NotImplementedError

    def close(self) -> None:
        pass


@dataclass
class Outcome:
    """What became of one request."""

    arrival: float
    token_times: list[float] = field(default_factory=list)
    last: TokenEvent | None = None

    @property
    def refused(self) -> bool:
        return self.last is not None and self.last.finish is FinishReason.ERROR and not self.token_times

    @property
    def ttft(self) -> float:
        return self.token_times[0] - self.arrival

    @property
    def time_per_token(self) -> float:
        return (self.token_times[-1] - self.token_times[0]) / max(1, len(self.token_times) - 1)


class VirtualEngine:
    """An engine, its clock, and what its requests saw."""

    def __init__(
        self,
        seconds: Callable[[StepShape], float] = H200_LLAMA_8B.seconds,
        *,
        known: StepCosts | None = None,
        max_running: int = 256,
        max_step_tokens: int = 8192,
        max_waiting: int = 1024,
        max_context_tokens: int = 40_000,
        num_tokens: int = 400_000,
        shares_prefixes: bool = False,
    ) -> None:
        self.clock = VirtualClock()
        self.runner = VirtualRunner(self.clock, seconds)
        foresight = Foresight.make(max_step_tokens=max_step_tokens, clock=self.clock, known=known)
        config = SchedulerConfig(
            max_running=max_running,
            max_step_tokens=max_step_tokens,
            max_waiting=max_waiting,
            max_context_tokens=max_context_tokens,
            vocab_size=VOCAB,
            eos_token_ids=(),
        )
        cache = KvCache(num_tokens // 16 + 1, BlockHasher(b"key", 16), share_prefixes=shares_prefixes)
        self.scheduler = Scheduler(config, cache, EngineMetrics(), foresight=foresight, clock=self.clock)
        self.engine = Engine(self.scheduler, self.runner)
        self.outcomes: dict[str, Outcome] = {}

    def submit(self, submit: Submit) -> Outcome:
        outcome = self.outcomes[submit.request_id] = Outcome(submit.arrival)
        self._take(self.engine.submit(submit))
        return outcome

    def run(self, submits: Iterable[Submit], until: float = float("inf")) -> dict[str, Outcome]:
        """Play requests at their arrivals, as the engine process does: up to the launch of a step they are in it."""
        coming = sorted(submits, key=lambda submit: submit.arrival)[::-1]
        while (coming or self.engine.has_work) and self.clock.now < until:
            while coming and coming[-1].arrival <= max(self.clock.now, self.engine.launch_due):
                self.clock.now = max(self.clock.now, coming[-1].arrival)
                self.submit(coming.pop())
            if self.engine.has_work:
                self.clock.now = max(self.clock.now, self.engine.launch_due)
                self._take(self.engine.step())
            elif coming:
                self.clock.now = max(self.clock.now, coming[-1].arrival)
        return self.outcomes

    def _take(self, events: Iterable[tuple[bytes, TokenEvent]]) -> None:
        for _, event in events:
            outcome = self.outcomes[event.request_id]
            outcome.token_times += [self.clock.now] * len(event.token_ids)
            if event.finish is not None:
                assert outcome.last is None, "a request ends once"
                outcome.last = event


def request(name: str, arrival: float = 0.0, *, prompt: int = 1024, answer: int = 128, **fields: object) -> Submit:
    params = SamplingParams(max_tokens=answer, ignore_eos=True, seed=1)
    return Submit(request_id=name, prompt=[1] * prompt, params=params, arrival=arrival, **fields)  # type: ignore[arg-type]


def percentile(values: Iterable[float], part: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(part * len(ordered)))]
