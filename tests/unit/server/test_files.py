"""Uploads: whole or not at all, within their limits, and from nobody's web page."""

import asyncio

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from penstock.server.routes import files as files_route
from tests.unit.server.conftest import running_service, until

BOUNDARY = "x-boundary"
FORM = {"content-type": f"multipart/form-data; boundary={BOUNDARY}"}


def part(name, content, filename=None):
    named = f'; filename="{filename}"' if filename is not None else ""
    head = f'--{BOUNDARY}\r\ncontent-disposition: form-data; name="{name}"{named}\r\n\r\n'
    return head.encode() + content + b"\r\n"


def form(*parts):
    return b"".join(parts) + f"--{BOUNDARY}--\r\n".encode()


WHOLE = form(part("purpose", b"batch"), part("file", b"hello\n", "a.jsonl"))


@pytest.fixture
async def service(tmp_path):
    async with running_service(store=str(tmp_path / "penstock.db")) as running:
        yield running


async def upload(service, body=WHOLE, **headers):
    return await service.client.post("/v1/files", content=body, headers={**FORM, **headers})


async def test_what_was_uploaded_comes_back_byte_by_byte(service):
    content = bytes(range(256)) * 9000
    response = await upload(service, form(part("file", content, "ä b.jsonl"), part("purpose", b"batch")))
    file = response.json()
    assert (file["bytes"], file["filename"], file["purpose"]) == (len(content), "ä b.jsonl", "batch")
    download = await service.client.get(f"/v1/files/{file['id']}/content")
    assert download.content == content
    assert download.headers["content-length"] == str(len(content))


@pytest.mark.parametrize(
    ("body", "headers", "status"),
    [
        (WHOLE, {"content-type": "application/json"}, 415),
        (WHOLE, {"content-type": "multipart/form-data"}, 400),
        (WHOLE, {"origin": "http://evil.example"}, 403),
        (WHOLE, {"origin": "null"}, 403),
        (WHOLE, {"origin": "http://penstock"}, 200),
        (WHOLE[:-20], {}, 400),
        (b"", {}, 400),
        (form(part("purpose", b"batch")), {}, 400),
        (form(part("purpose", b"batch"), part("file", b"text")), {}, 400),
        (form(part("purpose", b"vision"), part("file", b"x", "a")), {}, 400),
        (form(part("purpose", b"x" * 5000), part("file", b"x", "a")), {}, 400),
        (form(*[part("purpose", b"batch")] * 20, part("file", b"x", "a")), {}, 400),
        (form(part("purpose", b"batch"), *[part("file", b"x", "a")] * 2), {}, 400),
        (form(*[part("purpose", b"batch")] * 2, part("file", b"x", "a")), {}, 400),
        (WHOLE, {"content-type": f"multipart/form-data; boundary={'y' * 71}"}, 400),
        (WHOLE, {"content-type": f"multipart/form-data; boundary={'y' * 5000}"}, 400),
        (WHOLE, {"content-encoding": "gzip"}, 415),
        (WHOLE, {"content-encoding": "identity"}, 200),
    ],
)
async def test_forms_are_taken_or_refused(service, body, headers, status):
    response = await upload(service, body, **headers)
    assert response.status_code == status, response.text
    left = (await service.client.get("/v1/files")).json()["data"]
    assert len(left) == (status == 200)


@pytest.mark.parametrize("name", ["expires_after[anchor]", "expires_after[seconds]", "note", ""])
async def test_an_unknown_field_of_a_form_is_refused_by_name(service, name):
    response = await upload(service, form(part("purpose", b"batch"), part(name, b"1"), part("file", b"x", "a")))
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, name)
    assert error["message"] == f"unknown parameter {name!r}; the form may have: file, purpose"


async def test_a_file_over_the_limit_is_refused_whatever_it_declares(service, monkeypatch):
    monkeypatch.setattr(files_route, "MAX_FILE_BYTES", 1000)
    large = form(part("purpose", b"batch"), part("file", b"x" * 1001, "a"))
    assert (await upload(service, large)).status_code == 413
    huge = form(part("purpose", b"batch"), part("file", b"x" * 100_000, "a"))
    assert (await upload(service, huge)).status_code == 413

    async def pieces():
        for start in range(0, len(huge), 4096):
            yield huge[start : start + 4096]

    assert (await upload(service, pieces())).status_code == 413


async def test_a_tenant_has_only_few_uploads_under_way(service):
    ends, begun = asyncio.Event(), []

    async def slow():
        yield WHOLE[:30]
        begun.append(None)
        await ends.wait()
        yield WHOLE[30:]

    uploads = [asyncio.create_task(upload(service, slow())) for _ in range(2)]
    await until(lambda: len(begun) == 2)
    refused = await upload(service)
    assert (refused.status_code, refused.json()["error"]["code"]) == (429, "overloaded")
    ends.set()
    assert [(await task).status_code for task in uploads] == [200, 200]
    assert (await upload(service)).status_code == 200


@pytest.mark.parametrize("limit", ["0", "-1", "x", "1e9", "99999999999", ""])
@pytest.mark.parametrize("route", ["/v1/files", "/v1/batches"])
async def test_a_wrong_page_length_is_told(service, route, limit):
    response = await service.client.get(route, params={"limit": limit})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "limit")


@pytest.mark.parametrize("route", ["/v1/files", "/v1/batches"])
async def test_a_parameter_of_the_query_that_stands_twice_is_refused(service, route):
    response = await service.client.get(route, params=[("limit", "1"), ("limit", "2")])
    assert (response.status_code, response.json()["error"]["param"]) == (400, "limit")


async def test_a_page_behind_nothing_is_told(service):
    for route in ("/v1/files", "/v1/batches"):
        assert (await service.client.get(route, params={"after": "none"})).status_code == 404


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture], database=None)
@given(st.data())
def test_a_bent_form_is_never_a_failure_of_ours(tmp_path, data):
    start = data.draw(st.integers(0, len(WHOLE)))
    stop = data.draw(st.integers(start, len(WHOLE)))
    body = WHOLE[:start] + data.draw(st.binary(max_size=30)) + WHOLE[stop:]
    kind = data.draw(st.sampled_from([FORM["content-type"], "multipart/form-data; boundary=", "multipart/form-data;x"]))

    async def send():
        async with running_service(store=str(tmp_path / "penstock.db")) as service:
            return await upload(service, body, **{"content-type": kind})

    assert asyncio.run(send()).status_code < 500


@pytest.mark.parametrize(
    "path",
    ["files/%00", "files/a%00b/content", "files?after=%00", "files?purpose=%00", "batches/%00", "batches?after=%00"],
)
async def test_what_no_store_can_be_asked_for_is_its_callers_mistake(service, path):
    response = await service.client.get(f"/v1/{path}")
    assert (response.status_code, response.json()["error"]["code"]) == (400, "invalid_parameter")
