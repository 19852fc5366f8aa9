"""Recording and alerting rules for Prometheus: error budgets that burn, and what an operator must look at.

One list for the operator's PrometheusRule and for a plain Prometheus. Every metric and label named here is checked
against a live server's. Knows nothing of where the rules are put.
"""

from dataclasses import dataclass
from typing import Any

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

    @property
    def server_job(self) -> str:
        return f'job="{self.name}-server"'

    @property
    def gateway_job(self) -> str:
        return f'job="{self.name}-gateway"'


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
    return [
        {"name": f"{watched.name}-indicators", "interval": "30s", "rules": _recordings(indicators, watched.name)},
        {"name": f"{watched.name}-burn-rates", "rules": _burn_alerts(indicators, watched)},
        {"name": f"{watched.name}-servers", "rules": _server_alerts(watched)},
        {"name": f"{watched.name}-gateways", "rules": _gateway_alerts(watched)},
    ]


def failed_requests(gateways: str, window: str) -> str:
    """Return the PromQL of requests that ended with 5xx, each second."""
    return f'sum(rate(penstock_gateway_requests_total{{{gateways}, status=~"5.."}}[{window}])) or vector(0)'


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
            summary="Requests fail with 5xx",
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
    rules, objective, ours = [], watched.objective, f'{{deployment="{watched.name}"}}'
    for item in indicators:
        for long, short, factor, severity in _BURNS:
            limit = f"{factor * (1 - objective):.6g}"
            ratio = f"{item.name}:ratio_rate"
            rules.append(
                _alert(
                    item.alert,
                    f"{ratio}{long}{ours} > {limit} and {ratio}{short}{ours} > {limit}",
                    severity=severity,
                    window=long,
                    summary=f"{item.summary}: {factor:g} times more than {objective:.4g} of requests allows",
                    description=f"{{{{ $value | humanizePercentage }}}} over the last {long}, and still over {short}.",
                )
            )
    return rules


def _server_alerts(watched: Watched) -> list[Rule]:
    job = watched.server_job
    return [
        _alert(
            "PenstockServerDown", f"up{{{job}}} == 0", pending="2m", severity="critical",
            summary="A server cannot be scraped",
            description="{{ $labels.instance }} does not answer /metrics, or refuses the key it is asked with.",
        ),
        _alert(
            "PenstockEngineDown", f"penstock_engine_up{{{job}}} == 0", pending="5m", severity="critical",
            summary="An engine is not up",
            description="{{ $labels.instance }} answers, but its engine starts, restarts or is gone.",
        ),
        _alert(
            "PenstockNoServers", f"absent(penstock_engine_up{{{job}}})", pending="10m", severity="warning",
            summary="No server has been seen for ten minutes",
            description="Unless the fleet is scaled to zero, nothing is served.",
        ),
        _alert(
            "PenstockCacheCorrupted", f"increase(penstock_canary_failures_total{{{job}}}[15m]) > 0",
            severity="critical",
            summary="KV blocks changed though nobody wrote to them",
            description="{{ $labels.instance }} emptied its prefix cache. Faulty memory, or a bug: take it away.",
        ),
        _alert(
            "PenstockCacheFull",
            f"penstock_kv_cache_utilization{{{job}}} > 0.95 and rate(penstock_preemptions_total{{{job}}}[10m]) > 0",
            pending="10m", severity="warning",
            summary="A KV cache is full and requests are preempted",
            description="{{ $labels.instance }} needs more KV memory, fewer requests at once, or another replica.",
        ),
        _alert(
            "PenstockQueueLong",
            f"histogram_quantile(0.95, sum by (le) (rate(penstock_queue_seconds_bucket{{{job}}}[10m])))"
            f" > {watched.slow_ttft_seconds:g}",
            pending="10m", severity="warning",
            summary="Requests wait longer for their first step than a first token may take",
            description="The slowest 5 % wait {{ $value | humanizeDuration }}: more replicas are needed.",
        ),
        _alert(
            "PenstockRefusesRequests",
            f"sum(rate(penstock_refused_requests_total{{{job}}}[10m]))"
            f" > 0.05 * sum(rate(penstock_queue_seconds_count{{{job}}}[10m]))",
            pending="10m", severity="warning",
            summary="More than one request in twenty is refused",
            description="Queues are full, or targets cannot be met: more replicas are needed.",
        ),
        _alert(
            "PenstockStoreFails", f"increase(penstock_store_failures_total{{{job}}}[10m]) > 0",
            pending="5m", severity="warning",
            summary="The store does not take usage",
            description="{{ $labels.instance }} keeps it in memory and tries again; tenants with limits get 503.",
        ),
    ]  # fmt: skip


def _gateway_alerts(watched: Watched) -> list[Rule]:
    job = watched.gateway_job
    return [
        _alert(
            "PenstockGatewayDown", f"up{{{job}}} == 0", pending="2m", severity="critical",
            summary="A gateway cannot be scraped",
            description="{{ $labels.instance }} does not answer /metrics, or refuses the key it is asked with.",
        ),
        _alert(
            "PenstockNoReplicaReady",
            f'sum by (instance) (penstock_gateway_replicas{{{job}, standing="ready"}}) == 0',
            pending="1m", severity="critical",
            summary="A gateway has no ready replica",
            description="{{ $labels.instance }} holds requests for a while, then answers 503.",
        ),
        _alert(
            "PenstockReplicaEjected",
            f"delta(penstock_gateway_replica_ejections{{{job}}}[15m]) >= 3",
            severity="warning",
            summary="A replica is ejected again and again",
            description="{{ $labels.replica }} fails requests or probes; its own log says why.",
        ),
        _alert(
            "PenstockStreamsLost",
            f'sum(increase(penstock_gateway_resumptions_total{{{job}, outcome="lost"}}[10m])) > 0',
            severity="warning",
            summary="Streams ended in the middle",
            description="Their replica died and no other could go on with them.",
        ),
        _alert(
            "PenstockGatewayQueueLong", f"sum(penstock_gateway_waiting_requests{{{job}}}) > 0",
            pending="10m", severity="warning",
            summary="Requests have waited in the gateway for ten minutes on end",
            description="Every replica is full: more are needed.",
        ),
    ]  # fmt: skip


def _alert(
    name: str, expr: str, *, severity: str, summary: str, description: str, pending: str | None = None, window: str = ""
) -> Rule:
    return {
        "alert": name,
        "expr": expr,
        **({"for": pending} if pending else {}),
        "labels": {"severity": severity, **({"window": window} if window else {})},
        "annotations": {"summary": summary, "description": description},
    }
