"""The pages for people: complete in themselves, under a policy that lets nothing else run."""

import base64
import hashlib
import re
from pathlib import Path

import pytest

from penstock.server.app import create_app

PAGES = ["/", "/docs"]


@pytest.mark.parametrize("path", PAGES)
async def test_a_page_loads_nothing_from_elsewhere(service, path):
    text = (await service.client.get(path)).text
    assert not re.findall(r"""(?:src|href)=["'](?:https?:)?//""", text)
    assert "cdn" not in text.lower()


@pytest.mark.parametrize("path", PAGES)
async def test_the_policy_allows_the_pages_own_script_and_nothing_else(service, path):
    response = await service.client.get(path)
    (script,) = re.findall(r"<script>(.*?)</script>", response.text, flags=re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = dict(part.split(" ", 1) for part in response.headers["content-security-policy"].split("; "))
    assert policy["default-src"] == "'none'"
    assert policy["script-src"] == f"'sha256-{digest}'"
    assert not re.findall(r"<[^>]+\son\w+=", response.text)


@pytest.mark.parametrize("path", PAGES)
async def test_every_link_on_a_page_leads_somewhere(service, path):
    text = (await service.client.get(path)).text
    for link in re.findall(r'href="(/[^"]*)"', text):
        assert (await service.client.get(link)).status_code == 200


async def test_the_document_lists_the_routes_with_their_access(service):
    document = (await service.client.get("/openapi.json")).json()
    access = {path: {operation["x-access"] for operation in item.values()} for path, item in document["paths"].items()}
    assert access["/v1/chat/completions"] == {"client"}
    assert access["/metrics"] == {"admin"}
    assert access["/ready"] == {"public"}
    assert "/v1/models/{model}" in access


async def test_every_reference_in_the_document_resolves(service):
    response = await service.client.get("/openapi.json")
    schemas = response.json()["components"]["schemas"]
    used = set(re.findall(r'"#/components/schemas/([^"]+)"', response.text))
    assert used
    assert used <= set(schemas)
    assert set(schemas["ChatRequest"]["required"]) == {"model", "messages"}


async def test_the_document_for_readers_lists_every_route(service):
    text = (Path(__file__).parents[3] / "docs" / "api.md").read_text()
    rows = re.findall(r"^\| (`(?:GET|POST).*?) \| (\w+) \|", text, flags=re.MULTILINE)
    documented = {route: access for routes, access in rows for route in re.findall(r"`(\w+ [^`]+)`", routes)}
    endpoints = [route.endpoint.endpoint for route in create_app(service.context).routes]
    assert documented == {
        f"{endpoint.method} {endpoint.path.replace(':path', '')}": str(endpoint.access) for endpoint in endpoints
    }
