"""docs/promises.md names tests that are there, and its limits, like those of docs/security.md, are the code's."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.connection_limits import ConnectionLimits
from penstock.engine.config import CANARY_SECONDS
from penstock.engine.scheduler.lookout import FOLLOWED_A_STEP
from penstock.engine.scheduler.waiting_queue import AGEING_SECONDS, RISE_INTERVAL_SECONDS
from penstock.fleet.config import HealthSection, QueueSection
from penstock.fleet.router.proxy import MAX_ATTEMPTS
from penstock.server.chat_template import RENDER_SECONDS
from penstock.store.batch_work import HOLD_SECONDS
from penstock.store.quotas import RENEW_SECONDS
from tests.architecture.source_tree import REPOSITORY

PROMISES, SECURITY = REPOSITORY / "docs" / "promises.md", REPOSITORY / "docs" / "security.md"
LIMITS, HEALTH, QUEUE = ConnectionLimits(), HealthSection(), QueueSection()
# A file, and how the names of its tests that are meant begin or go on; nothing where all of them are.
PROOF = re.compile(r"`((?:tests|scripts)/[\w/.]*|test_\w+\.py)[^`]*`(?::([^;|]*))?")


def proofs() -> Iterator[tuple[str, Path, list[str]]]:
    """(promise, a file that shows it, words of the tests in it that do)."""
    for line in PROMISES.read_text().splitlines():
        promise, _, cell = line.strip("| ").partition(" | ")[0], *line.strip("| ").rpartition(" | ")[1:]
        folder = REPOSITORY
        for name, words in PROOF.findall(cell):
            path = (folder if name.startswith("test_") else REPOSITORY) / name
            folder = path.parent
            plain = re.sub(r"\([^)]*\)|`.*", "", words)
            yield promise, path, [word.strip() for word in plain.split(",") if word.strip()]


def names_of_tests(path: Path) -> list[str]:
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    nodes = ast.walk(ast.parse(path.read_text()))
    return [node.name for node in nodes if isinstance(node, functions) and node.name.startswith("test_")]


def test_every_promise_names_tests_that_are_there() -> None:
    found = list(proofs())
    assert len(found) > 100
    for promise, path, words in found:
        assert path.exists(), (promise, path)
        for word in words:
            wanted = re.sub(r"\W+", "_", word.lower())
            assert any(wanted in name for name in names_of_tests(path)), (promise, path, word)


def test_every_promise_is_shown_by_something() -> None:
    rows = [line for line in PROMISES.read_text().splitlines() if line.startswith("| ")]
    shown = {promise for promise, _, _ in proofs()}
    without = [row for row in rows if row.strip("| ").partition(" | ")[0] not in shown]
    # What only a device can show is shown by a command.
    assert [row for row in without if "`penstock " not in row and not row.startswith("| promise |")] == []


@pytest.mark.parametrize(
    ("document", "sentence"),
    [
        (
            PROMISES,
            f"for every {AGEING_SECONDS:g} s of waiting, one request of a tenant every {RISE_INTERVAL_SECONDS:g} s",
        ),
        (PROMISES, f"running requests count again within {RENEW_SECONDS:g} s"),
        (PROMISES, f"for each step {FOLLOWED_A_STEP} requests are followed at most"),
        (PROMISES, f"{LIMITS.unread_bytes >> 10} KiB + {LIMITS.socket_bytes >> 10} KiB, {LIMITS.reader_seconds:g} s"),
        (
            PROMISES,
            f"{LIMITS.head_seconds:g} s; {LIMITS.body_seconds:g} s + {LIMITS.body_bytes_per_second >> 10} KiB/s; 408",
        ),
        (PROMISES, f"a hold of {HOLD_SECONDS:g} s and a look every 4"),
        (PROMISES, f"a look every {CANARY_SECONDS:g} s"),
        (PROMISES, f"{MAX_ATTEMPTS} attempts without progress"),
        (PROMISES, f"{HEALTH.first_backoff_seconds:g} s doubling to {HEALTH.max_backoff_seconds:g} s"),
        (
            PROMISES,
            f"{QUEUE.max_waiting_per_tenant} a tenant, {QUEUE.max_wait_seconds:g} s; {QUEUE.patience_seconds:g} s",
        ),
        (SECURITY, f"{LIMITS.head_seconds:g} s from its first byte, {LIMITS.max_head_bytes >> 10} KiB"),
        (
            SECURITY,
            f"{LIMITS.body_seconds:g} s, and one second more for each {LIMITS.body_bytes_per_second >> 10} KiB",
        ),
        (SECURITY, f"| nothing at all, or between requests | {LIMITS.idle_seconds:g} s |"),
        (SECURITY, f"{LIMITS.unread_bytes >> 10} KiB in the worker and {LIMITS.socket_bytes >> 10} KiB in the kernel"),
        (SECURITY, f"| requests sent ahead of their answers | {LIMITS.max_pipelined} |"),
        (SECURITY, f"| connections of a worker | {LIMITS.max_connections:,},"),
        (SECURITY, f"sandboxed, with {RENDER_SECONDS:g} s,"),
    ],
)
def test_a_limit_in_the_documents_is_the_codes(document: Path, sentence: str) -> None:
    assert sentence in document.read_text()
