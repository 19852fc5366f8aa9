"""Answers that move between servers: framed so that another can go on with them, or gone on with here.

What `continue_from` gives a caller, token ids as a prompt give as well, so it needs no permission of its own. Knows
nothing of gateways or HTTP.
"""

from dataclasses import dataclass

import msgspec

from penstock.engine.messages import EngineInfo
from penstock.errors import ContextTooLong, InvalidParameter
from penstock.protocol.generation import GenerationRequest
from penstock.request import SamplingParams
from penstock.server.answer import Prompt
from penstock.server.loop_turns import ENTRIES_A_PASS, LoopTurns

_TOKENS_AN_ENTRY = 128  # of `LoopTurns`: they are only compared


@dataclass(frozen=True, slots=True)
class Begun:
    """What another server made of an answer: the tokens of each choice, and which of those have ended."""

    token_ids: list[list[int]]
    ended: frozenset[int]

    @property
    def indices(self) -> set[int]:
        """The choices of which anything was sent."""
        return {index for index, tokens in enumerate(self.token_ids) if tokens} | self.ended


def framed_params(asked: str | None, wanted: GenerationRequest, params: SamplingParams) -> SamplingParams | None:
    """Return the parameters of a framed stream, or None where none was asked for.

    `asked` is the seed that the gateway wants where the caller named none: with it another server draws the same.
    """
    if asked is None or not wanted.wants_stream:
        return None
    if not (asked.isascii() and asked.isdigit() and len(asked) <= 18):
        return None
    return msgspec.structs.replace(params, seed=int(asked)) if params.seed is None else params


async def check_continuation(
    wanted: GenerationRequest, params: SamplingParams, prompts: list[Prompt], info: EngineInfo, turns: LoopTurns
) -> Begun | None:
    """Return what to go on behind; None for an answer that begins here. Raises RequestError.

    There may be a million tokens in all, so they are looked at in turns.
    """
    given = wanted.continue_from
    if given is None:
        return None
    num_choices = wanted.num_choices * len(prompts)
    if not wanted.wants_stream:
        raise InvalidParameter("continue_from", f"{len(given.token_ids)} choices", "give it only with stream")
    ended = frozenset(given.ended or ())
    if len(given.token_ids) > num_choices or not ended <= set(range(num_choices)):
        raise InvalidParameter("continue_from", len(given.token_ids), f"give no more than the {num_choices} choices")
    if len(ended) == num_choices:
        raise InvalidParameter("continue_from", sorted(ended), "one choice at least must not have ended")
    for index, token_ids in enumerate(given.token_ids):
        await turns.take(min(1 + len(token_ids) // _TOKENS_AN_ENTRY, ENTRIES_A_PASS))
        prompt = prompts[index // wanted.num_choices]
        _check_choice(token_ids, index in ended, prompt, params, info)
    missing = num_choices - len(given.token_ids)
    return Begun(given.token_ids + [[]] * missing, ended)


def _check_choice(
    token_ids: list[int], has_ended: bool, prompt: Prompt, params: SamplingParams, info: EngineInfo
) -> None:
    # The least and the largest are found much sooner than each is compared.
    wrong = [item for item in (min(token_ids, default=0), max(token_ids, default=0)) if not 0 <= item < info.vocab_size]
    if wrong:
        raise InvalidParameter("continue_from", wrong[0], f"give token ids from 0 to {info.vocab_size - 1}")
    if params.max_tokens is not None and len(token_ids) >= params.max_tokens + has_ended:
        raise InvalidParameter("continue_from", len(token_ids), "give fewer tokens than max_tokens")
    total = len(prompt.token_ids) + len(token_ids)
    if total >= info.max_context_tokens + has_ended:
        raise ContextTooLong(total, info.max_context_tokens, what="prompt plus continue_from", param="continue_from")
