"""Recording and alerting rules for Prometheus: error budgets that burn, and what an operator must look at.

One list for the operator's PrometheusRule and for a plain Prometheus. Every metric and label named here is checked
against a live server's. Knows nothing of where the rules are put.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

Rule = dict[str, Any]

# How much faster than allowed the budget burns, over which long and short window, and how urgent that is: 2 % of a
# month's budget in an hour, 5 % in six, 10 % in three days.
_BURNS = (("1h", "5m", 14.4, "critical"), ("6h", "30m", 6.0, "critical"), ("3d", "6h", 1.0, "warning"))
_WINDOWS = ("5m", "30m", "1h", "6h", "3d")


@dataclass(frozen=True, slots=True)
class Watched:
    """What the rules are about."""

    name: str  # jobs are NAME-server and NAME-gateway; no other deployment that the same Prometheus sees has it
    objective: float
    slow_ttft_seconds: float  # one of the bounds of penstock_time_to_first_token_seconds
    may_sleep: bool = False  # there may be no server while nobody asks

    @property
    def server_job(self) -> str:
        return f'job="{self.name}-server"'

    @property
    def gateway_job(self) -> str:
        return f'job="{self.name}-gateway"'


class _Alert(NamedTuple):
    """Something to look at.

    SERVER and GATEWAY stand for the selectors of both jobs, SLOW for the seconds of a slow first token.
    """

    name: str
    severity: str
    pending: str  # how long it must have been so; "": not at all
    expr: str
    summary: str
    description: str


_SERVER_ALERTS = (
    _Alert(
        "PenstockServerDown", "critical", "2m", "up{SERVER} == 0",
        "A server cannot be scraped",
        "{{ $labels.instance }} does not answer /metrics, or refuses the key it is asked with.",
    ),
    _Alert(
        "PenstockEngineDown", "critical", "5m", "penstock_engine_up{SERVER} == 0",
        "An engine is not up",
        "{{ $labels.instance }} answers, but its engine starts, restarts or is gone.",
    ),
    _Alert(
        "PenstockCacheCorrupted", "critical", "", "increase(penstock_canary_failures_total{SERVER}[15m]) > 0",
        "KV blocks changed though nobody wrote to them",
        "{{ $labels.instance }} emptied its prefix cache. Faulty memory, or a bug: take it away.",
    ),
    _Alert(
        "PenstockCacheFull", "warning", "10m",
        "penstock_kv_cache_utilization{SERVER} > 0.95 and rate(penstock_preemptions_total{SERVER}[10m]) > 0",
        "A KV cache is full and requests are preempted",
        "{{ $labels.instance }} needs more KV memory, fewer requests at once, or another replica.",
    ),
    _Alert(
        "PenstockQueueLong", "warning", "10m",
        "histogram_quantile(0.95, sum by (le) (rate(penstock_queue_seconds_bucket{SERVER}[10m]))) > SLOW",
        "Requests wait longer for their first step than a first token may take",
        "The slowest 5 % wait {{ $value | humanizeDuration }}: more replicas are needed.",
    ),
    _Alert(
        "PenstockRefusesRequests", "warning", "10m",
        'sum(rate(penstock_refused_requests_total{SERVER, reason!="unreachable"}[10m]))'
        " > 0.05 * sum(rate(penstock_queue_seconds_count{SERVER}[10m]))",
        "More than one request in twenty is refused",
        "Queues are full, or targets cannot be met: more replicas are needed.",
    ),
    _Alert(
        "PenstockStoreFails", "warning", "5m", "increase(penstock_store_failures_total{SERVER}[10m]) > 0",
        "The store does not take usage",
        "{{ $labels.instance }} keeps it in memory and tries again; tenants with limits get 503.",
    ),
)  # fmt: skip

# Only where there should always be one: a fleet at zero is not seen either.
_NO_SERVERS = _Alert(
    "PenstockNoServers", "warning", "10m", "absent(penstock_engine_up{SERVER})",
    "No server has been seen for ten minutes",
    "Nothing is served.",
)  # fmt: skip

_GATEWAY_ALERTS = (
    _Alert(
        "PenstockGatewayDown", "critical", "2m", "up{GATEWAY} == 0",
        "A gateway cannot be scraped",
        "{{ $labels.instance }} does not answer /metrics, or refuses the key it is asked with.",
    ),
    _Alert(
        # A replica on trial takes requests. Where none is known, the fleet may be meant to be at zero: callers tell.
        "PenstockNoReplicaReady", "critical", "1m",
        'sum by (instance) (penstock_gateway_replicas{GATEWAY, standing=~"ready|trial"}) == 0 and on (instance) ('
        "sum by (instance) (penstock_gateway_replicas{GATEWAY}) > 0 or "
        'sum by (instance) (increase(penstock_gateway_requests_total{GATEWAY, status="503"}[5m])) > 0)',
        "A gateway has no replica that takes requests",
        "{{ $labels.instance }} knows replicas of which none is ready, or refuses callers because it knows none.",
    ),
    _Alert(
        "PenstockReplicaEjected", "warning", "", "delta(penstock_gateway_replica_ejections{GATEWAY}[15m]) >= 3",
        "A replica is ejected again and again",
        "{{ $labels.replica }} fails requests or probes; its own log says why.",
    ),
    _Alert(
        "PenstockStreamsLost", "warning", "",
        'sum(increase(penstock_gateway_resumptions_total{GATEWAY, outcome="lost"}[10m])) > 0',
        "Streams ended in the middle",
        "Their replica died and no other could go on with them.",
    ),
    _Alert(
        # Once is no trouble: a replica may end, or an API be away for a moment.
        "PenstockAutoscalerFails", "warning", "",
        "increase(penstock_gateway_autoscaler_failures_total{GATEWAY}[10m]) >= 3",
        "The autoscaler fails again and again",
        "{{ $labels.model }}: {{ $labels.reason }}. The log of {{ $labels.instance }} and /admin/autoscaler say why.",
    ),
    _Alert(
        "PenstockGatewayQueueLong", "warning", "10m", "sum(penstock_gateway_waiting_requests{GATEWAY}) > 0",
        "Requests have waited in the gateway for ten minutes on end",
        "Every replica is full, or none comes: more are needed.",
    ),
    _Alert(
        "PenstockGatewayStoreFails", "warning", "5m",
        "increase(penstock_gateway_store_failures_total{GATEWAY}[10m]) > 0",
        "The store does not take what a gateway counts",
        "{{ $labels.instance }} keeps it in memory and tries again; tenants with limits get 503.",
    ),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Indicator:
    """A part of requests that went badly, of which the objective allows so much."""

    name: str
    alert: str
    bad: str  # PromQL of both, with WINDOW for the window
    all: str
    summary: str


def groups(watched: Watched) -> list[dict[str, Any]]:
    """Return the groups of rules, as a rule file has them."""
    indicators = _indicators(watched)
    server_alerts = _SERVER_ALERTS if watched.may_sleep else (*_SERVER_ALERTS, _NO_SERVERS)
    return [
        {"name": f"{watched.name}-indicators", "interval": "30s", "rules": _recordings(indicators, watched.name)},
        {"name": f"{watched.name}-burn-rates", "rules": _burn_alerts(indicators, watched)},
        {"name": f"{watched.name}-servers", "rules": [_rule(alert, watched) for alert in server_alerts]},
        {"name": f"{watched.name}-gateways", "rules": [_rule(alert, watched) for alert in _GATEWAY_ALERTS]},
    ]


def failed_requests(gateways: str, window: str) -> str:
    """Return the PromQL of requests that failed, each second: those that ended with 5xx, but for callers' deadlines."""
    failed = 'status=~"5..", status!="504"'
    return f"sum(rate(penstock_gateway_requests_total{{{gateways}, {failed}}}[{window}])) or vector(0)"


