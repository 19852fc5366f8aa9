"""`penstock gateway` that starts and ends its own replicas: real servers on a simulated device."""

import threading
import time

import httpx
import pytest

from tests.fakes.gateway_process import MODEL, GatewayProcess, parents_of_processes, write_simulated_model
from tests.server_process import until
from tests.unit.server.sse import events_in, text_of

FLEET = """
[health]
probe_seconds = 0.2

[queue]
hold_seconds = 60.0

[autoscaler.{model}]
min_replicas = 0
max_replicas = 2
interval_seconds = 0.2
scale_down_seconds = 1.0
idle_seconds = 1.0
start_seconds = 3.0
target_utilization = 0.1

[autoscaler.{model}.backend]
kind = "local"
serve = ["{folder}", "--load-format", "dummy", "--device", "simulated", "--simulated-profile", "h200-llama-8b@4", "--store", "none"]
"""  # noqa: E501
NUM_TOKENS = 120


def stream(number):
    """A long prompt, which is work, and an answer that outlives the load by seconds."""
    prompt = [5 + (index * number) % 400 for index in range(2000)]
    return {
        "model": MODEL, "prompt": prompt, "max_tokens": NUM_TOKENS, "ignore_eos": True, "temperature": 0,
        "stream": True,
    }  # fmt: skip


class Fleet:
    """A gateway that began with no replica, and what its autoscaler did."""

    def __init__(self, gateway):
        self.gateway = gateway
        self.answers = {}
        self.most_ready = 0

    def read_admin(self, path):
        transport = httpx.HTTPTransport(uds=self.gateway.admin)
        with httpx.Client(transport=transport, base_url="http://admin", timeout=60) as admin:
            return admin.get(path).json()

    def report(self):
        return self.read_admin(f"/admin/autoscaler/{MODEL}")

    def num_processes(self):
        return len(self.read_admin("/admin/replicas")["replicas"])

    def ask(self, number, began=None):
        """Keep the answer to one stream; `began` is set when it has begun to arrive."""
        url = f"{self.gateway.url}/v1/completions"
        with httpx.stream("POST", url, json=stream(number), timeout=90) as response:
            pieces = []
            for piece in response.iter_bytes():
                pieces.append(piece)
                if began is not None:
                    began.set()
        self.answers[number] = httpx.Response(response.status_code, content=b"".join(pieces))

    def two_are_ready(self):
        self.most_ready = max(self.most_ready, self.report()["signals"]["num_ready"])
        return self.most_ready == 2


@pytest.fixture(scope="module")
def scaled(tmp_path_factory):
    """From nothing to two replicas under load, and back to none while the last streams still run."""
    folder = tmp_path_factory.mktemp("autoscaler")
    model = write_simulated_model(folder / "models")
    (folder / "fleet.toml").write_text(FLEET.format(model=MODEL, folder=model))
    with GatewayProcess("--fleet", str(folder / "fleet.toml")) as gateway:
        fleet = Fleet(gateway.wait_ready())
        fleet.ready_status = httpx.get(f"{gateway.url}/ready").status_code
        fleet.processes_before = fleet.num_processes()
        fleet.ask(1)  # held until there is a replica
        threads = []

        def load():
            if fleet.two_are_ready():
                return True
            threads.append(threading.Thread(target=fleet.ask, args=(len(threads) + 2,)))
            threads[-1].start()
            time.sleep(0.15)
            return False

        until(load, 60, "a second replica")
        # Both have streams now, and nothing more comes: they leave as these end.
        for thread in threads:
            thread.join(60)
        until(lambda: fleet.num_processes() == 0, 30, "the end of the last replica")
        fleet.metrics = httpx.get(f"{gateway.url}/metrics").text
        fleet.last = fleet.report()
        # Not asked of the autoscaler: what it last saw may be the replicas that have just gone.
        began = threading.Event()
        asking = threading.Thread(target=fleet.ask, args=(0, began))
        asking.start()
        assert began.wait(60), "the last stream did not begin"
        fleet.family = gateway.signal_all()
        asking.join(60)
        fleet.status = gateway.process.wait(60)
        yield fleet


def test_a_gateway_without_replicas_is_ready_and_holds_what_comes(scaled):
    assert scaled.processes_before == 0
    assert scaled.ready_status == 200
    assert scaled.answers[1].status_code == 200


def test_load_starts_replicas(scaled):
    assert scaled.most_ready == 2


def test_no_stream_is_cut_while_replicas_come_and_go(scaled):
    assert len(scaled.answers) > 3
    for answer in scaled.answers.values():
        events = events_in(answer.content)
        assert events[-1] == "[DONE]"
        assert events[-2]["choices"][0]["finish_reason"] == "length"
        assert text_of(events)


def test_an_idle_fleet_goes_to_zero_and_says_why(scaled):
    assert scaled.last["desired"] == 0
    assert scaled.last["changes"][0]["after"] == 0
    assert all(change["reason"] for change in scaled.last["changes"])
    assert f'penstock_gateway_autoscaler_changes_total{{direction="up",model="{MODEL}"}}' in scaled.metrics


def test_where_every_process_is_told_to_end_the_gateway_and_its_replica_finish_their_stream(scaled):
    assert scaled.status == 0
    assert len(scaled.family) >= 5  # the gateway; a leash, a supervisor, a worker and an engine
    assert events_in(scaled.answers[0].content)[-1] == "[DONE]"
    assert not parents_of_processes().keys() & set(scaled.family)
