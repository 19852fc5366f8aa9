"""A real `penstock serve` in processes of its own, for end-to-end and fault tests."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path

TINY_CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 512, "hidden_size": 32,
    "intermediate_size": 48, "num_attention_heads": 4, "num_hidden_layers": 2, "num_key_value_heads": 2, "head_dim": 8,
    "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "tie_word_embeddings": False,
    "hidden_act": "silu", "bos_token_id": 0, "eos_token_id": 1, "torch_dtype": "float32",
}  # fmt: skip


def write_tiny_model(folder: Path) -> Path:
    """A bare config.json: served with --load-format dummy."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(TINY_CONFIG))
    return folder


class ServerProcess:
    """One running server. Use as a context manager; leaves no process behind."""

    def __init__(
        self,
        *arguments: str,
        module: str = "penstock",
        folder: Path | None = None,
        variables: Mapping[str, str] | None = None,
    ) -> None:
        """Start `module` as the command; `folder` is for temporary files, `variables` are set beside the others."""
        environment = {name: value for name, value in os.environ.items() if not name.startswith("PENSTOCK_")}
        environment |= variables or {}
        if folder is not None:
            environment["TMPDIR"] = str(folder)
        self.started = time.monotonic()
        self.process = subprocess.Popen(
            [sys.executable, "-m", module, "serve", "--port", "0", *arguments],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment, start_new_session=True,
        )  # fmt: skip
        self.lines: list[str] = []
        self.url = ""
        self._ready = threading.Event()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def output(self) -> str:
        return "\n".join(self.lines)

    def wait_ready(self, seconds: float = 120.0) -> "ServerProcess":
        assert self._ready.wait(seconds), f"the server did not start:\n{self.output}"
        assert self.url, f"the server ended:\n{self.output}"
        return self

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line.rstrip("\n"))
            found = re.search(r"Look:\s+(http://\S+?)/\s", line)
            if found:
                self.url = found[1]
            if line.startswith("curl "):
                self._ready.set()
        self._ready.set()

    def children(self, module: str) -> list[int]:
        """Process ids of this server's children that run a module."""
        found = []
        for folder in Path("/proc").iterdir():
            if folder.name.isdigit():
                try:
                    command = (folder / "cmdline").read_bytes().split(b"\0")
                    parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
                except (OSError, IndexError):
                    continue
                if parent == self.process.pid and module.encode() in command:
                    found.append(int(folder.name))
        return found

    def child(self, module: str) -> int:
        found = self.children(module)
        assert found, f"no process runs {module} now"
        return found[0]

    @property
    def engine_pid(self) -> int:
        return self.child("penstock.engine.process")

    @property
    def worker_pids(self) -> list[int]:
        """Of the API workers: one, or several where there are many cores."""
        return self.children("penstock.server.worker")

    def kill_workers(self) -> list[int]:
        """Kill every API worker at once; return which they were."""
        killed = self.worker_pids
        for pid in killed:
            os.kill(pid, signal.SIGKILL)
        return killed

    def has_replaced(self, killed: list[int]) -> bool:
        """Whether as many other API workers are there as were killed, and one of them serves."""
        workers = set(self.worker_pids)
        return len(workers) == len(killed) and workers.isdisjoint(killed) and self.get("/ready")[0] == 200

    def get(self, path: str) -> tuple[int, str]:
        try:
            with urllib.request.urlopen(self.url + path, timeout=10) as response:
                return response.status, response.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()

    def metric(self, name: str) -> float:
        return self.metrics(name)[0]

    def metrics(self, *names: str) -> list[float]:
        """Return these, as they are at one moment."""
        _, text = self.get("/metrics")
        found = [re.search(rf"^{name}(?:{{[^}}]*}})? (\S+)$", text, re.MULTILINE) for name in names]
        assert all(found), f"one of {names} is missing"
        return [float(match[1]) for match in found if match]

    def stop(self, number: int = signal.SIGTERM, seconds: float = 60.0) -> int:
        self.process.send_signal(number)
        return self.process.wait(seconds)

    def __enter__(self) -> "ServerProcess":
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait(10)
        self._reader.join(30)
        assert not self._reader.is_alive(), "a process outlived its server and holds its output"
        assert self.process.stdout is not None
        self.process.stdout.close()


def is_alive(pid: int) -> bool:
    """Whether a process runs, or has at least not ended."""
    stat = Path(f"/proc/{pid}/stat")
    return stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z"


def until(condition, seconds: float, what: str) -> float:
    """Wait until the condition holds; return how long it took."""
    began = time.monotonic()
    while time.monotonic() - began < seconds:
        try:
            if condition():
                return time.monotonic() - began
        except (OSError, AssertionError):
            pass
        time.sleep(0.02)
    raise AssertionError(f"{what} did not happen within {seconds} s")
