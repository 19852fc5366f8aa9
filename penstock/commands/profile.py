"""`penstock bench profile`: an engine built in this process, timed step by step and written down."""

import time
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

from rich.console import Console
from rich.text import Text

from penstock.commands.models import fetch
from penstock.config import Sourced
from penstock.engine import config as engine_config
from penstock.engine.builder import BuiltEngine, build_engine
from penstock.engine.device import device_for
from penstock.engine.simulated.profile import write_profile
from penstock.engine.timeline import Timeline
from penstock.models.registry import spec_for
from penstock.models.store import ModelFiles
from penstock.tools.profiler.profiling import MAX_MEDIAN_ERROR, Subject, limits_of, measure
from penstock.tools.profiler.stopwatch import Stopwatch

_HOST_TIER = "256MiB"  # enough to time copies to it


def run(sourced: Sourced, out: Path, commit: str) -> int:
    """Write the profile; return 1 where it is further off than it may be."""
    started = time.monotonic()
    console = Console()
    options = sourced.options
    if options.host_kv_memory == "0" and options.prefix_cache:
        options = replace(options, host_kv_memory=_HOST_TIER)
    files = fetch(options)
    facts = device_for(options).probe(spec_for(files))
    built = build_engine(Sourced(options, sourced.sources), files, Timeline(started))
    console.print(Text(f"{files.name} on {facts.name}: ready after {time.monotonic() - started:.1f} s"))
    runner = built.engine.runner
    stopwatch = Stopwatch(runner, built.config, built.spec.vocab_size, max_context=limits_of(built.config).max_context)

    def say(line: str) -> None:
        console.print(Text(f"{time.monotonic() - started:6.1f} s  {line}"), soft_wrap=True)

    found = measure(stopwatch, _subject(built, files, facts, commit), say)
    runner.close()
    write_profile(found, out)
    fit = found.fit
    assert fit is not None
    is_good = fit.median_error <= MAX_MEDIAN_ERROR
    line = f"median error {fit.median_error:.1%}, p90 {fit.p90_error:.1%} on {fit.num_steps} other steps"
    console.print(Text(f"{line}; {MAX_MEDIAN_ERROR:.0%} is the limit", style="green" if is_good else "red"))
    return 0 if is_good else 1


def _subject(built: BuiltEngine, files: ModelFiles, facts: engine_config.DeviceFacts, commit: str) -> Subject:
    config, spec = built.config, built.spec
    return Subject(
        device=facts.name,
        model=f"{files.name}, {config.dtype}",
        commit=commit,
        made_at=datetime.now(UTC).date().isoformat(),
        memory_bytes=facts.free_bytes,
        weight_bytes=facts.weight_bytes or engine_config.weight_bytes(spec, config.precision, config.dtype, facts.kind),
        kv_token_bytes=facts.kv_token_bytes or engine_config.kv_token_bytes(spec, config.dtype),
        vocab_size=spec.vocab_size,
        max_context_tokens=spec.max_position,
        config=config,
        **_captured(config),
    )


def _captured(config: engine_config.EngineConfig) -> dict[str, tuple[int, ...]]:
    """The sizes of the engine's graphs: a step costs what the smallest that holds it does."""
    if config.device != "cuda":
        return {}
    # These load torch, as the engine has by now.
    from penstock.engine.runner.cuda_graphs import batch_sizes
    from penstock.engine.runner.mixed_graphs import token_counts
    from penstock.kernels.attention.registry import BACKENDS

    found = {"graph_sizes": tuple(batch_sizes(config.max_running))}
    if BACKENDS.load(config.attention_backend).captures_prompts:
        found["graph_tokens"] = tuple(token_counts(config.max_step_tokens))
    return found
