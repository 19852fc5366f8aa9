"""So many requests for each replica: the rule of a horizontal pod autoscaler over queue length.

Looks at requests that run, queue or are held, whatever they cost.
"""

import math

from penstock.fleet.autoscaler.policies.interface import Proposal, ScalePolicy
from penstock.fleet.autoscaler.signals import FleetSignals
from penstock.fleet.config import AutoscalerSection

_TOLERANCE = 0.1  # a ratio this near to 1 changes nothing


class QueueLength(ScalePolicy):
    def __init__(self, section: AutoscalerSection) -> None:
        self._each = section.requests_per_replica

    def propose(self, signals: FleetSignals) -> Proposal:
        num_requests = signals.num_requests + signals.num_held
        reason = f"{num_requests:g} requests at {self._each} for each replica"
        if signals.num_ready and abs(num_requests / signals.num_ready / self._each - 1.0) <= _TOLERANCE:
            return Proposal(signals.num_ready, f"{reason}, within a tenth")
        return Proposal(math.ceil(num_requests / self._each), reason)
