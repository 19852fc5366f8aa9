"""/v1/models: what is served."""

import hashlib

import openai

from penstock.tenants import ApiKey, KeyTerms, Limits
from tests.unit.server.conftest import MODEL, running_service
from tests.unit.server.openai_schema import check


async def test_the_served_model_is_listed(service):
    body = (await service.client.get("/v1/models")).json()
    check("ListModelsResponse", body)
    assert [model["id"] for model in body["data"]] == [MODEL]
    assert body["data"][0]["max_context_tokens"] == 512


async def test_the_openai_client_lists_and_retrieves(address):
    async with openai.AsyncOpenAI(base_url=f"{address}/v1", api_key="none") as client:
        assert [model.id async for model in client.models.list()] == [MODEL]
        assert (await client.models.retrieve(MODEL)).owned_by == "penstock"


async def test_one_model_can_be_asked_for(service):
    body = (await service.client.get(f"/v1/models/{MODEL}")).json()
    check("Model", body)


async def test_a_name_with_a_slash_is_a_name():
    async with running_service(served_name="org/model") as service:
        assert (await service.client.get("/v1/models/org/model")).json()["id"] == "org/model"


async def test_another_model_is_not_found(service):
    response = await service.client.get("/v1/models/other")
    assert response.status_code == 404
    assert response.json()["error"]["code"] == "model_not_found"


async def test_a_key_is_told_of_no_longer_context_than_it_may_use():
    terms = KeyTerms(limits=Limits(longest_context=100))
    async with running_service(keys=(ApiKey("alice", hashlib.sha256(b"a").hexdigest(), terms),)) as service:
        for path in ("/v1/models", f"/v1/models/{MODEL}"):
            body = (await service.client.get(path, headers={"authorization": "Bearer a"})).json()
            assert (body["data"][0] if "data" in body else body)["max_context_tokens"] == 100


async def test_the_list_is_there_before_the_engine_is(service):
    service.engine.info = None
    assert (await service.client.get("/v1/models")).json()["data"][0]["max_context_tokens"] is None
