"""What a device's memory will hold: weights, KV cache, room to work in, graphs. Plain arithmetic, before any loading.

Estimates lean to the safe side: what is planned must fit under any load that is let in. Knows sizes; nothing of how
they are chosen.
"""

from dataclasses import dataclass

from penstock.models.spec import ModelSpec

GIB = 2**30

# Of a device's free memory: what allocators lose between blocks of different sizes.
_LOST_SHARE = 0.02
# A captured step keeps its launches on the device.
_LAUNCH_BYTES = 2048
_LAUNCHES_PER_LAYER = 14
_NUM_GRAPHS = 120


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Bytes, and what they allow."""

    device: str
    free_bytes: int
    weight_bytes: int
    kv_bytes: int
    workspace_bytes: int
    graph_bytes: int
    block_tokens: int
    num_blocks: int
    max_context_tokens: int
    max_running: int

    @property
    def rest_bytes(self) -> int:
        return self.free_bytes - self.weight_bytes - self.kv_bytes - self.workspace_bytes - self.graph_bytes

    def num_requests(self, context_tokens: int) -> int:
        """The most requests of so many tokens that run at once."""
        return min(self.max_running, self.num_blocks // -(-context_tokens // self.block_tokens))

    def rows(self) -> list[tuple[str, str]]:
        """What there is to say, as names and values."""
        contexts = sorted({min(size, self.max_context_tokens) for size in (1024, 8192, self.max_context_tokens)})
        return [
            ("device", self.device),
            ("free", show_bytes(self.free_bytes)),
            ("weights", show_bytes(self.weight_bytes)),
            ("KV cache", f"{show_bytes(self.kv_bytes)}, {self.num_blocks} blocks of {self.block_tokens} tokens"),
            ("workspace", show_bytes(self.workspace_bytes)),
            ("graphs", show_bytes(self.graph_bytes)),
            ("left over", show_bytes(self.rest_bytes)),
            ("longest context", f"{self.max_context_tokens} tokens"),
            *((f"requests of {size} tokens", f"{self.num_requests(size)} at once") for size in contexts),
        ]


def workspace_bytes(
    spec: ModelSpec, kind: str, item_bytes: int, *, step_tokens: int, max_running: int, context_tokens: int
) -> int:
    """Memory that the largest step works in, and that rows live in."""
    per_token = 2 * spec.hidden_size + 2 * spec.q_size + 2 * spec.kv_size + 3 * spec.intermediate_size
    if spec.moe is not None:
        picks = spec.moe.num_active * (spec.moe.intermediate_size + spec.hidden_size)
        per_token = max(per_token, per_token - 3 * spec.intermediate_size + picks + spec.moe.num_experts)
    # On a GPU captured steps and others each have memory of their own.
    copies = 2 if kind == "cuda" else 1
    activations = copies * step_tokens * per_token * item_bytes
    # Logits as the product gives them, and twice more where penalties or filters edit them.
    logits = 3 * max_running * spec.vocab_size * 4
    rows = max_running * context_tokens * 8
    return activations + logits + rows


def graph_bytes(spec: ModelSpec, kind: str, max_running: int) -> int:
    """Memory of captured steps: their launches, and the logits that each size of draw keeps."""
    if kind != "cuda":
        return 0
    launches = _NUM_GRAPHS * spec.num_layers * _LAUNCHES_PER_LAYER * _LAUNCH_BYTES
    # Sizes go up in sixteens: of decode steps, and of draws behind prompts.
    kept_rows = max_running * (max_running + 16) // 32
    return launches + 2 * kept_rows * spec.vocab_size * 4


def lost_bytes(kind: str, free_bytes: int) -> int:
    return int(free_bytes * _LOST_SHARE) if kind == "cuda" else 0


def show_bytes(count: int) -> str:
    if abs(count) >= GIB:
        return f"{count / GIB:.2f} GiB"
    return f"{count / 2**20:.1f} MiB"
