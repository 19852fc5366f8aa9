"""One request as the scheduler sees it: `computed` tokens chasing `known` tokens.

There is no prefill phase and no decode phase. Prompt, prefix hit, sampled token, verified draft and resumption after
preemption all move the same two numbers.
"""

import math
from dataclasses import dataclass, field

import msgspec

from penstock.engine.cache.kv_cache import RequestCache
from penstock.engine.messages import PromptLogprobs
from penstock.engine.scheduler.prompt_work import PromptWork
from penstock.request import NO_TARGETS, OWN_TARGETS, SamplingParams, TargetOrigins, Targets

# (0 online, 1 batch; minus the priority): smaller goes first.
LevelKey = tuple[int, int]

# A deadline that is further away is kept whatever the steps are like.
_NEAR_SECONDS = 10.0


@dataclass(slots=True, eq=False)
class TenantAccount:
    """What one tenant got and holds at one level, and which of its requests wait there."""

    tenant: str
    weight: float = 1.0
    counter: float = 0.0  # service, divided by the weight
    prompt_cost: float = 1.0  # what a prompt token adds to the counter
    drawn_cost: float = 1.0  # what a drawn token adds
    num_open: int = 0  # requests that have not ended
    wanted_tokens: int = 0  # what those ask for, about
    num_rows: int = 0
    last_start: float = -math.inf  # when one of its requests last got a row
    waiting: list[tuple[float, int, "RequestState"]] = field(default_factory=list)  # by urgency
    waiting_tokens: int = 0
    in_line: bool = False  # its level knows that it waits
    came_with: int = -1  # the request with which it last came back to the queue

    @property
    def share(self) -> float:
        """Rows that it holds, over its weight."""
        return self.num_rows / self.weight

    @property
    def demand(self) -> float:
        """What it asks for, whether that runs or waits, over its weight."""
        return self.wanted_tokens / self.weight

    def exceeds(self, demand: float, num_requests: float) -> bool:
        """Whether it asks for more than this, both over a weight: in tokens, and not in one long prompt alone."""
        return self.demand > demand and self.num_open / self.weight > num_requests


@dataclass(slots=True, eq=False)
class RequestState:
    number: int  # unique for the engine's life
    client: bytes  # who gets its events
    request_id: str  # the client's name for it
    tokens: list[int]  # prompt, then every token the host knows to be sampled
    num_prompt_tokens: int
    max_total_tokens: int  # prompt and answer together
    params: SamplingParams
    stop_ids: frozenset[int]
    seed: int
    arrival: float
    cache: RequestCache
    account: TenantAccount
    level: LevelKey
    due: float  # when its prompt should begin to run: the earlier, the more urgent
    work: PromptWork
    tenant: str = ""
    adapter: str = ""
    targets: Targets = NO_TARGETS
    target_origins: TargetOrigins = OWN_TARGETS
    deadline_seconds: float | None = None  # behind its arrival
    best_effort: bool = False
    has_moved: bool = False  # its answer began elsewhere
    has_lost_pace: bool = False  # a time per token that was promised there cannot be kept here
    num_moved_tokens: int = 0  # of the answer, drawn there
    follows: str | None = None  # the client's name for the request that stands for it, where it is another
    call_answers: int = 1  # of the call that it stands for

    computed: int = 0  # leading tokens whose KV is computed, or will be by the steps already launched
    in_flight: int = 0  # tokens that launched steps will sample and the host does not know yet
    awaits_commit: bool = False  # its next step cannot be planned before its last one is settled
    row: int | None = None
    num_cached_tokens: int = 0  # of the prompt, when it was first admitted
    num_preemptions: int = 0
    num_rises: int = 0  # levels that it has risen by waiting
    promised_blocks: int = 0  # set aside for it at admission and not yet taken
    queued_tokens: int = 0  # tokens to run before its next one, when it was last queued
    prompt_logprobs: list[PromptLogprobs] = field(default_factory=list)  # as steps found them
    num_scored_tokens: int = 0  # that they tell of
    predicted_ttft: float | None = None  # seconds, at arrival
    predicted_answer: float = 0.0  # seconds behind the first token that its fewest tokens take, likewise
    admitted_at: float | None = None
    first_token_at: float | None = None
    last_token_at: float | None = None

    def __post_init__(self) -> None:
        if self.max_total_tokens - self.num_prompt_tokens <= 1:
            # No time passes between the tokens of an answer that has one.
            self.targets = Targets(self.targets.ttft_seconds)

    @property
    def deadline(self) -> float | None:
        """When it ends, whatever it has got."""
        return None if self.deadline_seconds is None else self.arrival + self.deadline_seconds

    @property
    def is_promised(self) -> bool:
        """Whether it is let in only where a time can be kept that longer steps could break."""
        times = (self.targets.ttft_seconds, self.targets.time_per_token_seconds)
        return self.has_near_deadline or (not self.best_effort and any([time is not None for time in times]))

    @property
    def has_near_deadline(self) -> bool:
        """Whether it was promised to end by a time that others could make it miss."""
        seconds = self.deadline_seconds
        return not self.best_effort and seconds is not None and seconds < _NEAR_SECONDS

    @property
    def known(self) -> int:
        """Tokens that exist or will before the next step runs."""
        return len(self.tokens) + self.in_flight

    @property
    def remaining(self) -> int:
        """Tokens to run before the next one can be sampled."""
        return self.known - self.computed

    @property
    def num_output_tokens(self) -> int:
        return len(self.tokens) - self.num_prompt_tokens

    @property
    def num_drawn_tokens(self) -> int:
        """Tokens of the answer that were drawn here."""
        return self.num_output_tokens - self.num_moved_tokens

    @property
    def runnable(self) -> int:
        """Tokens that a step could run for it now. None once the steps in flight will reach its last token."""
        known = len(self.tokens) + self.in_flight
        return 0 if self.awaits_commit or known >= self.max_total_tokens else known - self.computed

    @property
    def may_stop(self) -> bool:
        """Whether it may end before it has drawn all that it may."""
        return bool(self.stop_ids or self.params.stop)

    @property
    def fewest_left(self) -> int:
        """Tokens that must still be drawn before it can end, whatever they are."""
        most = self.max_total_tokens - self.num_prompt_tokens
        fewest = min(most, self.params.min_tokens) if self.may_stop else most
        return max(1, fewest - self.num_output_tokens)

    def add_prompt_logprobs(self, start: int, found: PromptLogprobs) -> None:
        """Take those of the tokens behind position `start`. One that was preempted runs tokens again that it knows."""
        assert start <= self.num_scored_tokens
        fresh = found.behind(self.num_scored_tokens - start)
        self.prompt_logprobs.append(fresh)
        self.num_scored_tokens += fresh.num_tokens

    def take_prompt_logprobs(self) -> PromptLogprobs:
        """Return those of the whole prompt. From now on this is a request like any other, wherever it resumes."""
        assert self.num_scored_tokens == self.num_prompt_tokens - 1
        told = PromptLogprobs.joined(self.prompt_logprobs)
        self.prompt_logprobs.clear()
        self.params = msgspec.structs.replace(self.params, prompt_logprobs=None)
        return told

    @property
    def is_batch(self) -> bool:
        return self.level[0] > 0
