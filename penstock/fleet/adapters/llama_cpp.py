"""A llama.cpp server, its own (started with --metrics) or llama-cpp-python's, which has no metrics and no /health."""

from penstock.fleet.adapters.interface import ReplicaAdapter

ADAPTER = ReplicaAdapter(
    kind="llama.cpp",
    # llama.cpp answers 503 here while it loads. llama-cpp-python's is there once it has loaded; whatever it has a route
    # for waits while it answers somebody else, or breaks off that stream.
    ready_path="/health",
    ready_statuses=(200, 404),
    tells_models_at_work=False,
    running=("llamacpp:requests_processing",),
    waiting=("llamacpp:requests_deferred",),
    kv_utilization="llamacpp:kv_cache_usage_ratio",
    prompt_tokens="llamacpp:prompt_tokens_total",
    generated_tokens="llamacpp:tokens_predicted_total",
    context_fields=("meta.n_ctx", "meta.n_ctx_train"),
)
