"""Every metric and label that alerts, triggers and dashboards name is one that a live server or gateway shows."""

import json
import socket
import urllib.error
import urllib.request
from collections import defaultdict
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path

import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.deployed_queries import Query, queries
from tests.fakes.gateway_process import MODEL, GatewayProcess, kill_all, simulated_replicas, write_simulated_model
from tests.promql import UnknownName, legend_labels, result_labels, selectors
from tests.server_process import until
from tests.unit.deploy.plans import smallest_bundle

KEY = "an-admins-key"
LIMITED = "a-key-with-limits"


@dataclass
class Live:
    """What /metrics showed."""

    labels: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))  # of each series
    bounds: set[tuple[str, str]] = field(default_factory=set)  # of histograms: (series, le)

    def read(self, url: str) -> None:
        with ask(url, "/metrics") as response:
            text = response.read().decode()
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                self.labels[sample.name] |= set(sample.labels)
                if "le" in sample.labels:
                    self.bounds.add((sample.name, sample.labels["le"]))


@pytest.fixture(scope="module")
def live(tmp_path_factory) -> Live:
    """Two servers and a gateway that have seen what alerts and panels count."""
    folder = tmp_path_factory.mktemp("fleet")
    key_file = folder / "metrics.key"
    key_file.write_text(KEY)
    keys = write_keys(folder / "keys.toml", "limits = { requests_per_minute = 1 }")
    model = write_simulated_model(folder)
    options = ["--keys", str(keys), "--store", str(folder / "store.db")]
    found = Live()
    with simulated_replicas(model, 2, *options) as servers:
        fleet = folder / "fleet.toml"
        entries = [f'[[replicas]]\nurl = "{server.url}"\nkey_file = "{key_file}"\n' for server in servers]
        # An autoscaler that never changes anything: its metrics are named too.
        entries.append(f'[autoscaler.{MODEL}]\nmin_replicas = 2\nmax_replicas = 2\nbackend = {{ kind = "external" }}\n')
        fleet.write_text("\n".join(entries))
        with GatewayProcess("--fleet", str(fleet), "--keys", str(write_keys(folder / "gateway.toml"))) as gateway:
            gateway.wait_ready()
            exercise(gateway.url)
            send_a_head_without_end(servers[0].url)
            run_a_batch(servers[0].url)
            for server in servers:
                found.read(server.url)
            interrupt(gateway.url, servers)
            found.read(gateway.url)
    return found


def write_keys(file: Path, limits: str = "") -> Path:
    admin, limited = (sha256(key.encode()).hexdigest() for key in (KEY, LIMITED))
    file.write_text(
        f'[[keys]]\nname = "operations"\nadmin = true\nsha256 = "{admin}"\n'
        f'[[keys]]\nname = "small"\nsha256 = "{limited}"\n{limits}\n'
    )
    return file


def ask(url: str, path: str, body: dict | None = None, key: str = KEY):
    data = None if body is None else json.dumps(body).encode()
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    return urllib.request.urlopen(urllib.request.Request(url + path, data, headers), timeout=60)


def complete(url: str, *, key: str = KEY, **more: object):
    return ask(url, "/v1/completions", {"model": MODEL, "prompt": "hello", "max_tokens": 4, **more}, key)


def exercise(url: str) -> None:
    """Ask for what each labelled counter counts, as often as both servers need to have seen it."""
    for _ in range(4):
        complete(url, ignore_eos=True).read()
    complete(url, key=LIMITED).read()
    with pytest.raises(urllib.error.HTTPError, match="429") as refused:
        complete(url, key=LIMITED)
    refused.value.close()


def send_a_head_without_end(url: str) -> None:
    """Have the server cut a connection."""
    host, _, port = url.removeprefix("http://").partition(":")
    with socket.create_connection((host, int(port)), timeout=30) as connection:
        connection.sendall(b"GET /live HTTP/1.1\r\n" + b"x: " + b"y" * 80_000)
        while connection.recv(65536):
            pass


def run_a_batch(url: str) -> None:
    body = {"model": MODEL, "prompt": "hello", "max_tokens": 2}
    line = {"custom_id": "1", "method": "POST", "url": "/v1/completions", "body": body}
    with openai.OpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0) as client:
        file = client.files.create(file=("lines.jsonl", json.dumps(line).encode()), purpose="batch")
        batch = client.batches.create(input_file_id=file.id, endpoint="/v1/completions", completion_window="24h")
        until(lambda: client.batches.retrieve(batch.id).status == "completed", 60, "the batch's end")


def interrupt(url: str, servers: list) -> None:
    """Kill the server that streams; the other goes on."""
    with complete(url, max_tokens=400, ignore_eos=True, stream=True) as stream:
        stream.readline()
        route = stream.headers["x-penstock-route"]
        (server,) = (server for server in servers if server.url.removeprefix("http://") in route)
        kill_all(server)
        assert stream.read().rstrip().endswith(b"[DONE]")


@pytest.fixture(scope="module")
def asked() -> list[Query]:
    return queries(smallest_bundle())


def test_every_query_names_only_what_is_there(live, asked):
    wrong = []
    metrics = {name: frozenset(labels) for name, labels in live.labels.items()}
    for query in asked:
        try:
            labels = result_labels(query.expression, metrics)
        except UnknownName as error:
            wrong.append(f"{query.where}: {error}")
            continue
        if query.record is not None:
            metrics[query.record] = labels | query.record_labels
        for text in query.texts:
            if unknown := legend_labels(text) - labels:
                wrong.append(f"{query.where}: the result has no label {sorted(unknown)}")
    assert wrong == []


def test_every_bound_of_a_histogram_that_is_named_exists(live, asked):
    named = {
        (selector.name, matcher.value)
        for query in asked
        for selector in selectors(query.expression)
        for matcher in selector.matchers.matchers
        if matcher.name == "le"
    }
    assert named
    assert named <= live.bounds
