"""What the gateway counts of itself. docs/metrics.md lists it all, and a test holds the two together."""

from collections import Counter as Tally
from collections.abc import Iterator, Sequence

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from penstock.connection_limits import Cut
from penstock.fleet.autoscaler.autoscaler import Autoscaler
from penstock.fleet.breaker import Standing
from penstock.fleet.replica import ReplicaPool
from penstock.fleet.rollout.split import VersionSplit
from penstock.fleet.router.decisions import Decision
from penstock.fleet.router.dispatch import Dispatcher
from penstock.metering.counts import StoreCounts

_BOUNDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)


class GatewayMetrics:
    def __init__(
        self,
        pool: ReplicaPool,
        dispatcher: Dispatcher,
        split: VersionSplit,
        counts: StoreCounts,
        autoscalers: Sequence[Autoscaler] = (),
    ) -> None:
        self._registry = _PlainRegistry()
        self._registry.register(_Gauges(pool, dispatcher, split))
        self._registry.register(_StoreCounters(counts))
        self._registry.register(_AutoscalerGauges(autoscalers))
        self.requests = Counter(
            "penstock_gateway_requests", "Requests of callers answered", ["model", "status"], registry=self._registry
        )
        self.retries = Counter(
            "penstock_gateway_retries", "Requests sent again before their first byte", registry=self._registry
        )
        self.resumptions = Counter(
            "penstock_gateway_resumptions",
            "Streams whose replica failed: continued, or lost",
            ["outcome"],
            registry=self._registry,
        )
        self._shadows = Counter(
            "penstock_gateway_shadow_requests",
            "Copies of requests for a candidate version",
            ["outcome"],
            registry=self._registry,
        )
        self.first_byte = Histogram(
            "penstock_gateway_time_to_first_byte_seconds",
            "From arrival to the replica's first byte",
            ["model"],
            buckets=_BOUNDS,
            registry=self._registry,
        )
        self.waited = Histogram(
            "penstock_gateway_wait_seconds",
            "In the gateway, before a replica was found",
            buckets=_BOUNDS,
            registry=self._registry,
        )

        self.estimated_usage = Counter(
            "penstock_gateway_estimated_usage",
            "Answers of foreign servers that did not tell what they cost",
            registry=self._registry,
        )

        self._cut = Counter(
            "penstock_gateway_connections_cut", "Connections that the gateway ended", ["why"], registry=self._registry
        )
        for why in Cut:
            self._cut.labels(why)
        self.prompt_tokens = Counter(
            "penstock_gateway_prompt_tokens", "Prompt tokens, as replicas told", ["model"], registry=self._registry
        )
        self.cached_tokens = Counter(
            "penstock_gateway_cached_prompt_tokens",
            "Prompt tokens that replicas had cached, as they told",
            ["model"],
            registry=self._registry,
        )

    def count_cut(self, why: str) -> None:
        """Count a connection that the gateway ended before its caller did."""
        self._cut.labels(why).inc()

    def observe(self, decision: Decision) -> None:
        """Count the times of a request that has ended: nobody waits for it any more."""
        if decision.attempts:
            self.waited.observe(decision.waited_seconds)
        if decision.ttft_seconds is not None:
            self.first_byte.labels(decision.model).observe(decision.ttft_seconds)
        if decision.prompt_tokens is not None:
            self.prompt_tokens.labels(decision.model).inc(decision.prompt_tokens)
            self.cached_tokens.labels(decision.model).inc(decision.cached_tokens or 0)

    def count_shadow(self, outcome: str) -> None:
        self._shadows.labels(outcome).inc()

    def exposition(self, accept: str) -> tuple[bytes, str]:
        encode, content_type = choose_encoder(accept)
        return encode(self._registry), content_type


class _PlainRegistry(CollectorRegistry):
    """One without what the client library adds: to each series another that says when it began."""

    def collect(self) -> Iterator[Metric]:
        for family in super().collect():
            family.samples = [sample for sample in family.samples if not sample.name.endswith("_created")]
            yield family


