"""Alerts, triggers and dashboards: that they parse, say what the documentation says, and that the check can fail."""

import json
import re
from pathlib import Path

import promql_parser
import pytest
import yaml
from promql_parser import MatchOp

from penstock.deploy.kubernetes.bundle import bundle
from penstock.deploy.monitoring.dashboard import dashboard
from penstock.deploy.monitoring.rules import Watched, failed_requests, groups
from tests.deployed_queries import queries
from tests.promql import OWN_SERIES, UnknownName, legend_labels, plain, result_labels, selectors
from tests.unit.deploy.plans import everything, smallest_bundle

WATCHED = Watched("models/qwen", objective=0.99, slow_ttft_seconds=2.5)
METRICS = {"a_total": frozenset({"kind"}), "b_bucket": frozenset({"le", "model"}), "c": frozenset({"kind"})}
DOCUMENT = Path(__file__).parents[4] / "docs" / "metrics.md"


@pytest.fixture(scope="module", params=["smallest", "everything"])
def asked(request, tmp_path_factory):
    if request.param == "smallest":
        return queries(smallest_bundle())
    return queries(bundle(everything(tmp_path_factory.mktemp("deploy"))))


def test_every_query_is_promql(asked):
    assert len(asked) > 100
    for query in asked:
        promql_parser.parse(plain(query.expression))


def documented() -> dict[str, str]:
    """Return each metric of the documentation and what is said of it."""
    rows = re.findall(r"^\| `(penstock_\w+)` \| \w+ \| (.*) \|$", DOCUMENT.read_text(), flags=re.MULTILINE)
    return dict(rows)


def test_every_metric_is_documented_and_every_value_of_a_label_with_it(asked):
    rows = documented()
    recorded = {query.record for query in asked}
    for query in asked:
        for selector in selectors(query.expression):
            name = re.sub(r"_(bucket|count|sum)$", "", selector.name)
            if selector.name in recorded or selector.name in OWN_SERIES:
                continue
            assert name in rows, query.where
            for matcher in selector.matchers.matchers:
                is_ours = matcher.name not in ("job", "instance", "le")
                if is_ours and matcher.op == MatchOp.Equal and matcher.value:
                    assert matcher.value in re.split(r"\W+", rows[name]), f"{query.where}: {matcher}"


def test_every_query_asks_for_this_deployment_only(asked):
    for query in asked:
        if ": variable" in query.where:
            continue
        for selector in selectors(query.expression):
            named = {matcher.name for matcher in selector.matchers.matchers}
            assert named & {"job", "deployment"}, query.where


@pytest.mark.parametrize(
    "wrong",
    [
        "rate(b_total[5m])",
        'rate(a_total{knd="x"}[5m])',
        "sum by (model) (rate(a_total[5m]))",
        "sum without (model) (a_total)",
        "histogram_quantile(0.9, sum by (model) (rate(b_bucket[5m])))",
        "a_total / on (model) c",
        "a_total / b_bucket",
        "sum(a_total) / sum by (kind) (c)",
        "absent(nothing)",
        "(a_total > 1) and nothing",
        "max_over_time(rate(nothing[5m])[1h:])",
    ],
)
def test_what_does_not_exist_is_noticed(wrong):
    with pytest.raises(UnknownName):
        result_labels(wrong, METRICS)


@pytest.mark.parametrize(
    ("expression", "labels"),
    [
        ("a_total", {"kind", "job", "instance"}),
        ("sum by (kind) (rate(a_total[5m])) / sum by (kind) (rate(c[5m]))", {"kind"}),
        ("histogram_quantile(0.9, sum by (le, model) (rate(b_bucket[5m])))", {"model"}),
        ("sum(a_total) or vector(0)", set()),
        ("sum by (kind) (a_total) / scalar(sum(c))", {"kind"}),
        ('absent(c{job="x"})', {"job"}),
        ("2 * a_total > 1", {"kind", "job", "instance"}),
        ("c > 0.5 and rate(a_total[5m]) > 0", {"kind", "job", "instance"}),
        ("up == 0", {"job", "instance"}),
    ],
)
def test_the_labels_of_a_result_are_known(expression, labels):
    assert result_labels(expression, METRICS) == labels


def test_labels_in_texts_are_seen():
    assert legend_labels("{{instance}} and {{ $labels.replica }}: {{ $value | humanize }}") == {"instance", "replica"}


