"""Starts the engine requests of one API call, within its caller's limits.

Knows nothing of the API that the call came through.
"""

import asyncio
import uuid
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager

import msgspec

from penstock.engine.messages import EngineInfo
from penstock.engine.tokenizer import StopMatcher
from penstock.errors import InvalidParameter, PenstockError
from penstock.metering.meter import Charge
from penstock.protocol.generation import GenerationRequest
from penstock.request import FinishReason, SamplingParams, Tier
from penstock.server.answer import Answer, Choice, Prompt, PromptScores
from penstock.server.claim import claim_of
from penstock.server.context import ServerContext
from penstock.server.continuation import Begun
from penstock.server.loop_turns import ENTRIES_A_PASS
from penstock.server.prompt import check_num_answers
from penstock.server.terms import Terms
from penstock.server.text_assembly import TextAssembler
from penstock.store.quotas import Need
from penstock.telemetry import RequestRecord
from penstock.tenants import Caller

# What a request to the engine costs, in entries of `LoopTurns`, and how many tokens of its prompt cost one more.
_SUBMIT_ENTRIES, _TOKENS_AN_ENTRY = 16, 128
_REPLAYED_TOKENS = 128  # in one turn


async def open_call(
    context: ServerContext,
    caller: Caller,
    record: RequestRecord,
    wanted: GenerationRequest,
    *,
    kind: str,
    num_prompts: int = 1,
) -> EngineInfo:
    """Check a call as a whole and note it in its record; return the engine as this caller may use it.

    Raises RequestError or EngineUnavailable.
    """
    context.check_model(wanted.model, caller)
    record.model, record.stream = wanted.model, wanted.wants_stream
    record.completion_id = f"{kind}-{uuid.uuid4().hex}"
    wanted.check_combinations()
    info = await context.meet_engine(caller)
    check_num_answers(num_prompts, wanted.num_choices, info)
    return info


async def check_limits(context: ServerContext, caller: Caller) -> None:
    """Raise where a limit of the caller's is used up, whatever the call may ask for."""
    least = Need(input_tokens=1, most_output_tokens=1, output_is_stated=True)
    await context.tenancy.meter.look(caller, context.config.served_name, least)


def preparing(
    context: ServerContext,
    caller: Caller,
    record: RequestRecord,
    params: SamplingParams,
    terms: Terms,
    *,
    num_answers: int,
    likely_input_tokens: int,
    least_input_tokens: int = 1,
) -> AbstractAsyncContextManager[None]:
    """Where a call's prompts are made: whoever is over a limit already does not get there."""
    longest = context.engine_info(caller).max_context_tokens
    most = longest if params.max_tokens is None else params.max_tokens
    least = Need(
        input_tokens=least_input_tokens,
        most_output_tokens=num_answers * most,
        output_is_stated=params.max_tokens is not None,
        least_output_tokens=num_answers * min(params.min_tokens, most),
        num_answers=num_answers,
        tier=terms.tier,
    )
    meter = context.tenancy.meter
    return meter.preparing(caller, record.model, least, likely_input_tokens=likely_input_tokens)


