"""The engine's own settings: every `auto` becomes a value here, once, with its reason. No torch.

What the device is and can do comes in as `DeviceFacts`; what the model is, as its spec.
"""

from dataclasses import dataclass, replace
from typing import NoReturn

from penstock.config import Setting, Sourced, flag, parse_bytes
from penstock.engine.memory_advice import LEAST_CONTEXT, USUAL_CONTEXT, Adviser, Changes, Present, largest, show
from penstock.engine.memory_plan import MemoryPlan, graph_bytes, lost_bytes, show_bytes, workspace_bytes
from penstock.errors import ConfigError
from penstock.models.packed_size import packed_bytes
from penstock.models.spec import ModelSpec

_ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
DTYPES = tuple(_ITEM_BYTES)

# Without a stated limit the KV cache takes this share of what nothing else needs: a GPU's, but little of a shared host.
_KV_SHARE = {"cpu": 0.25, "cuda": 1.0}

# Of a step, where no option says.
_USUAL_RUNNING = {"cpu": 32, "cuda": 256}
_USUAL_STEP_TOKENS = {"cpu": 256, "cuda": 8192}

CANARY_SECONDS = 60.0
_SPARE_SHARE = 0.1  # of what weights leave: not offered, where a refusal has a choice


@dataclass(frozen=True, slots=True)
class DeviceFacts:
    """What was found out about the device."""

    kind: str  # cpu or cuda
    name: str
    num_threads: int
    free_bytes: int
    fast_dtypes: tuple[str, ...]  # dtypes whose matrix products are fast here, best first
    attention_backends: dict[str, tuple[str, ...]]  # by dtype: those that can run this model here, best first
    is_simulated: bool = False
    # Of the model that a simulated device runs, whatever model is served; None: those of the model served.
    weight_bytes: int | None = None
    kv_token_bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Resolved and frozen."""

    device: str  # cpu, cuda or simulated
    threads: int
    precision: str  # auto or exact; float types are exact about their own type
    dtype: str
    attention_backend: str
    max_context_tokens: int
    max_running: int
    max_step_tokens: int
    max_waiting: int
    block_tokens: int
    num_blocks: int  # the scratch block included
    num_host_slots: int
    prefix_cache: bool
    speculative: str
    draft_tokens: int
    role: str = "both"
    memory: MemoryPlan
    device_kind: str = "cpu"  # cpu or cuda: what the device is, or is like
    canary_seconds: float = 0.0  # between looks at KV blocks whose content is known; 0: none


@dataclass(frozen=True, slots=True)
class _Sizes:
    """What the options come to in memory."""

    dtype: str
    max_running: int
    step_tokens: int
    wanted_context: int
    num_blocks: int
    context: int  # the longest that a request may have; 0: the options do not fit


def resolve(sourced: Sourced, spec: ModelSpec, facts: DeviceFacts) -> tuple[EngineConfig, list[Setting]]:
    """Choose every engine setting and say why. Raises ConfigError for what cannot work together."""
    return _Resolver(sourced, spec, facts).run()


def kv_token_bytes(spec: ModelSpec, dtype: str) -> int:
    """Memory that one token takes in the KV cache."""
    return spec.num_layers * 2 * spec.kv_size * _ITEM_BYTES[dtype]


def weight_bytes(spec: ModelSpec, precision: str, dtype: str, kind: str) -> int:
    """Memory that the weights will take, at most, on a device of this kind."""
    item_bytes = _ITEM_BYTES[dtype]
    dense = spec.num_parameters * item_bytes
    quantised = spec.quantised
    if quantised is None or precision != "auto" or kind != "cpu":
        return dense
    rest = dense - (quantised.num_four_bit + quantised.num_others) * item_bytes
    if quantised.table_bytes and not spec.tie_embeddings:
        rest -= spec.vocab_size * spec.hidden_size * item_bytes
    return rest + packed_bytes(quantised, item_bytes) + quantised.table_bytes


class _Resolver:
    """Holds what the choices depend on while they are made, in order."""

    def __init__(self, sourced: Sourced, spec: ModelSpec, facts: DeviceFacts) -> None:
        self.sourced = sourced
        self.options = sourced.options
        self.spec = spec
        self.facts = facts
        self.settings: list[Setting] = []

    def run(self) -> tuple[EngineConfig, list[Setting]]:
        options, facts = self.options, self.facts
        device = "simulated" if facts.is_simulated else facts.kind
        why = f"{self.sourced.why('device')}; {facts.name}" if facts.is_simulated else self.sourced.why("device")
        self._note("device", device, facts.name if options.device == "auto" else why)
        threads = self._choose("threads", options.threads, facts.num_threads, "physical cores this process may use")
        dtype = self._dtype()
        backend = self._attention_backend(dtype)
        sizes = self._sizes(dtype)
        if not sizes.context:
            self._refuse(sizes)
        self._note_sizes(sizes)
        host_bytes = parse_bytes("--host-kv-memory", options.host_kv_memory)
        for name in (
            "host_kv_memory",
            "block_tokens",
            "prefix_cache",
            "max_waiting",
            "speculative",
            "draft_tokens",
            "role",
        ):
            self._note(name, getattr(options, name), self.sourced.why(name))
        config = EngineConfig(
            device=device,
            memory=self._memory_plan(sizes),
            device_kind=facts.kind,
            threads=threads,
            precision=options.precision,
            dtype=dtype,
            attention_backend=backend,
            max_context_tokens=sizes.context,
            max_running=sizes.max_running,
            max_step_tokens=sizes.step_tokens,
            max_waiting=options.max_waiting,
            block_tokens=options.block_tokens,
            num_blocks=sizes.num_blocks + 1,
            num_host_slots=host_bytes // self._block_bytes(dtype) if options.prefix_cache else 0,
            prefix_cache=options.prefix_cache,
            speculative=options.speculative,
            draft_tokens=options.draft_tokens,
            role=options.role,
            # Without blocks that hold numbers and are found again there is nothing to watch.
            canary_seconds=CANARY_SECONDS if options.prefix_cache and not facts.is_simulated else 0.0,
        )
        return config, self.settings

    def _note(self, option: str, value: object, why: str) -> None:
        self.settings.append(Setting(option, str(value), why))

    def _choose(self, option: str, given: int | None, automatic: int, why: str) -> int:
        value = automatic if given is None else given
        self._note(option, value, f"auto: {why}" if given is None else self.sourced.why(option))
        return value

    def _dtype(self) -> str:
        precision = self.options.precision
        if precision in _ITEM_BYTES:
            if precision not in self.facts.fast_dtypes and precision != "float32":
                raise ConfigError(
                    "--precision", precision, f"on {self.facts.name} it is far slower than float32; use auto or exact"
                )
            dtype, why = precision, self.sourced.why("precision")
        elif precision == "exact":
            dtype, why = "float32", "exact: the reference's arithmetic"
        else:
            dtype = self.facts.fast_dtypes[0]
            why = f"auto: the fastest dtype on {self.facts.name}; quantised weights keep their own form"
        self._note("precision", f"{precision} ({dtype})", why)
        return dtype

    def _attention_backend(self, dtype: str) -> str:
        given, usable = self.options.attention_backend, self.facts.attention_backends[dtype]
        if given is not None and given not in usable:
            raise ConfigError("--attention-backend", given, f"give one that works here: {', '.join(usable)}")
        self._note(
            "attention_backend",
            given or usable[0],
            self.sourced.why("attention_backend") if given else f"auto: the fastest on {self.facts.kind}",
        )
        return given or usable[0]

    def _context(self) -> int:
        given, most = self.options.max_context_tokens, self.spec.max_position
        if given is not None and given > most:
            raise ConfigError("--max-context-tokens", given, f"the model was made for at most {most}")
        return given or most

    def _default_running(self) -> tuple[int, str]:
        usual, step_tokens = _USUAL_RUNNING[self.facts.kind], self.options.max_step_tokens
        if step_tokens is not None and step_tokens < usual:
            return step_tokens, "no more than --max-step-tokens"
        return usual, f"a {'CPU' if self.facts.kind == 'cpu' else 'GPU'}'s throughput grows little beyond this"

    def _step_tokens(self, max_running: int) -> int:
        given = self.options.max_step_tokens
        if given is not None and given < max_running:
            raise ConfigError("--max-step-tokens", given, f"give at least --max-running ({max_running})")
        if self.facts.kind == "cpu":
            why = "chunks short enough that running requests keep their pace"
        else:
            why = "large enough to keep the GPU's matrix units busy"
        return self._choose("max_step_tokens", given, max(_USUAL_STEP_TOKENS[self.facts.kind], max_running), why)

    def _block_bytes(self, dtype: str) -> int:
        simulated = self.facts.kv_token_bytes
        return self.options.block_tokens * (kv_token_bytes(self.spec, dtype) if simulated is None else simulated)

    def _sizes(self, dtype: str) -> _Sizes:
        """What the options come to, with the longest context that fits where none was asked for."""
        options, wanted = self.options, self._context()
        max_running = self._choose("max_running", options.max_running, *self._default_running())
        step_tokens = self._step_tokens(max_running)

        def with_context(context: int) -> _Sizes:
            return self._sizes_with(dtype, max_running, step_tokens, context)

        sizes = with_context(wanted)
        if sizes.context or options.max_context_tokens is not None:
            return sizes
        # Rows as long as the model allows may be what does not fit, though no request could ever fill them.
        least = USUAL_CONTEXT
        if options.kv_memory is not None:
            held = parse_bytes("--kv-memory", options.kv_memory) // self._block_bytes(dtype) * options.block_tokens
            least = max(1, min(least, held))
        shorter = largest(least, wanted, lambda context: with_context(context).context == context)
        return sizes if shorter is None else with_context(shorter)

    def _sizes_with(self, dtype: str, max_running: int, step_tokens: int, context: int) -> _Sizes:
        """Blocks that the memory for KV holds, but no more than the running requests could ever fill."""
        per_block, block_tokens = self._block_bytes(dtype), self.options.block_tokens
        blocks_each = -(-context // block_tokens)
        room = self._room(dtype, max_running, step_tokens, context)
        if self.options.kv_memory is not None:
            kv_bytes = parse_bytes("--kv-memory", self.options.kv_memory)
            num_blocks = kv_bytes // per_block
        else:
            kv_bytes = int(room * _KV_SHARE[self.facts.kind])
            num_blocks = min(kv_bytes // per_block, blocks_each * max_running)
        fewest = 1 if self.options.max_context_tokens is None else blocks_each
        least_bytes = -(-LEAST_CONTEXT // block_tokens) * per_block
        fits = room >= max(least_bytes, kv_bytes) and num_blocks >= fewest
        longest = min(context, num_blocks * block_tokens) if fits else 0
        return _Sizes(dtype, max_running, step_tokens, context, num_blocks, longest)

    def _room(self, dtype: str, max_running: int, step_tokens: int, context: int) -> int:
        """What is left for KV; below zero where steps of such a size do not fit."""
        free, kind = self.facts.free_bytes, self.facts.kind
        rest = free - self._weight_bytes(dtype) - graph_bytes(self.spec, kind, max_running) - lost_bytes(kind, free)
        return rest - self._workspace_bytes(dtype, max_running, step_tokens, context)

    def _refuse(self, sizes: _Sizes) -> NoReturn:
        """Say what takes how much, and what would make it fit."""
        needs, changes = self._needs(sizes), self._adviser(sizes).find()
        if changes is None:
            right = f"{needs}: no option makes it fit; serve a smaller or more quantised one"
            raise ConfigError("--model", self.options.model, right)
        values = {
            "max_context_tokens": sizes.wanted_context,
            "max_running": sizes.max_running,
            "max_step_tokens": sizes.step_tokens,
            "kv_memory": self.options.kv_memory or "auto",
            "precision": self.options.precision,
        }
        option = next(iter(changes))
        raise ConfigError(flag(option), values[option], f"{needs}; {show(changes, self.options)}")

    def _needs(self, sizes: _Sizes) -> str:
        """What weights, steps and KV take, and what there is."""
        kv_memory, block_tokens = self.options.kv_memory, self.options.block_tokens
        least = LEAST_CONTEXT if kv_memory is not None else min(USUAL_CONTEXT, sizes.wanted_context)
        context = self.options.max_context_tokens or least
        blocks = -(-context // block_tokens)
        needed = blocks * self._block_bytes(sizes.dtype)
        request = f"a request of {blocks * block_tokens} tokens needs {show_bytes(needed)} of KV"
        if kv_memory is not None and parse_bytes("--kv-memory", kv_memory) < needed:
            return request
        room = self._room(sizes.dtype, sizes.max_running, sizes.step_tokens, context)
        if kv_memory is None and needed <= room:
            share = f"{_KV_SHARE[self.facts.kind]:.0%} of the {show_bytes(room)} that nothing else needs"
            return f"{request}, and by itself the cache takes {share}"
        weights, free = self._weight_bytes(sizes.dtype), self.facts.free_bytes
        takes = f"its weights take {show_bytes(weights)}, steps work in {show_bytes(free - weights - room)}"
        kv = request if kv_memory is None else f"the KV cache is to be {kv_memory}"
        return f"{takes} and {kv}, but {self.facts.name} has {show_bytes(free)} free"

    def _adviser(self, sizes: _Sizes) -> Adviser:
        kind, left = self.facts.kind, self.facts.free_bytes - self._weight_bytes(sizes.dtype)
        present = Present(
            max_context_tokens=sizes.wanted_context,
            max_running=sizes.max_running,
            max_step_tokens=sizes.step_tokens,
            block_bytes=self._block_bytes(sizes.dtype),
            usual_running=_USUAL_RUNNING[kind],
            usual_step_tokens=_USUAL_STEP_TOKENS[kind],
            small_precision=self.facts.fast_dtypes[0] if kind == "cuda" else "auto",
            spare_bytes=int(max(0, left) * _SPARE_SHARE),
        )
        return Adviser(self.options, present, self._context_with)

    def _changed(self, changes: Changes) -> Sourced:
        return replace(self.sourced, options=replace(self.options, **changes))

    def _context_with(self, changes: Changes, spare_bytes: int) -> int:
        """The longest context with other options and less memory; 0: they do not fit."""
        facts = replace(self.facts, free_bytes=self.facts.free_bytes - spare_bytes)
        trial = _Resolver(self._changed(changes), self.spec, facts)
        try:
            dtype = trial._dtype()
            trial._attention_backend(dtype)
            return trial._sizes(dtype).context
        except ConfigError:  # such options contradict each other
            return 0

    def _workspace_bytes(self, dtype: str, max_running: int, step_tokens: int, context: int) -> int:
        if self.facts.is_simulated:
            return 0
        return workspace_bytes(
            self.spec,
            self.facts.kind,
            _ITEM_BYTES[dtype],
            step_tokens=step_tokens,
            max_running=max_running,
            context_tokens=context,
        )

    def _memory_plan(self, sizes: _Sizes) -> MemoryPlan:
        return MemoryPlan(
            device=self.facts.name,
            free_bytes=self.facts.free_bytes,
            weight_bytes=self._weight_bytes(sizes.dtype),
            kv_bytes=sizes.num_blocks * self._block_bytes(sizes.dtype),
            workspace_bytes=self._workspace_bytes(sizes.dtype, sizes.max_running, sizes.step_tokens, sizes.context),
            graph_bytes=graph_bytes(self.spec, self.facts.kind, sizes.max_running),
            block_tokens=self.options.block_tokens,
            num_blocks=sizes.num_blocks,
            max_context_tokens=sizes.context,
            max_running=sizes.max_running,
        )

    def _weight_bytes(self, dtype: str) -> int:
        simulated = self.facts.weight_bytes
        if simulated is not None:
            return simulated
        return weight_bytes(self.spec, self.options.precision, dtype, self.facts.kind)

    def _note_sizes(self, sizes: _Sizes) -> None:
        """Say why the KV cache and the context are as large as they are."""
        if self.options.kv_memory is not None:
            why = f"{self.sourced.why('kv_memory')}; {sizes.num_blocks} blocks"
        else:
            share = _KV_SHARE[self.facts.kind]
            part = "what" if share == 1 else f"{share:.0%} of what"
            most = f"at most {sizes.max_running} longest requests"
            why = f"auto: up to {part} nothing else needs, {most}; {sizes.num_blocks} blocks"
        self._note("kv_memory", f"{sizes.num_blocks * self._block_bytes(sizes.dtype) / 2**20:.0f}MiB", why)
        if self.options.max_context_tokens is not None:
            why = self.sourced.why("max_context_tokens")
        elif sizes.context < self.spec.max_position:
            why = f"auto: what the KV cache holds; the model allows {self.spec.max_position}"
        else:
            why = "auto: what the model was made for"
        self._note("max_context_tokens", sizes.context, why)
