"""How many tokens of each prompt the next step runs, best first, and when a tenant's prompt has a step to itself.

A prompt of a tenant that asks for less than others runs without their prompts, so that its first token waits for no
more than its own time. It is one step more for the others, and costs them what every step takes. They lose no more than
a small part of the device's time by it; where that is used up, their prompts fill the step. A prompt for which all
others pause runs whole where it ends sooner so, and they go on sooner too. Knows nothing of blocks.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence

from penstock.engine.scheduler.cost_model import CostModel, StepCosts, StepShape, with_prompt
from penstock.engine.scheduler.pace import Ready
from penstock.engine.scheduler.request_state import RequestState
from penstock.engine.scheduler.serving_pace import LEAST_PROMPT_TOKENS, ServingPace

# A prompt of which so small a part of the chunk would be left over runs to its end: its first token is a step sooner.
REST_PART = 1 / 32
# A prompt that others leave a step to may run whole if it is no longer than so many of its chunks.
_WHOLE_CHUNKS = 3
# Others' prompts may lengthen a step that is left to one tenant by this part: up to a knee tokens cost almost nothing.
_GUEST_PART = 0.05
# Of the device's time, what may be lost by leaving steps to one tenant; and so much of it at once.
_COURTESY_PART = 0.03
_MOST_COURTESY_SECONDS = 0.1


class PromptChunks:
    """Divides a step's time among prompts. Keeps account of what leaving steps to one tenant has cost."""

    def __init__(
        self, pace: ServingPace, model: CostModel, clock: Callable[[], float], step_sizes: Sequence[int] = ()
    ) -> None:
        self._pace = pace
        self._step_sizes = step_sizes
        self._model = model
        self._clock = clock
        self._courtesy_seconds = _MOST_COURTESY_SECONDS
        self._counted_at = clock()

    def sizes(
        self,
        prompts: Sequence[Ready],
        shape: StepShape,
        seconds: float,
        room: int,
        end_seconds: float = 0.0,
        *,
        whole_room: int = 0,
    ) -> dict[int, int]:
        """Return how many tokens of each prompt, by the request's number, fit beside `shape` into a step so long.

        It may take `end_seconds` until a prompt ends: behind that one it holds only what it has room for anyway. The
        first may run to its end with up to `whole_room` of them, where its end is sooner so.
        """
        sizes: dict[int, int] = {}
        costs = self._model.costs
        patient_seconds = min(seconds, self._pace.patient_seconds(shape))
        guest_seconds: float | None = None
        has_end = False
        for request, remaining in prompts:
            most = min(remaining, max(0, room))
            longest = patient_seconds if self._pace.can_wait(request, remaining) else max(seconds, end_seconds)
            if has_end and end_seconds > seconds:
                if costs.seconds(shape) <= seconds:
                    longest = min(longest, seconds)
                else:
                    most = min(most, self._spare_tokens(shape.num_tokens, 0))
            if _gives_way(request, prompts[0][0]):
                if guest_seconds is None:
                    guest_seconds = self._guest_seconds(costs, shape, seconds)
                longest = min(longest, guest_seconds)
                if longest < seconds:
                    most = min(most, self._spare_tokens(shape.num_tokens, most))
            fitting = costs.prompt_tokens_within(longest, shape, request.computed, most)
            if not sizes:
                fitting = max(fitting, min(most, LEAST_PROMPT_TOKENS))
                if fitting < remaining <= whole_room and _is_sooner_whole(costs, shape, request, remaining, fitting):
                    most = fitting = remaining
            if most - fitting <= fitting * REST_PART:
                fitting = most
            sizes[request.number] = fitting
            has_end = has_end or fitting == remaining
            room -= fitting
            shape = with_prompt(shape, fitting, request.computed)
        self._fit_step_size(sizes, prompts, shape.num_tokens)
        return sizes

    def _fit_step_size(self, sizes: dict[int, int], prompts: Sequence[Ready], num_tokens: int) -> None:
        """Where a prompt is cut: end it if the runner would fill the step up anyway, else leave it the size below."""
        above = bisect_right(self._step_sizes, num_tokens)
        if above == 0 or above == len(self._step_sizes):
            return
        surplus, spare = num_tokens - self._step_sizes[above - 1], self._step_sizes[above] - num_tokens
        for request, remaining in reversed(prompts):
            size = sizes[request.number]
            if not 0 < size < remaining:
                continue
            if surplus and remaining - size <= spare:
                sizes[request.number] = remaining
                return
            if size >= LEAST_PROMPT_TOKENS + surplus:
                sizes[request.number] = size - surplus
                return

    def _spare_tokens(self, num_tokens: int, unknown: int) -> int:
        """How many more the runner takes without running, and paying for, a larger step, if it has sizes so large."""
        index = bisect_left(self._step_sizes, num_tokens)
        return self._step_sizes[index] - num_tokens if index < len(self._step_sizes) else unknown

    def _guest_seconds(self, costs: StepCosts, shape: StepShape, seconds: float) -> float:
        """How long the prompts of others may make a step that has this shape without them."""
        alone = costs.seconds(shape)
        longest = alone * (1.0 + _GUEST_PART)
        if longest >= seconds:
            return seconds
        now = self._clock()
        earned = (now - self._counted_at) * _COURTESY_PART
        self._courtesy_seconds = min(_MOST_COURTESY_SECONDS, self._courtesy_seconds + earned)
        self._counted_at = now
        lost = costs.seconds(with_prompt(StepShape(), 1, 0))
        if lost > self._courtesy_seconds:
            return seconds
        self._courtesy_seconds -= lost
        return longest


def _gives_way(request: RequestState, first: RequestState) -> bool:
    """Whether a prompt is of a tenant that asks for more than the first one's, and no time was promised to it."""
    is_promised = request.targets.ttft_seconds is not None or request.deadline_seconds is not None
    is_promised = is_promised and not request.best_effort
    account = first.account
    return not is_promised and request.account.exceeds(account.demand, account.num_open / account.weight)


def _is_sooner_whole(costs: StepCosts, shape: StepShape, request: RequestState, remaining: int, chunk: int) -> bool:
    """Whether one step for all that is left of a prompt takes less than a few steps of a chunk each."""
    if remaining > chunk * _WHOLE_CHUNKS:
        return False
    starts = range(0, remaining, chunk)
    pieces = [with_prompt(shape, min(chunk, remaining - start), request.computed + start) for start in starts]
    whole = with_prompt(shape, remaining, request.computed)
    return costs.seconds(whole) < sum([costs.seconds(piece) for piece in pieces])
