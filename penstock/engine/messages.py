"""The frames that pass between API workers and the engine process.

msgspec structs, MessagePack on the wire, one ZeroMQ message per frame. Every frame is tagged by its type's name.
"""

from collections.abc import Sequence

import msgspec

from penstock.protocol.block_events import BlockChanges, BlockSnapshot
from penstock.protocol.prompt_note import PromptNote
from penstock.request import NO_TARGETS, OWN_TARGETS, FinishReason, SamplingParams, TargetOrigins, Targets, Tier

# ---------------------------------------------------------------- client to engine


class Submit(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """Run this prompt. Every submitted request ends with exactly one event whose `finish` is set."""

    request_id: str
    prompt: list[int]
    params: SamplingParams
    arrival: float  # time.monotonic() when the caller's bytes were read; same clock in all local processes
    tenant: str = ""
    adapter: str = ""
    num_public_tokens: int = 0  # leading tokens of the prompt that the operator declared: any tenant may share them
    weight: float = 1.0  # the tenant's share of a busy engine, against others of its priority
    priority: int = 0  # larger runs earlier
    targets: Targets = NO_TARGETS  # refused if they cannot be met, unless best_effort
    target_origins: TargetOrigins = OWN_TARGETS
    deadline_seconds: float | None = None  # so long after its arrival it ends, whatever it has got
    best_effort: bool = False  # rather late than refused
    has_moved: bool = False  # its answer began elsewhere: rather late than refused, but promised what can be kept
    tier: Tier = Tier.ONLINE
    num_answer_tokens: int = 0  # trailing tokens of the prompt that are the beginning of an answer given elsewhere
    # Of a call with several answers the first request stands for all: the lengths of its prompts, each of which gets
    # equally many. The others name it, and are taken with it. Requests of other calls may come in between.
    call_prompts: list[int] | None = None
    call_answers: int = 1  # with call_prompts: how many answers the call has
    follows: str | None = None  # the first request of its call, where it is another


class Abort(msgspec.Struct, tag=True, frozen=True):
    """Stop these requests; each still ends with an event, unless it had ended.

    Of a call whose first request is among them nothing more comes.
    """

    request_ids: list[str]
    reason: FinishReason = FinishReason.ABORT  # STOP where the client found a stop string in the text


class Hello(msgspec.Struct, tag=True, frozen=True):
    """A client is there, and heard from now on; answered with `EngineInfo` as soon as the engine can serve."""


class Goodbye(msgspec.Struct, tag=True, frozen=True):
    """Client `identity` is gone (said by the supervisor that reaped it): drop all its requests, also those to come."""

    identity: bytes


class Shutdown(msgspec.Struct, tag=True, frozen=True):
    """End the engine process now."""


class ExportPrefix(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """Hand out the KV of the leading whole blocks of `tokens`; answered with `ExportedPrefix`."""

    request_id: str
    tokens: list[int]
    tenant: str = ""
    adapter: str = ""
    num_public_tokens: int = 0


class ImportPrefix(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """Cache blocks that another engine of the same model exported; answered with `ImportedPrefix`."""

    request_id: str
    tokens: list[int]
    blocks: list[bytes]
    tenant: str = ""
    adapter: str = ""
    num_public_tokens: int = 0


class WatchBlocks(msgspec.Struct, tag=True, frozen=True):
    """Tell me which blocks the cache holds: answered with `BlockSnapshot`, then `BlockChanges` while it changes."""


class LeaveBlocks(msgspec.Struct, tag=True, frozen=True):
    """Tell me no more of blocks."""


ToEngine = Submit | Abort | Hello | Goodbye | Shutdown | ExportPrefix | ImportPrefix | WatchBlocks | LeaveBlocks

# ---------------------------------------------------------------- engine to client


_NUMBER_BYTES = 4


class TokenLogprob(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One token's log-probability under the model's own distribution, and the best alternatives.

    Two lists, since there may be twenty of them for every token: a pair each costs several times as much to read.
    """

    token_id: int
    logprob: float
    top_ids: list[int] = []
    top_logprobs: list[float] = []

    @property
    def top(self) -> list[tuple[int, float]]:
        """The alternatives, the best first."""
        return list(zip(self.top_ids, self.top_logprobs, strict=True))


class PromptLogprobs(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Log-probabilities of consecutive tokens of a prompt, each given those before it, and the best in its place.

    They stay packed, as the machine holds numbers, until somebody reads them: a long prompt may have a million.
    """

    own: bytes = b""  # float32 [tokens]
    num_top: int = 0
    top_ids: bytes = b""  # int32 [tokens, num_top], the best first
    top_logprobs: bytes = b""  # float32 [tokens, num_top]

    @property
    def num_tokens(self) -> int:
        return len(self.own) // _NUMBER_BYTES

    def behind(self, num_tokens: int) -> "PromptLogprobs":
        """Return those behind the first so many."""
        cut = _NUMBER_BYTES * num_tokens
        top_cut = cut * self.num_top
        return PromptLogprobs(self.own[cut:], self.num_top, self.top_ids[top_cut:], self.top_logprobs[top_cut:])

    def read(self, start: int, token_ids: Sequence[int]) -> list[TokenLogprob]:
        """Return what is told of these tokens, the first of which has place `start`."""
        stop, width = start + len(token_ids), self.num_top
        own = list(memoryview(self.own).cast("f")[start:stop])
        if not width:
            return [TokenLogprob(token_id, logprob) for token_id, logprob in zip(token_ids, own, strict=True)]
        ids = list(memoryview(self.top_ids).cast("i")[start * width : stop * width])
        best = list(memoryview(self.top_logprobs).cast("f")[start * width : stop * width])
        return [
            TokenLogprob(token_id, logprob, ids[place : place + width], best[place : place + width])
            for token_id, logprob, place in zip(token_ids, own, range(0, len(ids), width), strict=True)
        ]

    @staticmethod
    def joined(parts: "Sequence[PromptLogprobs]") -> "PromptLogprobs":
        """Return the parts of one prompt as one."""
        return PromptLogprobs(
            b"".join([part.own for part in parts]),
            parts[0].num_top if parts else 0,
            b"".join([part.top_ids for part in parts]),
            b"".join([part.top_logprobs for part in parts]),
        )


class StepEvent(msgspec.Struct, kw_only=True, omit_defaults=True):
    """What one step gave one request, but for its tokens. The last one carries `finish`."""

    request_id: str
    prompt_logprobs: PromptLogprobs | None = None  # once, with the first token; of all tokens but the prompt's first
    num_cached_tokens: int = 0  # prompt tokens that came from the prefix cache
    prompt: PromptNote | None = None  # with the first token, while somebody listens to block events
    finish: FinishReason | None = None
    stop_token: int | None = None  # the token that ended it, where one did; it is the last of token_ids
    error_code: str | None = None
    error: str | None = None  # a sentence from the catalogue, when finish is ERROR
    error_param: str | None = None  # the parameter that is wrong, where one is
    retry_after_seconds: float | None = None


class TokenEvent(StepEvent):
    """What one step gave one request."""

    token_ids: list[int] = []
    logprobs: list[TokenLogprob] | None = None  # one for each of token_ids, when asked for


class ArrivedEvent(StepEvent, gc=False):
    """A `TokenEvent` as it arrives: its log-probabilities, dozens of objects, are decoded when they are read.

    Thousands come in a second, so that they are none of the garbage collector's business, which would look through them
    again and again.
    """

    token_ids: tuple[int, ...] = ()
    logprobs: msgspec.Raw = msgspec.Raw()


class Events(msgspec.Struct, tag=True, frozen=True):
    """All events of one step for one client: tokens that wait together leave together."""

    events: list[TokenEvent]


class ArrivedEvents(msgspec.Struct, tag="Events", frozen=True):
    """`Events` as they arrive."""

    events: list[ArrivedEvent]


class EngineInfo(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """What a client must know of the engine. `epoch` changes when the engine restarts."""

    epoch: str
    max_context_tokens: int
    max_open_requests: int  # running and waiting together
    vocab_size: int
    eos_token_ids: list[int]
    num_blocks: int
    block_tokens: int
    device: str
    timeline: list[tuple[str, float]]  # (phase, seconds) from process start to ready
    settings: list[tuple[str, str, str]]  # (option, value, why), as `penstock explain` prints them


class Histogram(msgspec.Struct, frozen=True):
    """A cumulative histogram: counts[i] observations were ≤ bounds[i]; the last count has no bound."""

    bounds: list[float]
    counts: list[int]
    total: float


class EngineStats(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """Counters since the engine started and gauges of this moment. Sent at least every `STATS_SECONDS`."""

    num_running: int = 0
    num_waiting: int = 0
    num_blocks: int = 0
    num_used_blocks: int = 0  # held by requests
    num_cached_blocks: int = 0  # free but still named: a hit may revive them
    num_steps: int = 0
    last_step_monotonic: float | None = None  # when the last step ended; None before the first
    prompt_tokens: int = 0
    generated_tokens: int = 0
    work_seconds: float = 0.0  # what online requests' tokens cost, beyond what every step costs anyway
    queue_seconds: float = 0.0  # how long a prompt that comes now waits before it runs, as foreseen
    prefix_query_tokens: int = 0
    prefix_hit_tokens: int = 0
    num_preemptions: int = 0
    num_finished: dict[str, int] = {}  # by FinishReason
    num_refused: dict[str, int] = {}  # by reason
    promises: dict[str, dict[str, int]] = {}  # by kind, then kept or broken
    cost_model_error: float | None = None  # median of the last steps; None before the first
    ttft_prediction_error: float | None = None  # median of the last requests
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    settled: bool = False  # nothing is left that idle moments would prepare
    num_canary_failures: int = 0
    fault: str | None = None  # why no work should be sent here, as far as the engine knows
    histograms: dict[
        str, Histogram
    ] = {}  # ttft_seconds, time_per_output_token_seconds, e2e_seconds, queue_seconds, step_seconds


class ExportedPrefix(msgspec.Struct, tag=True, frozen=True):
    request_id: str
    blocks: list[bytes]


class ImportedPrefix(msgspec.Struct, tag=True, frozen=True):
    request_id: str
    num_tokens: int  # leading tokens that this engine now finds in its cache


ToClient = Events | EngineInfo | EngineStats | ExportedPrefix | ImportedPrefix | BlockSnapshot | BlockChanges
FromEngine = ArrivedEvents | EngineInfo | EngineStats | ExportedPrefix | ImportedPrefix | BlockSnapshot | BlockChanges

STATS_SECONDS = 0.5

_encoder = msgspec.msgpack.Encoder()
_to_engine = msgspec.msgpack.Decoder(ToEngine)
_from_engine = msgspec.msgpack.Decoder(FromEngine)
_logprobs = msgspec.msgpack.Decoder(list[TokenLogprob])


def encode(message: ToEngine | ToClient) -> bytes:
    return _encoder.encode(message)


def decode_to_engine(frame: bytes) -> ToEngine:
    message: ToEngine = _to_engine.decode(frame)
    return message


def decode_from_engine(frame: bytes) -> FromEngine:
    message: FromEngine = _from_engine.decode(frame)
    return message


def decode_logprobs(logprobs: msgspec.Raw) -> list[TokenLogprob]:
    """Return the log-probabilities of an event that arrived with some."""
    return _logprobs.decode(logprobs)