async def begin_answer(
    context: ServerContext,
    caller: Caller,
    record: RequestRecord,
    prompts: list[Prompt],
    params: SamplingParams,
    *,
    terms: Terms,
    num_choices: int,
    only_scores_prompt: bool = False,
    begun: Begun | None = None,
) -> Answer:
    """Submit `num_choices` requests for each prompt and return their answer, which the caller must deliver or abort.

    `begun` is what another server made of the answer. Raises LimitReached or LimitTooSmall, DeadlineExceeded or
    Overloaded where admission took too long, and InvalidParameter where a choice of it was complete, and then nothing
    was submitted.
    """
    each = [prompt for prompt in prompts for _ in range(num_choices)]
    assemblers = await _assemblers(context, params, each, begun)
    most_tokens = [_most_tokens(context, caller, prompt, params) for prompt in prompts]
    need = _need(prompts, params, most_tokens, num_choices, terms.tier)
    # The engine knows the end of its own context, but not of a caller's.
    ends_itself = params.max_tokens is None and caller.terms.limits.longest_context is None
    charge = await _admit(context, caller, record, terms, need)
    choices: list[Choice] = []
    first: str | None = None  # the request that stands for all
    num_ended = len(begun.ended) if begun is not None else 0
    try:
        for prompt, most in zip(prompts, most_tokens, strict=True):
            max_tokens = None if ends_itself else most
            num_public_tokens = context.shared_prefixes.count_tokens(prompt.token_ids)
            scores = PromptScores() if params.prompt_logprobs is not None else None
            for sample in range(num_choices):
                index = len(choices)
                assembler = assemblers[index]
                so_far = begun.token_ids[index] if begun is not None else []
                if begun is not None and index in begun.ended:
                    choices.append(_ended_choice(index, prompt, assembler, most))
                    continue
                # A prompt's scores are the same for all its choices: the first that shows them has them found.
                shown = None if so_far else scores
                finds = shown is not None and shown.is_found_by(index)
                own = msgspec.structs.replace(
                    params,
                    seed=_seed(params.seed, sample),
                    max_tokens=max_tokens,
                    prompt_logprobs=params.prompt_logprobs if finds else None,
                )
                if index or terms.tier is Tier.BATCH:
                    await _take_turn(context, len(prompt.token_ids) + len(so_far))
                request_id = f"{record.completion_id}-{index}"
                stream = context.engine.submit(
                    prompt=prompt.token_ids + so_far if so_far else prompt.token_ids,
                    params=own,
                    request_id=request_id,
                    arrival=record.arrival,
                    tenant=caller.tenant,
                    num_public_tokens=num_public_tokens,
                    weight=terms.weight,
                    priority=terms.priority,
                    targets=terms.targets,
                    target_origins=terms.target_origins,
                    deadline_seconds=terms.deadline_seconds,
                    best_effort=terms.best_effort,
                    has_moved=terms.has_moved,
                    tier=terms.tier,
                    num_answer_tokens=len(so_far),
                    call_prompts=_call_prompts(prompts, num_choices, begun) if first is None else None,
                    call_answers=need.num_answers - num_ended if first is None else 1,
                    follows=first,
                )
                first = first or request_id
                choices.append(Choice(index, prompt, stream, assembler, shown, only_scores_prompt=only_scores_prompt))
    except BaseException as error:
        _take_back(context, choices, first)
        await _close_charge(charge, terms, record, error)
        raise
    record.num_choices = len(choices)
    return Answer(prompts, choices, charge, context.turns)


def _need(
    prompts: Sequence[Prompt], params: SamplingParams, most_tokens: Sequence[int], num_choices: int, tier: Tier
) -> Need:
    """Return what a call reserves; `most_tokens` is how long an answer to each prompt may become."""
    most, least = sum(most_tokens), sum(params.fewest_tokens(most) for most in most_tokens)
    return Need(
        input_tokens=sum(len(prompt.token_ids) for prompt in prompts),
        most_output_tokens=num_choices * most,
        output_is_stated=params.max_tokens is not None or least == most,
        least_output_tokens=num_choices * least,
        num_answers=num_choices * len(prompts),
        tier=tier,
    )


def _ended_choice(index: int, prompt: Prompt, assembler: TextAssembler, most_tokens: int) -> Choice:
    """Return a choice that another server made to its end."""
    finish = FinishReason.LENGTH if assembler.num_tokens == most_tokens else FinishReason.STOP
    return Choice(index, prompt, None, assembler, only_scores_prompt=False, finish=finish)


