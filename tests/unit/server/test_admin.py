"""The admin socket's routes: keys and usage for whoever may open it, and nothing of it on the public port."""

import asyncio
import contextlib
import hashlib
from collections.abc import AsyncIterator

import httpx
import pytest

from penstock.server.app import create_admin_app
from penstock.store.key_ring import load_keys
from tests.unit.server.conftest import Service, all_threads_taken, running_service


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


ADMIN, CLIENT = {"authorization": "Bearer root"}, {"authorization": "Bearer alice"}


@contextlib.asynccontextmanager
async def admin_of(service: Service, *, needs_key: bool = False) -> AsyncIterator[httpx.AsyncClient]:
    app = create_admin_app(service.context, needs_key=needs_key)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://admin") as client:
        yield client


@pytest.fixture
async def service(tmp_path):
    async with running_service(store=str(tmp_path / "penstock.db")) as running:
        yield running


@pytest.fixture
async def admin(service):
    async with admin_of(service) as client:
        yield client


async def status_with(service: Service, secret: str) -> int:
    headers = {"authorization": f"Bearer {secret}"}
    return (await service.client.get("/v1/models", headers=headers)).status_code


async def followed(service: Service, secret: str, status: int) -> None:
    """Wait until the running server treats a secret so."""
    for _ in range(400):
        if await status_with(service, secret) == status:
            return
        await asyncio.sleep(0.05)
    raise AssertionError(f"{secret[:8]}… never got {status}")


async def test_a_created_key_works_within_seconds_and_closes_an_open_server(service, admin):
    assert await status_with(service, "anything") == 200
    made = (await admin.post("/admin/keys", json={"name": "alice"})).json()
    await followed(service, "anything", 401)
    assert await status_with(service, made["secret"]) == 200


async def test_a_revoked_key_stops_working_within_seconds_and_the_server_stays_closed(service, admin):
    secret = (await admin.post("/admin/keys", json={"name": "alice"})).json()["secret"]
    await followed(service, "anything", 401)
    assert (await admin.delete("/admin/keys/alice")).json() == {"name": "alice", "revoked": True}
    await followed(service, secret, 401)
    assert await status_with(service, "anything") == 401


async def test_a_key_is_made_and_revoked_in_time_whatever_tenants_have_the_servers_threads_do(service, admin):
    with all_threads_taken():
        secret = (await admin.post("/admin/keys", json={"name": "alice"})).json()["secret"]
        await followed(service, "anything", 401)
        await admin.delete("/admin/keys/alice")
        await followed(service, secret, 401)


async def test_a_rotated_key_opens_with_both_secrets_while_they_overlap(service, admin):
    old = (await admin.post("/admin/keys", json={"name": "alice"})).json()["secret"]
    new = (await admin.post("/admin/keys/alice/rotate", json={"overlap_seconds": 600})).json()["secret"]
    await followed(service, new, 200)
    assert await status_with(service, old) == 200
    newest = (await admin.post("/admin/keys/alice/rotate", json={})).json()["secret"]
    await followed(service, new, 401)
    assert await status_with(service, newest) == 200


async def test_keys_are_listed_on_their_terms_and_without_secrets(admin):
    terms = {"weight": 2.0, "limits": {"requests_per_minute": 5}, "targets": {"ttft_seconds": 0.5}}
    made = (await admin.post("/admin/keys", json={"name": "alice", **terms})).json()
    listed = await admin.get("/admin/keys")
    (key,) = listed.json()["data"]
    assert key["terms"] == terms
    assert made["secret"] not in listed.text
    assert digest(made["secret"]) not in listed.text


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"name": "a b"},
        {"name": "a", "weight": 0},
        {"name": "a", "weight": "1"},
        {"name": "a", "limits": {"requests_per_minute": 0}},
        {"name": "a", "limits": {"per_week": 1}},
        {"name": "a", "models": []},
        {"name": "a", "models": [""]},
        {"name": "open"},
        {"name": "a", "sha256": "0" * 64},
    ],
)
async def test_a_wrong_key_is_refused(admin, body):
    assert (await admin.post("/admin/keys", json=body)).status_code == 400
    assert (await admin.get("/admin/keys")).json() == {"data": []}


