"""The engine's own settings: every `auto` becomes a value here, once, with its reason. No torch.

What the device is and can do comes in as `DeviceFacts`; what the model is, as its spec.
"""

from bisect import bisect_left
from dataclasses import dataclass

from penstock.config import Setting, Sourced, parse_bytes
from penstock.engine.memory_plan import MemoryPlan, graph_bytes, lost_bytes, show_bytes, workspace_bytes
from penstock.errors import ConfigError
from penstock.models.packed_size import packed_bytes
from penstock.models.spec import ModelSpec

_ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
DTYPES = tuple(_ITEM_BYTES)

# Without a stated limit the KV cache takes this share of what nothing else needs: a GPU's, but little of a shared host.
_KV_SHARE = {"cpu": 0.25, "cuda": 1.0}

CANARY_SECONDS = 60.0
_LEAST_CONTEXT = 16  # tokens that are worth serving


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
        wanted_context = self._context()
        max_running = self._choose("max_running", options.max_running, *self._default_running())
        max_step_tokens = self._step_tokens(max_running)
        num_blocks = self._num_blocks(dtype, max_running, max_step_tokens, wanted_context)
        context = self._fit_context(wanted_context, num_blocks)
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
            memory=self._memory_plan(dtype, max_running, max_step_tokens, context, num_blocks - 1),
            device_kind=facts.kind,
            threads=threads,
            precision=options.precision,
            dtype=dtype,
            attention_backend=backend,
            max_context_tokens=context,
            max_running=max_running,
            max_step_tokens=max_step_tokens,
            max_waiting=options.max_waiting,
            block_tokens=options.block_tokens,
            num_blocks=num_blocks,
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
        if self.facts.kind == "cpu":
            return 32, "a CPU's throughput grows little beyond this"
        return 256, "a GPU's throughput grows little beyond this"

    def _step_tokens(self, max_running: int) -> int:
        given = self.options.max_step_tokens
        if given is not None and given < max_running:
            raise ConfigError("--max-step-tokens", given, f"give at least --max-running ({max_running})")
        if self.facts.kind == "cpu":
            automatic, why = max(256, max_running), "chunks short enough that running requests keep their pace"
        else:
            automatic, why = max(8192, max_running), "large enough to keep the GPU's matrix units busy"
        return self._choose("max_step_tokens", given, automatic, why)

    def _block_bytes(self, dtype: str) -> int:
        simulated = self.facts.kv_token_bytes
        return self.options.block_tokens * (kv_token_bytes(self.spec, dtype) if simulated is None else simulated)

    def _least_kv_bytes(self, dtype: str) -> int:
        return -(-_LEAST_CONTEXT // self.options.block_tokens) * self._block_bytes(dtype)

    def _num_blocks(self, dtype: str, max_running: int, step_tokens: int, context: int) -> int:
        """Blocks that the memory for KV holds, but no more than the running requests could ever fill."""
        per_block = self._block_bytes(dtype)
        blocks_each = -(-context // self.options.block_tokens)
        room = self._kv_room(dtype, max_running, step_tokens, context)
        if self.options.kv_memory is not None:
            given = parse_bytes("--kv-memory", self.options.kv_memory)
            if given > room:
                right = f"{self.facts.name} has room for less beside the weights; give {_show_option(room)} or less"
                raise ConfigError("--kv-memory", self.options.kv_memory, right)
            num_blocks = given // per_block
            why = f"{self.sourced.why('kv_memory')}; {num_blocks} blocks"
        else:
            share = _KV_SHARE[self.facts.kind]
            num_blocks = min(int(room * share) // per_block, blocks_each * max_running)
            part = "what" if share == 1 else f"{share:.0%} of what"
            why = f"auto: up to {part} nothing else needs, at most {max_running} longest requests; {num_blocks} blocks"
        fewest = 1 if self.options.max_context_tokens is None else blocks_each
        if num_blocks < fewest:
            self._refuse(num_blocks, per_block, context, room)
        self._note("kv_memory", f"{num_blocks * per_block / 2**20:.0f}MiB", why)
        return num_blocks + 1

    def _kv_room(self, dtype: str, max_running: int, step_tokens: int, context: int) -> int:
        """Memory that neither weights nor steps need. Raises ConfigError, with what would help, if there is none."""
        free, weights = self.facts.free_bytes, self._weight_bytes(dtype)
        if weights >= free:
            has = f"its weights take {show_bytes(weights)} and {self.facts.name} has {show_bytes(free)} free"
            smaller = self._dense_bytes("bfloat16")
            if self.facts.kind == "cuda" and _ITEM_BYTES[dtype] > 2 and smaller < free:
                raise ConfigError("--precision", self.options.precision, f"{has}; give --precision bfloat16")
            raise ConfigError("--model", self.options.model, f"{has}; serve a smaller or more quantised one")
        room = self._room(dtype, max_running, step_tokens, context)
        if room < self._least_kv_bytes(dtype):
            self._refuse_step(dtype, max_running, step_tokens, context)
        return room

    def _room(self, dtype: str, max_running: int, step_tokens: int, context: int) -> int:
        """What is left for KV; below zero where steps of such a size do not fit."""
        free, kind = self.facts.free_bytes, self.facts.kind
        rest = free - self._weight_bytes(dtype) - graph_bytes(self.spec, kind, max_running) - lost_bytes(kind, free)
        return rest - self._workspace_bytes(dtype, max_running, step_tokens, context)

    def _refuse_step(self, dtype: str, max_running: int, step_tokens: int, context: int) -> None:
        """Say how small steps must be for the rest to hold a short request and the step's workspace."""
        least, facts = self._least_kv_bytes(dtype), self.facts
        needs = show_bytes(self._workspace_bytes(dtype, max_running, step_tokens, context))
        base = self._room(dtype, max_running, 0, context)
        per_token = base - self._room(dtype, max_running, 1, context)
        fits = (base - least) // per_token if per_token else 0
        if fits >= max_running:
            what = f"a step of that many tokens works in {needs} beside the weights"
            raise ConfigError("--max-step-tokens", step_tokens, f"{what}; give {fits} or less")
        running = range(1, max_running)
        fewest = bisect_left(running, True, key=lambda number: self._room(dtype, number, number, context) < least)
        if not fewest:
            has = f"beside its weights {facts.name} has no room for a single request"
            raise ConfigError("--model", self.options.model, f"{has}; serve a smaller or more quantised one")
        what = f"steps of so many requests work in {needs}, more than {facts.name} has beside the weights"
        raise ConfigError("--max-running", max_running, f"{what}; give {fewest}, and --max-step-tokens {fewest}")

    def _refuse(self, num_blocks: int, per_block: int, context: int, room: int) -> None:
        """Say which context the blocks hold, or how much KV memory would do."""
        block_tokens, wanted = self.options.block_tokens, self.options.max_context_tokens
        fits = num_blocks * block_tokens
        blocks = -(-context // block_tokens) if wanted is not None else 1
        # More than the cache has by itself may be there: the option gave less, or most of a host is left to others.
        is_there = blocks * per_block <= room
        if wanted is not None and fits >= _LEAST_CONTEXT:
            right = f"the KV cache holds {fits} tokens; give {fits} or less"
            if is_there:
                right += f", or --kv-memory {_show_option(blocks * per_block, at_least=True)}"
            raise ConfigError("--max-context-tokens", context, right)
        blocks = blocks if is_there else -(-_LEAST_CONTEXT // block_tokens)
        needs = f"a request of {blocks * block_tokens} tokens needs {blocks * per_block} bytes"
        right = f"{needs}; give {_show_option(blocks * per_block, at_least=True)} or more"
        raise ConfigError("--kv-memory", self.options.kv_memory or "auto", right)

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

    def _memory_plan(self, dtype: str, max_running: int, step_tokens: int, context: int, num_blocks: int) -> MemoryPlan:
        return MemoryPlan(
            device=self.facts.name,
            free_bytes=self.facts.free_bytes,
            weight_bytes=self._weight_bytes(dtype),
            kv_bytes=num_blocks * self._block_bytes(dtype),
            workspace_bytes=self._workspace_bytes(dtype, max_running, step_tokens, context),
            graph_bytes=0 if self.facts.is_simulated else graph_bytes(self.spec, self.facts.kind, max_running),
            block_tokens=self.options.block_tokens,
            num_blocks=num_blocks,
            max_context_tokens=context,
            max_running=max_running,
        )

    def _dense_bytes(self, dtype: str) -> int:
        return self.spec.num_parameters * _ITEM_BYTES[dtype]

    def _weight_bytes(self, dtype: str) -> int:
        simulated = self.facts.weight_bytes
        if simulated is not None:
            return simulated
        return weight_bytes(self.spec, self.options.precision, dtype, self.facts.kind)

    def _fit_context(self, wanted: int, num_blocks: int) -> int:
        """The longest context that one request may have, once the blocks are counted."""
        room = (num_blocks - 1) * self.options.block_tokens
        context = min(wanted, room)
        if self.options.max_context_tokens is not None:
            why = self.sourced.why("max_context_tokens")
        elif context < wanted:
            why = f"auto: what the KV cache holds; the model allows {wanted}"
        else:
            why = "auto: what the model was made for"
        self._note("max_context_tokens", context, why)
        return context


def _show_option(count: int, *, at_least: bool = False) -> str:
    """A number of bytes as an option takes it, rounded to what still fits, or to what is enough."""
    if count < 64 * 2**20:  # a whole MiB may be more than there is
        return str(max(0, count))
    return f"{-(-count // 2**20) if at_least else count // 2**20}MiB"