async def _take_turn(context: ServerContext, num_tokens: int) -> None:
    """Wait for a turn to send a request with so many tokens to the engine."""
    await context.turns.take(min(_SUBMIT_ENTRIES + num_tokens // _TOKENS_AN_ENTRY, ENTRIES_A_PASS))


async def _admit(context: ServerContext, caller: Caller, record: RequestRecord, terms: Terms, need: Need) -> Charge:
    """Have a call admitted in the time that it has."""
    claim, meter = claim_of(caller, record, terms), context.tenancy.meter
    claim.check()
    admission = asyncio.create_task(meter.admit(caller, record.model, need, deadline=claim.deadline))
    try:
        return await claim.wait(admission)
    except BaseException:
        if not admission.done():
            admission.add_done_callback(_withdraw)
        raise


def _withdraw(admission: "asyncio.Task[Charge]") -> None:
    """Give back what nobody waited for any more."""
    if not admission.cancelled() and admission.exception() is None:
        admission.result().withdraw()


async def _close_charge(charge: Charge, terms: Terms, record: RequestRecord, error: BaseException) -> None:
    """Settle what was reserved for an answer that did not begin."""
    if terms.tier is Tier.BATCH:
        charge.withdraw()  # it will be tried again
    else:
        record.error_code = error.code if isinstance(error, PenstockError) else PenstockError.code
        await charge.closed(record)


def _take_back(context: ServerContext, choices: list[Choice], first: str | None) -> None:
    """Stop the requests of a call that cannot be sent as a whole."""
    for choice in choices:
        choice.abort()
    if first is not None:
        context.engine.leave_call(first)


def _call_prompts(prompts: list[Prompt], num_choices: int, begun: Begun | None) -> list[int] | None:
    """What the first request of a call tells the engine of all; None where there is no other."""
    if len(prompts) * num_choices == 1:
        return None
    lengths = [len(prompt.token_ids) for prompt in prompts]
    if begun is None:
        return lengths
    # Each answer's beginning is its own: it runs as another prompt.
    return [
        lengths[index // num_choices] + len(token_ids)
        for index, token_ids in enumerate(begun.token_ids)
        if index not in begun.ended
    ]


async def _assemblers(
    context: ServerContext, params: SamplingParams, prompts: Sequence[Prompt], begun: Begun | None
) -> list[TextAssembler]:
    """Return each choice's assembler, behind what another server made of it. Raises InvalidParameter.

    `prompts` are those of the choices, one for each.
    """
    matcher = StopMatcher(list(params.stop)) if params.stop else None
    assemblers = [
        TextAssembler(
            context.tokenizer, params, None if matcher is None else matcher.fresh(), unfinished=prompt.unfinished
        )
        for prompt in prompts
    ]
    if begun is None:
        return assemblers
    num_replayed = 0
    for index, (assembler, token_ids) in enumerate(zip(assemblers, begun.token_ids, strict=True)):
        for start in range(0, len(token_ids), _REPLAYED_TOKENS):
            if num_replayed >= _REPLAYED_TOKENS:
                num_replayed = 0
                await context.turns.take(ENTRIES_A_PASS)
            tokens = token_ids[start : start + _REPLAYED_TOKENS]
            num_replayed += len(tokens)
            assembler.replay(tokens)
            if assembler.finish is not None:
                break
        if assembler.finish is not None and index not in begun.ended:
            raise InvalidParameter("continue_from", len(token_ids), "these tokens already hold a stop text")
    return assemblers


def _most_tokens(context: ServerContext, caller: Caller, prompt: Prompt, params: SamplingParams) -> int:
    """Return how long one answer may become: as asked for, or to the end of the caller's context.

    Behind a prompt that is scored alone, and may fill the context, a token is drawn all the same, and dropped.
    """
    room = max(1, context.engine_info(caller).max_context_tokens - len(prompt.token_ids))
    return room if params.max_tokens is None else min(params.max_tokens, room)


def _seed(seed: int | None, sample: int) -> int | None:
    """Give each choice its own seed, within 64 bits."""
    return None if seed is None else (seed + sample + 2**63) % 2**64 - 2**63
