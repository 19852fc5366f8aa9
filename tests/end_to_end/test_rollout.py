"""Rollouts over real servers: corrupted weights and doubled latency are rolled back, a good version is promoted."""

import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.fakes.gateway_process import GatewayProcess, start_replica, write_simulated_model
from tests.fakes.tiny_tokenizer import write_tokenizer
from tests.server_process import ServerProcess
from tests.tiny_models import make_reference

PACE = 8  # about 40 ms a token: far more than this machine's own noise

# Times to the first token are of a busy machine, and say little; those per token are the simulated device's.
FLEET = """
[rollouts.{model}]
steps = ["shadow", 50, 100]
shadow_percent = 100
max_shadows = 64

[rollouts.{model}.gate]
max_ttft_ratio = 5.0
max_time_per_token_ratio = {ratio}
max_error_increase = 0.4
max_divergence = 0.1
window_seconds = 0.2
first_look = 16
min_step_seconds = 0
"""
REPLICA = '\n[[replicas]]\nurl = "{url}"\nversion = "{version}"\n'


class Fleet:
    """A gateway over replicas of several versions, and callers."""

    def __init__(self, stack: ExitStack, folder: Path, model: str, ratio: float, replicas: dict[str, ServerProcess]):
        self.store = str(folder / "penstock.db")
        self.file = folder / "fleet.toml"
        text = FLEET.format(model=model, ratio=ratio)
        for version, server in replicas.items():
            text += REPLICA.format(url=server.wait_ready().url, version=version)
        self.file.write_text(text)
        self.model = model
        self.gateway = stack.enter_context(GatewayProcess("--fleet", str(self.file), store=self.store)).wait_ready()

    def command(self, *arguments: str) -> str:
        command = [sys.executable, "-m", "penstock", "rollout", *arguments, "--store", self.store]
        return subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout

    def roll_out(self, candidate: str, num_callers: int = 16, seconds: float = 120.0) -> dict:
        """Begin a rollout, send requests until it has ended, and return it. Every caller gets a whole answer."""
        self.command("start", self.model, candidate, "--fleet", str(self.file))
        ends_at = time.monotonic() + seconds
        over = threading.Event()
        with ThreadPoolExecutor(num_callers) as pool, httpx.Client(base_url=self.gateway.url, timeout=60) as client:
            for caller in range(num_callers):
                pool.submit(self._call, client, caller, over)
            try:
                while time.monotonic() < ends_at:
                    time.sleep(0.5)
                    rollout = self.rollout()
                    if rollout["status"] != "running":
                        return rollout
            finally:
                over.set()
        raise AssertionError(f"nothing was decided: {rollout}")

    def rollout(self) -> dict:
        with httpx.Client(transport=httpx.HTTPTransport(uds=self.gateway.admin), base_url="http://admin") as admin:
            (report,) = admin.get("/admin/rollout").json()["rollouts"]
        return report["rollout"]

    def _call(self, client: httpx.Client, caller: int, over: threading.Event) -> None:
        number = 0
        while not over.is_set():
            number += 1
            answer = self.ask(client, [5 + caller, 6 + number % 50, 7], user=f"{caller}-{number}")
            assert answer.status_code == 200 and answer.text.endswith("data: [DONE]\n\n")

    def ask(self, client: httpx.Client, prompt: list[int], **fields: object) -> httpx.Response:
        body = {"model": self.model, "prompt": prompt, "max_tokens": 16, "ignore_eos": True, "temperature": 0}
        body["logprobs"] = 3
        return client.post("/v1/completions", json={**body, "stream": True, **fields})


@contextmanager
def simulated(folder: Path, candidate_pace: int) -> Iterator[Fleet]:
    """Two versions on simulated devices."""
    model = write_simulated_model(folder)
    with ExitStack() as stack:
        paces = {"stable": PACE, "b": candidate_pace}
        replicas = {name: stack.enter_context(start_replica(model, pace=str(pace))) for name, pace in paces.items()}
        yield Fleet(stack, folder, "tiny", 1.5, replicas)


