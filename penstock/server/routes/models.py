"""/v1/models: what is served here."""

from starlette.requests import Request
from starlette.responses import Response

from penstock.protocol.models import Model, ModelList
from penstock.server.context import ServerContext
from penstock.server.endpoint import Access, Endpoint, caller_of
from penstock.server.json_response import json_response
from penstock.tenants import Caller


def endpoints(context: ServerContext) -> list[Endpoint]:
    def describe(name: str, caller: Caller) -> Model:
        limit = None if context.engine.info is None else context.engine_info(caller).max_context_tokens
        return Model(id=name, created=context.created, max_context_tokens=limit)

    async def list_models(request: Request) -> Response:
        caller = caller_of(request)
        return json_response(ModelList(data=[describe(name, caller) for name in context.models_for(caller)]))

    async def retrieve(request: Request) -> Response:
        name, caller = request.path_params["model"], caller_of(request)
        context.check_model(name, caller)
        return json_response(describe(name, caller))

    return [
        Endpoint(
            method="GET",
            path="/v1/models",
            handler=list_models,
            access=Access.CLIENT,
            summary="List the served models",
            tag="OpenAI",
            gives=ModelList,
        ),
        Endpoint(
            method="GET",
            path="/v1/models/{model:path}",  # names of hub models hold a slash
            handler=retrieve,
            access=Access.CLIENT,
            summary="Describe one model",
            tag="OpenAI",
            gives=Model,
        ),
    ]
