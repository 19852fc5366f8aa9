"""Reads what the gateway fronts from a TOML file and the command line, and checks it.

Knows nothing of how any of it is done.
"""

import tomllib
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import urlsplit

import msgspec

from penstock.errors import ConfigError
from penstock.fleet.adapters.registry import ADAPTERS
from penstock.fleet.autoscaler.backends.registry import BACKENDS
from penstock.fleet.autoscaler.policies.registry import SCALE_POLICIES
from penstock.fleet.config import AutoscalerSection, FleetConfig, ModelSection, ReplicaEntry
from penstock.fleet.rollout.plan import VERSION_NAME, check_rollout
from penstock.fleet.router.policies.registry import POLICIES

_OPTION = "--fleet"


def read_fleet(file: Path | None, urls: Sequence[str] = (), policy: str | None = None) -> FleetConfig:
    """Return the configuration that a file and the command line make. Raises ConfigError."""
    config = FleetConfig() if file is None else _read_file(file)
    named = tuple(ReplicaEntry(url=url) for url in urls)
    config = msgspec.structs.replace(config, replicas=config.replicas + named, policy=policy or config.policy)
    for entry in config.replicas:
        check_entry(entry, "--replica" if entry in named else _OPTION)
    for name in config.policies:
        if name not in POLICIES:
            raise ConfigError("--policy", name, f"give one of: {', '.join(POLICIES.names)}")
    sections = config.discovery
    found = [(item.kind, item.version) for item in sections.dns]
    for kind, version in found + [(item.kind, item.version) for item in sections.kubernetes]:
        _check_kind(kind, _OPTION)
        _check_version(version, _OPTION)
    for model, rollout in config.rollouts.items():
        check_rollout(model, rollout, _OPTION)
    for model, autoscaler in config.autoscaler.items():
        _check_autoscaler(f"autoscaler.{model}", autoscaler)
    # A model that may be scaled to zero is declared: requests for it are held.
    declared = {model: ModelSection(policy=config.policy) for model in config.autoscaler}
    return msgspec.structs.replace(config, models={**declared, **config.models})


def check_entry(entry: ReplicaEntry, option: str) -> None:
    """Raise ConfigError unless this names a server that we can speak to."""
    _check_kind(entry.kind, option)
    try:
        parts = urlsplit(entry.url)
        is_usable = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port or 1) > 0
    except ValueError:
        is_usable = False
    if not is_usable or parts.query or parts.fragment or parts.username:
        raise ConfigError(option, entry.url[:200], "give a replica's URL such as http://127.0.0.1:8000")
    _check_version(entry.version, option)
    if entry.max_in_flight is not None and entry.max_in_flight < 1:
        raise ConfigError(option, entry.max_in_flight, "max_in_flight must be at least 1, or be left out")


def _check_autoscaler(where: str, section: AutoscalerSection) -> None:
    kind = str(section.backend.get("kind", ""))
    if kind not in BACKENDS:
        raise ConfigError(_OPTION, f"{where}.backend.kind", f"give one of: {', '.join(BACKENDS.names)}")
    if section.policy not in SCALE_POLICIES:
        raise ConfigError(_OPTION, f"{where}.policy", f"give one of: {', '.join(SCALE_POLICIES.names)}")
    try:
        fields = {name: value for name, value in section.backend.items() if name != "kind"}
        msgspec.convert(fields, BACKENDS.load(kind).Settings)
    except msgspec.ValidationError as error:
        raise ConfigError(_OPTION, f"{where}.backend", str(error)) from error
    if not 0 <= section.min_replicas <= section.max_replicas or section.max_replicas < 1:
        raise ConfigError(_OPTION, where, "give 0 ≤ min_replicas ≤ max_replicas, and max_replicas of at least 1")
    if section.warm_replicas < 0 or section.requests_per_replica < 1:
        raise ConfigError(_OPTION, where, "warm_replicas must be at least 0, and requests_per_replica at least 1")
    if not (0.0 < section.target_utilization <= 1.0 and 0.0 < section.attainment <= 1.0):
        raise ConfigError(_OPTION, where, "target_utilization and attainment must be parts: over 0, and at most 1")
    times = (section.scale_down_seconds, section.idle_seconds, section.start_seconds)
    if section.interval_seconds <= 0.0 or any(seconds < 0.0 for seconds in times):
        raise ConfigError(_OPTION, where, "times in seconds must not be negative, and interval_seconds over 0")


def _check_kind(kind: str, option: str) -> None:
    if kind not in ADAPTERS:
        raise ConfigError(option, kind[:200], f"kind must be one of: {', '.join(ADAPTERS.names)}")


def _check_version(version: str, option: str) -> None:
    if not VERSION_NAME.fullmatch(version):
        raise ConfigError(option, version[:200], "version must be 1 to 64 letters, digits, '.', '_' or '-'")


def _read_file(file: Path) -> FleetConfig:
    try:
        return msgspec.convert(tomllib.loads(file.read_text(encoding="utf-8")), FleetConfig)
    except OSError as error:
        raise ConfigError(_OPTION, str(file), f"it cannot be read ({error.strerror})") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(_OPTION, str(file), f"it is not valid TOML: {error}") from error
    except msgspec.ValidationError as error:
        raise ConfigError(_OPTION, str(file), str(error)) from error
