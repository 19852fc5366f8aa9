"""Waiting, timing and expiry follow the monotonic clock: the wall clock may jump by an hour at any moment."""

import ast

from tests.architecture.source_tree import modules

# Who may look at the wall clock, and for what: to tell people or other machines a date, never to measure or to wait.
STAMPS = {
    "commands.profile": "the date of a profile",
    "commands.usage": "today, as the first day to show",
    "store.key_ring": "when keys expire, which is a date",
    "fleet.rollout.book": "when a rollout's step began, which is a date",
    "metering.meter": "the day that usage is booked to",
    "fleet.router.app": "when a decision was made, for /admin/decisions",
    "store.database": "moments that several servers share: they have no other clock in common",
    "server.worker": "when the server started, for /v1/models",
    "server.openai_reply": "`created` of an answer",
    "server.template_process": "strftime_now of chat templates",
    "tools.bench.document": "the date of a report",
}
WALL_CLOCK = {
    ("time", "time"), ("time", "time_ns"), ("time", "localtime"), ("time", "gmtime"), ("datetime", "now"),
    ("datetime", "utcnow"), ("datetime", "today"), ("date", "today"),
}  # fmt: skip


def readings(tree: ast.Module) -> list[int]:
    """Return the lines that read the wall clock."""
    return [
        node.lineno
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        if (node.value.id if isinstance(node.value, ast.Name) else getattr(node.value, "attr", ""), node.attr)
        in WALL_CLOCK
    ]


def test_only_stamps_read_the_wall_clock() -> None:
    found = {module.name: lines for module in modules() if (lines := readings(module.tree))}
    assert {name: lines for name, lines in found.items() if name not in STAMPS} == {}


def test_the_list_of_stamps_is_no_longer_than_it_must_be() -> None:
    assert set(STAMPS) <= {module.name for module in modules() if readings(module.tree)}
