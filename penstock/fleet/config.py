"""The gateway's own configuration: which replicas, models and policies, how patient, how strict.

As `fleet.fleet_file` reads it; frozen. Knows nothing of how any of it is done.
"""

from typing import Annotated, Any

import msgspec

from penstock.fleet.rollout.plan import DEFAULT_VERSION, RolloutSection

# A day at most, so that no number is one that clocks cannot add.
Seconds = Annotated[float, msgspec.Meta(gt=0.0, le=86400.0)]
# Where the file does not say it; a deployment that may be at zero needs more, unless the file does.
DEFAULT_HOLD_SECONDS = 10.0
Count = Annotated[int, msgspec.Meta(ge=1)]


class ReplicaEntry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One server behind the gateway."""

    url: str
    kind: str = "penstock"
    key_file: str | None = None  # holds the key with which the gateway asks for its models and metrics
    max_in_flight: int | None = None  # most requests at once; None: until it says that it is full
    version: str = DEFAULT_VERSION  # of what it serves, for rollouts


class DnsSection(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Replicas are the addresses of a name."""

    name: str
    port: int
    kind: str = "penstock"
    version: str = DEFAULT_VERSION
    key_file: str | None = None  # as a ReplicaEntry's
    refresh_seconds: Seconds = 5.0


class KubernetesSection(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Replicas are the ready endpoints of a service."""

    service: str
    port: int | str  # a number, or the port's name in the service
    namespace: str | None = None  # None: the gateway's own
    kind: str = "penstock"
    version: str = DEFAULT_VERSION
    key_file: str | None = None  # as a ReplicaEntry's
    refresh_seconds: Seconds = 2.0


class RaySection(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Replicas are those of an application that `penstock deploy ray` started."""

    address: str = "auto"  # the cluster's; auto: the one in RAY_ADDRESS, or on this machine
    application: str = "penstock"
    version: str = DEFAULT_VERSION
    key_file: str | None = None  # as a replica's
    refresh_seconds: Seconds = 1.0


class DiscoverySection(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    dns: tuple[DnsSection, ...] = ()
    kubernetes: tuple[KubernetesSection, ...] = ()
    ray: tuple[RaySection, ...] = ()
    lease_seconds: Seconds = 15.0  # how long a replica that registered itself stays without a heartbeat


class HealthSection(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """When a replica is trusted."""

    probe_seconds: Seconds = 1.0
    probe_timeout_seconds: Seconds = 2.0
    failures_to_eject: Count = 3  # in a row; a refused connection ejects at once
    first_backoff_seconds: Seconds = 0.5
    max_backoff_seconds: Seconds = 30.0
    connect_seconds: Seconds = 2.0
    silence_seconds: Seconds = 300.0  # without a byte from a replica: it is given up


class QueueSection(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What happens while every replica is full, or there is none."""

    max_waiting_per_tenant: Count = 128
    max_wait_seconds: Seconds = 30.0  # for a place on a full replica, then 429
    hold_seconds: Seconds | None = None  # for a first replica to appear, then 503; None: DEFAULT_HOLD_SECONDS
    # Whether names that are declared nowhere are held too, until replicas have told theirs; None: if any could come.
    hold_unknown: bool | None = None

    @property
    def patience_seconds(self) -> float:
        """How long a request is held while there is no replica."""
        return DEFAULT_HOLD_SECONDS if self.hold_seconds is None else self.hold_seconds


class ModelSection(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    policy: str = ""  # empty: the fleet's


class AutoscalerSection(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How many replicas of one model there are."""

    backend: dict[str, Any]  # `kind`, and what that kind of backend needs
    policy: str = "promises"
    min_replicas: int = 1  # 0: none while nothing is asked
    max_replicas: int = 4
    warm_replicas: int = 0  # beside those: ready, but sent nothing until they are needed
    interval_seconds: float = 2.0
    scale_down_seconds: float = 60.0  # how long fewer must have been enough
    idle_seconds: float = 300.0  # without a request, before the last replica goes
    start_seconds: float = 20.0  # the first guess of what a start takes; those that were started teach it
    target_utilization: float = 0.85  # of a replica's time, what may go into work; promises kept and broken move it
    attainment: float = 0.99  # part of the promises to be kept
    requests_per_replica: int = 64  # for the policy queue-length, and for kinds that do not tell their work


class FleetConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All of it."""

    policy: str = "least-loaded"
    key_file: str | None = None  # as a replica's own, for Penstock replicas that have none: those that were found
    replicas: tuple[ReplicaEntry, ...] = ()
    aliases: dict[str, str] = {}  # what callers say: what replicas call it
    models: dict[str, ModelSection] = {}
    rollouts: dict[str, RolloutSection] = {}  # by model: how its versions share its requests
    discovery: DiscoverySection = DiscoverySection()
    health: HealthSection = HealthSection()
    queue: QueueSection = QueueSection()
    autoscaler: dict[str, AutoscalerSection] = {}  # by model

    @property
    def policies(self) -> set[str]:
        """Every policy that is named."""
        return {self.policy, *(section.policy for section in self.models.values() if section.policy)}

    @property
    def declared_models(self) -> set[str]:
        """Those that are named here, and waited for while nobody serves them."""
        return {*self.models, *self.autoscaler}

    @property
    def names_all_models(self) -> bool:
        """Whether no replica is expected that serves what is not named here."""
        if self.queue.hold_unknown is not None:
            return not self.queue.hold_unknown
        found = self.discovery
        # A local backend starts its own replicas, of its model; those of others come as anybody's do.
        is_local = all(section.backend.get("kind") == "local" for section in self.autoscaler.values())
        return bool(self.autoscaler) and is_local and not (self.replicas or found.dns or found.kubernetes or found.ray)

    def policy_of(self, model: str) -> str:
        section = self.models.get(model)
        return self.policy if section is None else section.policy or self.policy
