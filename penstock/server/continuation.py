"""Answers that move between servers: framed so that another can go on with them, or gone on with here.

What `continue_from` gives a caller, token ids as a prompt give as well, so it needs no permission of its own. Knows
nothing of gateways or HTTP.
"""

import msgspec

from penstock.engine.messages import EngineInfo
from penstock.errors import ContextTooLong, InvalidParameter
from penstock.protocol.generation import GenerationRequest
from penstock.request import SamplingParams
from penstock.server.answer import Prompt


def framed_params(
    asked: str | None, wanted: GenerationRequest, params: SamplingParams, num_answers: int
) -> SamplingParams | None:
    """Return the parameters of a framed stream, or None where none was asked for or it cannot be framed.

    `asked` is the seed that the gateway wants where the caller named none: with it another server draws the same.
    """
    if asked is None or not _can_move(wanted, params, num_answers):
        return None
    if not (asked.isascii() and asked.isdigit() and len(asked) <= 18):
        return None
    return msgspec.structs.replace(params, seed=int(asked)) if params.seed is None else params


def check_continuation(
    wanted: GenerationRequest, params: SamplingParams, prompts: list[Prompt], info: EngineInfo
) -> list[int]:
    """Return the tokens to go on behind; none for an answer that begins here. Raises RequestError."""
    if wanted.continue_from is None:
        return []
    token_ids = wanted.continue_from.token_ids
    if not _can_move(wanted, params, wanted.num_choices * len(prompts)):
        given = wanted.continue_from.model_dump(exclude_unset=True)
        raise InvalidParameter("continue_from", given, "give it only with stream, one choice and no logprobs")
    wrong = next((item for item in token_ids if not 0 <= item < info.vocab_size), None)
    if wrong is not None:
        raise InvalidParameter("continue_from", wrong, f"give token ids from 0 to {info.vocab_size - 1}")
    if params.max_tokens is not None and len(token_ids) >= params.max_tokens:
        raise InvalidParameter("continue_from", len(token_ids), "give fewer tokens than max_tokens")
    total = len(prompts[0].token_ids) + len(token_ids)
    if total >= info.max_context_tokens:
        raise ContextTooLong(total, info.max_context_tokens, what="prompt plus continue_from", param="continue_from")
    return token_ids


def _can_move(wanted: GenerationRequest, params: SamplingParams, num_answers: int) -> bool:
    return wanted.wants_stream and num_answers == 1 and params.logprobs is None
