"""/v1/completions: texts or token ids in, their continuations out."""

from dataclasses import replace

from penstock.protocol.openai_completions import DEFAULT_MAX_TOKENS, Completion, CompletionRequest
from penstock.request import SamplingParams, Tier, check_answer_fits, prompt_names
from penstock.server.answer import Answer, Prompt
from penstock.server.answer_size import check_answer_size
from penstock.server.answering import answer_handler
from penstock.server.claim import claim_of
from penstock.server.completion_reply import CompletionReply
from penstock.server.context import ServerContext
from penstock.server.continuation import check_continuation, framed_params
from penstock.server.endpoint import Access, Endpoint
from penstock.server.generation import begin_answer, open_call, preparing
from penstock.server.prompt import fewest_tokens, likely_tokens, text_prompts
from penstock.telemetry import RequestRecord
from penstock.tenants import Caller


def endpoints(context: ServerContext) -> list[Endpoint]:
    return [
        Endpoint(
            method="POST",
            path="/v1/completions",
            handler=answer_handler(context, CompletionRequest, begin_completion),
            access=Access.CLIENT,
            summary="Continue texts or token ids",
            tag="OpenAI",
            takes=CompletionRequest,
            gives=Completion,
            streams=Completion,
        )
    ]


async def begin_completion(
    context: ServerContext,
    caller: Caller,
    record: RequestRecord,
    wanted: CompletionRequest,
    *,
    frames: str | None = None,
    tier: Tier = Tier.ONLINE,
) -> tuple[Answer, CompletionReply, bool]:
    """See `answering.Begin`."""
    info = await open_call(context, caller, record, wanted, kind="cmpl", num_prompts=len(wanted.prompt))
    params = _params(wanted)
    params.validate(info.vocab_size)
    terms = context.terms(wanted, caller, tier)
    num_answers, likely = wanted.num_choices * len(wanted.prompt), likely_tokens(wanted.prompt)
    limited = preparing(
        context,
        caller,
        record,
        params,
        terms,
        num_answers=num_answers,
        likely_input_tokens=likely,
        least_input_tokens=fewest_tokens(context.tokenizer, wanted.prompt) if caller.terms.limits.are_metered else 1,
    )
    async with limited:
        claim, with_answer = claim_of(caller, record, terms), not wanted.only_scores_prompt
        prompts = await text_prompts(context, wanted.prompt, info, claim, with_answer=with_answer)
        for name, prompt in zip(prompt_names(len(prompts)), prompts, strict=True):
            check_answer_fits(
                len(prompt.token_ids),
                wanted.max_tokens,
                info.max_context_tokens,
                min_tokens=params.min_tokens,
                prompt=name,
            )
        if wanted.echo and with_answer:
            prompts = [_with_unfinished(context, prompt) for prompt in prompts]
        check_answer_size(prompts, params, num_choices=wanted.num_choices, max_context_tokens=info.max_context_tokens)
        begun = await check_continuation(wanted, params, prompts, info, context.turns)
    framed = framed_params(frames, wanted, params)
    with_logprobs = wanted.logprobs is not None
    reply = CompletionReply(context.tokenizer, record.completion_id, wanted, begun, with_logprobs=with_logprobs)
    answer = await begin_answer(
        context,
        caller,
        record,
        prompts,
        framed or params,
        terms=terms,
        num_choices=wanted.num_choices,
        only_scores_prompt=wanted.only_scores_prompt,
        begun=begun,
    )
    return answer, reply, framed is not None


def _params(wanted: CompletionRequest) -> SamplingParams:
    # The default length ends with the context, where that comes first; one that was asked for must fit.
    max_tokens = DEFAULT_MAX_TOKENS if wanted.max_tokens is None else wanted.max_tokens
    return wanted.sampling_params(
        max_tokens=max(1, max_tokens) if wanted.only_scores_prompt else max_tokens,
        logprobs=wanted.logprobs,
        prompt_logprobs=wanted.logprobs if wanted.echo else None,
    )


def _with_unfinished(context: ServerContext, prompt: Prompt) -> Prompt:
    """Tell of a character that token ids begin and leave to the answer."""
    if prompt.text is not None:
        return prompt
    return replace(prompt, unfinished=context.tokenizer.unfinished_bytes(prompt.token_ids))
