"""The Grafana dashboard: latency, promises, load, cache, errors, tenants and gateways, from our own metrics.

Every metric and label named here is checked against a live server's. Knows nothing of where it is installed.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from penstock.deploy.monitoring.rules import Watched, asked_requests, failed_requests

Panel = dict[str, Any]

UID = "penstock"
_SOURCE = {"type": "prometheus", "uid": "${datasource}"}
_WIDTH = 24
_SERVERS = 'job="$server_job", instance=~"$instance"'
_GATEWAYS = 'job="$gateway_job"'
_QUANTILES = (0.5, 0.95, 0.99)


@dataclass(frozen=True, slots=True)
class _Graph:
    """One panel: a title, what it means, a unit of Grafana's and (legend, PromQL) lines."""

    title: str
    about: str
    unit: str
    lines: tuple[tuple[str, str], ...]
    kind: str = "timeseries"
    width: int = 8
    top: float | None = None  # of the axis


def dashboard(watched: Watched) -> dict[str, Any]:
    """Return the dashboard's model, as Grafana imports it."""
    return {
        "uid": UID,
        "title": "Penstock",
        "description": "Servers and gateways: what callers see, and why.",
        "tags": ["penstock", "llm"],
        "schemaVersion": 39,
        "version": 1,
        "editable": True,
        "timezone": "browser",
        "refresh": "30s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {"list": _variables(watched)},
        "annotations": {"list": []},
        "panels": list(_panels(_rows(watched))),
    }


def _variables(watched: Watched) -> list[dict[str, Any]]:
    # Which servers and gateways, where one Prometheus watches several deployments.
    found = {
        "server_job": ("Servers", "label_values(penstock_engine_up, job)", f"{watched.name}-server"),
        "gateway_job": ("Gateways", "label_values(penstock_gateway_replicas, job)", f"{watched.name}-gateway"),
    }
    jobs = [
        {**_query_variable(name, label, query), "current": {"text": value, "value": value}}
        for name, (label, query, value) in found.items()
    ]
    every = {"multi": True, "includeAll": True, "allValue": ".*", "current": {"text": "All", "value": "$__all"}}
    instances = _query_variable("instance", "Server", 'label_values(penstock_engine_up{job="$server_job"}, instance)')
    source = {"name": "datasource", "label": "Data source", "type": "datasource", "query": "prometheus"}
    return [source, *jobs, {**instances, **every}]


def _query_variable(name: str, label: str, query: str) -> dict[str, Any]:
    return {"name": name, "label": label, "type": "query", "datasource": _SOURCE, "query": query, "refresh": 2}


def _panels(rows: list[tuple[str, list[_Graph]]]) -> Iterator[Panel]:
    """Lay graphs out from left to right and row by row."""
    number, down = 1, 0
    for title, graphs in rows:
        yield {
            "id": number,
            "type": "row",
            "title": title,
            "collapsed": False,
            "panels": [],
            "gridPos": _place(0, down),
        }
        number, down, right, height = number + 1, down + 1, 0, 0
        for graph in graphs:
            if right + graph.width > _WIDTH:
                right, down = 0, down + height
            height = 4 if graph.kind == "stat" else 8
            place = _place(right, down, graph.width, height)
            yield _panel(graph, number, place)
            number, right = number + 1, right + graph.width
        down += height


def _place(x: int, y: int, width: int = _WIDTH, height: int = 1) -> dict[str, int]:
    return {"x": x, "y": y, "w": width, "h": height}


def _panel(graph: _Graph, number: int, place: dict[str, int]) -> Panel:
    heat = graph.kind == "heatmap"
    targets = [
        {
            "refId": chr(ord("A") + index),
            "datasource": _SOURCE,
            "expr": expression,
            "legendFormat": legend,
            **({"format": "heatmap"} if heat else {}),
        }
        for index, (legend, expression) in enumerate(graph.lines)
    ]
    defaults: dict[str, Any] = {"unit": graph.unit, "min": 0}
    if graph.top is not None:
        defaults["max"] = graph.top
    return {
        "id": number,
        "type": graph.kind,
        "title": graph.title,
        "description": graph.about,
        "datasource": _SOURCE,
        "gridPos": place,
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "options": _options(graph),
        "targets": targets,
    }


