"""A profile of round numbers, so that what a step should take can be worked out by hand."""

from typing import Any

from penstock.engine.simulated.profile import Curve, DecodeCost, HostCost, MixedCost, Profile


def small_profile(**changes: Any) -> Profile:
    """Decode: 10 ms, 20 from two rows on, 1 ms per thousand tokens of context. Prompts: 1 ms a token."""
    settings: dict[str, Any] = {
        "device": "Abacus",
        "device_kind": "cpu",
        "model": "tiny",
        "measured": "made up",
        "made_at": "2026-01-01",
        "memory_bytes": 2**30,
        "weight_bytes": 2**20,
        "kv_token_bytes": 1024,
        "vocab_size": 97,
        "max_context_tokens": 1024,
        "dtype": "float32",
        "decode": DecodeCost(
            base_ms=Curve(at=(1, 2, 8), values=(10, 20, 20)), context_ms=Curve(at=(1,), values=(1,)), graph_sizes=(1, 8)
        ),
        "mixed": MixedCost(
            base_ms=Curve(at=(2, 1000), values=(2, 1000)),
            pair_ms=0,
            context_ms=0,
            slice_ms=0,
            draw_ms=Curve(at=(1,), values=(0,)),
        ),
        "host": HostCost(decode_launch_ms=0, mixed_launch_ms=0, arrival_ms=0, delivery_ms=0),
        "tier_block_ms": 5,
    }
    return Profile(**{**settings, **changes})
