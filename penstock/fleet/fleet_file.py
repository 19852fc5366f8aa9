"""Reads what the gateway fronts from a TOML file and the command line, and checks it.

Knows nothing of how any of it is done.
"""

import ipaddress
import re
import tomllib
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import urlsplit

import msgspec

from penstock.errors import ConfigError
from penstock.fleet.adapters.registry import ADAPTERS
from penstock.fleet.autoscaler.backends.registry import BACKENDS
from penstock.fleet.autoscaler.policies.registry import SCALE_POLICIES
from penstock.fleet.config import (
    AutoscalerSection,
    DiscoverySection,
    FleetConfig,
    KubernetesSection,
    ModelSection,
    ReplicaEntry,
)
from penstock.fleet.rollout.plan import VERSION_NAME, check_rollout
from penstock.fleet.router.policies.registry import POLICIES
from penstock.fleet.server_place import default_port, place_of

_OPTION = "--fleet"
_OWN_PATHS = frozenset({"models", "completions", "metrics", "health", "ready", "live", "admin"})  # no server's address
_ANY_ADDRESS = frozenset({"0.0.0.0", "::"})
_LOOPBACK = frozenset({"127.0.0.1", "::1", "localhost"})
_HOST_LABEL = re.compile(r"[0-9A-Za-z_-]{1,63}")
_HOST_RULE = "parts of 1 to 63 letters, digits, '-' or '_' with single dots between them, 253 characters at most"
_MAX_HOST_CHARACTERS = 253
_MAX_PORT = 65535
_CLUSTER_NAME = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
_CLUSTER_RULE = "small letters, digits and dashes, no dash first or last, at most 63"
_DAY_SECONDS = 86400.0


def read_fleet(file: Path | None, urls: Sequence[str] = (), policy: str | None = None) -> FleetConfig:
    """Return the configuration that a file and the command line make. Raises ConfigError."""
    config = FleetConfig() if file is None else _read_file(file)
    for number, entry in enumerate(config.replicas):
        check_entry(entry, f"{_OPTION} replicas[{number}].")
    named = tuple(ReplicaEntry(url=url) for url in urls)
    for entry in named:
        _check_url("--replica", entry.url)
    _check_different(config.replicas, named)
    _check_aliases(config)
    _check_policy(f"{_OPTION} policy", config.policy)
    for model, section in config.models.items():
        _check_policy(f"{_OPTION} models.{model}.policy", section.policy or config.policy)
    if policy is not None:
        _check_policy("--policy", policy)
    config = msgspec.structs.replace(config, replicas=config.replicas + named, policy=policy or config.policy)
    _check_discovery(config.discovery)
    for model, rollout in config.rollouts.items():
        check_rollout(model, rollout, _OPTION)
    for model, autoscaler in config.autoscaler.items():
        _check_autoscaler(f"autoscaler.{model}", autoscaler)
    # A model that may be scaled to zero is declared: requests for it are held.
    declared = {model: ModelSection() for model in config.autoscaler}
    return msgspec.structs.replace(config, models={**declared, **config.models})


def check_entry(entry: ReplicaEntry, where: str = "") -> None:
    """Raise ConfigError, whose option is `where` and the field, unless this names a server that we can speak to."""
    _check_url(f"{where}url", entry.url)
    _check_kind(f"{where}kind", entry.kind)
    _check_version(f"{where}version", entry.version)
    if entry.max_in_flight is not None and entry.max_in_flight < 1:
        raise ConfigError(f"{where}max_in_flight", entry.max_in_flight, "give at least 1, or leave it out")


