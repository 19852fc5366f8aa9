"""How many tokens the next step should run: all that fit, or only what is needed to end as soon.

Looks at requests; changes nothing. Knows nothing of blocks. `ServingPace` is the one for requests that somebody waits
for; it is in a module of its own.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence

from penstock.engine.scheduler.request_state import RequestState

# A running request and how many of its tokens a step could run now.
Ready = tuple[RequestState, int]


class Pace(ABC):
    """Sizes steps."""

    may_pause = False  # whether `choose` ever leaves one out

    @abstractmethod
    def step_tokens(self, ready: Sequence[Ready], waiting: Iterable[RequestState]) -> int:
        """Return how many tokens the next step should run, one for each decoding request included."""

    def choose(self, ready: Sequence[Ready], waiting: Iterable[RequestState]) -> Sequence[Ready]:
        """Return those that run in the next step; the others pause. Asked while every waiting request could start."""
        return ready

    def step_seconds(self, ready: Sequence[Ready], waiting: Iterable[RequestState]) -> float | None:
        """Return how long the next step may take, None for as long as its tokens take."""
        return None

    def end_seconds(self, ready: Sequence[Ready], waiting: Iterable[RequestState]) -> float:
        """Return how long the next step may take, if that is longer, until a prompt ends."""
        return 0.0


class BatchPace(Pace):
    """For a batch of which only the end counts: prompts run beside answers, as late as they may.

    Decoding reads every weight for a few tokens, so prompt tokens beside it are cheap up to `knee_tokens`; a step of
    prompts alone would pay for itself. Beyond, a step pays for whole multiples of so many tokens, or nearly: so prompts
    wait until the next one is full. A prompt may be late by as many steps as its answer is shorter than the longest
    one under way, where both lengths are known. Where they are not, nothing is held back. An answer that would end
    before the longest one may pause as long: so prompts that cannot wait need no larger steps, and the last steps, for
    which no prompts are left, are as full as the others. Where weights are small it is the prompts' attention that
    costs each step something: then they run in every so many steps, not fewer than `least_prompt_tokens` together.
    """

    def __init__(self, knee_tokens: int, max_step_tokens: int, least_prompt_tokens: int = 0) -> None:
        self._knee_tokens = knee_tokens
        self._max_step_tokens = max_step_tokens
        self._least_prompt_tokens = least_prompt_tokens
        self._saved_tokens = 0  # of prompts, that the last steps could have run
        self.may_pause = least_prompt_tokens == 0

    def choose(self, ready: Sequence[Ready], waiting: Iterable[RequestState]) -> Sequence[Ready]:
        prompts = [request for request, remaining in ready if remaining > 1] + list(waiting)
        answers = [(_steps_left(request), request.number) for request, remaining in ready if remaining == 1]
        if not prompts or not answers or min(answers)[0] == 0:
            return ready
        longest = max(answers)[0]
        rate = _urgent_tokens(prompts, longest)
        num_pausing = len(answers) + rate - self._knee_tokens
        if num_pausing <= 0 or rate >= self._knee_tokens:
            return ready
        # Those that would end first have the most time to spare. The longest one never pauses: so all end with it.
        paused = {number for steps, number in sorted(answers)[:num_pausing] if steps < longest - 1}
        return [item for item in ready if item[0].number not in paused]

    def step_tokens(self, ready: Sequence[Ready], waiting: Iterable[RequestState]) -> int:
        prompts: list[RequestState] = []
        longest = num_decoding = 0
        for request, remaining in ready:
            if remaining > 1:
                prompts.append(request)
            else:
                num_decoding += 1
                longest = max(longest, _steps_left(request))
        prompts.extend(waiting)
        if not prompts or longest == 0:
            self._saved_tokens = 0
            return self._max_step_tokens if num_decoding else self._first_tokens(prompts)
        self._saved_tokens += max(self._knee_tokens - num_decoding, _urgent_tokens(prompts, longest))
        return num_decoding + self._take_saved(num_decoding, sum([request.remaining for request in prompts]))

    def _first_tokens(self, prompts: Sequence[RequestState]) -> int:
        """Return how many tokens of prompts run with nothing beside them: those that cannot wait, where it is known."""
        longest = max([_steps_left(request) for request in prompts], default=0)
        if not self.may_pause or longest == 0:
            return self._max_step_tokens
        multiples = -(-_urgent_tokens(prompts, longest) // self._knee_tokens)
        return min(self._max_step_tokens, multiples * self._knee_tokens)

    def _take_saved(self, num_decoding: int, num_prompt_tokens: int) -> int:
        """Return how many of the saved tokens run now, beside so many that decode."""
        saved = self._saved_tokens
        taken = min(saved, self._max_step_tokens - num_decoding)
        if saved < num_prompt_tokens:
            taken -= (num_decoding + taken) % self._knee_tokens
            if taken < max(self._least_prompt_tokens, 1):
                return 0
        self._saved_tokens = min(saved - taken, self._knee_tokens)
        return taken


def _urgent_tokens(prompts: Sequence[RequestState], longest: int) -> int:
    """How many tokens of prompts each step must run, so that no answer ends after the longest one under way."""
    tokens_so_far, rate = 0, 0.0
    for request in prompts:
        tokens_so_far += request.remaining
        # A length that is not known may be any: such a request is not made to wait.
        steps = _steps_left(request) or longest
        rate = max(rate, tokens_so_far / max(1, longest - steps))
    return int(rate) + 1


def _steps_left(request: RequestState) -> int:
    """Tokens that the request will surely still draw; 0 if an end token or a stop string may cut it short."""
    if request.stop_ids or request.params.stop:
        return 0
    return request.max_total_tokens - request.known