def write_weights(folder: Path) -> Path:
    make_reference("llama", folder, vocab_size=512, max_position_embeddings=512)
    write_tokenizer(folder)
    return folder


def changed(folder: Path, copy: Path, change: Callable[[torch.Tensor], torch.Tensor]) -> Path:
    """Copy a model with some of its weights changed."""
    copy.mkdir()
    for file in folder.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    weights = load_file(folder / "model.safetensors")
    name = next(name for name in weights if name.endswith("layers.1.mlp.down_proj.weight"))
    weights[name] = change(weights[name])
    save_file(weights, copy / "model.safetensors", metadata={"format": "pt"})
    return copy


@pytest.fixture
def real(tmp_path):
    """A stable version on real weights, and one of which some are lost."""
    good = write_weights(tmp_path / "good")
    with real_fleet(tmp_path, stable=good, corrupted=changed(good, tmp_path / "corrupted", torch.zeros_like)) as fleet:
        yield fleet


@contextmanager
def real_fleet(folder: Path, **folders: Path) -> Iterator[Fleet]:
    options = ["--served-name", "real", "--device", "cpu", "--store", "none", "--threads", "1"]
    with ExitStack() as stack:
        replicas = {name: stack.enter_context(ServerProcess(str(folder), *options)) for name, folder in folders.items()}
        yield Fleet(stack, folder, "real", 20.0, replicas)


def measures(rollout: dict) -> set[str]:
    return {item["measure"] for item in rollout["history"][-1]["findings"] if item["verdict"] == "bad"}


def test_corrupted_weights_are_rolled_back_before_a_caller_sees_them(real):
    rollout = real.roll_out("corrupted", num_callers=4)
    assert (rollout["status"], [step["step"] for step in rollout["history"]]) == ("rolled_back", ["shadow"])
    # One measure beyond doubt is enough, and ends the step: which of the two is first so is a matter of moments.
    assert measures(rollout) and measures(rollout) <= {"tokens that differ", "log-probability distance p50"}
    with httpx.Client(base_url=real.gateway.url, timeout=60) as client:
        routes = [real.ask(client, [9], user=str(number)).headers["x-penstock-route"] for number in range(8)]
    assert not any("version=" in route for route in routes)


def test_doubled_latency_is_rolled_back(tmp_path):
    with simulated(tmp_path, 2 * PACE) as fleet:
        rollout = fleet.roll_out("b")
        assert (rollout["status"], [step["step"] for step in rollout["history"]]) == ("rolled_back", ["shadow"])
        assert measures(rollout) == {"time per token p50"}
        assert "**rolled back**: time per token p50" in fleet.command("status")


@pytest.mark.slow
def test_slightly_other_weights_are_promoted_and_their_distance_is_told(tmp_path):
    good = write_weights(tmp_path / "good")
    rounded = changed(good, tmp_path / "rounded", lambda weight: weight.to(torch.bfloat16).to(weight.dtype))
    with real_fleet(tmp_path, stable=good, rounded=rounded) as fleet:
        rollout = fleet.roll_out("rounded", num_callers=4, seconds=300)
    assert rollout["status"] == "promoted", rollout
    found = {item["measure"]: item for item in rollout["history"][0]["findings"]}
    distance = found["log-probability distance p50"]
    assert distance["verdict"] == "good" and 0 < distance["candidate"] < 0.1


@pytest.mark.slow
def test_a_good_version_is_promoted(tmp_path):
    with simulated(tmp_path, PACE) as fleet:
        rollout = fleet.roll_out("b")
        assert (rollout["status"], [step["step"] for step in rollout["history"]]) == ("promoted", ["shadow", 50])
        with httpx.Client(base_url=fleet.gateway.url, timeout=60) as client:
            assert "version=b" in fleet.ask(client, [9]).headers["x-penstock-route"]
        assert json.loads(fleet.command("status", "--json"))["rollouts"][0]["rollout"] == rollout
