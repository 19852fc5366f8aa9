"""Processes that die or stand still, signals that come: nobody hangs, nothing is left behind."""

import asyncio
import contextlib
import os
import signal
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx

from tests.faults.caller import call, completion_body, tally
from tests.faults.conftest import DUMMY, is_idle
from tests.server_process import ServerProcess, is_alive, until, write_tiny_model

NUM_STREAMS = 64


def running(server):
    return server.metric("penstock_total_running_requests")


def in_progress(server):
    return running(server) + server.metric("penstock_total_queued_requests")


def ask(server, **changes):
    body = completion_body(stream=False, max_tokens=5, **changes)
    headers = {"content-type": "application/json"}
    return httpx.post(f"{server.url}/v1/completions", content=body, headers=headers, timeout=30)


async def opened(server, count, **changes):
    """Open streams and wait until the engine has them all. It tells every half second: they must last longer."""
    calls = [asyncio.create_task(call(server.url, completion_body(**changes))) for _ in range(count)]
    await asyncio.to_thread(until, lambda: in_progress(server) >= count, 30, f"{count} open streams")
    return calls


async def test_a_killed_engine_ends_every_stream_with_a_typed_error_and_comes_back(server, server_folder, patience):
    calls = await opened(server, NUM_STREAMS)
    killed = time.monotonic()
    os.kill(server.engine_pid, signal.SIGKILL)
    outcomes = await asyncio.gather(*calls)
    assert {outcome.code for outcome in outcomes} == {"engine_failed"}
    assert max(outcome.ended for outcome in outcomes) - killed < 2.0 * patience
    assert server.get("/live")[0] == 200
    await asyncio.to_thread(until, lambda: server.get("/ready")[0] == 200, 60, "the engine's return")
    assert ask(server).status_code == 200
    assert len(server.children("penstock.engine.process")) == 1
    assert len(list(server_folder.rglob("engine.sock"))) == 1


async def test_a_killed_worker_leaves_no_request_running_and_is_replaced(server):
    calls = await opened(server, 2)
    killed = server.kill_workers()  # all, so that those of the streams are among them
    outcomes = await asyncio.gather(*calls)
    assert tally(outcomes) == {"connection_error": 2}
    until(lambda: server.has_replaced(killed), 60, "a new worker")
    until(lambda: is_idle(server), 10, "an idle engine")
    assert ask(server).status_code == 200


def test_a_worker_that_is_killed_whenever_it_serves_is_replaced_every_time(model):
    # One worker alone: it is the one that serves.
    with ServerProcess(str(model), *DUMMY, "--device", "simulated", "--workers", "1") as server:
        server.wait_ready()
        for _ in range(6):
            killed = server.kill_workers()
            until(lambda dead=killed: server.has_replaced(dead), 60, "a new worker")


def test_while_one_of_two_workers_is_replaced_whoever_asks_is_answered(model):
    with ServerProcess(str(model), *DUMMY, "--device", "simulated", "--workers", "2") as server:
        server.wait_ready()
        answers = []

        def has_answered(*workers) -> bool:
            with ThreadPoolExecutor(4) as pool:  # at once, so that none of the workers is left out for long
                answers.extend(pool.map(lambda _: ask(server).status_code, range(4)))
            answers.append(server.get("/ready")[0])
            return all(f'"process": "worker-{worker}"' in server.output for worker in workers)

        until(lambda: has_answered("0-0", "1-0"), 30, "an answer of each worker")
        answers.clear()
        os.kill(server.worker_pids[0], signal.SIGKILL)
        until(lambda: has_answered("0-1") or has_answered("1-1"), 60, "an answer of the new worker")
        assert set(answers) == {200}


def test_a_worker_that_never_comes_to_serve_leaves_the_others_serving(model):
    with ServerProcess(str(model), *DUMMY, "--device", "simulated", "--workers", "2") as server:
        server.wait_ready()
        serving, victim = server.worker_pids
        for _ in range(6):  # once while it serves, then as often as would end a server that nobody else answers for
            os.kill(victim, signal.SIGKILL)
            until(lambda dead=victim: set(server.worker_pids) - {serving, dead}, 30, "another start")
            (victim,) = set(server.worker_pids) - {serving}
        assert ask(server).status_code == 200
        assert serving in server.worker_pids


