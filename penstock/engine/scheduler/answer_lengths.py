"""How long answers are, and how many of them end only where they must: learnt from those that ended.

Knows nothing of steps, blocks or time.
"""

from penstock.engine.scheduler.request_state import RequestState

_LEARNING_RATE = 0.05


class AnswerLengths:
    """What the answers that ended tell of those that run."""

    def __init__(self, first_guess_tokens: float) -> None:
        self.mean_tokens = first_guess_tokens
        self._num_at_limit = 0.0  # recent answers that might have stopped and ran to their max_tokens
        self._num_stopped = 0.0

    def note(self, request: RequestState, *, stopped: bool) -> None:
        """An answer ended by itself (`stopped`) or at its limit."""
        self.mean_tokens += _LEARNING_RATE * (request.num_output_tokens - self.mean_tokens)
        if request.may_stop and request.params.max_tokens is not None:
            self._num_at_limit += _LEARNING_RATE * (float(not stopped) - self._num_at_limit)
            self._num_stopped += _LEARNING_RATE * (float(stopped) - self._num_stopped)

    def most_left(self, request: RequestState) -> int:
        """How many tokens a request may still draw."""
        return max(1, request.max_total_tokens - request.known)

    def chance_to_stop(self, request: RequestState) -> float:
        """How likely a request is to stop at its next token, before its limit.

        It is as likely at any token: an answer that outlived the mean has shown that it is none of the short ones.
        """
        if not request.may_stop:
            return 0.0
        chance = 1.0 / max(1.0, self.mean_tokens)
        return chance if request.params.max_tokens is None else chance * self._stopping_part

    def expected_left(self, request: RequestState) -> float:
        """How many tokens a request will still draw, as far as can be foreseen."""
        chance, most = self.chance_to_stop(request), self.most_left(request)
        return min(1.0 / chance, most) if chance else float(most)

    @property
    def _stopping_part(self) -> float:
        """Of answers with a max_tokens, those that do not need it. None of them, as far as is known at first."""
        return self._num_stopped / max(self._num_stopped + self._num_at_limit, 1e-9)
