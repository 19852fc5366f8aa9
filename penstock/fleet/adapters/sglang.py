"""An SGLang server (started with --enable-metrics)."""

from penstock.fleet.adapters.interface import ReplicaAdapter

ADAPTER = ReplicaAdapter(
    kind="sglang",
    ready_path="/health",
    running=("sglang:num_running_reqs",),
    waiting=("sglang:num_queue_reqs",),
    kv_utilization="sglang:token_usage",
    prompt_tokens="sglang:prompt_tokens_total",
    generated_tokens="sglang:generation_tokens_total",
    context_fields=("max_model_len",),
)
