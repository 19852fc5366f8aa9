"""The thread in which a process asks its store, and at which tenants take turns.

A store does some hundreds of things a second, and whoever has waited too long for it is refused: in a single line a
flood of one tenant would have everybody with limits refused. So each tenant's questions wait in a line of their own,
and one of each line is asked in turn; what belongs to no tenant has a line too. Knows nothing of the store.
"""

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from typing import Any, ParamSpec, TypeVar

Result = TypeVar("Result")
Given = ParamSpec("Given")


class StoreThread(Executor):
    """Any thread may call its methods."""

    def __init__(self, name: str) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=name)
        self._lock = threading.Lock()
        # By tenants, the one whose turn is next first. No line is empty.
        self._lines: dict[str | None, deque[tuple[Future[Any], Callable[[], Any]]]] = {}

    def submit(self, work: Callable[Given, Result], /, *args: Given.args, **kwargs: Given.kwargs) -> "Future[Result]":
        """Do what belongs to no tenant."""
        return self.submit_for(None, lambda: work(*args, **kwargs))

    def submit_for(self, tenant: str | None, work: Callable[[], Result]) -> "Future[Result]":
        """Do it when it is the tenant's turn, behind what was submitted for the same tenant before."""
        job: Future[Result] = Future()
        with self._lock:
            self._lines.setdefault(tenant, deque()).append((job, work))
        self._thread.submit(self._take_turn)
        return job

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        self._thread.shutdown(wait, cancel_futures=cancel_futures)

    def _take_turn(self) -> None:
        """Do the first thing of the first line. Each that was submitted has one turn, so there is always one."""
        with self._lock:
            tenant = next(iter(self._lines))
            line = self._lines.pop(tenant)
            job, work = line.popleft()
            if line:
                self._lines[tenant] = line
        if not job.set_running_or_notify_cancel():
            return
        try:
            job.set_result(work())
        except BaseException as error:  # noqa: BLE001 - whatever it is, it is told to whoever asked
            job.set_exception(error)
