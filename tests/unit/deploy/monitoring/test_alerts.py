"""When alerts fire, by Prometheus's own engine: `promtool test rules` over made-up series."""

import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from penstock.deploy.monitoring.rules import Watched, groups

PROMTOOL = shutil.which("promtool")
pytestmark = pytest.mark.skipif(PROMTOOL is None, reason="promtool is not here (Debian: apt install prometheus)")

SERVER, GATEWAY = 'job="penstock-server", instance="s"', 'job="penstock-gateway", instance="g"'
REQUESTS = "penstock_gateway_requests_total"
HEALTHY = {
    f"up{{{SERVER}}}": "1+0x120",
    f"penstock_engine_up{{{SERVER}}}": "1+0x120",
    f'{REQUESTS}{{{GATEWAY}, model="m", status="200"}}': "0+600x120",
    f'penstock_gateway_replicas{{{GATEWAY}, standing="ready"}}': "2+0x120",
}


WATCHED = Watched("penstock", 0.99, 2.5)


def fires(tmp_path: Path, series: dict[str, str], *alerts: str, watched: Watched = WATCHED) -> bool:
    """Whether any of the alerts fires over these series, which have a sample each minute, after 100 minutes."""
    (tmp_path / "rules.yml").write_text(yaml.safe_dump({"groups": groups(watched)}))
    test: dict[str, Any] = {
        "interval": "1m",
        "input_series": [{"series": name, "values": values} for name, values in series.items()],
        "alert_rule_test": [{"eval_time": "100m", "alertname": alert, "exp_alerts": []} for alert in alerts],
    }
    document = {"rule_files": ["rules.yml"], "evaluation_interval": "5m", "tests": [test]}
    (tmp_path / "test.yml").write_text(yaml.safe_dump(document))
    command = [str(PROMTOOL), "test", "rules", str(tmp_path / "test.yml")]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    output = result.stdout + result.stderr
    assert "SUCCESS" in output or "got:" in output, output
    return result.returncode != 0


ALERTS = sorted({rule["alert"] for group in groups(WATCHED) for rule in group["rules"] if "alert" in rule})


def test_nothing_fires_while_all_is_well(tmp_path):
    assert not fires(tmp_path, HEALTHY, *ALERTS)


def replicas(**standings: str) -> dict[str, str]:
    """How many there are, by standing; none of the others."""
    names = ("unknown", "ready", "not_ready", "ejected", "trial")
    name = f"penstock_gateway_replicas{{{GATEWAY}, standing="
    return {f'{name}"{standing}"}}': standings.get(standing, "0+0x120") for standing in names}


def bucket(name: str, bound: str, values: str) -> dict[str, str]:
    return {f'{name}_bucket{{{SERVER}, le="{bound}"}}': values}


TROUBLE = {
    # One request in five fails; the budget is one in a hundred.
    "PenstockErrorBudgetBurns": {f'{REQUESTS}{{{GATEWAY}, model="m", status="500"}}': "0+150x120"},
    "PenstockLatencyBudgetBurns": {
        **bucket("penstock_time_to_first_token_seconds", "2.5", "0+60x120"),
        f"penstock_time_to_first_token_seconds_count{{{SERVER}}}": "0+100x120",
    },
    "PenstockPromiseBudgetBurns": {
        f'penstock_promises_total{{{SERVER}, kind="ttft", outcome="kept"}}': "0+60x120",
        f'penstock_promises_total{{{SERVER}, kind="ttft", outcome="broken"}}': "0+30x120",
    },
    "PenstockServerDown": {f"up{{{SERVER}}}": "0+0x120"},
    "PenstockGatewayDown": {f"up{{{GATEWAY}}}": "0+0x120"},
    "PenstockEngineDown": {f"penstock_engine_up{{{SERVER}}}": "0+0x120"},
    "PenstockNoReplicaReady": replicas(ejected="2+0x120"),
    "PenstockCacheCorrupted": {f"penstock_canary_failures_total{{{SERVER}}}": "0+1x120"},
    "PenstockCacheFull": {
        f"penstock_kv_cache_utilization{{{SERVER}}}": "0.99+0x120",
        f"penstock_preemptions_total{{{SERVER}}}": "0+5x120",
    },
    "PenstockQueueLong": {
        **bucket("penstock_queue_seconds", "2.5", "0+10x120"),
        **bucket("penstock_queue_seconds", "5.0", "0+60x120"),
        **bucket("penstock_queue_seconds", "+Inf", "0+60x120"),
    },
    "PenstockRefusesRequests": {
        f'penstock_refused_requests_total{{{SERVER}, reason="ttft"}}': "0+30x120",
        f"penstock_queue_seconds_count{{{SERVER}}}": "0+60x120",
    },
    "PenstockStoreFails": {f"penstock_store_failures_total{{{SERVER}}}": "0+1x120"},
    "PenstockGatewayStoreFails": {f"penstock_gateway_store_failures_total{{{GATEWAY}}}": "0+1x120"},
    "PenstockReplicaEjected": {f'penstock_gateway_replica_ejections{{{GATEWAY}, replica="r"}}': "0+1x120"},
    "PenstockStreamsLost": {f'penstock_gateway_resumptions_total{{{GATEWAY}, outcome="lost"}}': "0+1x120"},
    "PenstockAutoscalerFails": {
        f'penstock_gateway_autoscaler_failures_total{{{GATEWAY}, model="m", reason="start_failed"}}': "0+1x120"
    },
    "PenstockGatewayQueueLong": {f"penstock_gateway_waiting_requests{{{GATEWAY}}}": "3+0x120"},
}


