"""A device measured: steps timed, costs fitted, the fit checked on steps that it has not seen.

Knows nothing of terminals or files: what it finds on the way it tells whoever listens.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

import msgspec

from penstock.engine.config import EngineConfig
from penstock.engine.simulated.profile import HostCost, Profile
from penstock.errors import ConfigError
from penstock.tools.profiler.fit import estimated_ms, fit_decode, fit_mixed, judge
from penstock.tools.profiler.steps import (
    Limits,
    TimedStep,
    decode_steps,
    mixed_steps,
    random_steps,
)
from penstock.tools.profiler.stopwatch import Stopwatch, Timed

MAX_MEDIAN_ERROR = 0.05
_NUM_HELD_OUT = 30
# Shorter ones leave nothing between which a line could be drawn.
_LEAST_CONTEXT = 128
_LEAST_TOKENS = 16
_LONGEST_CONTEXT = {"cuda": 8192, "cpu": 1024}
# Without a host tier to time: what a block's bytes take over PCIe.
_TIER_BYTES_PER_MS = 20e6
# HTTP, tokenising and the sockets between the processes are not timed here: about what they take on a server's cores.
_ARRIVAL_MS, _DELIVERY_MS, _EVENT_MS = 1.5, 0.7, 0.04

Listener = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """What is measured, apart from its times."""

    device: str
    model: str
    commit: str
    made_at: str
    memory_bytes: int
    weight_bytes: int
    kv_token_bytes: int
    vocab_size: int
    max_context_tokens: int
    config: EngineConfig
    graph_sizes: tuple[int, ...] = ()
    graph_tokens: tuple[int, ...] = ()

    @property
    def limits(self) -> Limits:
        return limits_of(self.config, self.graph_sizes, self.graph_tokens)


def limits_of(config: EngineConfig, graph_sizes: tuple[int, ...] = (), graph_tokens: tuple[int, ...] = ()) -> Limits:
    """Return the sizes of steps that an engine allows. Raises ConfigError where they are too few to be a grid."""
    cache_tokens = (config.num_blocks - 1) * config.block_tokens
    if config.max_context_tokens < _LEAST_CONTEXT:
        raise ConfigError(
            "--max-context-tokens", config.max_context_tokens, f"a profile needs steps of {_LEAST_CONTEXT} and more"
        )
    if config.max_step_tokens < _LEAST_TOKENS:
        raise ConfigError("--max-step-tokens", config.max_step_tokens, f"a profile needs {_LEAST_TOKENS} and more")
    return Limits(
        max_rows=config.max_running,
        max_tokens=config.max_step_tokens,
        max_context=min(config.max_context_tokens, cache_tokens, _LONGEST_CONTEXT[config.device_kind]),
        cache_tokens=cache_tokens,
        graph_sizes=graph_sizes,
        graph_tokens=graph_tokens,
    )


def measure(stopwatch: Stopwatch, subject: Subject, listen: Listener) -> Profile:
    """Time the grid and the held-out steps; return the profile with how well it fits."""
    limits = subject.limits
    decoded = _time_all(stopwatch, decode_steps(limits), "decode", listen)
    mixed = _time_all(stopwatch, mixed_steps(limits), "mixed", listen)
    tier_block_ms = stopwatch.time_block_copy()
    if tier_block_ms is None:
        tier_block_ms = subject.kv_token_bytes * subject.config.block_tokens / _TIER_BYTES_PER_MS
    draft = Profile(
        device=subject.device,
        device_kind="cuda" if subject.config.device_kind == "cuda" else "cpu",
        model=subject.model,
        measured=f"penstock bench profile: medians of {len(decoded) + len(mixed)} steps",
        made_at=subject.made_at,
        commit=subject.commit,
        memory_bytes=subject.memory_bytes,
        weight_bytes=subject.weight_bytes,
        kv_token_bytes=subject.kv_token_bytes,
        vocab_size=subject.vocab_size,
        max_context_tokens=subject.max_context_tokens,
        dtype=subject.config.dtype,
        decode=fit_decode(decoded, limits),
        mixed=fit_mixed(mixed, limits),
        host=HostCost(
            decode_launch_ms=round(median(item.launch_ms for item in decoded), 3),
            mixed_launch_ms=round(median(item.launch_ms for item in mixed), 3),
            arrival_ms=_ARRIVAL_MS,
            delivery_ms=_DELIVERY_MS,
            event_ms=_EVENT_MS,
        ),
        tier_block_ms=round(tier_block_ms, 4),
    )
    return _checked(stopwatch, draft, limits, listen)


def _checked(stopwatch: Stopwatch, draft: Profile, limits: Limits, listen: Listener) -> Profile:
    unseen = [stopwatch.time(step) for step in random_steps(limits, _NUM_HELD_OUT, "checked by")]
    for item in unseen:
        estimate = estimated_ms(draft, item)
        listen(f"check: {item.step}: {item.ms:.2f} ms, estimated {estimate:.2f} ({estimate / item.ms - 1:+.1%})")
    return msgspec.structs.replace(draft, fit=judge(draft, unseen))


def _time_all(stopwatch: Stopwatch, steps: Sequence[TimedStep], kind: str, listen: Listener) -> list[Timed]:
    timed = []
    for step in steps:
        item = stopwatch.time(step)
        timed.append(item)
        listen(f"{kind}: {step}: {item.ms:.2f} ms, launched in {item.launch_ms:.2f}")
    return timed
