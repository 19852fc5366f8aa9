"""A Penstock server."""

from penstock.fleet.adapters.interface import ReplicaAdapter
from penstock.protocol.block_events import BLOCK_EVENTS_PATH

_BUSY_REFUSALS = ("queue_full", "ttft", "time_per_token", "deadline")

ADAPTER = ReplicaAdapter(
    kind="penstock",
    ready_path="/ready",
    running=("penstock_total_running_requests",),
    waiting=("penstock_total_queued_requests",),
    kv_utilization="penstock_kv_cache_utilization",
    queue_seconds="penstock_predicted_queue_seconds",
    work_seconds="penstock_work_seconds_total",
    prompt_tokens="penstock_prompt_tokens_total",
    generated_tokens="penstock_generated_tokens_total",
    kept=('penstock_promises_total{outcome="kept"}',),
    missed=(
        'penstock_promises_total{outcome="broken"}',
        # What even an idle engine would refuse is no reason for more of them.
        *(f'penstock_refused_requests_total{{reason="{reason}"}}' for reason in _BUSY_REFUSALS),
    ),
    context_fields=("max_context_tokens",),
    counts_usage=True,
    keeps_files=True,
    runs_short_prompts_first=True,
    can_frame=True,
    cache_info="penstock_cache_config_info",
    block_events_path=BLOCK_EVENTS_PATH,
)
