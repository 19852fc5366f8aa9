"""What starts and ends replicas: told how many there should be, it sees to that.

Knows nothing of why. How replicas are found is discovery's business, unless the backend itself tells the pool.
"""

import enum
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, ClassVar

import aiohttp
import msgspec

from penstock.fleet.replica import Replica, ReplicaPool
from penstock.fleet.rollout.plan import DEFAULT_VERSION


@dataclass(frozen=True, slots=True)
class BackendContext:
    """What a backend is given beside its own settings."""

    model: str
    pool: ReplicaPool  # for backends that start replicas at addresses that nobody else finds
    session: aiohttp.ClientSession
    environment: Mapping[str, str] = field(
        default_factory=lambda: MappingProxyType({})
    )  # what servers that are started here get beside our own
    version: str = DEFAULT_VERSION  # of what the backend runs: the one that the fleet's file calls stable


class Failure(enum.StrEnum):
    """What went wrong, as metrics tell it."""

    START_FAILED = "start_failed"  # a replica ended before it was ready, or soon after
    USELESS_REPLICA = "useless_replica"  # one is ready, but cannot serve here
    BACKEND_REFUSED = "backend_refused"  # it could not be asked, or did not do what it was asked for
    POLICY_ERROR = "policy_error"


@dataclass(frozen=True, slots=True)
class Trouble:
    """Why replicas that were asked for do not come."""

    summary: str  # for callers who wait for one: tells nothing of this machine
    detail: str  # for operators
    failure: Failure = Failure.START_FAILED

    def __str__(self) -> str:
        return f"{self.summary}: {self.detail}"


class ScaleBackend(ABC):
    """One place where replicas of one model run.

    The autoscaler calls `scale_to` again and again, also with the number it gave before: what died meanwhile is then
    replaced. Calls never overlap.
    """

    # What `[autoscaler.MODEL.backend]` holds beside `kind`; unknown fields are refused.
    Settings: ClassVar[type[msgspec.Struct]]

    trouble: Trouble | None = None  # what the last start that failed failed by, until one goes well
    num_failed_starts: int = 0  # of replicas that ended before they were ready, or soon after
    version: str = DEFAULT_VERSION  # of its replicas

    @abstractmethod
    def __init__(self, settings: Any, context: BackendContext) -> None:
        """Take settings of the class above. Raises ConfigError where they cannot work here."""

    @abstractmethod
    async def count(self) -> int:
        """How many replicas there are or will be: ready, starting, and none that drains. Raises RemoteError."""

    @abstractmethod
    async def scale_to(self, count: int, leave_first: Collection[str] = ()) -> None:
        """Have so many replicas. Raises RemoteError where that cannot be asked for.

        Returns soon: starts and drains go on behind it. A replica that is to go gets no new requests and finishes those
        it has. `leave_first` names the URLs that should go before others, best first, where the backend can choose.
        """

    def owns(self, replica: Replica) -> bool:
        """Whether a replica of the model is one of its own. Where it cannot tell, those of its version are."""
        return replica.version == self.version

    async def close(self) -> None:
        """Let go of everything. What ends with the autoscaler, such as its own processes, is drained first."""
        return
