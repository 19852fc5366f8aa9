"""Loads as they are measured, but for what only a process of their own needs."""

from contextlib import nullcontext

import pytest

from penstock.tools.bench import load


@pytest.fixture(autouse=True)
def _leave_garbage(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before a load all garbage is collected: among all that a process of tests holds that takes half a second."""
    monkeypatch.setattr(load, "_collector_out_of_the_way", nullcontext)
