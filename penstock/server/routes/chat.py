"""/v1/chat/completions: messages in, the assistant's turn out."""

from penstock.protocol.openai_chat import ChatChunk, ChatCompletion, ChatRequest
from penstock.request import Tier, check_answer_fits
from penstock.server.answer import Answer
from penstock.server.answer_size import check_answer_size
from penstock.server.answering import answer_handler
from penstock.server.chat_reply import ChatReply
from penstock.server.claim import claim_of
from penstock.server.context import ServerContext
from penstock.server.continuation import check_continuation, framed_params
from penstock.server.endpoint import Access, Endpoint
from penstock.server.generation import begin_answer, open_call, preparing
from penstock.server.prompt import chat_prompt, check_prompt, likely_tokens
from penstock.telemetry import RequestRecord
from penstock.tenants import Caller


def endpoints(context: ServerContext) -> list[Endpoint]:
    return [
        Endpoint(
            method="POST",
            path="/v1/chat/completions",
            handler=answer_handler(context, ChatRequest, begin_chat),
            access=Access.CLIENT,
            summary="Continue a conversation",
            tag="OpenAI",
            takes=ChatRequest,
            gives=ChatCompletion,
            streams=ChatChunk,
        )
    ]


async def begin_chat(
    context: ServerContext,
    caller: Caller,
    record: RequestRecord,
    chat: ChatRequest,
    *,
    frames: str | None = None,
    tier: Tier = Tier.ONLINE,
) -> tuple[Answer, ChatReply, bool]:
    """See `answering.Begin`."""
    info = await open_call(context, caller, record, chat, kind="chatcmpl")
    max_tokens, num_logprobs = chat.answer_limit(), chat.num_logprobs()
    params = chat.sampling_params(max_tokens=max_tokens, logprobs=num_logprobs)
    params.validate(info.vocab_size)
    terms = context.terms(chat, caller, tier)
    likely = likely_tokens(chat.messages)
    limited = preparing(
        context, caller, record, params, terms, num_answers=chat.num_choices, likely_input_tokens=likely
    )
    async with limited:
        prompt = await chat_prompt(context, chat.messages, info, claim_of(caller, record, terms))
        check_prompt(prompt, info, param="messages")
        limit_name = "max_tokens" if chat.max_completion_tokens is None else "max_completion_tokens"
        check_answer_fits(
            len(prompt.token_ids),
            max_tokens,
            info.max_context_tokens,
            min_tokens=params.min_tokens,
            param=limit_name,
        )
        check_answer_size(
            [prompt],
            params,
            num_choices=chat.num_choices,
            max_context_tokens=info.max_context_tokens,
            max_tokens_name=limit_name,
            logprobs_name="top_logprobs",
        )
        begun = await check_continuation(chat, params, [prompt], info, context.turns)
    framed = framed_params(frames, chat, params)
    with_logprobs = num_logprobs is not None
    reply = ChatReply(context.tokenizer, record.completion_id, chat, begun, with_logprobs=with_logprobs)
    answer = await begin_answer(
        context,
        caller,
        record,
        [prompt],
        framed or params,
        terms=terms,
        num_choices=chat.num_choices,
        begun=begun,
    )
    return answer, reply, framed is not None
