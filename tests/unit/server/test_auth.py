"""Who may call what: open without keys, Bearer keys with them, admin routes for admin keys."""

import hashlib

import httpx
import pytest
from fastapi import FastAPI

from penstock.errors import ConfigError, NotAuthenticated
from penstock.request import Targets
from penstock.server.endpoint import check_access
from penstock.store.key_ring import KeyRing, load_keys
from penstock.tenants import SHADOW_HEADER, SHADOW_TENANT, ApiKey, KeyTerms, Limits
from tests.unit.server.conftest import listening, running_service

CLIENT_KEY, ADMIN_KEY = "sk-client", "sk-admin"


def digest(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


@pytest.fixture
async def guarded():
    keys = (ApiKey("alice", digest(CLIENT_KEY)), ApiKey("root", digest(ADMIN_KEY), KeyTerms(admin=True)))
    async with running_service(keys=keys) as service:
        yield service


@pytest.mark.parametrize(
    "headers", [{}, bearer("wrong"), bearer(""), {"authorization": "Basic x"}, {"authorization": ""}]
)
async def test_without_a_known_key_a_client_route_is_closed(guarded, headers):
    response = await guarded.client.get("/v1/models", headers=headers)
    assert response.status_code == 401
    assert response.json()["error"]["code"] == "invalid_api_key"
    assert response.headers["www-authenticate"] == "Bearer"


async def test_a_strangers_body_is_thrown_away_within_bounds(guarded, monkeypatch):
    monkeypatch.setattr("penstock.server.body._MAX_DISCARDED_BYTES", 10_000)
    sent = 0

    async def endless():
        nonlocal sent
        for _ in range(1000):
            sent += 1024
            yield b"x" * 1024

    response = await guarded.client.post("/tokenize", content=endless(), headers={"content-type": "application/json"})
    assert response.status_code == 401
    assert sent <= 10_000 + 2048


async def test_a_known_key_opens_client_routes_and_names_the_tenant(guarded):
    body = {"model": "tiny", "prompt": "x"}
    response = await guarded.client.post("/v1/completions", json=body, headers=bearer(CLIENT_KEY))
    assert response.status_code == 200
    assert guarded.engine.submitted[0].tenant == "alice"


async def test_an_admin_route_needs_an_admin_key(guarded):
    refused = await guarded.client.get("/metrics", headers=bearer(CLIENT_KEY))
    assert refused.status_code == 403
    assert refused.json()["error"]["code"] == "permission_denied"
    assert (await guarded.client.get("/metrics", headers=bearer(ADMIN_KEY))).status_code == 200


async def test_a_gateways_copy_counts_for_nobody_and_needs_an_admin_key(guarded):
    body = {"model": "tiny", "prompt": "x"}
    copied = {SHADOW_HEADER: "1", **bearer(ADMIN_KEY)}
    assert (await guarded.client.post("/v1/completions", json=body, headers=copied)).status_code == 200
    assert guarded.engine.submitted[0].tenant == SHADOW_TENANT
    refused = await guarded.client.post("/v1/completions", json=body, headers=copied | bearer(CLIENT_KEY))
    assert refused.status_code == 403


@pytest.mark.parametrize("path", ["/", "/docs", "/openapi.json", "/live", "/ready"])
async def test_public_routes_need_no_key(guarded, path):
    assert (await guarded.client.get(path)).status_code == 200


async def test_without_keys_every_route_is_open(service):
    assert (await service.client.get("/metrics")).status_code == 200
    assert (await service.client.get("/v1/models")).status_code == 200


EVIL = {"host": "evil.example:18200", "origin": "http://evil.example:18200"}


async def test_without_keys_a_page_whose_name_points_here_gets_nothing(tmp_path):
    async with (
        running_service(store=str(tmp_path / "penstock.db")) as service,
        listening(service.context) as url,
        httpx.AsyncClient(base_url=url) as client,
    ):
        body = {"model": "tiny", "prompt": "x"}
        form = {"files": {"file": ("a", b"x")}, "data": {"purpose": "batch"}}
        refused = [
            await client.post("/v1/completions", json=body, headers=EVIL),
            await client.post("/v1/files", headers=EVIL, **form),
            await client.get("/v1/models", headers=EVIL),
            await client.get("/metrics", headers=EVIL),
            await client.post("/v1/batches/batch_x/cancel", headers={"sec-fetch-site": "cross-site"}),
        ]
        assert [response.status_code for response in refused] == [403] * 5
        assert {response.json()["error"]["code"] for response in refused} == {"permission_denied"}
        assert (await client.get("/live", headers=EVIL)).status_code == 200
        assert (await client.post("/v1/completions", json=body)).status_code == 200
        local = {"host": url.removeprefix("http://").replace("127.0.0.1", "localhost")}
        assert (await client.post("/v1/files", headers=local, **form)).status_code == 200


async def test_with_keys_a_server_may_have_any_name(guarded):
    async with listening(guarded.context) as url, httpx.AsyncClient(base_url=url) as client:
        headers = {"host": "models.example", **bearer(CLIENT_KEY)}
        assert (await client.get("/v1/models", headers=headers)).status_code == 200


def test_an_app_with_an_undeclared_route_is_refused():
    app = FastAPI(openapi_url=None)
    app.add_api_route("/backdoor", lambda: None)
    with pytest.raises(RuntimeError, match="/backdoor"):
        check_access(app.routes)


def write(tmp_path, text):
    path = tmp_path / "keys.toml"
    path.write_text(text)
    return str(path)


def test_keys_are_read_from_a_file(tmp_path):
    alice = f'[[keys]]\nname = "alice"\nsha256 = "{digest("a").upper()}"\n'
    text = alice + f'[[keys]]\nname = "b"\nsha256 = "{digest("b")}"\nadmin = true\n'
    assert load_keys(write(tmp_path, text)) == (
        ApiKey("alice", digest("a")),
        ApiKey("b", digest("b"), KeyTerms(admin=True)),
    )


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("", "at least one"),
        ("keys = []", "at least one"),
        ("[[keys", "TOML"),
        ('[[keys]]\nname = "a"', "sha256"),
        ('[[keys]]\nname = "a"\nsha256 = "sk-plain"', "64 hexadecimal"),
        (f'[[keys]]\nname = "open"\nsha256 = "{digest("a")}"', "another name"),
        (f'[[keys]]\nname = "a b"\nsha256 = "{digest("a")}"', "name"),
        (f'[[keys]]\nname = "a"\nsha256 = "{digest("a")}"\nkey = "x"', "unknown field `key`"),
        (f'[[keys]]\nname = "a"\nsha256 = "{digest("a")}"\nadmin = "yes"', "admin"),
        (f'[[keys]]\nname = "a"\nsha256 = "{digest("a")}"\n' * 2, "same name"),
    ],
)
def test_a_wrong_keys_file_is_refused_with_the_reason(tmp_path, text, word):
    with pytest.raises(ConfigError, match=word):
        load_keys(write(tmp_path, text))