def asked_requests(gateways: str, window: str) -> str:
    """Return the PromQL of requests for a model, each second.

    While no replica is there no model is known, and the gateway refuses with 5xx under none.
    """
    total = "penstock_gateway_requests_total"
    served = f'(sum(rate({total}{{{gateways}, model!=""}}[{window}])) or vector(0))'
    return f'{served} + (sum(rate({total}{{{gateways}, model="", status=~"5.."}}[{window}])) or vector(0))'


def _indicators(watched: Watched) -> list[_Indicator]:
    server, gateway = watched.server_job, watched.gateway_job
    first = "penstock_time_to_first_token_seconds"
    bound = f'le="{float(watched.slow_ttft_seconds)}"'
    return [
        _Indicator(
            name="penstock:failed_requests",
            alert="PenstockErrorBudgetBurns",
            bad=failed_requests(gateway, "WINDOW"),
            all=asked_requests(gateway, "WINDOW"),
            summary="Requests fail with 5xx (callers' own deadlines, 504, apart)",
        ),
        _Indicator(
            name="penstock:slow_first_tokens",
            alert="PenstockLatencyBudgetBurns",
            bad=(
                f"sum(rate({first}_count{{{server}}}[WINDOW])) - sum(rate({first}_bucket{{{server}, {bound}}}[WINDOW]))"
            ),
            all=f"sum(rate({first}_count{{{server}}}[WINDOW]))",
            summary=f"First tokens take more than {watched.slow_ttft_seconds:g} s",
        ),
        _Indicator(
            name="penstock:broken_promises",
            alert="PenstockPromiseBudgetBurns",
            bad=f'sum(rate(penstock_promises_total{{{server}, outcome="broken"}}[WINDOW])) or vector(0)',
            all=f"sum(rate(penstock_promises_total{{{server}}}[WINDOW]))",
            summary="Targets that requests were accepted with are not kept",
        ),
    ]


