"""How many log-probabilities one call may tell: with many answers, hundreds of megabytes were asked for in a line.

One answer alone may be as long as the context allows: it takes its time. A prompt's are there at once. Knows nothing of
HTTP.
"""

from collections.abc import Sequence

from penstock.errors import InvalidParameter
from penstock.request import SamplingParams
from penstock.server.answer import Prompt

MAX_CALL_LOGPROBS = 1 << 20


def check_answer_size(
    prompts: Sequence[Prompt],
    params: SamplingParams,
    *,
    num_choices: int,
    max_context_tokens: int,
    max_tokens_name: str = "max_tokens",
    logprobs_name: str = "logprobs",
) -> None:
    """Raise where echoed prompts, or several answers together with theirs, would tell too many log-probabilities."""
    num_answers = len(prompts) * num_choices
    if params.logprobs is None:
        return
    num_told = 0
    for prompt in prompts:
        room = max_context_tokens - len(prompt.token_ids)
        most_tokens = room if params.max_tokens is None else min(params.max_tokens, room)
        num_told += _num_echoed(prompt, params) + (most_tokens * (1 + params.logprobs) if num_answers > 1 else 0)
    if num_choices * num_told > MAX_CALL_LOGPROBS:
        if num_answers == 1:
            right = (
                f"the echoed prompt has {num_told} log-probabilities, and a call tells at most {MAX_CALL_LOGPROBS} of "
                f"prompts; lower {logprobs_name}, or send a shorter prompt"
            )
            raise InvalidParameter(logprobs_name, params.logprobs, right)
        param, value = ("n", num_choices) if num_choices > 1 else ("prompt", f"{num_answers} prompts")
        right = (
            f"{num_answers} answers can have {num_choices * num_told} log-probabilities, and a call at most "
            f"{MAX_CALL_LOGPROBS}; lower {param}, {max_tokens_name} or {logprobs_name}"
        )
        raise InvalidParameter(param, value, right)


def _num_echoed(prompt: Prompt, params: SamplingParams) -> int:
    return 0 if params.prompt_logprobs is None else len(prompt.token_ids) * (1 + params.prompt_logprobs)
