"""A real `penstock gateway` and the simulated replicas behind it, each in processes of its own."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path

from tests.fakes.tiny_tokenizer import write_tokenizer
from tests.server_process import ServerProcess, write_tiny_model

MODEL = "tiny"


class GatewayProcess:
    """One running gateway. Use as a context manager; leaves no process behind."""

    def __init__(self, *arguments: str, store: str = "none") -> None:
        environment = {name: value for name, value in os.environ.items() if not name.startswith("PENSTOCK_")}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "penstock", "gateway", *arguments, "--port", "0", "--store", store],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment, start_new_session=True,
        )  # fmt: skip
        self.lines: list[str] = []
        self.url = ""
        self.admin = ""
        self._ready = threading.Event()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def wait_ready(self, seconds: float = 60.0) -> "GatewayProcess":
        assert self._ready.wait(seconds) and self.url, "the gateway did not start:\n" + "\n".join(self.lines)
        return self

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line.rstrip("\n"))
            if found := re.match(r"Gateway: (http://\S+)/v1", line):
                self.url = found[1]
            if found := re.match(r"Admin:\s+unix:(\S+)", line):
                self.admin = found[1]
            if line.startswith("Ready:"):
                self._ready.set()
        self._ready.set()

    def stop(self, number: int = signal.SIGTERM, seconds: float = 60.0) -> int:
        self.process.send_signal(number)
        return self.process.wait(seconds)

    def signal_all(self, number: int = signal.SIGTERM) -> list[int]:
        """Signal every process that came of it, as a service manager does; return them."""
        parents = parents_of_processes()
        family = [self.process.pid]
        for pid in family:
            family += [child for child, parent in parents.items() if parent == pid]
        for pid in family:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
        return family

    def __enter__(self) -> "GatewayProcess":
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait(10)
        self._reader.join(10)
        assert self.process.stdout is not None
        self.process.stdout.close()


def parents_of_processes() -> dict[int, int]:
    """Whose child each process of this machine is, but for those that have ended."""
    parents = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, parent = stat.read_text().rpartition(")")[2].split()[:2]
            if state != "Z":
                parents[int(stat.parent.name)] = int(parent)
    return parents


def write_simulated_model(folder: Path) -> Path:
    model = write_tiny_model(folder / MODEL)
    write_tokenizer(model)
    return model


def start_replica(
    model: Path, *arguments: str, pace: str = "1", store: str = "none", variables: Mapping[str, str] | None = None
) -> ServerProcess:
    """A Penstock server on a simulated device: about 5 ms a token times `pace`."""
    profile = f"h200-llama-8b@{pace}"
    options = ["--load-format", "dummy", "--device", "simulated", "--simulated-profile", profile, "--store", store]
    return ServerProcess(str(model), *options, *arguments, variables=variables)


def kill_all(server: ServerProcess) -> None:
    """End a server at once, all of its processes, as a machine that loses power does."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(server.process.pid, signal.SIGKILL)
    server.process.wait(10)


@contextlib.contextmanager
def simulated_replicas(model: Path, count: int, *arguments: str, pace: str = "1") -> Iterator[list[ServerProcess]]:
    with contextlib.ExitStack() as stack:
        servers = [stack.enter_context(start_replica(model, *arguments, pace=pace)) for _ in range(count)]
        for server in servers:
            server.wait_ready()
        yield servers
