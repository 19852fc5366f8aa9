"""How one kind of server tells of itself: whether it is ready, what it serves, how busy it is.

Texts in, values out. Knows nothing of HTTP clients or routing.
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import astuple, dataclass
from typing import Any

import msgspec
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

# Real servers have a few lines that count, and a name for each adapter. Who has far more would hold up the gateway.
_MAX_CHARACTERS = 64 * 1024  # in the lines of metrics that count
_MAX_MODELS = 4096


@dataclass(frozen=True, slots=True)
class Load:
    """How busy a replica last said it was."""

    num_running: float = 0.0
    num_waiting: float = 0.0
    kv_utilization: float = 0.0  # 0 to 1
    kv_tokens: float | None = None  # that its cache holds, where it tells
    queue_seconds: float = 0.0  # how long a prompt that comes now waits before it runs, as the replica foresees it
    # Since the replica started; None where its kind does not tell.
    work_seconds: float | None = None  # device time that tokens cost, beyond what every step costs anyway
    prompt_tokens: float | None = None
    generated_tokens: float | None = None
    num_kept: float = 0.0  # promises: time to first token, time per token, deadline
    num_missed: float = 0.0  # promises broken, and requests refused because none could be made

    @property
    def is_possible(self) -> bool:
        return all(math.isfinite(value) and value >= 0.0 for value in astuple(self) if value is not None)


@dataclass(frozen=True, slots=True)
class ServedModel:
    """One model of a replica."""

    name: str
    max_context_tokens: int | None = None
    is_adapter: bool = False  # of another model, by whose name the server has it too


@dataclass(frozen=True, slots=True)
class ReplicaAdapter:
    """One kind of server, as data. Metrics that it has under several names are added up; of utilisation it is the mean.

    A metric is named alone, which is the sum over its labels, or with one label as Prometheus writes it.
    """

    kind: str
    ready_path: str
    running: tuple[str, ...]
    waiting: tuple[str, ...]
    kv_utilization: str | None
    ready_statuses: tuple[int, ...] = (200,)  # of the answers at ready_path, those of a server that is ready
    queue_seconds: str | None = None
    work_seconds: str | None = None
    prompt_tokens: str | None = None
    generated_tokens: str | None = None
    kept: tuple[str, ...] = ()
    missed: tuple[str, ...] = ()
    context_fields: tuple[str, ...] = ()  # where an entry of /v1/models tells the longest context
    counts_usage: bool = False  # admits and books requests in the store itself, where it shares the gateway's
    keeps_files: bool = False  # has /v1/files and /v1/batches, on the store that all replicas share
    runs_short_prompts_first: bool = False  # else prompts run in the order in which they came
    can_frame: bool = False  # streams that another replica can go on with (`protocol.frames`)
    metrics_path: str = "/metrics"
    models_path: str = "/v1/models"
    tells_models_at_work: bool = True  # else it must not be asked for them while it answers a request
    cache_info: str | None = None  # the metric whose labels block_size and num_gpu_blocks tell the cache's size
    block_events_path: str | None = None  # where it tells which blocks it has cached (`protocol.block_events`)

    def load(self, text: str) -> Load:
        """Read the load from Prometheus's text. Raises ValueError where that is none, whatever came."""
        try:
            load = self._read_load(text)
        except (LookupError, ArithmeticError) as error:  # prometheus_client's, and of numbers too large for a float
            raise ValueError("these are no metrics") from error
        if not load.is_possible:
            raise ValueError("no load has such numbers")
        return load

    def _read_load(self, text: str) -> Load:
        values: dict[str, float] = {}
        kv_tokens = None
        num_caches = 0  # a server may have several engines, each with its own
        for sample in self._samples(text):
            labelled = (f'{sample.name}{{{label}="{value}"}}' for label, value in sample.labels.items())
            for name in (sample.name, *labelled):
                values[name] = values.get(name, 0.0) + sample.value
            num_caches += sample.name == self.kv_utilization
            if sample.name == self.cache_info and (size := _cache_size(sample.labels)) is not None:
                kv_tokens = (kv_tokens or 0.0) + size
        return Load(
            num_running=sum(values.get(name, 0.0) for name in self.running),
            num_waiting=sum(values.get(name, 0.0) for name in self.waiting),
            kv_utilization=values.get(self.kv_utilization or "", 0.0) / max(1, num_caches),
            kv_tokens=kv_tokens,
            queue_seconds=values.get(self.queue_seconds or "", 0.0),
            work_seconds=values.get(self.work_seconds or ""),
            prompt_tokens=values.get(self.prompt_tokens or ""),
            generated_tokens=values.get(self.generated_tokens or ""),
            num_kept=sum(values.get(name, 0.0) for name in self.kept),
            num_missed=sum(values.get(name, 0.0) for name in self.missed),
        )

    def _samples(self, text: str) -> Iterator[Sample]:
        single = (
            self.kv_utilization, self.cache_info, self.queue_seconds, self.work_seconds, self.prompt_tokens,
            self.generated_tokens,
        )  # fmt: skip
        named = (*self.running, *self.waiting, *self.kept, *self.missed, *filter(None, single))
        # Only the lines that count: a server may have thousands.
        starts = tuple(name.partition("{")[0] for name in named)
        lines = "\n".join(line for line in text.splitlines() if line.startswith(starts))
        if len(lines) > _MAX_CHARACTERS:
            raise ValueError("no server has so many metrics of one name")
        for family in text_string_to_metric_families(lines + "\n"):
            yield from family.samples

    def models(self, body: bytes) -> tuple[ServedModel, ...]:
        """Read the answer of OpenAI's /v1/models. Raises ValueError where that is none, whatever came."""
        try:
            document = msgspec.json.decode(body)
        except RecursionError as error:
            raise ValueError("this is nested too deeply for a list of models") from error
        entries = document.get("data") if isinstance(document, Mapping) else None
        if not isinstance(entries, list):
            raise ValueError("this is no list of models")
        if len(entries) > _MAX_MODELS:
            raise ValueError("no server has so many models")
        return tuple(self._model(entry) for entry in _named(entries))

    def _model(self, entry: Mapping[str, Any]) -> ServedModel:
        limits = (_inside(entry, field) for field in self.context_fields)
        # vLLM and SGLang list adapters as models that have another for a parent.
        is_adapter = isinstance(entry.get("parent"), str) and entry["parent"] != entry["id"]
        return ServedModel(
            str(entry["id"]), next((limit for limit in limits if _is_length(limit)), None), is_adapter=is_adapter
        )


def _cache_size(labels: Mapping[str, str]) -> float | None:
    sizes = labels.get("block_size", ""), labels.get("num_gpu_blocks", "")
    return float(sizes[0]) * float(sizes[1]) if all(size.isdigit() for size in sizes) else None


def _is_length(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _named(entries: Iterable[Any]) -> Iterable[Mapping[str, Any]]:
    return (entry for entry in entries if isinstance(entry, Mapping) and isinstance(entry.get("id"), str))


def _inside(entry: Mapping[str, Any], path: str) -> Any:
    """Return the value at "meta.n_ctx_train"."""
    value: Any = entry
    for name in path.split("."):
        value = value.get(name) if isinstance(value, Mapping) else None
    return value
