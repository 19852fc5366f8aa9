"""Starts the engine requests of one API call.

Knows nothing of the API that the call came through.
"""

import msgspec

from penstock.request import SamplingParams
from penstock.server.answer import Answer, Choice, Prompt
from penstock.server.context import ServerContext
from penstock.server.text_assembly import TextAssembler
from penstock.telemetry import RequestRecord


def begin_answer(
    context: ServerContext,
    record: RequestRecord,
    prompts: list[Prompt],
    params: SamplingParams,
    *,
    num_choices: int,
    only_scores_prompt: bool = False,
) -> Answer:
    """Submit `num_choices` requests for each prompt and return their answer, which the caller must deliver or abort."""
    choices: list[Choice] = []
    try:
        for prompt in prompts:
            for sample in range(num_choices):
                index = len(choices)
                own = msgspec.structs.replace(params, seed=_seed(params.seed, sample))
                stream = context.engine.submit(
                    prompt=prompt.token_ids,
                    params=own,
                    request_id=f"{record.completion_id}-{index}",
                    arrival=record.arrival,
                    tenant=record.tenant,
                )
                assembler = TextAssembler(context.tokenizer, own)
                choices.append(Choice(index, prompt, stream, assembler, only_scores_prompt=only_scores_prompt))
    except BaseException:
        for choice in choices:
            choice.abort()
        raise
    record.num_choices = len(choices)
    return Answer(prompts, choices)


def _seed(seed: int | None, sample: int) -> int | None:
    """Give each choice its own seed, within 64 bits."""
    return None if seed is None else (seed + sample + 2**63) % 2**64 - 2**63
