"""Recorded arrivals as workloads: Azure's CSV and Mooncake's JSON lines.

The traces hold lengths, not text. Prompts are made up: unrelated for Azure's, and of equal blocks where Mooncake's
`hash_ids` are equal. Knows nothing of servers.
"""

import csv
import itertools
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from penstock.errors import ConfigError
from penstock.tools.bench.workload import SEEDED_BLOCK_TOKENS, PlannedRequest, SeededPrompt, Workload

AZURE_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")

# Beyond these a number is damage, and would cost memory or time without end before it is noticed.
MAX_TOKENS = 2**24
MAX_SECONDS = 366 * 86400.0


class _MooncakeLine(msgspec.Struct):
    timestamp: float  # milliseconds
    input_length: int
    output_length: int
    hash_ids: list[int]


class _BadLine(ValueError):
    """What is wrong with one line of a trace."""


def read_trace(file: Path, limit: int | None = None) -> Workload:
    """Return the first `limit` requests of a trace, its first arrival at zero."""
    try:
        with file.open(newline="", encoding="utf-8-sig", errors="surrogateescape") as lines:
            numbered = _numbered(lines)
            first = next(numbered, None)
            requests = [] if first is None else _read(first, numbered, limit)
    except OSError as error:
        raise ConfigError("--trace", str(file), f"it cannot be read ({error.strerror})") from error
    except (ValueError, csv.Error) as error:
        raise ConfigError("--trace", str(file), str(error)) from error
    if not requests:
        raise ConfigError("--trace", str(file), "it holds no requests")
    requests.sort(key=lambda request: request.start_seconds)
    first_start = requests[0].start_seconds
    planned = (PlannedRequest(item.prompt, item.max_tokens, item.start_seconds - first_start) for item in requests)
    return Workload(name=file.stem, requests=tuple(planned))


def _numbered(lines: Iterable[str]) -> Iterator[tuple[int, str]]:
    """Yield the lines that are not empty; bytes that are not UTF-8 are surrogates in them."""
    for number, line in enumerate(lines, 1):
        try:
            line.encode()
        except UnicodeEncodeError as error:
            raise _BadLine(f"line {number}: it has a byte that is not UTF-8; save the file as UTF-8") from error
        if line.strip():
            yield number, line


def _read(first: tuple[int, str], rest: Iterator[tuple[int, str]], limit: int | None) -> list[PlannedRequest]:
    read = _read_mooncake if first[1].lstrip().startswith("{") else _read_azure
    return list(itertools.islice(_checked(read(itertools.chain([first], rest))), limit))


def _checked(requests: Iterator[tuple[int, PlannedRequest]]) -> Iterator[PlannedRequest]:
    first_start, last_start = float("inf"), float("-inf")
    for number, request in requests:
        first_start, last_start = min(first_start, request.start_seconds), max(last_start, request.start_seconds)
        if last_start - first_start > MAX_SECONDS:
            raise _BadLine(f"line {number}: it and a line before it are more than a year apart")
        if request.prompt.num_tokens < 1 or request.max_tokens < 0:
            raise _BadLine(f"line {number}: lengths must be positive")
        if max(request.prompt.num_tokens, request.max_tokens) > MAX_TOKENS:
            raise _BadLine(f"line {number}: lengths must be at most {MAX_TOKENS}")
        # A recorded answer may be empty; a server can only be asked for one token or more.
        yield request if request.max_tokens else PlannedRequest(request.prompt, 1, request.start_seconds)


def _read_azure(lines: Iterator[tuple[int, str]]) -> Iterator[tuple[int, PlannedRequest]]:
    number, header = next(lines)
    columns = [name.strip() for name in next(csv.reader([header], skipinitialspace=True))]
    if not set(AZURE_COLUMNS) <= set(columns):
        raise _BadLine(f"line {number}: it is neither JSON lines nor a CSV with the columns {','.join(AZURE_COLUMNS)}")
    time_at, input_at, output_at = (columns.index(name) for name in AZURE_COLUMNS)
    next_seed = itertools.count()
    for number, line in lines:
        try:
            (fields,) = csv.reader([line], skipinitialspace=True)
            start, num_input, max_tokens = _to_seconds(fields[time_at]), int(fields[input_at]), int(fields[output_at])
        except (ValueError, IndexError) as error:
            raise _BadLine(f"line {number}: it is not a time and two numbers of tokens") from error
        seeds = tuple(itertools.islice(next_seed, _num_blocks(min(num_input, MAX_TOKENS))))
        yield number, PlannedRequest(SeededPrompt(seeds, num_input), max_tokens, start)


def _read_mooncake(lines: Iterator[tuple[int, str]]) -> Iterator[tuple[int, PlannedRequest]]:
    decoder = msgspec.json.Decoder(_MooncakeLine)
    for number, line in lines:
        try:
            read = decoder.decode(line)
        except (msgspec.DecodeError, RecursionError) as error:
            raise _BadLine(f"line {number}: {error}") from error
        needed = _num_blocks(read.input_length)
        if len(read.hash_ids) < needed:
            raise _BadLine(f"line {number}: {read.input_length} tokens need {needed} hash_ids")
        prompt = SeededPrompt(tuple(map(_seed_of, read.hash_ids[:needed])), read.input_length)
        yield number, PlannedRequest(prompt, read.output_length, read.timestamp / 1000)


def _seed_of(hash_id: int) -> int:
    """Return a seed of its own for each id: of a seed below zero a generator takes the absolute value."""
    return hash_id if hash_id >= 0 else 2**128 - hash_id


def _to_seconds(text: str) -> float:
    moment = datetime.fromisoformat(text.strip())
    # Without a zone it must not be taken for this machine's, whose clock may jump in the middle of the trace.
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()


def _num_blocks(num_tokens: int) -> int:
    return -(-num_tokens // SEEDED_BLOCK_TOKENS)