def alerts() -> list[dict]:
    return [rule for group in groups(WATCHED) for rule in group["rules"] if "alert" in rule]


def test_alerts_tell_what_is_wrong_and_how_urgent_it_is():
    for rule in alerts():
        assert rule["labels"]["severity"] in ("critical", "warning"), rule["alert"]
        assert rule["annotations"]["summary"]
        assert rule["annotations"]["description"]


def test_what_an_operator_must_know_of_has_an_alert():
    assert {rule["alert"] for rule in alerts()} >= {
        "PenstockErrorBudgetBurns",
        "PenstockLatencyBudgetBurns",
        "PenstockPromiseBudgetBurns",
        "PenstockServerDown",
        "PenstockEngineDown",
        "PenstockNoReplicaReady",
        "PenstockCacheFull",
        "PenstockCacheCorrupted",
        "PenstockStoreFails",
        "PenstockGatewayStoreFails",
        "PenstockAutoscalerFails",
    }


@pytest.mark.parametrize("metric", ["penstock_store_failures_total", "penstock_gateway_store_failures_total"])
def test_a_store_that_fails_is_seen_on_the_dashboard_whoever_writes_to_it(metric):
    assert f"increase({metric}{{" in json.dumps(dashboard(WATCHED))


def test_a_budget_that_burns_is_seen_over_a_long_and_a_short_window():
    (fast,) = (
        rule for rule in alerts() if rule["alert"] == "PenstockErrorBudgetBurns" and rule["labels"]["window"] == "1h"
    )
    ours = '{deployment="models/qwen"}'
    assert fast["expr"] == (
        f"penstock:failed_requests:ratio_rate1h{ours} > 0.144 and penstock:failed_requests:ratio_rate5m{ours} > 0.144"
    )


def test_a_callers_own_deadline_burns_no_budget():
    assert 'status!="504"' in failed_requests('job="gateways"', "5m")


def test_every_ratio_that_an_alert_reads_is_recorded():
    recorded = {rule["record"] for group in groups(WATCHED) for rule in group["rules"] if "record" in rule}
    read = {item.name for rule in alerts() for item in selectors(rule["expr"]) if ":" in item.name}
    assert read <= recorded


def test_the_cluster_and_compose_have_the_same_alerts():
    files = smallest_bundle()
    cluster = yaml.safe_load(files["prometheus/prometheusrule.yaml"])["spec"]["groups"]
    compose = yaml.safe_load(files["compose/prometheus/rules.yml"])["groups"]
    names = [[rule.get("alert") for group in found for rule in group["rules"]] for found in (cluster, compose)]
    assert names[0] == names[1]


def test_panels_do_not_overlap_and_have_numbers_of_their_own():
    panels = dashboard(WATCHED)["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    taken = set()
    for panel in panels:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken, panel["title"]
        taken |= cells


@pytest.mark.parametrize(
    "metric",
    [
        "penstock_time_to_first_token_seconds_bucket",
        "penstock_time_per_output_token_seconds_bucket",
        "penstock_promises_total",
        "penstock_total_queued_requests",
        "penstock_kv_cache_utilization",
        "penstock_prefix_hit_tokens_total",
        "penstock_preemptions_total",
        "penstock_http_requests_total",
        "penstock_tenant_tokens_total",
        "penstock_gateway_requests_total",
        "penstock_gateway_in_flight_requests",
    ],
)
def test_the_dashboard_shows(metric):
    shown = {
        item.name
        for panel in dashboard(WATCHED)["panels"]
        for target in panel.get("targets", ())
        for item in selectors(target["expr"])
    }
    assert metric in shown


@pytest.mark.parametrize("objective", [0.5, 0.9, 0.93, 0.99, 0.999])
def test_no_part_of_requests_is_asked_to_be_more_than_all(objective):
    watched = Watched("models", objective=objective, slow_ttft_seconds=2.5)
    rules = [rule for group in groups(watched) for rule in group["rules"]]
    limits = [float(part) for rule in rules for part in re.findall(r"ratio_rate\w+\{[^}]*\} > (\S+)", rule["expr"])]
    assert len(limits) >= 12
    assert all(1 - objective <= limit * 1.0001 and limit < 1 for limit in limits)
