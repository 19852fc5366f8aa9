"""A llama.cpp server, its own (started with --metrics) or llama-cpp-python's, which has no metrics and no /health."""

from penstock.fleet.adapters.interface import ReplicaAdapter

ADAPTER = ReplicaAdapter(
    kind="llama.cpp",
    # The one route that both have; llama.cpp answers 503 here while it loads.
    ready_path="/v1/models",
    running=("llamacpp:requests_processing",),
    waiting=("llamacpp:requests_deferred",),
    kv_utilization="llamacpp:kv_cache_usage_ratio",
    prompt_tokens="llamacpp:prompt_tokens_total",
    generated_tokens="llamacpp:tokens_predicted_total",
    context_fields=("meta.n_ctx", "meta.n_ctx_train"),
)