def check_key_files(config: FleetConfig) -> None:
    """Raise ConfigError unless every key file is there, with a key in it. Files are where the gateway runs."""
    named = [(f"{_OPTION} key_file", config.key_file, "all replicas without one of their own")]
    for number, entry in enumerate(config.replicas):
        named.append((f"{_OPTION} replicas[{number}].key_file", entry.key_file, entry.url))
    for source in ("dns", "kubernetes", "ray"):
        for number, section in enumerate(getattr(config.discovery, source)):
            where = f"discovery.{source}[{number}]"
            named.append((f"{_OPTION} {where}.key_file", section.key_file, f"the replicas of {where}"))
    for model, scaled in config.autoscaler.items():
        where = f"autoscaler.{model}.backend"
        named.append((f"{_OPTION} {where}.key_file", scaled.backend.get("key_file"), f"the replicas of {where}"))
    for option, file, whose in named:
        if file is None:
            continue
        try:
            is_empty = not Path(file).read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            why = error.strerror if isinstance(error, OSError) else "it is not text"
            raise ConfigError(option, file, f"it cannot be read ({why}); it must hold the key for {whose}") from error
        if is_empty:
            raise ConfigError(option, file, f"it is empty; it must hold the key for {whose}")


def check_not_itself(config: FleetConfig, host: str, port: int) -> None:
    """Raise ConfigError where the gateway that listens there is named as its own replica.

    Names are taken as they are written: whom else a name leads to is found out when it is asked.
    """
    own = {host} if host not in _ANY_ADDRESS else {*_LOOPBACK, *_ANY_ADDRESS}
    own |= _LOOPBACK if own & _LOOPBACK else set()
    for entry in config.replicas:
        parts = urlsplit(entry.url)
        if parts.hostname in own and (parts.port or default_port(parts.scheme)) == port:
            raise ConfigError("--replica", entry.url, "this is the gateway's own address: give the URLs of servers")


def _check_discovery(discovery: DiscoverySection) -> None:
    for source in ("dns", "kubernetes"):
        for number, found in enumerate(getattr(discovery, source)):
            where = f"{_OPTION} discovery.{source}[{number}]."
            _check_kind(f"{where}kind", found.kind)
            _check_version(f"{where}version", found.version)
            if isinstance(found.port, int) and not 1 <= found.port <= _MAX_PORT:
                raise ConfigError(f"{where}port", found.port, f"give a port of 1 to {_MAX_PORT}")
    for number, service in enumerate(discovery.kubernetes):
        _check_service(f"{_OPTION} discovery.kubernetes[{number}].", service)
    _check_sources("dns", [f"{section.name}:{section.port}" for section in discovery.dns])
    services = [f"{section.namespace or ''}/{section.service}:{section.port}" for section in discovery.kubernetes]
    _check_sources("kubernetes", services)
    _check_sources("ray", [f"{section.address}/{section.application}" for section in discovery.ray])
    for number, cluster in enumerate(discovery.ray):
        _check_version(f"{_OPTION} discovery.ray[{number}].version", cluster.version)
    for number, section in enumerate(discovery.dns):
        if not _is_host(section.name):
            option = f"{_OPTION} discovery.dns[{number}].name"
            raise ConfigError(option, section.name[:200], f"this can be no host: give {_HOST_RULE}")


def _check_service(where: str, section: KubernetesSection) -> None:
    """Raise unless these can be names in a cluster: what else stood there would ask its API something else."""
    named = (("service", section.service), ("namespace", section.namespace), ("port", section.port))
    for field, value in named:
        if isinstance(value, str) and not _CLUSTER_NAME.fullmatch(value):
            raise ConfigError(f"{where}{field}", value[:200], f"give {_CLUSTER_RULE}")
    if isinstance(section.port, str) and section.port.isdigit():
        raise ConfigError(f"{where}port", section.port, "give a number without quotes, or the name of a port")


def _check_sources(kind: str, places: Sequence[str]) -> None:
    """Raise where two entries find the same replicas: what each says of them would be the other's to change."""
    for number, place in enumerate(places):
        first = places.index(place)
        if first < number:
            right = f"discovery.{kind}[{first}] finds the same replicas: name them once"
            raise ConfigError(f"{_OPTION} discovery.{kind}[{number}]", place[:200], right)


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
    if not (
        0.0 < section.interval_seconds <= _DAY_SECONDS and all(0.0 <= seconds <= _DAY_SECONDS for seconds in times)
    ):
        right = "times must be 0 to 86400 seconds, and interval_seconds over 0"
        raise ConfigError(_OPTION, where, right)


