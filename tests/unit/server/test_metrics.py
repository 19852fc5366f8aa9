"""What Prometheus reads, and that docs/metrics.md says all of it."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from penstock.engine.messages import EngineStats, Histogram, TokenEvent
from penstock.request import FinishReason

DOCUMENT = Path(__file__).parents[3] / "docs" / "metrics.md"


async def families(service):
    response = await service.client.get("/metrics")
    return {family.name: family for family in text_string_to_metric_families(response.text)}


def value(families, name):
    (sample,) = families[name].samples
    return sample.value


async def test_the_names_are_those_of_the_document(service):
    await service.chat()
    # prometheus_client adds creation times of its own.
    exposed = {name for name in await families(service) if not name.endswith("_created")}
    documented = set(re.findall(r"^\| `(penstock_(?!gateway_)\w+)", DOCUMENT.read_text(), flags=re.MULTILINE))
    assert exposed == {name.removesuffix("_total") for name in documented}


async def test_the_engines_numbers_are_told(service):
    service.engine.stats = EngineStats(
        num_running=3, num_waiting=5, num_blocks=32, num_used_blocks=8, num_cached_blocks=4, num_preemptions=2,
        generated_tokens=70, prefix_query_tokens=50, prefix_hit_tokens=20, num_finished={"stop": 6, "abort": 1},
    )  # fmt: skip
    seen = await families(service)
    assert value(seen, "penstock_total_running_requests") == 3
    assert value(seen, "penstock_total_queued_requests") == 5
    assert value(seen, "penstock_kv_cache_utilization") == 0.25
    assert value(seen, "penstock_preemptions") == 2
    assert value(seen, "penstock_generated_tokens") == 70
    assert value(seen, "penstock_prefix_hit_tokens") == 20
    finished = {sample.labels["reason"]: sample.value for sample in seen["penstock_finished_requests"].samples}
    assert finished == {"stop": 6, "abort": 1}
    (info,) = seen["penstock_cache_config_info"].samples
    assert info.labels == {"block_size": "16", "num_gpu_blocks": "32"}


async def test_an_engine_that_is_down_runs_and_holds_nothing(service):
    service.engine.stats = EngineStats(num_running=3, num_waiting=5, num_blocks=32, num_used_blocks=8, num_steps=9)
    service.engine.connected = False
    seen = await families(service)
    assert value(seen, "penstock_engine_up") == 0
    assert value(seen, "penstock_total_running_requests") == 0
    assert value(seen, "penstock_total_queued_requests") == 0
    assert value(seen, "penstock_kv_blocks_used") == 0
    assert value(seen, "penstock_steps") == 9


async def test_the_engines_histograms_are_told(service):
    service.engine.stats = EngineStats(histograms={"ttft_seconds": Histogram([0.1, 1.0], [2, 5, 6], 4.5)})
    samples = (await families(service))["penstock_time_to_first_token_seconds"].samples
    buckets = {sample.labels["le"]: sample.value for sample in samples if sample.name.endswith("_bucket")}
    assert buckets == {"0.1": 2, "1.0": 5, "+Inf": 6}
    assert {sample.name.rpartition("_")[2]: sample.value for sample in samples[-2:]} == {"count": 6, "sum": 4.5}


async def test_requests_are_counted_by_route_and_status(service):
    await service.chat()
    await service.chat(temperature=9)
    for name in ("/a", "/b"):
        await service.client.get(name)
    await service.client.delete("/v1/models/any")
    samples = (await families(service))["penstock_http_requests"].samples
    counts = {(s.labels["route"], s.labels["status"]): s.value for s in samples if s.name.endswith("_total")}
    assert counts == {
        ("/v1/chat/completions", "200"): 1,
        ("/v1/chat/completions", "400"): 1,
        ("unmatched", "404"): 2,
        ("/v1/models/{model:path}", "405"): 1,
    }


async def test_each_tenants_requests_and_tokens_are_counted(service):
    answer = (await service.chat()).json()
    seen = await families(service)
    (requests,) = (item for item in seen["penstock_tenant_requests"].samples if item.name.endswith("_total"))
    assert (requests.labels["status"], requests.value) == ("200", 1)
    samples = [item for item in seen["penstock_tenant_tokens"].samples if item.name.endswith("_total")]
    assert {item.labels["tenant"] for item in samples} == {requests.labels["tenant"]}
    assert {item.labels["kind"]: item.value for item in samples} == {
        "prompt": answer["usage"]["prompt_tokens"],
        "cached": 0,
        "output": answer["usage"]["completion_tokens"],
    }


async def test_prompts_of_refused_requests_are_nobodys_tokens(service):
    service.engine.script = lambda request: [
        TokenEvent(request_id=request.request_id, finish=FinishReason.ERROR, error_code="overloaded", error="full")
    ]
    assert (await service.chat()).status_code == 429
    samples = (await families(service))["penstock_tenant_tokens"].samples
    assert {item.value for item in samples if item.name.endswith("_total")} == {0}


async def test_what_is_no_request_for_a_model_is_nobodys(service):
    await service.client.get("/v1/models")
    assert (await families(service))["penstock_tenant_requests"].samples == []


@pytest.mark.parametrize(
    ("accept", "content_type"),
    [("", "text/plain"), ("application/openmetrics-text; version=1.0.0", "application/openmetrics-text")],
)
async def test_the_scraper_chooses_the_format(service, accept, content_type):
    response = await service.client.get("/metrics", headers={"accept": accept})
    assert response.headers["content-type"].startswith(content_type)


PROGRAM = """
from penstock.server.metrics import ServerMetrics
from penstock.telemetry import RequestRecord
from tests.fakes.fake_engine import FakeEngine
from tests.fakes.tiny_tokenizer import make_tokenizer
metrics = ServerMetrics(FakeEngine(make_tokenizer()))
metrics.observe(RequestRecord("id", "GET", "/live", 0.0, route="/live", status=200))
print(metrics.exposition("")[0].decode())
"""


def test_the_counts_of_several_workers_add_up(tmp_path, monkeypatch):
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", str(tmp_path))
    root = Path(__file__).parents[3]
    outputs = [
        subprocess.run([sys.executable, "-c", PROGRAM], cwd=root, capture_output=True, text=True, check=True).stdout
        for _ in range(2)
    ]
    line = 'penstock_http_requests_total{route="/live",status="200"}'
    assert [f"{line} {count}.0" in output for count, output in enumerate(outputs, start=1)] == [True, True]
    assert "penstock_total_queued_requests 0.0" in outputs[1]