def _recordings(indicators: list[_Indicator], deployment: str) -> list[Rule]:
    return [
        {
            "record": f"{item.name}:ratio_rate{window}",
            "labels": {"deployment": deployment},
            # Nothing asked is nothing wrong: a division by zero would be neither.
            "expr": f"(({item.bad}) / (({item.all}) > 0)) or vector(0)".replace("WINDOW", window),
        }
        for item in indicators
        for window in _WINDOWS
    ]


def _burn_alerts(indicators: list[_Indicator], watched: Watched) -> list[Rule]:
    rules: list[Rule] = []
    objective, ours = watched.objective, f'{{deployment="{watched.name}"}}'
    for item in indicators:
        for long, short, most, severity in _BURNS:
            # Where the objective allows much, that many times more would be more than all of them.
            factor = min(most, (1 + 1 / (1 - objective)) / 2)
            limit = f"{factor * (1 - objective):.6g}"
            ratio = f"{item.name}:ratio_rate"
            alert = _Alert(
                item.alert,
                severity,
                "",
                f"{ratio}{long}{ours} > {limit} and {ratio}{short}{ours} > {limit}",
                f"{item.summary}: {factor:.4g} times more than {objective:.4g} of requests allows",
                f"{{{{ $value | humanizePercentage }}}} over the last {long}, and still over {short}.",
            )
            rules.append(_rule(alert, watched, window=long))
    return rules


def _rule(alert: _Alert, watched: Watched, **labels: str) -> Rule:
    expr = alert.expr
    stands_for = {
        "SERVER": watched.server_job, "GATEWAY": watched.gateway_job, "SLOW": f"{watched.slow_ttft_seconds:g}",
    }  # fmt: skip
    for word, meaning in stands_for.items():
        expr = expr.replace(word, meaning)
    return {
        "alert": alert.name,
        "expr": expr,
        **({"for": alert.pending} if alert.pending else {}),
        "labels": {"severity": alert.severity, **labels},
        "annotations": {"summary": alert.summary, "description": alert.description},
    }
