"""How many log-probabilities one call may tell: with many answers, hundreds of megabytes were asked for in a line.

One answer alone may be as long as the context allows. Knows nothing of HTTP.
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
    """Raise where several answers together would tell too many log-probabilities, those of echoed prompts included."""
    num_answers = len(prompts) * num_choices
    if params.logprobs is None or num_answers == 1:
        return
    num_told = 0
    for prompt in prompts:
        room = max_context_tokens - len(prompt.token_ids)
        most_tokens = room if params.max_tokens is None else min(params.max_tokens, room)
        num_told += most_tokens * (1 + params.logprobs) + (len(prompt.token_ids) if params.prompt_logprobs else 0)
    if num_choices * num_told > MAX_CALL_LOGPROBS:
        param, value = ("n", num_choices) if num_choices > 1 else ("prompt", f"{num_answers} prompts")
        right = (
            f"{num_answers} answers can have {num_choices * num_told} log-probabilities, and a call at most "
            f"{MAX_CALL_LOGPROBS}; lower {param}, {max_tokens_name} or {logprobs_name}"
        )
        raise InvalidParameter(param, value, right)
