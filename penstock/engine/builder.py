"""Puts an engine together from options and model files: the one place where its parts meet.

Used by the engine process and by `LLM`; knows nothing of sockets.
"""

import secrets
from collections.abc import Callable
from dataclasses import dataclass

import torch

from penstock.block_hash import BlockHasher
from penstock.config import Setting, Sourced
from penstock.engine.cache.host_tier import HostTier
from penstock.engine.cache.kv_cache import KvCache
from penstock.engine.config import EngineConfig, resolve
from penstock.engine.engine import Engine
from penstock.engine.messages import Submit
from penstock.engine.metrics import EngineMetrics
from penstock.engine.runner.batch_rows import BatchRows
from penstock.engine.runner.cuda_graphs import DecodeGraphs
from penstock.engine.runner.device import DTYPES, probe
from penstock.engine.runner.kv_pool import KvPool
from penstock.engine.runner.mixed_graphs import MixedGraphs
from penstock.engine.runner.model_runner import ModelRunner
from penstock.engine.runner.token_draw import TokenDraw
from penstock.engine.sampling.drawer import make_drawer
from penstock.engine.sampling.row_parameters import RowParameters
from penstock.engine.sampling.sampler import Sampler
from penstock.engine.scheduler.pace import BatchPace, Pace
from penstock.engine.scheduler.scheduler import Scheduler, SchedulerConfig
from penstock.engine.speculative.registry import DRAFTERS
from penstock.engine.timeline import Timeline
from penstock.errors import EngineFailed
from penstock.kernels.attention.registry import BACKENDS
from penstock.models.decoder import Decoder, attention_layers
from penstock.models.loader import load_model
from penstock.models.registry import spec_for
from penstock.models.spec import ModelSpec
from penstock.models.store import ModelFiles
from penstock.request import SamplingParams

Progress = Callable[[int, int, str], None]

# A tenant that no caller can have: the warm-up's blocks are shared with nobody.
_WARM_UP_TENANT = "\x00warm-up"

# Up to so many tokens a step's products take hardly longer than reading the weights for one (docs/benchmarks.md).
_KNEE_TOKENS = 256


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
    config, settings = resolve(sourced, spec, probe(sourced.options.device, spec))
    # On a CPU the runner's thread does the tensor work. OpenMP's workers wait for more of it in a loop, and are there
    # at once, only while a single thread has workers: so this one gets none.
    torch.set_num_threads(1 if config.device == "cpu" else config.threads)
    timeline.mark("settings")
    model = load_model(
        files,
        spec,
        device=torch.device(config.device),
        dtype=DTYPES[config.dtype],
        precision=config.precision,
        context_tokens=config.max_context_tokens,
        progress=progress,
    )
    timeline.mark("weights")
    engine = assemble(config, spec, model, for_batches=for_batches)
    timeline.mark("KV cache")
    _warm_up(engine)
    timeline.mark("first step")
    return BuiltEngine(engine, config, spec, settings)


def assemble(config: EngineConfig, spec: ModelSpec, model: Decoder, *, for_batches: bool = False) -> Engine:
    """Return an engine around a loaded model."""
    pace = BatchPace(_KNEE_TOKENS, config.max_step_tokens) if for_batches and config.device == "cuda" else None
    return Engine(_make_scheduler(config, spec, pace), _make_runner(config, spec, model))


def _make_scheduler(config: EngineConfig, spec: ModelSpec, pace: Pace | None) -> Scheduler:
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
    return Scheduler(scheduler_config, cache, EngineMetrics(), drafter=drafter, pace=pace)


def _make_runner(config: EngineConfig, spec: ModelSpec, model: Decoder) -> ModelRunner:
    device = torch.device(config.device)
    pool = KvPool(
        spec,
        num_blocks=config.num_blocks,
        num_host_slots=config.num_host_slots,
        block_tokens=config.block_tokens,
        dtype=DTYPES[config.dtype],
        device=device,
    )
    attention = BACKENDS.load(config.attention_backend)(attention_layers(spec), pool.layers)
    rows = BatchRows(config.max_running, config.max_context_tokens, config.block_tokens, device)
    parameters = RowParameters(config.max_running, spec.vocab_size, device)
    graphs = mixed_graphs = None
    if device.type == "cuda":
        draw = TokenDraw(rows, parameters, config.max_running)
        graphs = DecodeGraphs(model, attention, rows, draw, config.max_running)
        graphs.capture()
        if attention.captures_prompts:
            mixed_graphs = MixedGraphs(
                model,
                attention,
                rows,
                draw,
                graphs,
                max_running=config.max_running,
                max_step_tokens=config.max_step_tokens,
            )
    # Each running request may draw one token, and one more for each of its guesses.
    max_draws = config.max_running * (1 + (config.draft_tokens if config.speculative != "none" else 0))
    sampler = Sampler(parameters, spec.eos_token_ids, make_drawer(max_draws, device))
    return ModelRunner(model, attention, pool, rows, parameters, sampler, graphs, mixed_graphs, threads=config.threads)


def _warm_up(engine: Engine) -> None:
    """Run one short request, so that first-use costs are paid and a broken model is found before anybody calls."""
    metrics = engine.scheduler.metrics
    engine.scheduler.metrics = EngineMetrics()
    params = SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True)
    prompt = [0] * min(8, engine.scheduler.config.max_context_tokens - 2)
    events = engine.submit(
        Submit(request_id="warm-up", prompt=prompt, params=params, arrival=0.0, tenant=_WARM_UP_TENANT)
    )
    while engine.has_work:
        events += engine.step()
    engine.scheduler.metrics = metrics
    if any(event.error is not None for _, event in events):
        raise EngineFailed("the model gave no usable numbers in its first step; its weights may be damaged")