class _AutoscalerGauges(Collector):
    """What the autoscalers see and want at this moment, and what they met."""

    def __init__(self, autoscalers: Sequence[Autoscaler]) -> None:
        self._autoscalers = autoscalers

    def collect(self) -> Iterator[Metric]:
        text = "Replicas that the autoscaler wants (desired: all, active: to take requests) and has (ready, coming)"
        replicas = GaugeMetricFamily("penstock_gateway_autoscaler_replicas", text, labels=["model", "state"])
        text = "Work that comes, in replicas"
        demand = GaugeMetricFamily("penstock_gateway_autoscaler_demand", text, labels=["model"])
        text = "Times that the autoscaler wanted more or fewer replicas"
        changes = CounterMetricFamily("penstock_gateway_autoscaler_changes", text, labels=["model", "direction"])
        text = "Failures of the autoscaler: replicas that did not start, and looks that met something else"
        failures = CounterMetricFamily("penstock_gateway_autoscaler_failures", text, labels=["model", "reason"])
        for item in self._autoscalers:
            for reason, count in item.num_failures.items():
                failures.add_metric([item.model, reason.value], count)
            changes.add_metric([item.model, "up"], item.num_rises)
            changes.add_metric([item.model, "down"], item.num_falls)
            if item.decision is not None and item.signals is not None:
                replicas.add_metric([item.model, "desired"], item.decision.total)
                replicas.add_metric([item.model, "active"], item.decision.desired)
                replicas.add_metric([item.model, "ready"], item.signals.num_ready)
                replicas.add_metric([item.model, "coming"], item.signals.num_coming + item.signals.num_warm)
                demand.add_metric([item.model], item.signals.demand)
        yield from (replicas, demand, changes, failures)


class _Gauges(Collector):
    """What is so at this moment."""

    def __init__(self, pool: ReplicaPool, dispatcher: Dispatcher, split: VersionSplit) -> None:
        self._pool = pool
        self._dispatcher = dispatcher
        self._split = split

    def collect(self) -> Iterator[Metric]:
        standings = Tally(replica.breaker.standing for replica in self._pool)
        replicas = GaugeMetricFamily("penstock_gateway_replicas", "Replicas, by standing", labels=["standing"])
        for standing in Standing:
            replicas.add_metric([standing.value], standings[standing])
        yield replicas
        in_flight = GaugeMetricFamily(
            "penstock_gateway_in_flight_requests", "Requests that a replica works on for us", labels=["replica"]
        )
        ejections = GaugeMetricFamily(
            "penstock_gateway_replica_ejections", "Times a replica was ejected", labels=["replica"]
        )
        blocks = GaugeMetricFamily(
            "penstock_gateway_known_blocks", "Cached blocks that a replica tells of", labels=["replica"]
        )
        for replica in self._pool:
            if replica.blocks is not None:
                blocks.add_metric([replica.name], len(replica.blocks))
            in_flight.add_metric([replica.name], replica.num_in_flight)
            ejections.add_metric([replica.name], replica.breaker.num_ejections)
        yield in_flight
        yield ejections
        yield blocks
        text = "Requests that wait for a replica"
        yield GaugeMetricFamily("penstock_gateway_waiting_requests", text, self._dispatcher.num_waiting)
        percent = GaugeMetricFamily(
            "penstock_gateway_rollout_percent",
            "Part of the sessions that a rollout's candidate answers",
            labels=["model", "candidate", "status"],
        )
        for rollout in self._split.rollouts:
            labels = [rollout.model, rollout.candidate, rollout.status.value]
            percent.add_metric(labels, rollout.candidate_percent)
        yield percent


class _StoreCounters(Collector):
    """What was counted of limits and the store."""

    def __init__(self, counts: StoreCounts) -> None:
        self._counts = counts

    def collect(self) -> Iterator[Metric]:
        text = "Requests refused for a tenant's limit"
        limited = CounterMetricFamily("penstock_gateway_limited_requests", text, labels=["limit"])
        for limit, count in self._counts.limit_refusals.items():
            limited.add_metric([limit], count)
        yield limited
        text = "Transactions that the store did not take"
        yield CounterMetricFamily("penstock_gateway_store_failures", text, self._counts.num_store_failures)