def _options(graph: _Graph) -> dict[str, Any]:
    if graph.kind == "stat":
        return {"reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False}, "colorMode": "value"}
    if graph.kind == "heatmap":
        return {"calculate": False, "yAxis": {"unit": graph.unit}, "tooltip": {"mode": "single"}}
    return {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi", "sort": "desc"}}


def _rate(metric: str, labels: str) -> str:
    return f"rate({metric}{{{labels}}}[$__rate_interval])"


def _by(label: str, metric: str, labels: str) -> tuple[tuple[str, str], ...]:
    return ((f"{{{{{label}}}}}", f"sum by ({label}) ({_rate(metric, labels)})"),)


def _quantile(part: float, histogram: str, labels: str) -> str:
    return f"histogram_quantile({part}, sum by (le) ({_rate(histogram + '_bucket', labels)}))"


def _quantiles(histogram: str, labels: str) -> tuple[tuple[str, str], ...]:
    return tuple((f"p{part * 100:g}", _quantile(part, histogram, labels)) for part in _QUANTILES)


def _share(part: str, whole: str) -> str:
    return f"({part}) / ({whole})"


def _rows(watched: Watched) -> list[tuple[str, list[_Graph]]]:
    return [
        ("Now", _now(watched)),
        ("What callers wait for", _latency()),
        ("Promises", _promises()),
        ("Load", _load()),
        ("Cache", _cache()),
        ("Tenants", _tenants()),
        ("Errors", _errors()),
        ("Gateways", _gateways()),
    ]


def _kept() -> str:
    promises, kept = "penstock_promises_total", f'{_SERVERS}, outcome="kept"'
    return _share(f"sum({_rate(promises, kept)})", f"sum({_rate(promises, _SERVERS)})")


def _now(watched: Watched) -> list[_Graph]:
    first, between = "penstock_time_to_first_token_seconds", "penstock_time_per_output_token_seconds"
    asked = asked_requests(_GATEWAYS, "$__rate_interval")
    errors = _share(failed_requests(_GATEWAYS, "$__rate_interval"), f"({asked}) > 0")
    within = f'{_SERVERS}, le="{float(watched.slow_ttft_seconds)}"'
    in_time = _share(f"sum({_rate(first + '_bucket', within)})", f"sum({_rate(first + '_count', _SERVERS)})")
    figures = [
        ("Servers up", "Engines that answer", "short", f"sum(penstock_engine_up{{{_SERVERS}}})"),
        ("Requests", "Answered by gateways, each second", "reqps", asked),
        ("Tokens", "Made, each second", "short", f"sum({_rate('penstock_generated_tokens_total', _SERVERS)})"),
        ("Errors", "Part of requests that end with 5xx", "percentunit", errors),
        ("Promises kept", "Part of the targets that requests were accepted with", "percentunit", _kept()),
        (
            "First tokens in time",
            f"Part that came within {watched.slow_ttft_seconds:g} s; the objective is {watched.objective:.4g}",
            "percentunit",
            in_time,
        ),
        ("First token, p95", "From arrival to the first token", "s", _quantile(0.95, first, _SERVERS)),
        ("Time per token, p95", "Between the tokens of an answer", "s", _quantile(0.95, between, _SERVERS)),
    ]
    return [_Graph(title, about, unit, (("", line),), kind="stat", width=3) for title, about, unit, line in figures]


def _latency() -> list[_Graph]:
    first = "penstock_time_to_first_token_seconds"
    spread = f"sum by (le) (increase({first}_bucket{{{_SERVERS}}}[$__rate_interval]))"
    return [
        _Graph("Time to first token", "From arrival to the first token", "s", _quantiles(first, _SERVERS)),
        _Graph(
            "Time per output token", "Between the tokens of an answer", "s",
            _quantiles("penstock_time_per_output_token_seconds", _SERVERS),
        ),
        _Graph(
            "Whole request", "From arrival to the last token", "s", _quantiles("penstock_request_seconds", _SERVERS)
        ),
        _Graph("First tokens, spread", "How many took how long", "s", (("{{le}}", spread),), kind="heatmap"),
        _Graph(
            "Queue", "From arrival to the first step that ran the request", "s",
            _quantiles("penstock_queue_seconds", _SERVERS),
        ),
        _Graph(
            "How well it foresees", "Median relative error of what the scheduler decides by", "percentunit",
            (
                ("step, {{instance}}", f"penstock_cost_model_error{{{_SERVERS}}}"),
                ("first token, {{instance}}", f"penstock_ttft_prediction_error{{{_SERVERS}}}"),
            ),
        ),
    ]  # fmt: skip


def _promises() -> list[_Graph]:
    promises = "penstock_promises_total"
    labels = f'{_SERVERS}, outcome="kept"'
    kept = f"sum by (kind) ({_rate(promises, labels)})"
    return [
        _Graph(
            "Kept, by kind", "Part of the targets that requests were accepted with", "percentunit",
            (("{{kind}}", _share(kept, f"sum by (kind) ({_rate(promises, _SERVERS)})")),), top=1.0,
        ),
        _Graph(
            "Goodput", "Promises kept and broken, each second", "reqps", _by("outcome", promises, _SERVERS)
        ),
        _Graph(
            "Refused unstarted", "What could not be done in time, by reason", "reqps",
            _by("reason", "penstock_refused_requests_total", _SERVERS),
        ),
    ]  # fmt: skip


def _load() -> list[_Graph]:
    return [
        _Graph(
            "Running", "Requests in the batch", "short",
            (("{{instance}}", f"penstock_total_running_requests{{{_SERVERS}}}"),),
        ),
        _Graph(
            "Queued", "Requests that wait for a place in the batch", "short",
            (("{{instance}}", f"penstock_total_queued_requests{{{_SERVERS}}}"),),
        ),
        _Graph(
            "Tokens", "Taken in and made, each second", "short",
            (
                ("prompt", f"sum({_rate('penstock_prompt_tokens_total', _SERVERS)})"),
                ("made", f"sum({_rate('penstock_generated_tokens_total', _SERVERS)})"),
            ),
        ),
        _Graph("Step", "One forward pass", "s", _quantiles("penstock_step_seconds", _SERVERS)),
        _Graph("Steps", "Forward passes each second", "short", _by("instance", "penstock_steps_total", _SERVERS)),
        _Graph(
            "Speculation", "Part of the guessed tokens that were right", "percentunit",
            (
                (
                    "right",
                    _share(
                        f"sum({_rate('penstock_accepted_tokens_total', _SERVERS)})",
                        f"sum({_rate('penstock_drafted_tokens_total', _SERVERS)})",
                    ),
                ),
            ),
            top=1.0,
        ),
    ]  # fmt: skip


def _cache() -> list[_Graph]:
    hits = _rate("penstock_prefix_hit_tokens_total", _SERVERS)
    looked = _rate("penstock_prefix_query_tokens_total", _SERVERS)
    return [
        _Graph(
            "KV cache in use", "Part of the blocks that requests hold", "percentunit",
            (("{{instance}}", f"penstock_kv_cache_utilization{{{_SERVERS}}}"),), top=1.0,
        ),
        _Graph(
            "Prefix hits", "Part of the prompts' tokens found in the cache", "percentunit",
            (
                ("all", _share(f"sum({hits})", f"sum({looked})")),
                ("{{instance}}", _share(f"sum by (instance) ({hits})", f"sum by (instance) ({looked})")),
            ),
            top=1.0,
        ),
        _Graph(
            "Preemptions", "Running requests that gave their blocks back, each second", "short",
            _by("instance", "penstock_preemptions_total", _SERVERS),
        ),
        _Graph(
            "Blocks", "In all, held by requests, and free with content that may be reused", "short",
            (
                ("all", f"sum(penstock_kv_blocks{{{_SERVERS}}})"),
                ("held", f"sum(penstock_kv_blocks_used{{{_SERVERS}}})"),
                ("reusable", f"sum(penstock_kv_blocks_cached{{{_SERVERS}}})"),
            ),
        ),
    ]  # fmt: skip


def _tenants() -> list[_Graph]:
    tokens, requests = "penstock_tenant_tokens_total", "penstock_tenant_requests_total"
    prompts, outputs = f'{_SERVERS}, kind="prompt"', f'{_SERVERS}, kind="output"'
    return [
        _Graph("Requests", "Each tenant's, each second", "reqps", _by("tenant", requests, _SERVERS)),
        _Graph("Prompt tokens", "Each tenant's, each second", "short", _by("tenant", tokens, prompts)),
        _Graph("Output tokens", "Each tenant's, each second", "short", _by("tenant", tokens, outputs)),
        _Graph(
            "Share of output", "Who gets what part of the tokens made", "percentunit",
            (
                (
                    "{{tenant}}",
                    f"sum by (tenant) ({_rate(tokens, outputs)}) / scalar(sum({_rate(tokens, outputs)}))",
                ),
            ),
            top=1.0,
        ),
        _Graph(
            "Failed", "Each tenant's requests that end with 4xx or 5xx", "reqps",
            _by("tenant", requests, f'{_SERVERS}, status=~"[45].."'),
        ),
        _Graph(
            "Limits reached", "Requests refused for their tenant's limit", "reqps",
            _by("limit", "penstock_limited_requests_total", _SERVERS),
        ),
    ]  # fmt: skip


def _errors() -> list[_Graph]:
    return [
        _Graph(
            "Answers by status", "Of the servers", "reqps", _by("status", "penstock_http_requests_total", _SERVERS)
        ),
        _Graph(
            "Ends", "Requests by how they ended in the engine", "reqps",
            _by("reason", "penstock_finished_requests_total", _SERVERS),
        ),
        _Graph(
            "Callers gone, connections cut", "Before their answer's end, and by us", "short",
            (
                ("gone", f"sum({_rate('penstock_http_client_disconnects_total', _SERVERS)})"),
                ("cut: {{why}}", f"sum by (why) ({_rate('penstock_http_connections_cut_total', _SERVERS)})"),
            ),
        ),
        _Graph(
            "Found corrupted", "KV blocks that changed though nobody wrote to them", "short",
            (("{{instance}}", f"increase(penstock_canary_failures_total{{{_SERVERS}}}[$__rate_interval])"),),
        ),
        _Graph(
            "Store", "Writes that it did not take", "short",
            (("{{instance}}", f"increase(penstock_store_failures_total{{{_SERVERS}}}[$__rate_interval])"),),
        ),
        _Graph(
            "Batches", "Lines of batches, by outcome", "reqps",
            _by("outcome", "penstock_batch_requests_total", _SERVERS),
        ),
    ]  # fmt: skip


def _gateways() -> list[_Graph]:
    first = "penstock_gateway_time_to_first_byte_seconds_bucket"
    first_byte = f"histogram_quantile(0.95, sum by (le, model) ({_rate(first, _GATEWAYS)}))"
    requests, asked = "penstock_gateway_requests_total", f'{_GATEWAYS}, model!=""'
    autoscaler = "penstock_gateway_autoscaler_failures_total"
    return [
        _Graph("Requests by model", "Answered, each second", "reqps", _by("model", requests, asked)),
        _Graph("Answers by status", "499: the caller left", "reqps", _by("status", requests, _GATEWAYS)),
        _Graph("First byte, p95", "From arrival to the replica's first byte", "s", (("{{model}}", first_byte),)),
        _Graph(
            "In the gateway", "Before a replica was found", "s", _quantiles("penstock_gateway_wait_seconds", _GATEWAYS)
        ),
        _Graph(
            "Waiting", "Requests without a replica", "short",
            (("{{instance}}", f"penstock_gateway_waiting_requests{{{_GATEWAYS}}}"),),
        ),
        _Graph(
            "Replicas", "By standing; each gateway judges for itself", "short",
            (("{{standing}}", f"max by (standing) (penstock_gateway_replicas{{{_GATEWAYS}}})"),),
        ),
        _Graph(
            "In flight", "Requests that each replica works on", "short",
            (("{{replica}}", f"sum by (replica) (penstock_gateway_in_flight_requests{{{_GATEWAYS}}})"),),
        ),
        _Graph(
            "Retried and resumed", "What failed on its replica, and went on", "short",
            (
                ("retried", f"sum({_rate('penstock_gateway_retries_total', _GATEWAYS)})"),
                ("{{outcome}}", f"sum by (outcome) ({_rate('penstock_gateway_resumptions_total', _GATEWAYS)})"),
            ),
        ),
        _Graph(
            "Ejections", "How often each replica was found failing", "short",
            (("{{replica}}", f"max by (replica) (penstock_gateway_replica_ejections{{{_GATEWAYS}}})"),),
        ),
        _Graph(
            "Store", "Transactions that it did not take from a gateway", "short",
            (("{{instance}}", f"increase(penstock_gateway_store_failures_total{{{_GATEWAYS}}}[$__rate_interval])"),),
        ),
        _Graph(
            "Autoscaler", "What went wrong", "short",
            (("{{model}}: {{reason}}", f"increase({autoscaler}{{{_GATEWAYS}}}[$__rate_interval])"),),
        ),
    ]  # fmt: skip
