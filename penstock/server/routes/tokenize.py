"""/tokenize and /detokenize: what a text costs, and what tokens say."""

from starlette.requests import Request
from starlette.responses import Response

from penstock.engine.messages import EngineInfo
from penstock.errors import ContextTooLong, InvalidParameter, NotPermitted
from penstock.protocol.tokenize import DetokenizeRequest, DetokenizeResponse, TokenizeRequest, TokenizeResponse
from penstock.server.answer import Prompt
from penstock.server.body import read_request
from penstock.server.context import ServerContext
from penstock.server.endpoint import Access, Endpoint, caller_of, record_of
from penstock.server.json_response import json_response
from penstock.server.prompt import SHORTER, chat_prompt, text_prompt


def endpoints(context: ServerContext) -> list[Endpoint]:
    def check_model(request: Request, model: str | None) -> None:
        caller = caller_of(request)
        if model is not None:
            context.check_model(model, caller)
        elif not context.models_for(caller):
            raise NotPermitted("your key may use no model of this server; ask who runs it")
        record_of(request).model = model or context.config.served_name

    async def tokenize(request: Request) -> Response:
        wanted = await read_request(request, TokenizeRequest, context.config.max_body_bytes)
        check_model(request, wanted.model)
        wanted.check_combinations()
        info = context.engine_info(caller_of(request))
        token_ids = (await _prompt(context, wanted, info)).token_ids
        if len(token_ids) > info.max_context_tokens:
            param = "prompt" if wanted.messages is None else "messages"
            raise ContextTooLong(len(token_ids), info.max_context_tokens, param=param, right=SHORTER)
        texts = [context.tokenizer.token_text(token_id) for token_id in token_ids] if wanted.return_token_strs else None
        return json_response(TokenizeResponse(len(token_ids), info.max_context_tokens, token_ids, texts))

    async def detokenize(request: Request) -> Response:
        wanted = await read_request(request, DetokenizeRequest, context.config.max_body_bytes)
        check_model(request, wanted.model)
        limit = context.engine_info(caller_of(request)).max_context_tokens
        if len(wanted.tokens) > limit:
            raise InvalidParameter(
                "tokens", f"{len(wanted.tokens)} tokens", f"give at most {limit}, the longest context"
            )
        size = context.tokenizer.vocab_size
        for token_id in wanted.tokens:
            if not 0 <= token_id < size:
                raise InvalidParameter("tokens", token_id, f"give token ids from 0 to {size - 1}")
        return json_response(DetokenizeResponse(context.tokenizer.decode(wanted.tokens, skip_special=False)))

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


async def _prompt(context: ServerContext, wanted: TokenizeRequest, info: EngineInfo) -> Prompt:
    if wanted.messages is not None:
        return await chat_prompt(context, wanted.messages, info)
    assert wanted.prompt is not None
    return await text_prompt(context, wanted.prompt, add_special=wanted.add_special_tokens is not False, info=info)
