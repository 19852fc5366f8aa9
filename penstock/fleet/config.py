"""The gateway's own configuration: which replicas, models and policies, how patient, how strict.

As `fleet.fleet_file` reads it; frozen. Knows nothing of how any of it is done.
"""

import msgspec

from penstock.fleet.rollout.plan import DEFAULT_VERSION, RolloutSection


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
    refresh_seconds: float = 5.0


class KubernetesSection(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Replicas are the ready endpoints of a service."""

    service: str
    port: int | str  # a number, or the port's name in the service
    namespace: str | None = None  # None: the gateway's own
    kind: str = "penstock"
    version: str = DEFAULT_VERSION
    key_file: str | None = None  # as a ReplicaEntry's
    refresh_seconds: float = 2.0


class DiscoverySection(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    dns: tuple[DnsSection, ...] = ()
    kubernetes: tuple[KubernetesSection, ...] = ()
    lease_seconds: float = 15.0  # how long a replica that registered itself stays without a heartbeat


class HealthSection(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """When a replica is trusted."""

    probe_seconds: float = 1.0
    probe_timeout_seconds: float = 2.0
    failures_to_eject: int = 3  # in a row; a refused connection ejects at once
    first_backoff_seconds: float = 0.5
    max_backoff_seconds: float = 30.0
    connect_seconds: float = 2.0
    silence_seconds: float = 300.0  # without a byte from a replica: it is given up


class QueueSection(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What happens while every replica is full, or there is none."""

    max_waiting_per_tenant: int = 128
    max_wait_seconds: float = 30.0  # for a place on a full replica, then 429
    hold_seconds: float = 10.0  # for a first replica to appear, then 503


class ModelSection(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    policy: str


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

    @property
    def policies(self) -> set[str]:
        """Every policy that is named."""
        return {self.policy, *(section.policy for section in self.models.values())}

    def policy_of(self, model: str) -> str:
        section = self.models.get(model)
        return self.policy if section is None else section.policy