def test_a_missing_keys_file_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="cannot be read"):
        load_keys(str(tmp_path / "none.toml"))


def test_a_key_in_a_file_states_its_terms(tmp_path):
    text = f'''
        [[keys]]
        name = "alice"
        sha256 = "{digest("a")}"
        weight = 2
        priority = 1
        models = ["tiny"]
        limits = {{ requests_per_minute = 60, tokens_per_day = 1000000, longest_context = 4096 }}
        targets = {{ ttft_seconds = 0.5, time_per_token_seconds = 0.03 }}
    '''
    (key,) = load_keys(write(tmp_path, text))
    assert key.terms == KeyTerms(
        weight=2.0,
        priority=1,
        models=("tiny",),
        limits=Limits(requests_per_minute=60, tokens_per_day=1_000_000, longest_context=4096),
        targets=Targets(ttft_seconds=0.5, time_per_token_seconds=0.03),
    )


@pytest.mark.parametrize(
    ("line", "word"),
    [
        ("weight = 0", "weight"),
        ("weight = nan", "weight"),
        ("models = []", "models"),
        ('models = ["tiny", " "]', "each of them a name"),
        ("limits = { requests_per_minute = 0 }", "requests_per_minute"),
        ("limits = { requests_per_minute = 1.5 }", "requests_per_minute"),
        ("limits = { tokens_per_week = 1 }", "tokens_per_week"),
        ("targets = { ttft_seconds = -1 }", "ttft_seconds"),
        ("targets = { speed = 1 }", "only"),
        ("priority = 11", "priority"),
    ],
)
def test_wrong_terms_in_a_file_are_refused_with_the_reason(tmp_path, line, word):
    text = f'[[keys]]\nname = "a"\nsha256 = "{digest("a")}"\n{line}\n'
    with pytest.raises(ConfigError, match=word):
        load_keys(write(tmp_path, text))


