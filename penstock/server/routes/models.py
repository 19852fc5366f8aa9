"""/v1/models: what is served here."""

from starlette.requests import Request
from starlette.responses import Response

from penstock.protocol.models import Model, ModelList
from penstock.server.context import ServerContext
from penstock.server.endpoint import Access, Endpoint, caller_of
from penstock.server.json_response import json_response


def endpoints(context: ServerContext) -> list[Endpoint]:
    def describe(name: str) -> Model:
        info = context.engine.info
        limit = None if info is None else info.max_context_tokens
        return Model(id=name, created=context.created, max_context_tokens=limit)

    async def list_models(request: Request) -> Response:
        return json_response(ModelList(data=[describe(name) for name in context.models_for(caller_of(request))]))

    async def retrieve(request: Request) -> Response:
        name = request.path_params["model"]
        context.check_model(name, caller_of(request))
        return json_response(describe(name))

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
