"""What a scale policy is: signals in, a number of replicas and why out."""

from abc import ABC, abstractmethod
from dataclasses import dataclass

from penstock.fleet.autoscaler.signals import FleetSignals
from penstock.fleet.config import AutoscalerSection


@dataclass(frozen=True, slots=True)
class Proposal:
    """How many replicas should take requests."""

    count: int
    reason: str  # one phrase for people


class ScalePolicy(ABC):
    """One way to tell how many replicas are needed. One object serves one model, for the autoscaler's life.

    It need not know of limits, cooldowns or the warm pool: the controller sees to these.
    """

    @abstractmethod
    def __init__(self, section: AutoscalerSection) -> None: ...

    @abstractmethod
    def propose(self, signals: FleetSignals) -> Proposal:
        """Return what these signals, and those before them, call for. Called once for each look, in order of time."""
