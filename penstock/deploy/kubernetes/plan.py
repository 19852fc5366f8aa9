"""One deployment as data: the settings, and the files that servers and gateways read in the cluster.

Made once from the options of `penstock serve`, the gateway's fleet file and the `[deploy]` table; the manifests are
made from it alone. Knows nothing of manifests.
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from penstock.config import COMMAND_LINE, Options, Sourced, flag
from penstock.deploy.kubernetes.locality import is_path, refuse_local_fleet, refuse_local_options
from penstock.deploy.kubernetes.settings import Settings, read_settings
from penstock.deploy.toml_text import toml_text
from penstock.errors import ConfigError
from penstock.fleet.config import FleetConfig, KubernetesSection, ModelSection
from penstock.fleet.fleet_file import read_fleet
from penstock.server.config import resolve

SERVER_PORT = 8000
GATEWAY_PORT = 8080
SERVER_FILES = "/etc/penstock/server"  # folders in the containers
GATEWAY_FILES = "/etc/penstock/gateway"
KEYS_FILES = "/etc/penstock/keys"
METRICS_FILES = "/etc/penstock/metrics"
CACHE_FOLDER = "/var/cache/penstock"
KEYS_ENTRY, METRICS_ENTRY, STORE_ENTRY, HUB_ENTRY = "keys.toml", "key", "url", "token"
METRICS_KEY_FILE = f"{METRICS_FILES}/{METRICS_ENTRY}"

# The deployment says these itself.
CLUSTER_OPTIONS = ("host", "port", "admin_listen", "cache_dir", "log_format")
# These name files of this machine, which travel along.
_FILE_OPTIONS = {"chat_template": "chat_template.jinja", "shared_prefixes": "shared_prefixes.toml"}
_SECRET_OPTIONS = {"keys": "keys_secret", "store": "store_secret"}
# From the first request to a fleet at zero until a pod starts: Prometheus, KEDA, placement, the image.
_WAKING_SECONDS = 120
_MAX_HOLD_SECONDS = 86_400
_MAX_FILE_BYTES = 512 * 1024  # a ConfigMap holds 1 MiB in all


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    settings: Settings
    options: Options  # as the servers will have them
    given: tuple[str, ...]  # the options that are not left to their defaults
    gpus: int
    fleet: FleetConfig  # the operator's
    server_files: Mapping[str, str]  # name: text
    gateway_text: str  # of the gateway's own options

    @property
    def drain_seconds(self) -> int:
        return int(-(-self.options.drain_seconds // 1))

    @property
    def may_sleep(self) -> bool:
        """Whether there may be no server while nobody asks."""
        sections = self.fleet.autoscaler.values()
        return self.settings.replicas == 0 or any(section.min_replicas == 0 for section in sections)

    @property
    def cluster_fleet(self) -> FleetConfig:
        """The fleet file for a cluster: it finds the servers, and holds requests for as long as one takes to come.

        Where there may be no server and none but ours, it names their model: nobody waits for another, or wakes them.
        """
        section = KubernetesSection(service=self.settings.name, port="http", key_file=METRICS_KEY_FILE)
        fleet = with_servers(self.fleet, kubernetes=(section,))
        if not self.may_sleep:
            return fleet
        models, queue = fleet.models, fleet.queue
        if queue.hold_seconds is None:
            seconds = float(min(self.settings.startup_seconds + _WAKING_SECONDS, _MAX_HOLD_SECONDS))
            queue = msgspec.structs.replace(queue, hold_seconds=seconds)
        served = _served_name(self.options)
        if served is not None and served not in fleet.aliases and not _names_replicas(self.fleet):
            models = {served: ModelSection(policy=fleet.policy), **models}
            if queue.hold_unknown is None:
                queue = msgspec.structs.replace(queue, hold_unknown=False)
        return msgspec.structs.replace(fleet, models=models, queue=queue)

    @property
    def gateway_files(self) -> Mapping[str, str]:
        """Name: text."""
        return {"gateway.toml": self.gateway_text, "fleet.toml": fleet_text(self.cluster_fleet)}


def make_plan(sourced: Sourced, fleet_file: Path | None, flags: Mapping[str, Any]) -> Plan:
    """Return the deployment of these options. Raises ConfigError."""
    settings = read_settings(sourced.deploy, flags)
    _refuse_secrets(sourced)
    _refuse_addresses(sourced)
    refuse_local_options(sourced.options, settings, CACHE_FOLDER)
    texts = _named_files(sourced.options)
    own: dict[str, Any] = {
        "host": "::",  # whichever kind of addresses the cluster has
        "port": SERVER_PORT,
        "cache_dir": CACHE_FOLDER,
        "log_format": "json",
        "keys": f"{KEYS_FILES}/{KEYS_ENTRY}" if settings.keys_secret_name else None,
        "store": None if settings.store_secret else "none",
        **{option: f"{SERVER_FILES}/{name}" for option, name in _FILE_OPTIONS.items() if name in texts},
    }
    given = [
        item.name
        for item in dataclasses.fields(Options)
        if item.name in sourced.sources and item.name not in (*CLUSTER_OPTIONS, *_SECRET_OPTIONS, *own)
    ]
    values = {name: getattr(sourced.options, name) for name in given} | own
    options = dataclasses.replace(sourced.options, admin_listen=None, **own)
    shared = {"keys": own["keys"], "store": own["store"], "drain_seconds": sourced.options.drain_seconds}
    gateway = {"host": own["host"], "port": GATEWAY_PORT, "log_format": "json", **shared}
    fleet = read_fleet(fleet_file)
    refuse_local_fleet(fleet, settings, METRICS_KEY_FILE)
    _refuse_unserved(fleet, options)
    return Plan(
        settings=settings,
        options=options,
        given=tuple(name for name in values if values[name] is not None),
        gpus=_num_gpus(settings, sourced.options, "deploy.gpus" if flags.get("gpus") is None else "--gpus"),
        fleet=fleet,
        server_files={"serve.toml": toml_text(values), **texts},
        gateway_text=toml_text(gateway),
    )


def _refuse_secrets(sourced: Sourced) -> None:
    """Raise where a secret would stand in a manifest for all to read."""
    for option, setting in _SECRET_OPTIONS.items():
        if option in sourced.sources and getattr(sourced.options, option) != "none":
            raise ConfigError(
                flag(option), "…", f"in a cluster it comes from a Secret: name it in [deploy] as {setting}"
            )


def _refuse_addresses(sourced: Sourced) -> None:
    """Raise where the command itself asks for what it would not do. A file or a shell may be for `serve` as well."""
    for option in CLUSTER_OPTIONS:
        if sourced.why(option) == COMMAND_LINE:
            value = getattr(sourced.options, option)
            raise ConfigError(flag(option), value, "in a cluster the deployment decides it: leave it out")


def _refuse_unserved(fleet: FleetConfig, options: Options) -> None:
    """Raise where the gateway would scale our servers for a model that they do not serve."""
    served = _served_name(options)
    if served is None:
        return
    for model, section in fleet.autoscaler.items():
        is_ours = section.backend["kind"] == "kubernetes" or not _names_replicas(fleet)
        if is_ours and model != served:
            right = f'the servers serve {served}: write [autoscaler."{served}"], or give --served-name {model}'
            raise ConfigError(f"--fleet: autoscaler.{model}", model, right)


def _served_name(options: Options) -> str | None:
    """Return what the servers call their model; None: as its folder in the pod is called."""
    if options.served_name is None and is_path(options.model):
        return None
    return options.served_name or options.model


def _names_replicas(fleet: FleetConfig) -> bool:
    sections = fleet.discovery
    return bool(fleet.replicas or sections.dns or sections.kubernetes or sections.ray)


def _named_files(options: Options) -> dict[str, str]:
    texts = {}
    for option, name in _FILE_OPTIONS.items():
        path = getattr(options, option)
        if path is not None:
            texts[name] = _read(option, Path(path))
    if texts:
        # What is wrong in them is told now, not by a server that does not start.
        files = {option: getattr(options, option) for option in _FILE_OPTIONS}
        resolve(Sourced(Options(**files), {}))
    return texts


def _read(option: str, path: Path) -> str:
    try:
        with path.open("rb") as file:
            content = file.read(_MAX_FILE_BYTES + 1)
        if len(content) > _MAX_FILE_BYTES:
            raise ConfigError(flag(option), str(path), f"it must fit a ConfigMap: at most {_MAX_FILE_BYTES} bytes")
        return content.decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(flag(option), str(path), "give a file of UTF-8 text that can be read") from error


def _num_gpus(settings: Settings, options: Options, option: str) -> int:
    """Return how many each server gets. Raises where it would have some that it does not use, or too few to start."""
    used = 0 if options.device in ("cpu", "simulated") else options.tensor_parallel
    fewest = used if options.device == "cuda" else 0
    if settings.gpus is None:
        return used
    if settings.gpus not in (fewest, used):
        numbers = " or ".join(str(number) for number in sorted({fewest, used}, reverse=True))
        right = f"a server with --device {options.device} uses {used}: give {numbers}, or leave it out"
        raise ConfigError(option, settings.gpus, right)
    return settings.gpus


def with_servers(fleet: FleetConfig, **ours: Any) -> FleetConfig:
    """Return the operator's fleet with our servers in it, unless it says where replicas are.

    `ours` is the entry of its `[discovery]` that finds them.
    """
    if _names_replicas(fleet):
        return fleet
    return msgspec.structs.replace(fleet, discovery=msgspec.structs.replace(fleet.discovery, **ours))


def fleet_text(fleet: FleetConfig) -> str:
    """Return a gateway's fleet file."""
    return toml_text(_changed(msgspec.to_builtins(fleet), msgspec.to_builtins(FleetConfig())))


def _changed(document: Mapping[str, Any], default: Mapping[str, Any]) -> dict[str, Any]:
    """Return what differs from the defaults, so that the file says what was decided."""
    changed = {}
    for name, value in document.items():
        usual = default.get(name)
        if value == usual:
            continue
        is_section = isinstance(value, dict) and isinstance(usual, dict)
        changed[name] = _changed(value, default[name]) if is_section else value
    return changed