async def test_a_wrong_target_is_named_with_its_value(admin):
    answer = await admin.post("/admin/keys", json={"name": "a", "targets": {"ttft_seconds": -1}})
    error = answer.json()["error"]
    assert error["param"] == "targets.ttft_seconds"
    assert error["message"] == "targets.ttft_seconds: -1.0 is not usable; give a number over 0 and under 2**53"


async def test_a_key_is_rotated_without_a_body(service, admin):
    await admin.post("/admin/keys", json={"name": "alice"})
    answer = await admin.post("/admin/keys/alice/rotate")
    assert answer.status_code == 200
    await followed(service, answer.json()["secret"], 200)


async def test_an_old_secret_cannot_be_kept_for_ever(service, admin):
    secret = (await admin.post("/admin/keys", json={"name": "alice"})).json()["secret"]
    refused = await admin.post("/admin/keys/alice/rotate", json={"overlap_seconds": 30 * 86400 + 1})
    assert refused.json()["error"]["message"].endswith("give a number of at most 2592000")
    await followed(service, secret, 200)


async def test_an_unknown_key_cannot_be_revoked(admin):
    refused = await admin.delete("/admin/keys/nobody")
    assert (refused.status_code, refused.json()["error"]["code"]) == (404, "key_not_found")


async def test_usage_is_told_by_tenant_model_and_day(service, admin):
    answer = (await service.complete("hi", max_tokens=5)).json()["usage"]
    (entry,) = (await admin.get("/admin/usage")).json()["data"]
    assert (entry["tenant"], entry["model"], entry["requests"]) == ("open", "tiny", 1)
    assert (entry["prompt_tokens"], entry["output_tokens"]) == (answer["prompt_tokens"], answer["completion_tokens"])
    assert (await admin.get("/admin/usage", params={"tenant": "bob"})).json() == {"data": []}
    assert (await admin.get("/admin/usage", params={"since": "2999-01-01"})).json() == {"data": []}
    for wrong in ("yesterday", "20260101", ""):
        assert (await admin.get("/admin/usage", params={"since": wrong})).status_code == 400


async def test_an_unknown_parameter_of_a_query_is_refused_with_those_that_exist(admin):
    refused = await admin.get("/admin/usage", params={"since": "2026-01-01", "tenants": "bob"})
    error = refused.json()["error"]
    assert (refused.status_code, error["param"]) == (400, "tenants")
    assert error["message"] == "unknown parameter 'tenants'; the query may have: tenant, since"


async def test_a_route_without_parameters_takes_none(admin):
    refused = await admin.get("/admin/keys", params={"tenant": "bob"})
    assert refused.status_code == 400
    assert refused.json()["error"]["message"].startswith("unknown parameter 'tenant'; there is none")


@pytest.mark.parametrize(
    ("body", "param"), [({"name": "a", "limts": {}}, "limts"), ({"name": "a", "limits": {"x": 1}}, "limits.x")]
)
async def test_an_unknown_field_is_refused_with_a_place_that_the_socket_has(admin, body, param):
    refused = await admin.post("/admin/keys", json=body)
    error = refused.json()["error"]
    assert (refused.status_code, error["param"]) == (400, param)
    assert error["message"] == f"unknown parameter '{param}'; see /openapi.json for those that exist"
    assert (await admin.get("/openapi.json")).status_code == 200


@pytest.mark.parametrize("path", ["/admin/keys", "/admin/usage"])
async def test_the_public_port_has_no_admin_routes(service, path):
    assert (await service.client.get(path)).status_code == 404
    assert path not in (await service.client.get("/openapi.json")).text


