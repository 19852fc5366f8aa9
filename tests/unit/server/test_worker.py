"""A real API worker process, on a real socket, before a real engine loop with the fake model behind it."""

import asyncio
import json
import os
import select
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx
import pytest

from penstock.child_setup import encode_setup
from penstock.engine.setup import Refused
from penstock.models.store import ModelFiles
from penstock.request import SamplingParams
from penstock.server.listeners import bind, listen
from penstock.server.worker_setup import WorkerNotice, WorkerSetup, decode_worker_notice, encode_worker_notice
from penstock.stop_signals import OPERATORS_SIGNALS, OWNERS_SIGNAL
from tests.fakes.tiny_tokenizer import write_tokenizer
from tests.unit.engine.test_client import RunningEngine, connected
from tests.unit.server.conftest import MODEL, make_config, until
from tests.unit.server.sse import events_in

LONG = {"model": MODEL, "prompt": [1, 2, 3], "max_tokens": 50, "ignore_eos": True}


class HeldEngine(RunningEngine):
    """Steps can be held back, so that a request stays open as long as a test needs it."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.may_step = threading.Event()
        self.may_step.set()
        launch = self.engine.runner.launch

        def launch_when_allowed(plan):
            assert self.may_step.wait(60)
            return launch(plan)

        self.engine.runner.launch = launch_when_allowed


@pytest.fixture
def engine(tmp_path):
    engine = HeldEngine(tmp_path / "engine.sock")
    yield engine
    engine.may_step.set()
    engine.stop()


@pytest.fixture
async def other(engine, tmp_path):
    async with connected(tmp_path, b"worker-1") as client:
        yield client


class RunningWorker:
    def __init__(self, process: subprocess.Popen[bytes], port: int) -> None:
        self.process = process
        self.client = httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=30)

    async def wait_ready(self) -> None:
        for _ in range(600):
            try:
                if (await self.client.get("/ready")).status_code == 200:
                    return
            except httpx.TransportError:
                pass
            await asyncio.sleep(0.05)
        raise AssertionError("the worker was never ready")

    async def ended(self) -> int:
        return await asyncio.to_thread(self.process.wait, 20)

    async def close(self) -> None:
        self.process.kill()
        self.process.wait()
        self.process.stdout.close()
        self.process.stderr.close()
        await self.client.aclose()


@pytest.fixture
def notices():
    """The two ends of a pipe in which workers say that they serve."""
    ends = os.pipe()
    os.set_blocking(ends[0], False)
    yield ends
    for end in ends:
        os.close(end)


def setup_for(folder: Path, listener: socket.socket, notice_fd: int, **changes: object) -> bytes:
    write_tokenizer(folder)
    files = ModelFiles(name=MODEL, kind="folder", path=folder)
    return encode_setup(
        WorkerSetup(
            config=make_config(**changes),
            files=files,
            engine_socket=str(folder / "engine.sock"),
            identity="worker-0",
            parent_pid=os.getpid(),
            listen_fd=listener.fileno(),
            notice_fd=notice_fd,
            is_replacement=True,
        )
    )


def launch(command: list[str], document: bytes, listener: socket.socket, notice_fd: int) -> RunningWorker:
    pipe, inherited = subprocess.PIPE, [listener.fileno(), notice_fd]
    process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, pass_fds=inherited)
    process.stdin.write(document)
    process.stdin.close()
    return RunningWorker(process, listener.getsockname()[1])


@pytest.fixture
async def start(tmp_path, notices):
    workers = []

    async def start_worker(tokenizer: str | None = None, port: int = 0, take=bind, **changes: object) -> RunningWorker:
        with take("127.0.0.1", port) as listener:
            document = setup_for(tmp_path, listener, notices[1], **changes)
            if tokenizer is not None:
                (tmp_path / "tokenizer.json").write_text(tokenizer)
            command = [sys.executable, "-m", "penstock.server.worker"]
            workers.append(launch(command, document, listener, notices[1]))
        return workers[-1]

    yield start_worker
    for worker in workers:
        await worker.close()


async def open_stream(worker: RunningWorker, engine: HeldEngine) -> asyncio.Task[httpx.Response]:
    """Start a streamed request that cannot end before the engine may step."""
    engine.may_step.clear()
    call = asyncio.create_task(worker.client.post("/v1/completions", json={**LONG, "stream": True}))
    await until(lambda: engine.engine.scheduler.requests)
    return call


async def stopped_listening(worker: RunningWorker) -> None:
    for _ in range(600):
        try:
            async with httpx.AsyncClient(base_url=worker.client.base_url) as stranger:
                await stranger.get("/live")
        except httpx.TransportError:
            return
        await asyncio.sleep(0.05)
    raise AssertionError("the worker went on listening")


async def test_a_worker_serves_what_the_engine_makes(engine, start):
    worker = await start()
    await worker.wait_ready()
    answer = (await worker.client.post("/v1/completions", json={**LONG, "max_tokens": 5})).json()
    assert answer["usage"]["completion_tokens"] == 5
    chat = {"model": MODEL, "messages": [{"role": "user", "content": "x"}]}
    assert (await worker.client.post("/tokenize", json=chat)).json()["count"] > 1


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="needs /proc to see a process's children")
async def test_a_worker_that_replaces_another_while_the_engine_is_in_a_long_step_refuses_nobody(engine, start, other):
    engine.may_step.clear()
    params = SamplingParams(max_tokens=1)
    other.submit(prompt=[1, 2, 3], params=params, request_id="long", arrival=time.monotonic())
    await until(lambda: engine.engine.scheduler.requests)
    worker = await start(take=listen)  # as the one before it did
    ready = asyncio.create_task(worker.client.get("/ready"))
    completion = asyncio.create_task(worker.client.post("/v1/completions", json={**LONG, "max_tokens": 5}))
    await until(lambda: children_of(worker.process.pid))  # the template's, which is the last thing a start waits for
    await asyncio.sleep(1.5)  # longer than a worker that listens would keep the request
    assert not ready.done() and not completion.done()
    engine.may_step.set()
    assert (await ready).status_code == 200
    assert (await completion).json()["usage"]["completion_tokens"] == 5


async def test_without_an_engine_a_worker_is_live_but_not_ready(start):
    worker = await start()
    for _ in range(400):
        try:
            assert (await worker.client.get("/live")).status_code == 200
            break
        except httpx.TransportError:
            await asyncio.sleep(0.05)
    response = await worker.client.get("/ready")
    assert response.status_code == 503
    assert "starting" in response.json()["error"]["message"]


async def test_a_worker_that_serves_says_so_once(engine, start, notices):
    worker = await start()
    await worker.wait_ready()
    assert os.read(notices[0], 10) == WorkerNotice.SERVES.value
    assert str(notices[1]) not in os.listdir(f"/proc/{worker.process.pid}/fd")


async def test_a_worker_that_cannot_read_the_tokenizer_says_why_and_nothing_else(start, notices, tmp_path):
    worker = await start(tokenizer="{")
    assert await worker.ended() == 2
    notice = decode_worker_notice(os.read(notices[0], select.PIPE_BUF))
    assert isinstance(notice, Refused)
    assert notice.message.startswith(f"file {tmp_path}/tokenizer.json: it cannot be read as a tokenizer")
    assert worker.process.stderr.read() == b""


async def test_a_worker_that_cannot_read_the_models_end_tokens_says_why(start, notices, tmp_path):
    (tmp_path / "generation_config.json").write_text("{")
    worker = await start()
    assert await worker.ended() == 2
    notice = decode_worker_notice(os.read(notices[0], select.PIPE_BUF))
    assert notice == Refused(f"file {tmp_path}/generation_config.json: this is not JSON; fetch the model again")


def test_a_refusal_is_cut_where_a_pipe_would_give_it_in_pieces():
    said = encode_worker_notice(Refused("\udcff" + "é" * select.PIPE_BUF))
    assert len(said) == select.PIPE_BUF
    assert decode_worker_notice(said).message.startswith("\\udcffé")


async def test_a_worker_tells_that_another_server_was_sooner_to_listen(engine, start, notices):
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as of a server that found connections lingering
        other.bind(("127.0.0.1", 0))
        worker = await start(port=other.getsockname()[1])
        other.listen()
        assert await worker.ended() == 0
    assert os.read(notices[0], 10) == WorkerNotice.PORT_TAKEN.value


async def test_the_owners_first_signal_lets_open_requests_finish(engine, start):
    worker = await start(drain_seconds=60.0)
    await worker.wait_ready()
    call = await open_stream(worker, engine)
    for number in OPERATORS_SIGNALS * 2:  # which come to every process: they are the owner's to act upon
        worker.process.send_signal(number)
    assert (await worker.client.get("/live")).status_code == 200
    worker.process.send_signal(OWNERS_SIGNAL)
    await stopped_listening(worker)
    engine.may_step.set()
    response = await call
    assert events_in(response.content)[-1] == "[DONE]"
    assert await worker.ended() == 0


async def test_a_drain_that_runs_out_ends_requests_with_an_error(engine, start):
    worker = await start(drain_seconds=0.2)
    await worker.wait_ready()
    call = await open_stream(worker, engine)
    worker.process.send_signal(OWNERS_SIGNAL)
    assert (await call).json()["error"]["code"] == "engine_unavailable"
    assert await worker.ended() == 0
    engine.may_step.set()
    await until(lambda: not engine.engine.scheduler.running)


async def test_the_owners_second_signal_ends_at_once(engine, start):
    worker = await start(drain_seconds=600.0)
    await worker.wait_ready()
    call = await open_stream(worker, engine)
    worker.process.send_signal(OWNERS_SIGNAL)
    await stopped_listening(worker)
    worker.process.send_signal(OWNERS_SIGNAL)
    await worker.ended()
    (outcome,) = await asyncio.gather(call, return_exceptions=True)
    assert isinstance(outcome, httpx.TransportError) or outcome.status_code >= 500


async def test_a_request_leaves_one_structured_log_line(engine, start):
    worker = await start()
    await worker.wait_ready()
    await worker.client.post("/v1/completions", json={**LONG, "max_tokens": 3}, headers={"x-request-id": "mine"})
    worker.process.send_signal(OWNERS_SIGNAL)
    await worker.ended()
    lines = [json.loads(line) for line in worker.process.stderr.read().splitlines()]
    (line,) = [line for line in lines if line.get("request_id") == "mine"]
    assert (line["process"], line["output_tokens"], line["status"]) == ("worker-0", 3, 200)


async def test_a_worker_with_nothing_to_drain_does_not_speak_of_it(engine, start):
    worker = await start()
    await worker.wait_ready()
    worker.process.send_signal(OWNERS_SIGNAL)
    await worker.ended()
    assert b"draining" not in worker.process.stderr.read()


PARENT = """
import json, os, subprocess, sys, time
worker = subprocess.Popen([sys.executable, "-m", "penstock.server.worker"], stdin=subprocess.PIPE, pass_fds={fds})
setup = json.loads(sys.stdin.buffer.read())
worker.stdin.write(json.dumps({{**setup, "parent_pid": os.getpid()}}).encode())
worker.stdin.close()
print(worker.pid, flush=True)
time.sleep(600)
"""


async def test_a_worker_ends_when_its_parent_is_gone(engine, tmp_path, notices):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        document = setup_for(tmp_path, listener, notices[1])
        command = [sys.executable, "-c", PARENT.format(fds=[listener.fileno(), notices[1]])]
        parent = launch(command, document, listener, notices[1])
    try:
        pid = int(parent.process.stdout.readline())
        await parent.wait_ready()
    finally:
        await parent.close()
    await until(lambda: not is_running(pid))


def children_of(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    try:
        return ") Z" not in Path(f"/proc/{pid}/stat").read_text()  # nobody may be there to reap it
    except FileNotFoundError:
        return False


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="needs /proc to see a process's children")
async def test_a_killed_worker_leaves_no_process_behind(engine, start):
    worker = await start()
    await worker.wait_ready()
    children = children_of(worker.process.pid)
    assert children  # the template's process
    worker.process.kill()
    await until(lambda: not any(is_running(child) for child in children))
