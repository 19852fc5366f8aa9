"""The whole API under generated requests: whatever comes, the answer is never a failure of ours."""

import asyncio
import json

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st

from penstock.protocol.block_events import BLOCK_EVENTS_PATH
from tests.unit.server.conftest import MODEL, running_service

SHORT, LONG = 60, 5000
QUIET = [
    HealthCheck.too_slow,
    HealthCheck.function_scoped_fixture,
    HealthCheck.filter_too_much,
    HealthCheck.data_too_large,
]

VALID = {
    "/v1/chat/completions": {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "stream": False},
    "/v1/completions": {"model": MODEL, "prompt": "hi", "echo": False},
    "/tokenize": {"model": MODEL, "prompt": "hi"},
    "/detokenize": {"model": MODEL, "tokens": [1, 2]},
}
FIELDS = [
    "model", "messages", "prompt", "tokens", "stream", "stream_options", "n", "max_tokens", "max_completion_tokens",
    "min_tokens", "temperature", "top_p", "top_k", "min_p", "seed", "stop", "stop_token_ids", "ignore_eos", "echo",
    "presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias", "logprobs", "top_logprobs", "best_of",
    "user", "metadata", "tools", "response_format", "add_special_tokens", "return_token_strs",
]  # fmt: skip
EDGES = [
    None, True, 0, -1, 1, 2**31, 2**63, -(2**63) - 1, 10**30, 0.5, 1e308, -0.0, "", "x", "\x00", "\ud800", "💥" * 50,
    "x" * 5000, [], [[]], {}, {"": None}, [None], [1], ["a"], [[1, 2]], {"1": 1}, {"type": "text"},
]  # fmt: skip
RAW_EDGES = [b"NaN", b"Infinity", b"-Infinity", b"1e999", b"9" * 500, b"[" * 500, b'"\\ud800"', b"\xff", b"01", b"'x'"]

values = st.recursive(
    st.sampled_from(EDGES) | st.integers() | st.floats(allow_nan=False) | st.text(max_size=20),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(FIELDS) | st.text(max_size=5), inner, max_size=4)
    ),
    max_leaves=6,
)


@st.composite
def requests(draw):
    """A valid request, bent in a few places: fields, then bytes."""
    path = draw(st.sampled_from(sorted(VALID)))
    body = dict(VALID[path])
    for name in draw(st.lists(st.sampled_from(FIELDS), max_size=4)):
        body[name] = draw(values)
    raw = json.dumps(body).encode()
    if draw(st.integers(0, 3)) == 0:
        start = draw(st.integers(0, len(raw)))
        raw = (
            raw[:start]
            + draw(st.sampled_from(RAW_EDGES) | st.binary(max_size=4))
            + raw[start + draw(st.integers(0, 3)) :]
        )
    return path, raw


async def send(path, body, headers):
    async with running_service() as service:
        return await service.client.post(path, content=body, headers={"content-type": "application/json", **headers})


def check_generated(request):
    path, body = request
    response = asyncio.run(send(path, body, {}))
    assert response.status_code < 500, (path, body, response.text)
    if response.status_code >= 400:
        assert response.json()["error"]["message"]


@seed(1)
@settings(max_examples=SHORT * 3, deadline=None, suppress_health_check=QUIET, database=None)
@given(request=requests())
def test_bent_requests_are_answered_or_refused(request):
    check_generated(request)


@pytest.mark.faults
@pytest.mark.timeout(1800)
@settings(max_examples=LONG, deadline=None, suppress_health_check=QUIET, database=None)
@given(request=requests())
def test_bent_requests_are_answered_or_refused_for_long(request):
    check_generated(request)


# ---------------------------------------------------------------- by the published document


def document() -> dict:
    async def read():
        async with running_service() as service:
            return (await service.client.get("/openapi.json")).json()

    return asyncio.run(read())


# Without the one stream that has no end; tests/unit/server/test_block_events.py reads its beginning.
schema = schemathesis.openapi.from_dict(document()).exclude(path=BLOCK_EVENTS_PATH)


def check_case(case):
    """Send what the document allows, and what it does not, to an app of its own."""
    request = case.as_transport_kwargs(base_url="http://penstock")

    async def run():
        async with running_service() as service:
            return await service.client.request(
                request["method"], httpx.URL(request["url"]), params=request.get("params"),
                headers=dict(request.get("headers") or {}), content=_content(request),
            )  # fmt: skip

    response = asyncio.run(run())
    assert response.status_code < 500, response.text


def _content(request):
    if "json" in request:
        if isinstance(request["json"], dict) and isinstance(request["json"].get("model"), str):
            request["json"]["model"] = MODEL  # or nearly all would end at its name
        return json.dumps(request["json"]).encode("utf-8", "surrogatepass")
    data = request.get("data")
    return data.encode() if isinstance(data, str) else data


@schema.parametrize()
@seed(1)
@settings(max_examples=SHORT // 5, deadline=None, suppress_health_check=QUIET, database=None)
def test_requests_made_from_the_document_never_fail_on_our_side(case):
    check_case(case)


@pytest.mark.faults
@pytest.mark.timeout(1800)
@schema.parametrize()
@settings(max_examples=LONG // 10, deadline=None, suppress_health_check=QUIET, database=None)
def test_requests_made_from_the_document_never_fail_on_our_side_for_long(case):
    check_case(case)
