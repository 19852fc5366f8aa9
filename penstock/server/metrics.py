"""What Prometheus reads: the engine's own numbers, and what the API workers count of HTTP.

The engine's numbers come with its stats frames, the same to every worker, so that any worker may answer a scrape. HTTP
counts are each worker's own: with several, the supervisor sets PROMETHEUS_MULTIPROC_DIR to a folder of this server's,
prometheus_client keeps every worker's counts in files there, and a scrape adds them up (workers that died included).

Where the inference-gateway model-server protocol has a metric, the name here is its name in snake case. docs/metrics.md
lists them all, and a test holds the two together.
"""

import os
from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.exposition import choose_encoder
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.registry import Collector

from penstock.connection_limits import Cut
from penstock.engine.messages import EngineInfo, EngineStats
from penstock.engine.messages import Histogram as EngineHistogram
from penstock.metering.meter import usage_of
from penstock.server.readiness import EngineView
from penstock.telemetry import RequestRecord

_HTTP_BOUNDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
_NO_HISTOGRAM = EngineHistogram([], [0], 0.0)

_HISTOGRAMS = {
    "ttft_seconds": ("penstock_time_to_first_token_seconds", "From arrival to the first token"),
    "time_per_output_token_seconds": ("penstock_time_per_output_token_seconds", "Between the tokens of an answer"),
    "e2e_seconds": ("penstock_request_seconds", "From arrival to the last token"),
    "queue_seconds": ("penstock_queue_seconds", "From arrival to the first step"),
    "step_seconds": ("penstock_step_seconds", "One forward pass"),
}


class ServerMetrics:
    """Counts requests and answers scrapes."""

    def __init__(self, engine: EngineView) -> None:
        self._engine = _EngineCollector(engine)
        self._own = CollectorRegistry()
        self._requests = Counter(
            "penstock_http_requests", "HTTP requests answered", ["route", "status"], registry=self._own
        )
        self._seconds = Histogram(
            "penstock_http_request_seconds",
            "From a request's head to its response's end",
            ["route"],
            buckets=_HTTP_BOUNDS,
            registry=self._own,
        )
        self._gone = Counter(
            "penstock_http_client_disconnects", "Callers gone before their response's end", registry=self._own
        )
        self._cut = Counter(
            "penstock_http_connections_cut",
            "Connections that the server ended",
            ["why"],
            registry=self._own,
        )
        for why in Cut:
            self._cut.labels(why)
        self._limited = Counter(
            "penstock_limited_requests", "Requests refused for a tenant's limit", ["limit"], registry=self._own
        )
        self._tenant_requests = Counter(
            "penstock_tenant_requests", "Requests for a model, by tenant", ["tenant", "status"], registry=self._own
        )
        self._tenant_tokens = Counter(
            "penstock_tenant_tokens", "Tokens of a tenant's requests", ["tenant", "kind"], registry=self._own
        )
        self._store_failures = Counter(
            "penstock_store_failures", "Transactions that the store did not take", registry=self._own
        )
        self._batch_requests = Counter(
            "penstock_batch_requests", "Runs of lines of batches, by outcome", ["outcome"], registry=self._own
        )
        self._batches = Counter("penstock_batches", "Batches ended, by status", ["status"], registry=self._own)

    def count_batch_request(self, outcome: str) -> None:
        """Count a line of a batch that was run: completed, failed, or postponed to be run again."""
        self._batch_requests.labels(outcome).inc()

    def count_batch(self, status: str) -> None:
        self._batches.labels(status).inc()

    def count_cut(self, why: str) -> None:
        """Count a connection that the server ended before its client did."""
        self._cut.labels(why).inc()

    def observe(self, record: RequestRecord) -> None:
        """Count a request that has ended."""
        self._requests.labels(record.route, str(record.status)).inc()
        self._seconds.labels(record.route).observe(record.total_seconds)
        if record.finish == "abort":
            self._gone.inc()
        if record.model:
            self._observe_tenant(record)

    def _observe_tenant(self, record: RequestRecord) -> None:
        # Tenants are the names of keys, so there are no more of them than the operator made.
        self._tenant_requests.labels(record.tenant, str(record.status)).inc()
        usage = usage_of(record, record.tenant, record.model)  # what the ledger has, too
        tokens = {"prompt": usage.prompt_tokens, "cached": usage.cached_tokens, "output": usage.output_tokens}
        for kind, count in tokens.items():
            self._tenant_tokens.labels(record.tenant, kind).inc(count)

    def count_limit_refusal(self, limit: str) -> None:
        self._limited.labels(limit).inc()

    def count_store_failure(self) -> None:
        self._store_failures.inc()

    def exposition(self, accept: str) -> tuple[bytes, str]:
        """Return the metrics' text in a format that the scraper accepts, and its content type."""
        registry = CollectorRegistry()
        registry.register(self._engine)
        if "PROMETHEUS_MULTIPROC_DIR" in os.environ:
            MultiProcessCollector(registry)  # type: ignore[no-untyped-call]
        else:
            registry.register(self._own)
        encode, content_type = choose_encoder(accept)
        return encode(registry), content_type


