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

from penstock.config import Options, Sourced, flag
from penstock.deploy.kubernetes.settings import Settings, read_settings
from penstock.deploy.toml_text import toml_text
from penstock.errors import ConfigError
from penstock.fleet.config import FleetConfig, KubernetesSection
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

# The deployment says these itself.
CLUSTER_OPTIONS = ("host", "port", "admin_listen", "cache_dir", "log_format")
# These name files of this machine, which travel along.
_FILE_OPTIONS = {"chat_template": "chat_template.jinja", "shared_prefixes": "shared_prefixes.toml"}
_SECRET_OPTIONS = {"keys": "keys_secret", "store": "store_secret"}
_MAX_FILE_BYTES = 512 * 1024  # a ConfigMap holds 1 MiB in all


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    settings: Settings
    options: Options  # as the servers will have them
    given: tuple[str, ...]  # the options that are not left to their defaults
    gpus: int
    fleet: FleetConfig  # the operator's
    server_files: Mapping[str, str]  # name: text
    gateway_files: Mapping[str, str]

    @property
    def drain_seconds(self) -> int:
        return int(-(-self.options.drain_seconds // 1))


def make_plan(sourced: Sourced, fleet_file: Path | None, flags: Mapping[str, Any]) -> Plan:
    """Return the deployment of these options. Raises ConfigError."""
    settings = read_settings(sourced.deploy, flags)
    _refuse_secrets(sourced)
    texts = _named_files(sourced.options)
    own: dict[str, Any] = {
        "host": "0.0.0.0",
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
    ours = KubernetesSection(service=settings.name, port="http", key_file=f"{METRICS_FILES}/{METRICS_ENTRY}")
    return Plan(
        settings=settings,
        options=options,
        given=tuple(name for name in values if values[name] is not None),
        gpus=_num_gpus(settings, sourced.options),
        fleet=fleet,
        server_files={"serve.toml": toml_text(values), **texts},
        gateway_files={"gateway.toml": toml_text(gateway), "fleet.toml": fleet_text(fleet, kubernetes=(ours,))},
    )


def _refuse_secrets(sourced: Sourced) -> None:
    """Raise where a secret would stand in a manifest for all to read."""
    for option, setting in _SECRET_OPTIONS.items():
        if option in sourced.sources and getattr(sourced.options, option) != "none":
            raise ConfigError(
                flag(option), "…", f"in a cluster it comes from a Secret: name it in [deploy] as {setting}"
            )


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
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(flag(option), str(path), "give a file of UTF-8 text that can be read") from error
    if len(text.encode()) > _MAX_FILE_BYTES:
        raise ConfigError(flag(option), str(path), f"it must fit a ConfigMap: at most {_MAX_FILE_BYTES} bytes")
    return text


def _num_gpus(settings: Settings, options: Options) -> int:
    if settings.gpus is not None:
        return settings.gpus
    return 0 if options.device in ("cpu", "simulated") else options.tensor_parallel


def fleet_text(fleet: FleetConfig, **ours: Any) -> str:
    """Return the gateway's fleet file: the operator's, with our servers in it unless it says where replicas are.

    `ours` is the entry of its `[discovery]` that finds them.
    """
    sections = fleet.discovery
    if not (fleet.replicas or sections.dns or sections.kubernetes):
        fleet = msgspec.structs.replace(fleet, discovery=msgspec.structs.replace(sections, **ours))
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
