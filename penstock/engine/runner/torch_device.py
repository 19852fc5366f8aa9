"""CPUs and CUDA devices: the model loaded, its memory laid out, and a runner around both."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from penstock.engine.config import DeviceFacts, EngineConfig
from penstock.engine.device import Device, Progress
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
from penstock.engine.timeline import Timeline
from penstock.kernels.attention.registry import BACKENDS
from penstock.kernels.product_tuner import ProductTuner
from penstock.models.decoder import Decoder, attention_layers
from penstock.models.loader import load_model, refuse_damage
from penstock.models.spec import ModelSpec
from penstock.models.store import ModelFiles, cache_folder

# How long a server that starts spends on graphs of steps with prompts; the rest are captured in idle moments.
_CAPTURE_SECONDS = 0.25
# How long the first server on a device tries how products run fastest before it serves; the rest is for idle moments.
_TUNE_SECONDS = 2.0


class TorchDevice(Device):
    """`--device cpu`, `cuda` or `auto`."""

    def probe(self, spec: ModelSpec) -> DeviceFacts:
        return probe(self.options.device, spec)

    def make_runner(
        self,
        config: EngineConfig,
        spec: ModelSpec,
        files: ModelFiles,
        timeline: Timeline,
        progress: Progress | None,
    ) -> ModelRunner:
        with _loading_threads(config):
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
            runner = make_runner(config, spec, model, cache_folder(self.options.cache_dir))
        timeline.mark("KV cache and graphs")
        return runner

    def refuse_damage(self, spec: ModelSpec, files: ModelFiles) -> None:
        refuse_damage(files, spec)


@contextmanager
def _loading_threads(config: EngineConfig) -> Iterator[None]:
    """Set how many threads torch uses in this thread. On a GPU they stay: this thread runs the steps, too.

    On a CPU the runner's thread does the tensor work. OpenMP's workers wait for more of it in a loop, and are there at
    once, only while a single thread has workers: so this one gets none. Behind it the caller's number is set again:
    the engine does no tensor work in this thread any more, and an `LLM`'s caller may.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1 if config.device == "cpu" else config.threads)
    try:
        yield
    finally:
        if config.device == "cpu":
            torch.set_num_threads(before)


def make_runner(config: EngineConfig, spec: ModelSpec, model: Decoder, folder: Path | None = None) -> ModelRunner:
    """Return a runner around a loaded model. The folder keeps what is found out about the device."""
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
        tuner = ProductTuner(device, None if folder is None else folder / "tuned")
        graphs = DecodeGraphs(model, attention, rows, draw, tuner, max_batch=config.max_running)
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
        graphs.tune(_TUNE_SECONDS if tuner.is_new else 0.0)
        _compile_ahead(graphs, mixed_graphs)
        graphs.capture()
        if mixed_graphs is not None:
            end = time.monotonic() + _CAPTURE_SECONDS
            while time.monotonic() < end and mixed_graphs.prepare_next():
                pass
    else:
        model.record()
    # Each running request may draw one token, and one more for each of its guesses.
    max_draws = config.max_running * (1 + (config.draft_tokens if config.speculative != "none" else 0))
    sampler = Sampler(parameters, spec.eos_token_ids, make_drawer(max_draws, device))
    return ModelRunner(model, attention, pool, rows, parameters, sampler, graphs, mixed_graphs, threads=config.threads)


def _compile_ahead(graphs: DecodeGraphs, mixed_graphs: MixedGraphs | None) -> None:
    """Have every kernel that captures will want compiled: all at once, where the first start has none in its cache."""
    from penstock.kernels.triton.launch import compiling_ahead

    with compiling_ahead():
        if mixed_graphs is not None:
            mixed_graphs.rehearse()  # first: its kernels take longest
        graphs.rehearse()
