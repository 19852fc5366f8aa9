"""Processes that die, clients that leave, signals that come: nobody hangs, nothing is left behind."""

import json
import os
import signal
import threading
import time
from pathlib import Path

import httpx
import pytest

from tests.server_process import ServerProcess, until, write_tiny_model


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def server(model):
    with ServerProcess(str(model), "--load-format", "dummy", "--kv-memory", "64MiB") as running:
        yield running.wait_ready()


def body(**changes):
    return {
        "model": "tiny", "prompt": [5, 6, 7], "max_tokens": 4000, "ignore_eos": True, "stream": True,
        "temperature": 0, **changes,
    }  # fmt: skip


class Stream:
    """One open stream, read in a thread."""

    def __init__(self, url, **changes):
        self.events: list[str] = []
        self.ended_at: float | None = None
        self.failure: Exception | None = None
        self._url = url
        self._body = body(**changes)
        self.thread = threading.Thread(target=self._read, daemon=True)
        self.thread.start()

    def _read(self):
        try:
            with httpx.stream("POST", f"{self._url}/v1/completions", json=self._body, timeout=60) as response:
                self.events += [line for line in response.iter_lines() if line]
        except httpx.HTTPError as error:
            self.failure = error
        self.ended_at = time.monotonic()

    def begun(self):
        return self.thread.is_alive() or self.events


def is_idle(server):
    return (
        server.metric("penstock_total_running_requests") == 0 and server.metric("penstock_total_queued_requests") == 0
    )


def test_a_killed_engine_ends_streams_with_a_typed_error_and_comes_back(server):
    streams = [Stream(server.url) for _ in range(8)]
    until(lambda: server.metric("penstock_total_running_requests") >= 8, 20, "eight running requests")
    killed = time.monotonic()
    os.kill(server.engine_pid, signal.SIGKILL)
    for stream in streams:
        stream.thread.join(20)
        assert stream.ended_at is not None
        assert stream.ended_at - killed < 2.0
        error = json.loads(stream.events[-1].removeprefix("data: "))["error"]
        assert error["code"] == "engine_failed"
    assert server.get("/live")[0] == 200
    until(lambda: server.get("/ready")[0] == 200, 60, "the engine's return")
    response = httpx.post(f"{server.url}/v1/completions", json=body(stream=False, max_tokens=5), timeout=30)
    assert response.status_code == 200
    assert len(server.children("penstock.engine.process")) == 1


def test_a_killed_worker_leaves_no_request_running_and_is_replaced(server):
    until(lambda: server.get("/ready")[0] == 200, 60, "readiness")
    stream = Stream(server.url)
    until(lambda: server.metric("penstock_total_running_requests") >= 1, 20, "a running request")
    before = server.worker_pid
    os.kill(before, signal.SIGKILL)
    until(lambda: server.worker_pid != before and server.get("/ready")[0] == 200, 60, "a new worker")
    until(lambda: is_idle(server) and server.metric("penstock_kv_blocks_used") == 0, 10, "an idle engine")
    stream.thread.join(10)
    assert stream.ended_at is not None


def test_a_client_that_leaves_frees_its_blocks(server):
    until(lambda: server.get("/ready")[0] == 200, 60, "readiness")
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body(n=4), timeout=60) as response:
        next(response.iter_lines())
        assert response.status_code == 200
    until(lambda: is_idle(server) and server.metric("penstock_kv_blocks_used") == 0, 10, "an idle engine")


def test_sigterm_lets_open_requests_finish(model):
    with ServerProcess(str(model), "--load-format", "dummy", "--kv-memory", "64MiB") as server:
        server.wait_ready()
        stream = Stream(server.url, max_tokens=400)
        until(lambda: server.metric("penstock_total_running_requests") >= 1, 20, "a running request")
        assert server.stop() == 0
        stream.thread.join(20)
        assert stream.failure is None
        assert stream.events[-1] == "data: [DONE]"


def test_a_second_signal_ends_at_once_and_leaves_no_process(model):
    with ServerProcess(str(model), "--load-format", "dummy", "--kv-memory", "64MiB") as server:
        server.wait_ready()
        Stream(server.url)
        until(lambda: server.metric("penstock_total_running_requests") >= 1, 20, "a running request")
        family = [server.engine_pid, server.worker_pid]
        server.process.send_signal(signal.SIGTERM)
        time.sleep(0.3)
        assert server.process.poll() is None, "open requests may go on after the first signal"
        began = time.monotonic()
        server.stop()
        assert time.monotonic() - began < 5.0
        until(lambda: not any(_alive(pid) for pid in family), 5, "the end of every process")


def test_processes_do_not_outlive_a_killed_supervisor(model):
    with ServerProcess(str(model), "--load-format", "dummy", "--kv-memory", "64MiB") as server:
        server.wait_ready()
        family = [server.engine_pid, server.worker_pid]
        server.process.kill()
        until(lambda: not any(_alive(pid) for pid in family), 10, "the end of every process")


def _alive(pid: int) -> bool:
    stat = Path(f"/proc/{pid}/stat")
    return stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z"