@pytest.mark.parametrize("path", ["/v1/models", "/metrics", "/"])
async def test_the_admin_socket_has_no_other_routes(admin, path):
    assert (await admin.get(path)).status_code == 404


@pytest.mark.parametrize(("method", "path"), [("GET", "/admin"), ("PUT", "/admin/keys")])
async def test_the_admin_socket_sends_nobody_to_a_page_that_it_does_not_have(admin, method, path):
    message = (await admin.request(method, path)).json()["error"]["message"]
    assert "see /openapi.json for what" in message


async def test_the_admin_socket_describes_itself(admin):
    document = (await admin.get("/openapi.json")).json()
    assert set(document["paths"]) == {"/admin/keys", "/admin/keys/{name}", "/admin/keys/{name}/rotate", "/admin/usage"}
    (parameter,) = document["paths"]["/admin/keys/{name}"]["delete"]["parameters"]
    assert (parameter["name"], parameter["in"]) == ("name", "path")
    described = document["paths"]["/admin/usage"]["get"]["parameters"]
    assert [(item["name"], item["in"], item["required"]) for item in described] == [
        ("tenant", "query", False),
        ("since", "query", False),
    ]


def keys_file(tmp_path):
    file = tmp_path / "keys.toml"
    entries = [("alice", "false"), ("root", "true")]
    file.write_text(
        "".join(f'[[keys]]\nname = "{name}"\nsha256 = "{digest(name)}"\nadmin = {admin}\n' for name, admin in entries)
    )
    return file


async def test_on_a_port_the_admin_routes_need_an_admin_key(tmp_path):
    file = str(keys_file(tmp_path))
    async with (
        running_service(keys=load_keys(file), keys_file=file, store=str(tmp_path / "s.db")) as service,
        admin_of(service, needs_key=True) as admin,
    ):
        assert (await admin.get("/admin/usage")).status_code == 401
        assert (await admin.get("/admin/usage", headers=CLIENT)).status_code == 403
        assert (await admin.get("/admin/usage", headers=ADMIN)).status_code == 200


async def test_on_a_port_the_admin_routes_are_closed_while_there_is_no_key(service, admin):
    async with admin_of(service, needs_key=True) as port:
        assert (await port.get("/openapi.json")).status_code == 200
        for headers in ({}, ADMIN):
            refused = await port.post("/admin/keys", json={"name": "mallory", "admin": True}, headers=headers)
            assert refused.status_code == 401
            assert "penstock keys create NAME --admin" in refused.json()["error"]["message"]
        assert (await port.get("/admin/usage")).status_code == 401
        assert (await service.client.get("/v1/models")).status_code == 200
        secret = (await admin.post("/admin/keys", json={"name": "root", "admin": True})).json()["secret"]
        await followed(service, "anything", 401)
        answer = await port.get("/admin/keys", headers={"authorization": f"Bearer {secret}"})
        assert [key["name"] for key in answer.json()["data"]] == ["root"]


async def test_keys_of_a_file_are_changed_in_the_file(tmp_path):
    file = keys_file(tmp_path)
    store = str(tmp_path / "s.db")
    async with running_service(keys=load_keys(str(file)), keys_file=str(file), store=store) as service:
        async with admin_of(service) as admin:
            refused = await admin.post("/admin/keys", json={"name": "carol"})
            assert refused.status_code == 400
            assert "--keys" in refused.json()["error"]["message"]
        assert await status_with(service, "alice") == 200
        file.write_text(file.read_text().replace("alice", "bob").replace(digest("alice"), digest("bob")))
        await followed(service, "alice", 401)
        assert await status_with(service, "bob") == 200


async def test_without_a_store_there_are_no_keys_and_no_usage():
    async with running_service() as service, admin_of(service) as admin:
        for path in ("/admin/keys", "/admin/usage"):
            assert (await admin.get(path)).status_code == 400
