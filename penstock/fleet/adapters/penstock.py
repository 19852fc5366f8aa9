"""A Penstock server."""

from penstock.fleet.adapters.interface import ReplicaAdapter

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
)
