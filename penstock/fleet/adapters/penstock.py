"""A Penstock server."""

from penstock.fleet.adapters.interface import ReplicaAdapter
from penstock.protocol.block_events import BLOCK_EVENTS_PATH

ADAPTER = ReplicaAdapter(
    kind="penstock",
    ready_path="/ready",
    running=("penstock_total_running_requests",),
    waiting=("penstock_total_queued_requests",),
    kv_utilization="penstock_kv_cache_utilization",
    context_fields=("max_context_tokens",),
    counts_usage=True,
    keeps_files=True,
    can_frame=True,
    cache_info="penstock_cache_config_info",
    block_events_path=BLOCK_EVENTS_PATH,
)
