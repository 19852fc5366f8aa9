"""/tokenize and /detokenize: what a text costs, and what tokens say."""

from collections.abc import Callable

from starlette.requests import Request
from starlette.responses import Response

from penstock.engine.messages import EngineInfo
from penstock.errors import ContextTooLong, InvalidParameter, NotPermitted
from penstock.protocol.tokenize import DetokenizeRequest, DetokenizeResponse, TokenizeRequest, TokenizeResponse
from penstock.server.answer import Prompt
from penstock.server.body import read_request
from penstock.server.claim import Claim
from penstock.server.context import ServerContext
from penstock.server.endpoint import Access, Endpoint, caller_of, record_of
from penstock.server.json_response import json_response
from penstock.server.prompt import SHORTER, chat_prompt, text_prompt

_FEW_TOKENS = 1024  # cheaper to write out at once than to hand to a thread
_TOKEN_CHARACTERS = 4


def endpoints(context: ServerContext) -> list[Endpoint]:
    def check_model(request: Request, model: str | None) -> None:
        caller = caller_of(request)
        if model is not None:
            context.check_model(model, caller)
        elif not context.models_for(caller):
            raise NotPermitted("your key may use no model of this server; ask who runs it")
        record_of(request).model = model or context.config.served_name

    async def in_turn(claim: Claim, num_tokens: int, response: Callable[[], Response]) -> Response:
        if num_tokens <= _FEW_TOKENS:
            return response()
        return await context.texts.run(claim, num_tokens * _TOKEN_CHARACTERS, response)

    async def tokenize(request: Request) -> Response:
        wanted = await read_request(
            request, TokenizeRequest, context.config.max_body_bytes, context.texts, max_entries=context.max_entries
        )
        check_model(request, wanted.model)
        wanted.check_combinations()
        info, claim = await context.meet_engine(caller_of(request)), Claim(caller_of(request).tenant)
        token_ids = (await _prompt(context, wanted, info, claim)).token_ids
        if len(token_ids) > info.max_context_tokens:
            param = "prompt" if wanted.messages is None else "messages"
            raise ContextTooLong(len(token_ids), info.max_context_tokens, param=param, right=SHORTER)

        def response() -> Response:
            token_text = context.tokenizer.token_text
            texts = [token_text(token_id) for token_id in token_ids] if wanted.return_token_strs else None
            return json_response(TokenizeResponse(len(token_ids), info.max_context_tokens, token_ids, texts))

        return await in_turn(claim, len(token_ids), response)

    async def detokenize(request: Request) -> Response:
        wanted = await read_request(
            request, DetokenizeRequest, context.config.max_body_bytes, context.texts, max_entries=context.max_entries
        )
        check_model(request, wanted.model)
        limit = (await context.meet_engine(caller_of(request))).max_context_tokens
        if len(wanted.tokens) > limit:
            raise InvalidParameter(
                "tokens", f"{len(wanted.tokens)} tokens", f"give at most {limit}, the longest context"
            )

        def response() -> Response:
            size = context.tokenizer.vocab_size
            for token_id in wanted.tokens:
                if not 0 <= token_id < size:
                    raise InvalidParameter("tokens", token_id, f"give token ids from 0 to {size - 1}")
            return json_response(DetokenizeResponse(context.tokenizer.decode(wanted.tokens, skip_special=False)))

        return await in_turn(Claim(caller_of(request).tenant), len(wanted.tokens), response)

    return [
        Endpoint(
            method="POST",
            path="/tokenize",
            handler=tokenize,
            access=Access.CLIENT,
            summary="Turn a text or messages into token ids",
            tag="Tokens",
            takes=TokenizeRequest,
            gives=TokenizeResponse,
        ),
        Endpoint(
            method="POST",
            path="/detokenize",
            handler=detokenize,
            access=Access.CLIENT,
            summary="Turn token ids into a text",
            tag="Tokens",
            takes=DetokenizeRequest,
            gives=DetokenizeResponse,
        ),
    ]


async def _prompt(context: ServerContext, wanted: TokenizeRequest, info: EngineInfo, claim: Claim) -> Prompt:
    if wanted.messages is not None:
        return await chat_prompt(context, wanted.messages, info, claim)
    assert wanted.prompt is not None
    add_special = wanted.add_special_tokens is not False
    return await text_prompt(context, wanted.prompt, add_special=add_special, info=info, claim=claim)
