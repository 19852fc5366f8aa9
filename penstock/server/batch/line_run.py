"""One line of a batch, run as the same request would be online, and how it ended.

Nothing is booked here: the cost travels with the result, so that both are written together or not at all. Knows
nothing of the batch's other lines.
"""

import asyncio
import logging
import time
import uuid
from dataclasses import dataclass
from functools import partial

import msgspec

from penstock.errors import (
    EngineFailed,
    EngineUnavailable,
    Overloaded,
    PenstockError,
    StoreUnavailable,
    UnsupportedParameter,
)
from penstock.protocol.errors import reply_for
from penstock.protocol.openai_batches import LineError, LineResponse, ResultLine
from penstock.protocol.openai_chat import ChatRequest
from penstock.protocol.openai_completions import CompletionRequest
from penstock.protocol.wire import parse_request
from penstock.request import Tier
from penstock.server.answer import Answer
from penstock.server.claim import Claim
from penstock.server.context import ServerContext
from penstock.server.json_parts import Body
from penstock.server.routes.chat import begin_chat
from penstock.server.routes.completions import begin_completion
from penstock.server.streaming import Reply, keep_whole, note_outcome
from penstock.store.batch_work import MAX_ATTEMPTS, EndedRow, RowEnd, RunningRow
from penstock.telemetry import RequestRecord
from penstock.tenants import Caller

_UNKNOWN_WAIT_SECONDS = 1.0
_LINE_ENTRIES = 16  # what it costs to begin one, in entries of `LoopTurns`
_SHORT_BYTES = 1 << 20  # copied at once rather than in a thread
# Characters that end a line for Unicode, as for Python's `splitlines`, and that JSON allows inside a text as they are.
_LINE_ENDS = tuple((end.encode(), f"\\u{ord(end):04x}".encode()) for end in "\x85\u2028\u2029")

log = logging.getLogger("penstock.batch")


@dataclass(frozen=True, slots=True)
class Postponed:
    """A line that must run again: after so many seconds, and whether this try counts."""

    line: int
    wait_seconds: float
    counts: bool
    is_crowded: bool = False  # the engine had no place


async def run_line(
    context: ServerContext, caller: Caller, batch_id: str, endpoint: str, row: RunningRow
) -> RowEnd | Postponed:
    """Run a line to its end. Cancelled, it leaves nothing behind."""
    record = RequestRecord(
        request_id=uuid.uuid4().hex, method="POST", path=endpoint, arrival=time.monotonic(), tenant=caller.tenant
    )
    answer: Answer | None = None
    try:
        if row.attempts > MAX_ATTEMPTS:
            raise EngineFailed(f"this request was under way {MAX_ATTEMPTS} times when something failed")
        await context.turns.take(_LINE_ENTRIES)  # hundreds may begin together
        answer, reply = await _begin(context, caller, record, endpoint, row.body)
        await keep_whole(answer, reply)
        body = reply.body(answer.choices, answer.usage())
        note_outcome(record, answer)
        return await _end(batch_id, row, record, answer, 200, body)
    except (Overloaded, EngineUnavailable, StoreUnavailable) as error:
        wait = error.retry_after_seconds if isinstance(error, Overloaded) else _UNKNOWN_WAIT_SECONDS
        return Postponed(row.line, wait, counts=False, is_crowded=error.code == Overloaded.code)
    except EngineFailed as error:
        if row.attempts < MAX_ATTEMPTS:
            return Postponed(row.line, 0.0, counts=True)
        return await _fail(batch_id, row, record, answer, error)
    except PenstockError as error:
        return await _fail(batch_id, row, record, answer, error)
    except Exception as error:
        log.exception("a line of a batch could not be run (batch %s, line %d)", batch_id, row.line)
        return await _fail(batch_id, row, record, answer, error)
    finally:
        if answer is not None:
            answer.abort()
            answer.charge.withdraw()


class _Asked(msgspec.Struct):
    """What of a body says how many answers it wants."""

    n: int | None = None
    prompt: str | list[int | str | list[int]] | None = None


def count_answers(body: str) -> int:
    """How many answers a line asks for; 1 where its body is not what it should be, as will be found when it runs."""
    try:
        asked = msgspec.json.decode(body, type=_Asked)
    except (msgspec.DecodeError, RecursionError):
        return 1
    prompt = asked.prompt
    num_prompts = len(prompt) if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int) else 1
    return max(1, asked.n or 1) * num_prompts


async def _begin(
    context: ServerContext, caller: Caller, record: RequestRecord, endpoint: str, body: str
) -> tuple[Answer, Reply]:
    kind = ChatRequest if endpoint == "/v1/chat/completions" else CompletionRequest
    # Bodies may be megabytes: others' streams go on meanwhile.
    parse = partial(parse_request, kind, body.encode(), max_entries=context.max_entries)
    wanted = await context.texts.run(Claim(caller.tenant, Tier.BATCH), len(body), parse)
    if wanted.wants_stream:
        raise UnsupportedParameter("stream", wanted.stream, "leave it out of a batch")
    if isinstance(wanted, ChatRequest):
        chat, chat_reply, _ = await begin_chat(context, caller, record, wanted, tier=Tier.BATCH)
        return chat, chat_reply
    assert isinstance(wanted, CompletionRequest)
    completion, completion_reply, _ = await begin_completion(context, caller, record, wanted, tier=Tier.BATCH)
    return completion, completion_reply


async def _fail(
    batch_id: str, row: RunningRow, record: RequestRecord, answer: Answer | None, error: Exception
) -> RowEnd:
    reply = reply_for(error)
    record.error_code = reply.code
    return await _end(batch_id, row, record, answer, reply.status, Body([reply.body]))


async def _end(
    batch_id: str, row: RunningRow, record: RequestRecord, answer: Answer | None, status: int, body: Body
) -> RowEnd:
    write = partial(_result, batch_id, row, record.request_id, status, body)
    result = write() if body.num_bytes <= _SHORT_BYTES else await asyncio.to_thread(write)
    usage, settlement = answer.charge.hand_over(record) if answer is not None else (None, None)
    return RowEnd(line=row.line, is_completed=status == 200, result=result, usage=usage, settlement=settlement)


def _result(batch_id: str, row: RunningRow, request_id: str, status: int, body: Body) -> str:
    response = LineResponse(status_code=status, request_id=request_id, body=msgspec.Raw(body.whole()))
    result = ResultLine(id=_line_id(batch_id, row.line), custom_id=row.custom_id, response=response)
    return msgspec.json.encode(result).decode()


def result_line(batch_id: str, row: EndedRow, *, is_cancelled: bool) -> bytes:
    """Return a line of an output or error file, also of what never ran. Only its end can be taken for one."""
    line = row.result.encode() if row.result is not None else _unrun(batch_id, row, is_cancelled=is_cancelled)
    for end, escaped in _LINE_ENDS:
        line = line.replace(end, escaped)
    return line + b"\n"


def _unrun(batch_id: str, row: EndedRow, *, is_cancelled: bool) -> bytes:
    error = LineError(code="batch_expired", message="the completion window ended before this request could run")
    if is_cancelled:
        error = LineError(code="batch_cancelled", message="the batch was cancelled before this request could run")
    return msgspec.json.encode(ResultLine(id=_line_id(batch_id, row.line), custom_id=row.custom_id, error=error))


def _line_id(batch_id: str, line: int) -> str:
    return f"batch_req_{batch_id.removeprefix('batch_')}_{line}"
