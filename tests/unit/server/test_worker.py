"""A real API worker process, on a real socket, before a real engine loop with the fake model behind it."""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest

from penstock.models.store import ModelFiles
from penstock.server.worker_setup import WorkerSetup, encode_worker_setup
from tests.fakes.tiny_tokenizer import write_tokenizer
from tests.unit.engine.test_client import RunningEngine
from tests.unit.server.conftest import MODEL, make_config, until
from tests.unit.server.sse import events_in

LONG = {"model": MODEL, "prompt": [1, 2, 3], "max_tokens": 50, "ignore_eos": True}
STEP_SECONDS = 0.03


class SlowEngine(RunningEngine):
    """Steps that take a while, so that something happens in between."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        launch = self.engine.runner.launch

        def slow(plan):
            time.sleep(STEP_SECONDS)
            return launch(plan)

        self.engine.runner.launch = slow


@pytest.fixture
def engine(tmp_path):
    engine = SlowEngine(tmp_path / "engine.sock")
    yield engine
    engine.stop()


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


def setup_for(folder: Path, listener: socket.socket, **changes: object) -> bytes:
    write_tokenizer(folder)
    files = ModelFiles(name=MODEL, kind="folder", path=folder)
    return encode_worker_setup(
        WorkerSetup(
            config=make_config(**changes),
            files=files,
            engine_socket=str(folder / "engine.sock"),
            identity="worker-0",
            listen_fd=listener.fileno(),
        )
    )


@pytest.fixture
async def start(tmp_path):
    workers = []

    async def start_worker(**changes: object) -> RunningWorker:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            document = setup_for(tmp_path, listener, **changes)
            command = [sys.executable, "-m", "penstock.server.worker"]
            process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stderr=subprocess.PIPE, pass_fds=[listener.fileno()]
            )
            workers.append(RunningWorker(process, listener.getsockname()[1]))
        process.stdin.write(document)
        process.stdin.close()
        return workers[-1]

    yield start_worker
    for worker in workers:
        worker.process.kill()
        worker.process.wait()
        worker.process.stderr.close()
        await worker.client.aclose()


async def test_a_worker_serves_what_the_engine_makes(engine, start):
    worker = await start()
    await worker.wait_ready()
    answer = (await worker.client.post("/v1/completions", json={**LONG, "max_tokens": 5})).json()
    assert answer["usage"]["completion_tokens"] == 5
    chat = {"model": MODEL, "messages": [{"role": "user", "content": "x"}]}
    tokens = (await worker.client.post("/tokenize", json=chat)).json()["token_strs"]
    assert tokens is None


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


async def test_the_first_sigterm_lets_open_requests_finish(engine, start):
    worker = await start(drain_seconds=20.0)
    await worker.wait_ready()
    call = asyncio.create_task(worker.client.post("/v1/completions", json={**LONG, "stream": True}))
    await until(lambda: engine.engine.scheduler.running)
    worker.process.send_signal(signal.SIGTERM)
    response = await call
    assert events_in(response.content)[-1] == "[DONE]"
    assert await worker.ended() == 0


async def test_a_drain_that_runs_out_ends_requests_with_an_error(engine, start):
    worker = await start(drain_seconds=0.2)
    await worker.wait_ready()
    call = asyncio.create_task(worker.client.post("/v1/completions", json={**LONG, "stream": True}))
    await until(lambda: engine.engine.scheduler.running)
    worker.process.send_signal(signal.SIGTERM)
    last = events_in((await call).content)[-1]
    assert last["error"]["code"] == "engine_unavailable"
    assert await worker.ended() == 0
    await until(lambda: not engine.engine.scheduler.running)


async def test_the_second_sigterm_ends_at_once(engine, start):
    worker = await start(drain_seconds=600.0)
    await worker.wait_ready()
    call = asyncio.create_task(worker.client.post("/v1/completions", json={**LONG, "stream": True}))
    await until(lambda: engine.engine.scheduler.running)
    worker.process.send_signal(signal.SIGTERM)
    await asyncio.sleep(0.3)
    worker.process.send_signal(signal.SIGTERM)
    await worker.ended()
    assert engine.engine.scheduler.running
    with pytest.raises(httpx.TransportError):
        await call


async def test_a_request_leaves_one_structured_log_line(engine, start):
    worker = await start()
    await worker.wait_ready()
    await worker.client.post("/v1/completions", json={**LONG, "max_tokens": 3}, headers={"x-request-id": "mine"})
    worker.process.send_signal(signal.SIGTERM)
    await worker.ended()
    lines = [json.loads(line) for line in worker.process.stderr.read().splitlines()]
    (line,) = [line for line in lines if line.get("request_id") == "mine"]
    assert (line["process"], line["output_tokens"], line["status"]) == ("worker-0", 3, 200)


PARENT = """
import subprocess, sys, time
worker = subprocess.Popen([sys.executable, "-m", "penstock.server.worker"], stdin=subprocess.PIPE, pass_fds=[{fd}])
worker.stdin.write(sys.stdin.buffer.read())
worker.stdin.close()
print(worker.pid, flush=True)
time.sleep(600)
"""


async def test_a_worker_ends_when_its_parent_is_gone(engine, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        document = setup_for(tmp_path, listener)
        command = [sys.executable, "-c", PARENT.format(fd=listener.fileno())]
        parent = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, pass_fds=[listener.fileno()]
        )
        worker = RunningWorker(parent, listener.getsockname()[1])
    parent.stdin.write(document)
    parent.stdin.close()
    try:
        pid = int(parent.stdout.readline())
        await worker.wait_ready()
    finally:
        parent.kill()
        parent.wait()
        parent.stdout.close()
        await worker.client.aclose()
    await until(lambda: not is_running(pid))


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
    pid = worker.process.pid
    children = [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    assert children  # the template's process
    worker.process.kill()
    await until(lambda: not any(is_running(child) for child in children))