class _EngineCollector(Collector):
    """The engine's newest numbers as metrics."""

    def __init__(self, engine: EngineView) -> None:
        self._engine = engine

    def collect(self) -> Iterator[Metric]:
        stats = self._engine.stats
        yield GaugeMetricFamily("penstock_engine_up", "1 while the engine answers", float(self._engine.connected))
        # What a dead engine last ran and held, it does no more.
        yield from _gauges(stats if self._engine.connected else EngineStats())
        yield from _counters(stats)
        for name, (metric, text) in _HISTOGRAMS.items():
            yield _histogram(metric, text, stats.histograms.get(name, _NO_HISTOGRAM))
        yield _cache_info(self._engine.info)


def _gauges(stats: EngineStats) -> Iterator[Metric]:
    use = stats.num_used_blocks / stats.num_blocks if stats.num_blocks else 0.0
    yield GaugeMetricFamily("penstock_total_queued_requests", "Requests waiting", stats.num_waiting)
    yield GaugeMetricFamily("penstock_total_running_requests", "Requests in the batch", stats.num_running)
    yield GaugeMetricFamily("penstock_kv_cache_utilization", "Part of the KV blocks that requests hold, 0 to 1", use)
    yield GaugeMetricFamily("penstock_kv_blocks", "KV blocks in all", stats.num_blocks)
    yield GaugeMetricFamily("penstock_kv_blocks_used", "KV blocks that requests hold", stats.num_used_blocks)
    text = "How long a prompt that comes now waits before it runs, as foreseen"
    yield GaugeMetricFamily("penstock_predicted_queue_seconds", text, stats.queue_seconds)
    text = "Median relative error of the step-cost model over the last steps"
    yield GaugeMetricFamily("penstock_cost_model_error", text, stats.cost_model_error or 0.0)
    text = "Median relative error of the predicted time to first token over the last requests"
    yield GaugeMetricFamily("penstock_ttft_prediction_error", text, stats.ttft_prediction_error or 0.0)
    text = "1 once nothing is left that the engine prepares in idle moments"
    yield GaugeMetricFamily("penstock_engine_settled", text, float(stats.settled))
    text = "Free KV blocks whose content a prompt may still reuse"
    yield GaugeMetricFamily("penstock_kv_blocks_cached", text, stats.num_cached_blocks)


def _counters(stats: EngineStats) -> Iterator[Metric]:
    yield CounterMetricFamily("penstock_steps", "Forward passes", stats.num_steps)
    yield CounterMetricFamily("penstock_prompt_tokens", "Prompt tokens taken in", stats.prompt_tokens)
    yield CounterMetricFamily("penstock_generated_tokens", "Tokens made", stats.generated_tokens)
    text = "Device time that online requests' tokens cost, beyond what every step costs anyway"
    yield CounterMetricFamily("penstock_work_seconds", text, stats.work_seconds)
    text = "Prompt tokens looked up in the prefix cache"
    yield CounterMetricFamily("penstock_prefix_query_tokens", text, stats.prefix_query_tokens)
    text = "Prompt tokens found in the prefix cache"
    yield CounterMetricFamily("penstock_prefix_hit_tokens", text, stats.prefix_hit_tokens)
    text = "Times a running request gave its blocks back"
    yield CounterMetricFamily("penstock_preemptions", text, stats.num_preemptions)
    refused = CounterMetricFamily("penstock_refused_requests", "Requests refused unstarted", labels=["reason"])
    for reason, count in stats.num_refused.items():
        refused.add_metric([reason], count)
    yield refused
    text = "Targets that requests were accepted with, by kind and whether they were met: kept or broken"
    promises = CounterMetricFamily("penstock_promises", text, labels=["kind", "outcome"])
    for kind, outcomes in stats.promises.items():
        for outcome, count in outcomes.items():
            promises.add_metric([kind, outcome], count)
    yield promises
    text = "Tokens guessed by speculation"
    yield CounterMetricFamily("penstock_drafted_tokens", text, stats.drafted_tokens)
    yield CounterMetricFamily("penstock_accepted_tokens", "Guesses that were right", stats.accepted_tokens)
    text = "Blocks of the KV cache found changed though nobody wrote to them"
    yield CounterMetricFamily("penstock_canary_failures", text, stats.num_canary_failures)
    text = "Requests ended, by reason: stop, length, abort or error"
    finished = CounterMetricFamily("penstock_finished_requests", text, labels=["reason"])
    for reason, count in stats.num_finished.items():
        finished.add_metric([reason], count)
    yield finished


def _histogram(name: str, text: str, histogram: EngineHistogram) -> Metric:
    bounds = [str(float(bound)) for bound in histogram.bounds] + ["+Inf"]
    buckets = list(zip(bounds, map(float, histogram.counts), strict=True))
    return HistogramMetricFamily(name, text, buckets=buckets, sum_value=histogram.total)


def _cache_info(info: EngineInfo | None) -> Metric:
    family = InfoMetricFamily("penstock_cache_config", "The KV cache's shape")
    if info is not None:
        family.add_metric([], {"block_size": str(info.block_tokens), "num_gpu_blocks": str(info.num_blocks)})
    return family
