"""The gateway with an autoscaler: ready without replicas, and what it tells of it."""

import hashlib

import msgspec
import pytest

from penstock.fleet.autoscaler.backends.interface import Trouble
from penstock.fleet.autoscaler.report import report
from penstock.fleet.config import AutoscalerSection, ModelSection, QueueSection
from penstock.store.key_ring import KeyRing
from penstock.tenants import ApiKey, KeyTerms
from tests.fakes.fake_replica import FakeReplica
from tests.unit.fleet.conftest import QUICK, running_gateway

SECTION = AutoscalerSection(
    backend={"kind": "external"}, policy="queue-length", requests_per_replica=2, interval_seconds=0.05
)
CONFIG = msgspec.structs.replace(
    QUICK, autoscaler={"tiny": SECTION}, models={"tiny": ModelSection(policy="round-robin")}
)
METRICS = "penstock_total_running_requests 7\npenstock_work_seconds_total 1\n"


async def report_of(running):
    (autoscaler,) = running.gateway.autoscalers
    await autoscaler.step()
    return report(autoscaler, running.gateway.pool.clock())


async def test_a_gateway_that_scales_from_zero_is_ready_without_replicas():
    async with running_gateway(config=CONFIG) as running:
        assert (await running.client.get(f"{running.url}/ready")).status == 200
    async with running_gateway() as running:
        assert (await running.client.get(f"{running.url}/ready")).status == 503


async def test_what_replicas_tell_becomes_a_number_that_others_may_read():
    async with FakeReplica(metrics=METRICS).running() as one, running_gateway(one, config=CONFIG) as running:
        told = await report_of(running)
        assert (told.desired, told.reason) == (4, "7 requests at 2 for each replica")
        text = await (await running.client.get(f"{running.url}/metrics")).text()
        assert 'penstock_gateway_autoscaler_replicas{model="tiny",state="desired"} 4.0' in text
        for reason in ("start_failed", "useless_replica", "backend_refused", "policy_error"):
            assert f'penstock_gateway_autoscaler_failures_total{{model="tiny",reason="{reason}"}} 0.0' in text


ADMIN = KeyRing((ApiKey("boss", hashlib.sha256(b"boss").hexdigest(), KeyTerms(admin=True)),), needs_keys=True)


@pytest.mark.parametrize(("model", "status"), [("", 200), ("/tiny", 200), ("/other", 404)])
async def test_a_key_with_the_admins_rights_is_told_every_decision(model, status):
    async with running_gateway(config=CONFIG, ring=ADMIN) as running:
        url, headers = f"{running.url}/admin/autoscaler{model}", {"authorization": "Bearer boss"}
        assert (await running.client.get(url)).status == 401
        response = await running.client.get(url, headers=headers)
        assert response.status == status
        if model == "/tiny":
            assert (await response.json())["desired"] == 1


@pytest.mark.parametrize("path", ["/admin/autoscaler", "/admin/autoscaler/tiny"])
async def test_without_keys_the_public_port_tells_nothing_of_it(path):
    async with running_gateway(config=CONFIG) as running:
        assert (await running.client.get(f"{running.url}{path}")).status == 404


async def test_a_held_request_is_told_that_replicas_do_not_start():
    config = msgspec.structs.replace(CONFIG, queue=QueueSection(hold_seconds=0.05))
    async with running_gateway(config=config) as running:
        (autoscaler,) = running.gateway.autoscalers
        autoscaler._backend.trouble = Trouble("a server ended with status 2", "/home/alice: no such folder")
        await autoscaler.step()
        body = {"model": "tiny", "prompt": "hello"}
        response = await running.client.post(f"{running.url}/v1/completions", json=body)
        assert response.status == 503
        assert (await response.json())["error"]["message"] == (
            "no replica of this model is ready: a server ended with status 2; the gateway's log says why"
        )
