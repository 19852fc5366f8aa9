"""A vLLM server."""

from penstock.fleet.adapters.interface import ReplicaAdapter

ADAPTER = ReplicaAdapter(
    kind="vllm",
    ready_path="/health",
    running=("vllm:num_requests_running",),
    waiting=("vllm:num_requests_waiting",),
    kv_utilization="vllm:kv_cache_usage_perc",
    prompt_tokens="vllm:prompt_tokens_total",
    generated_tokens="vllm:generation_tokens_total",
    cache_info="vllm:cache_config_info",
    context_fields=("max_model_len",),
)
