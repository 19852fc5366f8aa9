"""`penstock gateway` in front of real servers on a simulated device: one address, whatever dies behind it."""

import re
import signal
import threading

import httpx
import openai
import pytest

from tests.fakes.gateway_process import (
    MODEL,
    GatewayProcess,
    kill_all,
    simulated_replicas,
    start_replica,
    write_simulated_model,
)
from tests.server_process import until
from tests.unit.server.sse import events_in, text_of

QUESTION = [{"role": "user", "content": "hello world, tell me more"}]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_simulated_model(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def fleet(model):
    with simulated_replicas(model, 2, pace="4") as servers:
        yield servers


@pytest.fixture
def gateway(fleet):
    with GatewayProcess(*[part for server in fleet for part in ("--replica", server.url)]) as running:
        yield running.wait_ready()


def replica_in(response):
    return re.search(r"replica=([^;]+)", response.headers["x-penstock-route"])[1]


def whole_answer(url, **fields):
    body = {"model": MODEL, "messages": QUESTION, "temperature": 0, "max_tokens": 24, **fields}
    response = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60)
    assert response.status_code == 200, response.text
    return response


def test_an_openai_client_works_through_it(gateway, fleet):
    with openai.OpenAI(base_url=f"{gateway.url}/v1", api_key="none", max_retries=0) as client:
        assert [item.id for item in client.models.list()] == [MODEL]
        asked = {"model": MODEL, "messages": QUESTION, "temperature": 0, "max_tokens": 12}
        whole = client.chat.completions.create(**asked)
        chunks = list(client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == (
        whole.choices[0].message.content
    )
    assert chunks[-1].usage.completion_tokens == 12
    direct = whole_answer(fleet[0].url, max_tokens=12).json()["choices"][0]["message"]["content"]
    assert whole.choices[0].message.content == direct


def test_the_response_and_the_admin_socket_say_why(gateway):
    response = whole_answer(gateway.url)
    assert "policy=least-loaded" in response.headers["x-penstock-route"]
    transport = httpx.HTTPTransport(uds=gateway.admin)
    with httpx.Client(transport=transport, base_url="http://admin") as admin:
        (decision,) = admin.get("/admin/decisions").json()["decisions"]
        standings = [item["standing"] for item in admin.get("/admin/replicas").json()["replicas"]]
    assert decision["replica"] == replica_in(response)
    assert decision["request_id"] == response.headers["x-request-id"]
    assert decision["status"] == 200
    assert standings == ["ready", "ready"]


SAMPLINGS = {
    "greedy": {"temperature": 0},
    "seeded": {"temperature": 1.0, "seed": 7},
    "penalised, with stop texts": {"temperature": 0, "stop": ["never to be seen"], "frequency_penalty": 0.5},
    "two choices": {"temperature": 1.0, "seed": 7, "n": 2},
    "scored": {"temperature": 0, "logprobs": True, "top_logprobs": 2},
}


def streamed(**fields):
    return {
        "model": MODEL, "messages": QUESTION, "max_tokens": 100, "ignore_eos": True, "stream": True,
        "stream_options": {"include_usage": True}, **fields,
    }  # fmt: skip


@pytest.fixture(scope="module")
def survived(model):
    """For each sampling, what an undisturbed server answers and what came of a stream whose replica was killed."""
    with simulated_replicas(model, 2, pace="3") as (victim, heir), GatewayProcess("--replica", victim.url) as gateway:
        gateway.wait_ready()
        bodies = {name: streamed(**fields) for name, fields in SAMPLINGS.items()}
        expected = {
            name: httpx.post(f"{heir.url}/v1/chat/completions", json=body, timeout=60).content
            for name, body in bodies.items()
        }
        received = dict.fromkeys(bodies, b"")

        def read(name):
            with httpx.stream("POST", f"{gateway.url}/v1/chat/completions", json=bodies[name], timeout=60) as response:
                for data in response.iter_raw():
                    received[name] += data

        threads = [threading.Thread(target=read, args=(name,)) for name in bodies]
        for thread in threads:
            thread.start()
        until(lambda: all(data.count(b"data: ") > 10 for data in received.values()), 30, "the streams' beginning")
        register(gateway, heir.url)
        kill_all(victim)
        for thread in threads:
            thread.join(60)
        yield {name: (events_in(received[name]), events_in(expected[name])) for name in bodies}


def register(gateway, url):
    with httpx.Client(transport=httpx.HTTPTransport(uds=gateway.admin), base_url="http://admin") as admin:
        assert admin.post("/admin/replicas", json={"url": url}).json() == {"lease_seconds": 15.0}


@pytest.mark.parametrize("name", SAMPLINGS)
def test_a_stream_whose_replica_is_killed_goes_on_identically(survived, name):
    events, expected = survived[name]
    for index in range(SAMPLINGS[name].get("n", 1)):
        assert text_of(events, index) == text_of(expected, index)
    assert events[-1] == "[DONE]"


def test_every_token_of_a_moved_stream_has_its_score_once(survived):
    def scores(events):
        choices = [choice for event in events[:-1] for choice in event["choices"] if choice.get("logprobs")]
        return [item for choice in choices for item in choice["logprobs"]["content"]]

    events, expected = survived["scored"]
    assert len(scores(expected)) == 100
    assert [item["token"] for item in scores(events)] == [item["token"] for item in scores(expected)]


@pytest.mark.parametrize("name", SAMPLINGS)
def test_ids_roles_finish_and_usage_are_those_of_one_stream(survived, name):
    events, expected = survived[name]
    assert len({(event["id"], event["created"]) for event in events[:-1]}) == 1
    choices = [choice for event in events[:-1] for choice in event["choices"]]
    count = SAMPLINGS[name].get("n", 1)
    assert sum("role" in choice["delta"] for choice in choices) == count
    assert [choice["finish_reason"] for choice in choices if choice["finish_reason"]] == ["length"] * count
    assert events[-2]["usage"]["completion_tokens"] == 100 * count
    assert events[-2]["usage"]["prompt_tokens"] == expected[-2]["usage"]["prompt_tokens"]


@pytest.mark.slow
def test_a_killed_replica_is_ejected_and_comes_back(model):
    with start_replica(model) as first, start_replica(model) as second:
        urls = [server.wait_ready().url for server in (first, second)]
        with GatewayProcess("--replica", urls[0], "--replica", urls[1], "--policy", "round-robin") as gateway:
            gateway.wait_ready()
            assert len({replica_in(whole_answer(gateway.url)) for _ in range(2)}) == 2
            kill_all(first)
            assert len({replica_in(whole_answer(gateway.url)) for _ in range(4)}) == 1
            port = urls[0].rpartition(":")[2]
            with start_replica(model, "--port", port) as third:
                third.wait_ready()
                until(lambda: len({replica_in(whole_answer(gateway.url)) for _ in range(2)}) == 2, 30, "its return")


@pytest.mark.slow
def test_a_stream_whose_only_replica_is_killed_goes_on_when_it_was_started_again(model):
    body = streamed(temperature=0)
    with start_replica(model, pace="3") as first, GatewayProcess("--replica", first.wait_ready().url) as gateway:
        expected = httpx.post(f"{first.url}/v1/chat/completions", json=body, timeout=60).content
        url, received = f"{gateway.wait_ready().url}/v1/chat/completions", b""
        with httpx.stream("POST", url, json=body, timeout=60) as response:
            pieces = response.iter_raw()
            while received.count(b"data: ") < 10:
                received += next(pieces)
            kill_all(first)
            with start_replica(model, "--port", first.url.rpartition(":")[2], pace="3"):
                received += b"".join(pieces)
    events = events_in(received)
    assert text_of(events) == text_of(events_in(expected))
    assert events[-1] == "[DONE]"


def test_killing_one_gateway_loses_its_own_open_connections_and_nothing_else(fleet):
    arguments = [part for server in fleet for part in ("--replica", server.url)]
    body = {"model": MODEL, "prompt": [5, 6, 7], "max_tokens": 200, "ignore_eos": True, "stream": True}
    with GatewayProcess(*arguments) as one, GatewayProcess(*arguments) as other, httpx.Client(timeout=60) as client:
        urls = [f"{gateway.wait_ready().url}/v1/completions" for gateway in (one, other)]
        requests = [client.build_request("POST", url, json=body) for url in urls]
        streams = [client.send(request, stream=True) for request in requests]
        cut, kept = (stream.iter_lines() for stream in streams)
        next(cut)
        next(kept)
        one.process.kill()
        with pytest.raises(httpx.RemoteProtocolError):
            list(cut)
        assert [line for line in kept if line][-1] == "data: [DONE]"
        for stream in streams:
            stream.close()
        assert whole_answer(other.url).status_code == 200


def test_a_draining_replica_and_a_draining_gateway_finish_their_streams_unless_told_twice(model):
    body = {"model": MODEL, "prompt": [5, 6, 7], "max_tokens": 80, "ignore_eos": True, "stream": True}
    endless = {**body, "max_tokens": 3000}  # a minute: it is cut before
    with simulated_replicas(model, 1, pace="4") as (server,), GatewayProcess("--replica", server.url) as gateway:
        with (
            GatewayProcess("--replica", server.url) as hasty,
            httpx.stream("POST", f"{hasty.wait_ready().url}/v1/completions", json=endless, timeout=60) as response,
        ):
            lines = response.iter_lines()
            next(lines)
            hasty.process.send_signal(signal.SIGTERM)
            until(lambda: any("draining" in line for line in hasty.lines), 10, "its drain")
            hasty.process.send_signal(signal.SIGINT)
            with pytest.raises(httpx.TransportError):
                list(lines)
            assert hasty.process.wait(10) == 0
        url = f"{gateway.wait_ready().url}/v1/completions"
        with httpx.stream("POST", url, json=body, timeout=60) as response:
            lines = response.iter_lines()
            next(lines)
            server.process.send_signal(signal.SIGTERM)
            gateway.process.send_signal(signal.SIGTERM)
            last = [line for line in lines if line][-1]
        assert last == "data: [DONE]"
        assert gateway.process.wait(30) == 0
