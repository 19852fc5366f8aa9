"""Who holds a row and which blocks, who waits, and who gives way to whom.

A request that gives up its row keeps its blocks (it is parked) while nobody needs them more: it goes on where it was.
One whose blocks are taken (it is preempted) finds most of them again in the prefix cache. Knows nothing of steps.
"""

from bisect import insort
from collections.abc import Callable, Sequence

from penstock.engine.cache.kv_cache import NO_MATCH, KvCache
from penstock.engine.metrics import EngineMetrics
from penstock.engine.scheduler.answer_lengths import AnswerLengths
from penstock.engine.scheduler.pace import Ready
from penstock.engine.scheduler.parked import Parked
from penstock.engine.scheduler.pledges import NOBODY
from penstock.engine.scheduler.precedence import Order, Patience, displaced_by, give_way, num_below, pressed_out_by
from penstock.engine.scheduler.request_state import LevelKey, RequestState
from penstock.engine.scheduler.step_plan import BlockAssignment, RowStart, StepPlan
from penstock.engine.scheduler.waiting_queue import WaitingQueue
from penstock.request import MAX_PRIORITY

# A request preempted this often is promised all the blocks it can ever need before it runs again.
MAX_PREEMPTIONS = 3

_BEST_LEVEL = (0, -MAX_PRIORITY)