@pytest.mark.parametrize("alert", sorted(TROUBLE))
def test_it_fires_when_it_should(tmp_path, alert):
    assert fires(tmp_path, {**HEALTHY, **TROUBLE[alert]}, alert)


def test_servers_that_are_gone_are_noticed(tmp_path):
    gone = {name: values for name, values in HEALTHY.items() if "server" not in name}
    assert fires(tmp_path, gone, "PenstockNoServers")


def test_replicas_that_are_back_and_have_had_no_request_yet_are_no_trouble(tmp_path):
    assert not fires(tmp_path, {**HEALTHY, **replicas(trial="2+0x120")}, "PenstockNoReplicaReady")


def test_a_replica_that_once_did_not_start_is_no_trouble(tmp_path):
    failures = f'penstock_gateway_autoscaler_failures_total{{{GATEWAY}, model="m", reason="start_failed"}}'
    assert not fires(tmp_path, {**HEALTHY, failures: "0+0x95 1+0x25"}, "PenstockAutoscalerFails")


SLEEPING = Watched("penstock", 0.99, 2.5, may_sleep=True)
ASLEEP = {f"up{{{GATEWAY}}}": "1+0x120", **replicas()}


def test_a_fleet_at_zero_is_no_trouble_while_nobody_is_refused(tmp_path):
    woken = {f'{REQUESTS}{{{GATEWAY}, model="m", status="200"}}': "0+1x120"}
    tried = [alert for alert in ALERTS if alert != "PenstockNoServers"]
    assert not fires(tmp_path, {**ASLEEP, **woken}, *tried, watched=SLEEPING)


def test_a_fleet_at_zero_that_does_not_wake_is_noticed(tmp_path):
    refused = {f'{REQUESTS}{{{GATEWAY}, model="", status="503"}}': "0+1x120"}
    assert fires(tmp_path, {**ASLEEP, **refused}, "PenstockNoReplicaReady", watched=SLEEPING)


def test_only_a_fleet_that_may_be_at_zero_may_be_without_servers():
    names = {rule.get("alert") for group in groups(SLEEPING) for rule in group["rules"]}
    assert set(ALERTS) - names == {"PenstockNoServers"}


def test_every_alert_is_tried():
    assert sorted([*TROUBLE, "PenstockNoServers"]) == ALERTS


def test_a_fleet_without_any_replica_burns_its_budget(tmp_path):
    """Then no model is known, and what is refused is counted under none."""
    refused = {f'{REQUESTS}{{{GATEWAY}, model="", status="503"}}': "0+600x120"}
    assert fires(tmp_path, refused, "PenstockErrorBudgetBurns")


def test_an_error_that_is_over_stops_burning(tmp_path):
    over = {f'{REQUESTS}{{{GATEWAY}, model="m", status="500"}}': "0+150x2 300+0x118"}
    assert not fires(tmp_path, {**HEALTHY, **over}, "PenstockErrorBudgetBurns")