def _check_url(option: str, url: str) -> None:
    try:
        parts = urlsplit(url)
        is_usable = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        # urlsplit passes over tabs and line breaks.
        is_usable = is_usable and url.isprintable() and " " not in parts.path
    except ValueError:
        is_usable = False
    if not is_usable or parts.query or parts.fragment or parts.username:
        raise ConfigError(option, url[:200], "give a replica's URL such as http://127.0.0.1:8000")
    if not _is_host(parts.hostname or ""):
        raise ConfigError(option, url[:200], f"its host can be none: give an address, or {_HOST_RULE}")
    # A server may be behind a path of its own, but no path of its API is where it is.
    segments = [part for part in parts.path.split("/") if part]
    if "v1" in segments or (segments and segments[-1] in _OWN_PATHS):
        base = f"{parts.scheme}://{parts.netloc}"
        raise ConfigError(option, url[:200], f"leave out the path of its API, which the gateway adds: {base}")


def _is_host(name: str) -> bool:
    """Return whether this is an address, or a name that can be looked up."""
    try:
        if ":" in name:
            ipaddress.IPv6Address(name)
            return True
        labels = name.encode("idna").decode("ascii").removesuffix(".")
    except ValueError:
        return False
    return len(labels) <= _MAX_HOST_CHARACTERS and all(map(_HOST_LABEL.fullmatch, labels.split(".")))


def _check_different(listed: Sequence[ReplicaEntry], named: Sequence[ReplicaEntry]) -> None:
    """Raise where a server is there twice: what the second says of it would be lost."""
    options = [f"{_OPTION} replicas[{number}].url" for number in range(len(listed))] + ["--replica"] * len(named)
    seen: dict[str, str] = {}
    for option, entry in zip(options, [*listed, *named], strict=True):
        places = _places_of(entry.url)
        for place in places & seen.keys():
            raise ConfigError(option, entry.url[:200], f"{seen[place]} is the same server: name it once")
        seen |= dict.fromkeys(places, option)


def _places_of(url: str) -> set[str]:
    """Return where a server is. `localhost` is this machine's own address, of either kind."""
    place = place_of(url)
    if urlsplit(url).hostname != "localhost":
        return {place}
    return {place, place.replace("://127.0.0.1:", "://[::1]:", 1)}


def _check_aliases(config: FleetConfig) -> None:
    aliases = config.aliases
    for section in ("models", "rollouts", "autoscaler"):
        for name in getattr(config, section):
            if not name.strip():
                raise ConfigError(f"{_OPTION} {section}", name[:200], "give a model's name, as replicas call it")
            if name in aliases:
                right = f"this is an alias, and nothing would come of it: name the model, {aliases[name]!r}"
                raise ConfigError(f"{_OPTION} {section}", name[:200], right)
    for alias, model in aliases.items():
        if not alias.strip() or not model.strip():
            right = "neither name may be empty: give what callers say = what replicas call it"
            raise ConfigError(f"{_OPTION} aliases", {alias[:200]: model[:200]}, right)
        if model in aliases:
            right = "this is an alias itself: give the name that replicas use"
            raise ConfigError(f"{_OPTION} aliases.{alias}", model[:200], right)


def _check_policy(option: str, name: str) -> None:
    if name not in POLICIES:
        raise ConfigError(option, name[:200], f"give one of: {', '.join(POLICIES.names)}")


def _check_kind(option: str, kind: str) -> None:
    if kind not in ADAPTERS:
        raise ConfigError(option, kind[:200], f"give one of: {', '.join(ADAPTERS.names)}")


def _check_version(option: str, version: str) -> None:
    if not VERSION_NAME.fullmatch(version):
        raise ConfigError(option, version[:200], "give 1 to 64 letters, digits, '.', '_' or '-'")


def _read_file(file: Path) -> FleetConfig:
    try:
        return msgspec.convert(tomllib.loads(file.read_text(encoding="utf-8")), FleetConfig)
    except OSError as error:
        raise ConfigError(_OPTION, str(file), f"it cannot be read ({error.strerror})") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(_OPTION, str(file), f"it is not valid TOML: {error}") from error
    except msgspec.ValidationError as error:
        raise ConfigError(_OPTION, str(file), str(error)) from error
