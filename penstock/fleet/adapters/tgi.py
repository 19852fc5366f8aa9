"""A text-generation-inference server."""

from penstock.fleet.adapters.interface import ReplicaAdapter

ADAPTER = ReplicaAdapter(
    kind="tgi",
    ready_path="/health",
    running=("tgi_batch_current_size",),
    waiting=("tgi_queue_size",),
    kv_utilization=None,
    prompt_tokens="tgi_request_input_length_sum",
    generated_tokens="tgi_request_generated_tokens_sum",
)
