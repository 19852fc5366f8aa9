"""Puts an engine together from options and model files: the one place where its parts meet.

Used by the engine process, by `LLM` and by the simulator; knows nothing of sockets. No torch: a device loads what it
needs.
"""

import logging
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass

from penstock.block_hash import BlockHasher
from penstock.config import Setting, Sourced
from penstock.engine import own_requests
from penstock.engine.cache.host_tier import HostTier
from penstock.engine.cache.kv_cache import KvCache
from penstock.engine.config import EngineConfig, resolve
from penstock.engine.device import Progress, device_for
from penstock.engine.engine import Engine
from penstock.engine.messages import Submit
from penstock.engine.metrics import EngineMetrics
from penstock.engine.runner.interface import Runner, StepFailed
from penstock.engine.scheduler.foresight import Foresight
from penstock.engine.scheduler.pace import BatchPace, Pace
from penstock.engine.scheduler.scheduler import Addressed, Scheduler, SchedulerConfig
from penstock.engine.speculative.registry import DRAFTERS
from penstock.engine.timeline import Timeline
from penstock.errors import EngineFailed
from penstock.models.registry import spec_for
from penstock.models.spec import ModelSpec
from penstock.models.store import ModelFiles
from penstock.request import SamplingParams

log = logging.getLogger(__name__)

# Prompts that the scheduler learns from before it serves. The longest first: until it knows what steps cost, it cuts
# none.
_WARM_UP_TOKENS = (4096, 2048, 1024, 512, 256, 128, 64)
# How long an engine for batches may capture and try what a server does in idle moments.
_PREPARATION_SECONDS = 4.0

# Up to so many tokens a step's products take hardly longer than reading the weights for one (docs/benchmarks.md).
_KNEE_TOKENS = 256
# Where reading a layer's weights takes less than what prompts' attention adds to a step, prompts of a batch run
# together in some of the steps. Found with 43 MB a layer, where it pays, and with 500, where it does not.
_SMALL_LAYER_BYTES, _TOGETHER_TOKENS = 64 << 20, 1024


@dataclass(frozen=True, slots=True)
class BuiltEngine:
    engine: Engine
    config: EngineConfig
    spec: ModelSpec
    settings: list[Setting]


def build_engine(
    sourced: Sourced,
    files: ModelFiles,
    timeline: Timeline,
    *,
    for_batches: bool = False,
    progress: Progress | None = None,
) -> BuiltEngine:
    """Load the model and return an engine that has already run its first step.

    `for_batches`: only the end of all requests counts, not how soon each begins.
    """
    spec = spec_for(files)
    device = device_for(sourced.options)
    timeline.mark("imports")
    config, settings = resolve(sourced, spec, device.probe(spec))
    log.info("memory plan: %s", "; ".join(f"{name} {value}" for name, value in config.memory.rows()))
    timeline.mark("settings")
    runner = device.make_runner(config, spec, files, timeline, progress)
    engine = assemble(config, spec, runner, for_batches=for_batches)
    try:
        warm_up(engine, config)
    except EngineFailed as failure:
        device.refuse_damage(spec, files)
        if failure.__cause__ is not None:
            log.error("the first step raised, though every weight is a finite number", exc_info=failure)
        raise
    timeline.mark("first step")
    if for_batches:
        # Nobody waits to be let in, as before a server: what would be done in idle moments is done before the batch.
        end = time.monotonic() + _PREPARATION_SECONDS
        while time.monotonic() < end and runner.use_idle_moment():
            pass
        timeline.mark("preparation")
    return BuiltEngine(engine, config, spec, settings)


def assemble(
    config: EngineConfig,
    spec: ModelSpec,
    runner: Runner,
    *,
    for_batches: bool = False,
    clock: Callable[[], float] = time.monotonic,
) -> Engine:
    """Return an engine around a runner."""
    pace = _batch_pace(config, spec) if for_batches and config.device_kind == "cuda" else None
    foresight = None
    if not for_batches:
        foresight = Foresight.make(max_step_tokens=config.max_step_tokens, clock=clock, step_sizes=runner.step_sizes)
    return Engine(_make_scheduler(config, spec, pace, foresight, clock), runner)


def _batch_pace(config: EngineConfig, spec: ModelSpec) -> Pace:
    is_small = config.memory.weight_bytes < spec.num_layers * _SMALL_LAYER_BYTES
    return BatchPace(_KNEE_TOKENS, config.max_step_tokens, _TOGETHER_TOKENS if is_small else 0)


def _make_scheduler(
    config: EngineConfig, spec: ModelSpec, pace: Pace | None, foresight: Foresight | None, clock: Callable[[], float]
) -> Scheduler:
    cache = KvCache(
        config.num_blocks,
        BlockHasher(secrets.token_bytes(32), config.block_tokens),
        kv_dtype=config.dtype,
        share_prefixes=config.prefix_cache,
        host_tier=HostTier(config.num_host_slots) if config.num_host_slots else None,
    )
    scheduler_config = SchedulerConfig(
        max_running=config.max_running,
        max_step_tokens=config.max_step_tokens,
        max_waiting=config.max_waiting,
        max_context_tokens=config.max_context_tokens,
        vocab_size=spec.vocab_size,
        eos_token_ids=spec.eos_token_ids,
        draft_tokens=config.draft_tokens,
        prefill_only=config.role == "prefill",
    )
    drafter = None if config.speculative == "none" else DRAFTERS.load(config.speculative)()
    return Scheduler(
        scheduler_config, cache, EngineMetrics(), drafter=drafter, pace=pace, foresight=foresight, clock=clock
    )


def warm_up(engine: Engine, config: EngineConfig) -> None:
    """Run a few requests, so that first-use costs are paid and a broken model is found before anybody calls.

    Where prompts are quick, of many lengths: a scheduler that has only seen short steps would think that long ones are
    no better. Raises EngineFailed where the model does not work.
    """
    unusable = EngineFailed("the model gave no usable numbers in its first step; its weights may be damaged")
    metrics = engine.scheduler.metrics
    engine.scheduler.count_into(EngineMetrics())
    num_answer = min(2, config.max_context_tokens - 1)
    params = SamplingParams(max_tokens=num_answer, temperature=0.0, ignore_eos=True)
    most = min(
        config.max_context_tokens - num_answer, config.max_step_tokens, config.num_blocks * config.block_tokens // 2
    )
    longer = _WARM_UP_TOKENS if config.device_kind == "cuda" else ()
    events: list[Addressed] = []
    engine.raises_failures = True
    for index, length in enumerate([*(length for length in longer if length <= most), min(8, most)]):
        # Of other tokens each time: what is cached does not run.
        prompt = [index] * length
        submit = Submit(request_id="warm-up", prompt=prompt, params=params, arrival=0.0, tenant=own_requests.WARM_UP)
        events += engine.submit(submit)
        try:
            while engine.has_work:
                events += engine.step()
        except StepFailed as failure:
            raise unusable from failure
    engine.raises_failures = False
    engine.scheduler.count_into(metrics)
    if any(event.error is not None for _, event in events):
        raise unusable
