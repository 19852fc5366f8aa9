"""What is to run on a Ray cluster: which server, how many of it, on what.

Plain data, no Ray: it travels from the command to the cluster's actors.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from penstock.config import Sourced, flag
from penstock.errors import ConfigError
from penstock.fleet.router.policies.registry import POLICIES

DEPLOYMENT = "replica"  # within the application
_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
_MAX_PORT = 65535
_REPLICAS_OWN = ("port", "admin_listen")
_FILES = frozenset({"model", "chat_template", "cache_dir", "simulated_profile", "keys", "store", "shared_prefixes"})


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaSettings:
    """One replica."""

    application: str = "penstock"
    arguments: tuple[str, ...] = ()  # of `penstock serve`, without host and port
    host: str | None = None  # to listen on; None: the node's own address
    port: int | None = None  # None: any that is free
    key_file: str | None = None  # on every node: an admin key, with which a replica is asked how it is
    start_seconds: float = 600.0
    drain_seconds: float = 30.0
    num_ranks: int = 1
    cpus_per_rank: float = 1.0
    gpus_per_rank: float = 0.0

    @property
    def bundles(self) -> list[dict[str, float]]:
        """Return what each rank needs of a node: the bundles of the replica's placement group."""
        needs = {"CPU": self.cpus_per_rank, "GPU": self.gpus_per_rank}
        return [{name: number for name, number in needs.items() if number} for _ in range(self.num_ranks)]


@dataclass(frozen=True, slots=True, kw_only=True)
class ApplicationSettings:
    """All of them."""

    replica: ReplicaSettings
    num_replicas: int = 1  # with `max_replicas`: the fewest
    max_replicas: int | None = None  # None: as many as were asked for, until another number is
    scaling: Mapping[str, Any] = field(default_factory=dict)  # of a fleet file's [autoscaler.MODEL]
    policy: str = "least-loaded"  # for callers who come through Ray Serve
    route_prefix: str | None = None  # None: nothing comes through Ray Serve's proxies

    @property
    def name(self) -> str:
        return self.replica.application


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What `penstock deploy ray` is told beside the options of `penstock serve`."""

    name: str = "penstock"
    replicas: int = 1
    max_replicas: int | None = None
    cpus: float = 1.0  # for each rank
    gpus: float | None = None  # for each rank; None: nothing was said, which is none
    port: int | None = None  # of each server, where every node has room for one only; None: any that is free
    policy: str = "least-loaded"
    route_prefix: str | None = None
    key_file: str | None = None


def _check(wanted: Wanted) -> None:
    if not _NAME.fullmatch(wanted.name):
        raise ConfigError("--name", wanted.name[:100], "give 1 to 64 letters, digits, '.', '_' or '-'")
    if wanted.replicas < 1:
        raise ConfigError("--replicas", wanted.replicas, "give at least 1")
    for name in ("cpus", "gpus"):
        if not 0 <= (getattr(wanted, name) or 0.0) < math.inf:
            raise ConfigError(flag(name), getattr(wanted, name), "give a number, at least 0")
    if wanted.port is not None and not 1 <= wanted.port <= _MAX_PORT:
        raise ConfigError("--port", wanted.port, f"give a port of 1 to {_MAX_PORT}")
    if wanted.route_prefix is not None and not wanted.route_prefix.startswith("/"):
        raise ConfigError("--route-prefix", wanted.route_prefix[:100], "give a path that begins with /")


def make_settings(sourced: Sourced, wanted: Wanted) -> ApplicationSettings:
    """Return what is to run. Raises ConfigError."""
    options = sourced.options
    for name in _REPLICAS_OWN:
        if name in sourced.sources:
            raise ConfigError(flag(name), getattr(options, name), "leave it out: each replica on a node has its own")
    _check(wanted)
    if wanted.policy not in POLICIES:
        raise ConfigError("--policy", wanted.policy, f"give one of: {', '.join(POLICIES.names)}")
    if wanted.max_replicas is not None and wanted.max_replicas < wanted.replicas:
        raise ConfigError(
            "--max-replicas", wanted.max_replicas, f"give at least --replicas, which is {wanted.replicas}"
        )
    gpus = wanted.gpus or 0.0
    if wanted.cpus <= 0 and gpus <= 0:
        raise ConfigError("--cpus", wanted.cpus, "a replica needs a part of a CPU or of a GPU to be placed by")
    most_gpus = 0 if options.device in ("cpu", "simulated") else 1
    if wanted.gpus == 0 and options.device == "cuda":
        raise ConfigError("--gpus", wanted.gpus, "a server with --device cuda finds none then: give 1, or leave it out")
    if gpus > most_gpus:
        right = f"a rank of a server with --device {options.device} uses {most_gpus}: give no more, or leave it out"
        raise ConfigError("--gpus", gpus, right)
    replica = ReplicaSettings(
        application=wanted.name,
        arguments=serve_arguments(sourced),
        host=options.host if "host" in sourced.sources else None,
        port=wanted.port,
        key_file=wanted.key_file,
        drain_seconds=options.drain_seconds,
        num_ranks=options.tensor_parallel,
        cpus_per_rank=wanted.cpus,
        gpus_per_rank=gpus,
    )
    return ApplicationSettings(
        replica=replica,
        num_replicas=wanted.replicas,
        max_replicas=wanted.max_replicas,
        policy=wanted.policy,
        route_prefix=wanted.route_prefix,
    )


def serve_arguments(sourced: Sourced) -> tuple[str, ...]:
    """Return the options that were given as `penstock serve` takes them. Files of this machine are named whole."""
    arguments: list[str] = []
    for name in sourced.sources:
        value = getattr(sourced.options, name)
        if name == "host":
            continue
        if name in _FILES and Path(value).exists():
            value = Path(value).absolute()
        if name == "model":
            arguments.insert(0, str(value))
        elif isinstance(value, bool):
            arguments.append(flag(name) if value else flag(f"no_{name}"))
        else:
            arguments += [flag(name), str(value)]
    return tuple(arguments)
