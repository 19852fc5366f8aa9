"""The gateway before a real foreign server: llama.cpp's, from llama-cpp-python[server].

Needs it in this environment, or LLAMA_CPP_PYTHON naming an interpreter that has it; skipped where there is neither.
"""

import contextlib
import importlib.util
import os
import socket
import subprocess
import sys

import httpx
import openai
import pytest

from penstock.store.database import Database
from penstock.store.ledger import UsageLedger
from tests.fakes.gateway_process import GatewayProcess
from tests.server_process import until

MODEL = "smol"
# So certain that its numerics, which depend on what it was asked before, do not change the answer.
QUESTION = {"prompt": "The capital of France is", "temperature": 0, "max_tokens": 2}
CHAT = {"messages": [{"role": "user", "content": "What is the capital of France?"}], "max_tokens": 8}


def interpreter() -> str | None:
    named = os.environ.get("LLAMA_CPP_PYTHON")
    return named or (sys.executable if importlib.util.find_spec("llama_cpp") else None)


pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.skipif(interpreter() is None, reason="no llama-cpp-python[server]; LLAMA_CPP_PYTHON may name one"),
]


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


@contextlib.contextmanager
def llama_server(model_path, port):
    options = {
        "--model": str(model_path), "--model_alias": MODEL, "--host": "127.0.0.1", "--port": str(port),
        "--n_ctx": "512", "--n_threads": "1", "--interrupt_requests": "False",
    }  # fmt: skip
    command = [str(interpreter()), "-m", "llama_cpp.server", *[part for pair in options.items() for part in pair]]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        url = f"http://127.0.0.1:{port}"
        until(lambda: answers(url) or process.poll() is not None, 120, "llama.cpp's start")
        assert process.poll() is None
        yield url
    finally:
        process.kill()
        process.wait(10)


def answers(url) -> bool:
    try:
        return httpx.get(f"{url}/v1/models").status_code == 200
    except httpx.TransportError:
        return False


@pytest.fixture(scope="module")
def server(default_model_path):
    with llama_server(default_model_path, free_port()) as url:
        yield url


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return str(tmp_path_factory.mktemp("store") / "penstock.db")


@pytest.fixture(scope="module")
def fleet(tmp_path_factory):
    """Write a fleet's file of llama.cpp servers; return the gateway's arguments."""

    def write(*urls):
        file = tmp_path_factory.mktemp("fleet") / "fleet.toml"
        replicas = "".join(f'[[replicas]]\nurl = "{url}"\nkind = "llama.cpp"\n' for url in urls)
        file.write_text(f'policy = "round-robin"\naliases = {{ "gpt" = "{MODEL}" }}\n{replicas}')
        return ["--fleet", str(file)]

    return write


@pytest.fixture(scope="module")
def gateway(server, fleet, store):
    with GatewayProcess(*fleet(server), store=store) as running:
        yield running.wait_ready()


@pytest.fixture(scope="module")
def client(gateway):
    with openai.OpenAI(base_url=f"{gateway.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def booked(store):
    database = Database.open(store)
    entries = UsageLedger(database).read()
    database.close()
    return sum(entry.requests for entry in entries), sum(entry.output_tokens for entry in entries)


def test_its_model_is_listed_under_its_name_and_its_alias(client):
    assert [item.id for item in client.models.list()] == ["gpt", MODEL]


@pytest.mark.parametrize("name", [MODEL, "gpt"])
def test_an_answer_is_its_own_and_what_it_cost_is_booked(client, server, store, name):
    before = booked(store)
    answer = client.completions.create(model=name, **QUESTION)
    direct = httpx.post(f"{server}/v1/completions", json={"model": MODEL, **QUESTION}, timeout=60).json()
    assert answer.choices[0].text == direct["choices"][0]["text"]
    assert booked(store) == (before[0] + 1, before[1] + direct["usage"]["completion_tokens"])


def test_a_stream_passes_through_and_is_booked_by_an_estimate(client, gateway, store):
    before = booked(store)
    whole = client.completions.create(model=MODEL, **QUESTION)
    chunks = list(client.completions.create(model=MODEL, stream=True, **QUESTION))
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole.choices[0].text
    # It tells no usage of streams; a chunk is a token.
    assert booked(store) == (before[0] + 2, before[1] + 2 * whole.usage.completion_tokens)
    assert "penstock_gateway_estimated_usage_total 1.0" in httpx.get(f"{gateway.url}/metrics").text


def test_chats_pass_through_streamed_and_whole(client):
    assert client.chat.completions.create(model=MODEL, **CHAT).usage.completion_tokens == 8
    chunks = list(client.chat.completions.create(model=MODEL, stream=True, **CHAT))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].choices[0].finish_reason == "length"


def test_its_own_errors_reach_the_caller_and_cost_nothing(client, gateway, store):
    before = booked(store)
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model=MODEL, prompt="word " * 900, max_tokens=4)
    assert caught.value.code == "context_length_exceeded"
    # What it cannot digest is 500 there, and must not have it ejected.
    assert httpx.post(f"{gateway.url}/v1/completions", json={"model": MODEL}, timeout=60).status_code == 500
    assert client.completions.create(model=MODEL, prompt="a", max_tokens=1).choices
    assert booked(store) == (before[0] + 1, before[1] + 1)


def test_what_a_server_that_died_was_sent_is_tried_elsewhere(server, fleet, default_model_path):
    port = free_port()
    body = {"model": MODEL, "prompt": "a", "max_tokens": 1}
    with GatewayProcess(*fleet(server, f"http://127.0.0.1:{port}")) as gateway:
        url = f"{gateway.wait_ready().url}/v1/completions"
        with llama_server(default_model_path, port):
            until(lambda: len({route(httpx.post(url, json=body, timeout=60)) for _ in range(2)}) == 2, 60, "its turn")
        # It is dead now, and no probe need have found that out yet.
        responses = [httpx.post(url, json=body, timeout=60) for _ in range(4)]
        assert len({route(response) for response in responses}) == 1


def route(response):
    assert response.status_code == 200, response.text
    return response.headers["x-penstock-route"].partition(";")[0]