def test_an_old_secret_opens_its_key_until_it_expires():
    now = [1000.0]
    old, new = ApiKey("alice", digest("old"), expires_at=1060.0), ApiKey("alice", digest("new"))
    ring = KeyRing((old, new), clock=lambda: now[0])
    assert ring.identify("Bearer old").tenant == ring.identify("Bearer new").tenant == "alice"
    now[0] = 1060.0
    with pytest.raises(NotAuthenticated):
        ring.identify("Bearer old")
    assert ring.identify("Bearer new").tenant == "alice"


def test_the_open_tenant_has_terms_on_an_open_server_only():
    ring = KeyRing(())
    assert ring.caller_named("open") is not None
    ring.replace((ApiKey("alice", digest("a")),), needs_keys=True)
    assert ring.caller_named("open") is None
    ring.replace((), needs_keys=True)
    assert ring.caller_named("open") is None


def test_a_ring_that_lost_all_its_keys_is_closed_not_open():
    ring = KeyRing((ApiKey("alice", digest("a")),))
    ring.replace((), needs_keys=True)
    with pytest.raises(NotAuthenticated):
        ring.identify("Bearer a")


async def test_a_key_sees_and_uses_only_its_own_models():
    keys = (
        ApiKey("alice", digest("a"), KeyTerms(models=("tiny",))),
        ApiKey("bob", digest("b"), KeyTerms(models=("other",))),
    )
    async with running_service(keys=keys) as service:
        for key, seen in (("a", ["tiny"]), ("b", [])):
            listed = await service.client.get("/v1/models", headers=bearer(key))
            assert [model["id"] for model in listed.json()["data"]] == seen
        assert (await service.chat(key="a")).status_code == 200
        for call in (service.chat, service.complete):
            refused = await call(key="b")
            assert refused.status_code == 404
            assert refused.json()["error"]["code"] == "model_not_found"
            message = "model 'tiny' is not served here; nor is any other that you may use: ask who runs it"
            assert refused.json()["error"]["message"] == message
        assert (await service.client.get("/v1/models/tiny", headers=bearer("b"))).status_code == 404
        assert (await service.post("/tokenize", key="b", prompt="x")).status_code == 404
        for path, body in (("/tokenize", {"prompt": "x"}), ("/detokenize", {"tokens": [1]})):
            allowed = await service.client.post(path, json=body, headers=bearer("a"))
            refused = await service.client.post(path, json=body, headers=bearer("b"))
            assert (allowed.status_code, refused.status_code) == (200, 403)


async def test_a_keys_priority_goes_with_its_requests():
    async with running_service(keys=(ApiKey("alice", digest("a"), KeyTerms(priority=7)),)) as service:
        await service.chat(key="a")
        assert service.engine.submitted[0].terms.priority == 7


async def test_a_key_without_a_priority_cannot_pass_the_other_tenants():
    async with running_service(keys=(ApiKey("alice", digest("a")),)) as service:
        refused = await service.chat(key="a", priority=1)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "priority")
        assert (await service.chat(key="a", priority=-1)).status_code == 200
    async with running_service() as service:
        await service.chat(priority=10)
        assert service.engine.submitted[0].terms.priority == 10, "who is alone may order its own"
