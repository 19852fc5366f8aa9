"""What a deployment is told beyond the server's own options: names, sizes, Secrets, objectives.

The `[deploy]` table of the file that `--config` names, with the command's flags over it; checked, frozen. Knows nothing
of manifests.
"""

import re
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

import penstock
from penstock.engine.metrics import LATENCY_BOUNDS
from penstock.errors import ConfigError

# Kubernetes' rule for names of services, which is the strictest of those we make; room is left for our endings.
_NAME = re.compile(r"[a-z]([-a-z0-9]{0,38}[a-z0-9])?")
_NAMESPACE = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
_SECRET = re.compile(r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?")
_QUANTITY = re.compile(r"\d+(\.\d+)?(m|k|Ki|M|Mi|G|Gi|T|Ti)?")
_HOSTNAME = re.compile(r"(\*\.)?[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)+")
_IMAGE = re.compile(r"\w[\w./-]*(:\d+/[\w./-]+)?(:[\w.-]+)?(@sha256:[0-9a-f]{64})?", re.ASCII)


class Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The `[deploy]` table. An empty text means: not wanted, or the default that `name` gives."""

    name: str = "penstock"
    namespace: str = "penstock"
    image: str = f"penstock:{penstock.__version__}"
    image_pull_secret: str = ""

    replicas: int = 2  # at least so many servers; 0: none while nobody asks, where KEDA scales
    max_replicas: int = 8
    gateways: int = 2
    gateway_scales: bool = False  # an autoscaler of the fleet file may scale the servers; KEDA then does not
    gpus: int | None = None  # of each server; None: one for each of its ranks, where it runs on GPUs
    gpu_resource: str = "nvidia.com/gpu"
    cpu: str = "4"  # of each server
    memory: str = "32Gi"
    cache_size: str = "100Gi"  # for fetched models, where there is no claim
    cache_claim: str = ""  # a PersistentVolumeClaim that servers share for fetched models
    model_in_image: bool = False  # the model is a path that the image has
    startup_seconds: int = 900  # how long a server may take to fetch and load its model

    keys_secret: str = ""  # its entry keys.toml is the file of keys; NAME-keys, unless there is a store
    store_secret: str = ""  # its entry url is the store's; limits need one
    metrics_secret: str = ""  # its entry key is an admin key, for scrapes and the gateway's probes; NAME-metrics
    hub_secret: str = ""  # its entry token is the model hub's

    hostname: str = ""  # of the HTTPRoute
    parent_gateway: str = "inference-gateway"  # the Gateway that routes are attached to
    prometheus_url: str = "http://prometheus-operated.monitoring.svc:9090"

    objective: float = 0.99  # part of requests that must go well
    slow_ttft_seconds: float = 2.5  # a first token later than this did not go well; a bound of its histogram

    @property
    def keys_secret_name(self) -> str | None:
        """The Secret with the file of keys; None: keys are in the store."""
        return self.keys_secret or (None if self.store_secret else f"{self.name}-keys")

    @property
    def metrics_secret_name(self) -> str:
        return self.metrics_secret or f"{self.name}-metrics"


def read_settings(table: Mapping[str, Any], flags: Mapping[str, Any]) -> Settings:
    """Return what the `[deploy]` table and the flags that were given (not None) make. Raises ConfigError."""
    given = {name: value for name, value in flags.items() if value is not None}

    def option(name: str) -> str:
        """Return what a person wrote for a setting."""
        return f"--{name.replace('_', '-')}" if name in given else f"deploy.{name}"

    values = {**table, **given}
    if type(values.get("cpu")) in (int, float):
        values["cpu"] = str(values["cpu"])  # the one quantity that people write as a number
    try:
        settings = msgspec.convert(values, Settings)
    except msgspec.ValidationError as error:
        unknown = [name for name in table if name not in Settings.__struct_fields__]
        if unknown:
            right = f"there is no such setting; the settings are: {', '.join(Settings.__struct_fields__)}"
            raise ConfigError(f"[deploy] {unknown[0]}"[:200], table[unknown[0]], right) from error
        expected, _, place = str(error).partition(" - at `$.")
        name = place.rstrip("`")
        raise ConfigError(option(name), values[name], expected.replace("Expected", "it must be", 1)) from error
    _check(settings, option)
    return settings


def _check(settings: Settings, option: Callable[[str], str]) -> None:
    """Raise ConfigError."""
    patterns = {
        "name": (_NAME, "small letters, digits and dashes, a letter first and no dash last, at most 40"),
        "namespace": (_NAMESPACE, "small letters, digits and dashes, no dash first or last, at most 63"),
        "image": (_IMAGE, "an image such as registry.example.com/penstock:0.1.0"),
        "gpu_resource": (re.compile(r"[\w.-]+/[\w.-]+"), "a resource such as nvidia.com/gpu"),
        "cpu": (_QUANTITY, "a quantity such as 4 or 500m"),
        "memory": (_QUANTITY, "a quantity such as 32Gi"),
        "cache_size": (_QUANTITY, "a quantity such as 100Gi"),
        "parent_gateway": (_SECRET, "the name of a Gateway"),
        "prometheus_url": (re.compile(r"https?://\S+"), "a URL such as http://prometheus:9090"),
    }
    for name, (pattern, right) in patterns.items():
        _check_text(option(name), getattr(settings, name), pattern, right)
    for name in ("image_pull_secret", "cache_claim", "keys_secret", "store_secret", "metrics_secret", "hub_secret"):
        if getattr(settings, name):
            right = "the name of an object of the cluster, not a secret"
            _check_text(option(name), getattr(settings, name), _SECRET, right)
    if settings.hostname:
        _check_text(option("hostname"), settings.hostname, _HOSTNAME, "a name such as llm.example.com")
    bounds = {"replicas": (0, 1000), "max_replicas": (1, 1000), "gateways": (1, 100), "gpus": (0, 64)}
    bounds |= {"startup_seconds": (10, 86_400)}
    for name, (low, high) in bounds.items():
        value = getattr(settings, name)
        if value is not None and not low <= value <= high:
            raise ConfigError(option(name), value, f"give a number from {low} to {high}")
    if settings.max_replicas < settings.replicas:
        raise ConfigError(option("max_replicas"), settings.max_replicas, f"give at least {settings.replicas}")
    if settings.gateway_scales and settings.gateways > 1:
        raise ConfigError(option("gateways"), settings.gateways, "give 1 with gateway_scales: only one may scale")
    if not 0.5 <= settings.objective < 1:
        raise ConfigError(option("objective"), settings.objective, "give a part such as 0.99")
    if settings.slow_ttft_seconds not in LATENCY_BOUNDS:
        right = f"give a bound of the histogram: {', '.join(f'{bound:g}' for bound in LATENCY_BOUNDS)}"
        raise ConfigError(option("slow_ttft_seconds"), settings.slow_ttft_seconds, right)


def _check_text(option: str, value: str, pattern: re.Pattern[str], right: str) -> None:
    if pattern.fullmatch(value) is None:
        raise ConfigError(option, value[:100], f"give {right}")