def test_a_tokenizer_that_cannot_be_read_ends_the_start_with_one_sentence(tmp_path):
    folder = write_tiny_model(tmp_path / "model")
    (folder / "tokenizer.json").write_text("{")
    with ServerProcess(str(folder), *DUMMY, "--device", "simulated", "--workers", "2") as server:
        assert server.process.wait(60) == 2
    assert server.lines[-1].startswith(f"file {folder}/tokenizer.json: it cannot be read as a tokenizer")
    assert server.output.count("cannot be read") == 1
    assert "Traceback" not in server.output
    assert "started again" not in server.output


def test_of_two_servers_that_start_on_one_port_the_later_ends_and_says_why(model):
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as of a server that found connections lingering
        other.bind(("127.0.0.1", 0))
        port = str(other.getsockname()[1])
        with ServerProcess(str(model), *DUMMY, "--device", "simulated", "--port", port) as server:
            until(lambda: server.children("penstock.engine.process"), 60, "its port was free when it looked")
            other.listen()
            threading.Thread(target=answer_everything, args=(other,), daemon=True).start()
            assert server.process.wait(60) == 2
            other.shutdown(socket.SHUT_RDWR)
    assert f"another server came to listen on http://127.0.0.1:{port}" in server.output
    assert "ready:" not in server.output, "though the other one is"


def answer_everything(listener: socket.socket) -> None:
    """Answer whatever is asked with 200, until the listener is shut down."""
    with contextlib.suppress(OSError):
        while True:
            with listener.accept()[0] as connection:
                connection.recv(4096)
                connection.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\nconnection: close\r\n\r\n")


async def test_an_engine_that_stands_still_is_not_ready_and_recovers(server, patience):
    calls = await opened(server, 2, max_tokens=1500)
    engine = server.engine_pid
    os.kill(engine, signal.SIGSTOP)
    try:
        seconds = until(lambda: "stood still" in server.get("/ready")[1], 30, "not being ready")
        assert server.get("/ready")[0] == 503
        assert server.get("/live")[0] == 200
    finally:
        os.kill(engine, signal.SIGCONT)
    assert seconds < 3.0 * patience
    until(lambda: server.get("/ready")[0] == 200, 10, "readiness")
    assert tally(await asyncio.gather(*calls)) == {"completed": 2}, "streams go on where they stood"
    assert server.engine_pid == engine


async def test_a_server_whose_whole_group_is_told_to_end_drains_and_leaves_nothing_behind(model, tmp_path):
    before = shared_memory()
    with ServerProcess(str(model), *DUMMY, folder=tmp_path) as server:
        server.wait_ready()
        family = [server.engine_pid, *server.worker_pids]
        calls = await opened(server, 1, max_tokens=1000)
        os.killpg(server.process.pid, signal.SIGTERM)  # as a terminal or a service manager does
        assert await asyncio.to_thread(server.process.wait, 60) == 0
        assert tally(await asyncio.gather(*calls)) == {"completed": 1}, "SIGTERM lets open requests finish"
    assert not any(is_alive(pid) for pid in family)
    assert list(tmp_path.iterdir()) == []
    assert shared_memory() <= before


async def test_a_second_signal_ends_at_once_and_leaves_no_process(model, patience):
    with ServerProcess(str(model), *DUMMY) as server:
        server.wait_ready()
        calls = await opened(server, 1)
        family = [server.engine_pid, *server.worker_pids]
        os.killpg(server.process.pid, signal.SIGTERM)
        await asyncio.sleep(0.3)
        assert server.process.poll() is None, "open requests may go on after the first signal"
        began = time.monotonic()
        os.killpg(server.process.pid, signal.SIGTERM)
        await asyncio.to_thread(server.process.wait, 60)
        assert time.monotonic() - began < 5.0 * patience
        assert not any(is_alive(pid) for pid in family), "they are gone before the server is"
        assert "asyncio" not in server.output
        await asyncio.gather(*calls)


def test_processes_do_not_outlive_a_killed_supervisor(model):
    with ServerProcess(str(model), *DUMMY) as server:
        server.wait_ready()
        family = [server.engine_pid, *server.worker_pids]
        server.process.kill()
        until(lambda: not any(is_alive(pid) for pid in family), 10, "the end of every process")


def test_an_engine_that_was_starting_does_not_outlive_a_killed_supervisor_either(model):
    with ServerProcess(str(model), *DUMMY) as starting:
        until(lambda: starting.children("penstock.engine.process"), 30, "the start of an engine")
        engine = starting.engine_pid
        starting.process.kill()
        until(lambda: not is_alive(engine), 30, "the end of the engine")


def shared_memory() -> set[str]:
    """Names of our own segments: other programs come and go."""
    return {path.name for path in Path("/dev/shm").iterdir() if path.name.startswith(("penstock", "torch"))}