class Placement:
    """The rows and blocks of one engine."""

    def __init__(
        self,
        cache: KvCache,
        metrics: EngineMetrics,
        *,
        max_running: int,
        quantum: float,
        expected_output_tokens: float,
        clock: Callable[[], float],
    ) -> None:
        self.cache = cache
        self.metrics = metrics
        self.running: list[RequestState] = []  # best first: the last is the first to be preempted
        self.waiting = WaitingQueue(quantum)
        self.parked = Parked()
        self.free_rows = list(range(max_running - 1, -1, -1))
        self.lengths = AnswerLengths(expected_output_tokens)
        self.firmly_promised = 0  # blocks set aside for requests that may not be preempted again
        self.loosely_promised = 0  # estimates: they hold back admission, never a running request
        self.version = 0  # another one whenever who runs, or how far, has changed
        self.pressed = NOBODY  # whose prompts go first now, whoever's turn it is
        self._quantum = quantum
        self._clock = clock

    @property
    def num_unpromised_blocks(self) -> int:
        return self.cache.pool.num_free - self.firmly_promised - self.loosely_promised

    def displaced_by(self, request: RequestState, plan: StepPlan | None = None) -> RequestState | None:
        """The running request that has to make room for a waiting one; none that `plan` starts. None if none has."""
        running = self.running
        if plan is not None and plan.row_starts:
            started = {start.row for start in plan.row_starts}
            running = [other for other in running if other.row not in started]
        victim = displaced_by(request, running, self._quantum)
        if victim is None and request.number in self.pressed.places:
            victim = pressed_out_by(request, running)
        return victim

    def yields_rows(self, request: RequestState, num_rows: int) -> bool:
        """Whether those that run would make room for so many answers to the request's call."""
        if self.displaced_by(request) is None:
            return False
        # How many rows of its own level it would get, by its share, shows only once it has got them.
        return num_rows == 1 or num_below(request, self.running) >= num_rows

    def order(self, ready: Sequence[Ready]) -> Order:
        """In which order these and those that wait get prompt tokens."""
        prompts = [request for request, remaining in ready if remaining > 1]
        return Order(prompts, self.waiting.least_counters(), self._quantum, self.pressed)

    def give_way(self, ready: Sequence[Ready], can_pause: Patience | None) -> Sequence[Ready]:
        """Who of those that could run does, while others are owed more."""
        return give_way(ready, self._quantum, self._clock(), can_pause, self.pressed)

    def next_waiting(self) -> RequestState | None:
        """The request to start next."""
        best = self.waiting.best()
        if best is None:
            return None
        pressed = [self.waiting.find(number) for number in self.pressed.places]
        return next((request for request in pressed if request is not None and request.level == best.level), best)

    def note_progress(self) -> None:
        """Those that run have gone on."""
        self.version += 1

    def release(self, request: RequestState, *, forget: bool = False) -> None:
        """A request has ended: take everything back."""
        self.version += 1
        if request.row is not None:
            self._leave_row(request)
        else:
            self.waiting.remove(request)
        self._free_blocks(request, forget=forget)
        self.waiting.dismiss(request)

    def start(self, plan: StepPlan, request: RequestState) -> bool:
        """Give a waiting request a row and its cached prefix, if the blocks it is promised are there."""
        promise = self.cache.blocks_for(self._expected_total(request))
        if request in self.parked:
            self.parked.discard(request)
        else:
            # Log-probabilities of prompt tokens come from running them: what the cache has gives none.
            scores_prompt = request.params.prompt_logprobs is not None
            match = NO_MATCH if scores_prompt else self.cache.match(request.cache, request.tokens)
            if not self._find_blocks(plan, request, promise - match.num_held_blocks):
                return False
            request.computed = self.cache.adopt(request.cache, match)
            self.metrics.prefix_query_tokens += len(request.tokens)
            self.metrics.prefix_hit_tokens += request.computed
        self.waiting.remove(request)
        request.row = self.free_rows.pop()
        self.waiting.change_rows(request, 1)
        request.account.last_start = self._clock()
        self._promise(request, max(0, promise - len(request.cache.blocks)))
        insort(self.running, request, key=rank)
        plan.row_starts.append(
            RowStart(
                request.row,
                list(request.tokens),
                request.num_prompt_tokens,
                request.params,
                request.seed,
                request.adapter,
            )
        )
        self._assign(plan, request, range(len(request.cache.blocks)))
        if request.admitted_at is None:
            request.admitted_at = self._clock()
            request.num_cached_tokens = min(request.computed, request.num_prompt_tokens)
            self.metrics.queue.observe(request.admitted_at - request.arrival)
        return True

    def resume_parked(self, plan: StepPlan) -> None:
        """Blocks are short: let those go on that hold theirs, so that some come free."""
        for request in sorted(self.parked, key=rank):
            if self.free_rows and not request.in_flight:
                self.start(plan, request)

    def make_room(self, plan: StepPlan, request: RequestState, num_tokens: int) -> bool:
        """Take blocks for a running request, preempting from the end of the line. False if it must wait."""
        needed = self.cache.blocks_for(num_tokens) - len(request.cache.blocks)
        while needed > self._available_to(request):
            victim = self._parked_victim(_BEST_LEVEL) or self._victim(request)
            if victim is None:
                return False
            self.preempt(victim)
            if victim is request:
                return False
        self._take_blocks(plan, request, num_tokens)
        return True

    def park(self, request: RequestState) -> None:
        """Send a request back to the queue with its blocks: nothing is lost, and it goes on where it was."""
        self._leave_row(request)
        if request.num_preemptions < MAX_PREEMPTIONS:
            self._promise(request, 0)
        self.parked.add(request)
        self.waiting.push(request, self._clock())

    def preempt(self, request: RequestState) -> None:
        """Take a request's blocks. Full ones keep their names, so most of its work is found again."""
        if request in self.parked:
            self.waiting.remove(request)
        else:
            self._leave_row(request)
        self._free_blocks(request)
        request.computed = 0
        request.num_preemptions += 1
        request.awaits_commit = False
        self.metrics.num_preemptions += 1
        self.waiting.push(request, self._clock())

    def _expected_total(self, request: RequestState) -> int:
        """Tokens to set blocks aside for: an estimate, or the most possible once it has been preempted too often."""
        most = request.max_total_tokens - 1  # the last is drawn and never run
        if request.num_preemptions >= MAX_PREEMPTIONS:
            return most
        return min(most, len(request.tokens) + int(self.lengths.mean_tokens) + 1)

    def _find_blocks(self, plan: StepPlan, request: RequestState, num_blocks: int) -> bool:
        """See that so many blocks are promised to nobody, if it takes the blocks of those that are to give way."""
        while num_blocks > self.num_unpromised_blocks:
            victim = self._parked_victim(request.level)
            if victim is None:
                victim = self.displaced_by(request, plan)
                if victim is None or victim.num_preemptions >= MAX_PREEMPTIONS:
                    return False
            self.preempt(victim)
        return True

    def _victim(self, request: RequestState) -> RequestState | None:
        """The last of the line that may still be preempted, `request` itself at worst."""
        for candidate in reversed(self.running):
            if candidate.num_preemptions < MAX_PREEMPTIONS:
                return candidate
            if candidate is request:
                break
        return None

    def _parked_victim(self, level: LevelKey) -> RequestState | None:
        """The worst of those that hold blocks without a row, at this level or below."""
        candidates = [
            request for request in self.parked if request.num_preemptions < MAX_PREEMPTIONS and request.level >= level
        ]
        return max(candidates, key=rank, default=None)

    def _available_to(self, request: RequestState) -> int:
        own = request.promised_blocks if request.num_preemptions >= MAX_PREEMPTIONS else 0
        return self.cache.pool.num_free - self.firmly_promised + own

    def _take_blocks(self, plan: StepPlan, request: RequestState, num_tokens: int) -> None:
        added = self.cache.grow(request.cache, num_tokens)
        self._promise(request, max(0, request.promised_blocks - len(added)))
        self._assign(plan, request, added)

    def _assign(self, plan: StepPlan, request: RequestState, indices: range) -> None:
        assert request.row is not None
        blocks = request.cache.blocks
        plan.block_assignments.extend(BlockAssignment(request.row, index, blocks[index]) for index in indices)

    def _promise(self, request: RequestState, num_blocks: int) -> None:
        change = num_blocks - request.promised_blocks
        request.promised_blocks = num_blocks
        if request.num_preemptions >= MAX_PREEMPTIONS:
            self.firmly_promised += change
        else:
            self.loosely_promised += change

    def _leave_row(self, request: RequestState) -> None:
        """Take a running request off its row. Safe while its last step runs: steps take effect in order."""
        assert request.row is not None
        self.running.remove(request)
        self.free_rows.append(request.row)
        request.row = None
        self.waiting.change_rows(request, -1)

    def _free_blocks(self, request: RequestState, *, forget: bool = False) -> None:
        self.parked.discard(request)
        self._promise(request, 0)
        self.cache.free(request.cache, forget=forget)


def rank(request: RequestState) -> tuple[LevelKey, float, int]:
    """Sorts running requests: the last is the first to give its blocks up."""
    return (request.level, request.arrival, request.number)
