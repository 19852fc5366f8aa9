"""The thread in which a process asks its store, and at which tenants take turns.

A store does some hundreds of things a second, and whoever has waited too long for it is refused: in a single line a
flood of one tenant would have everybody with limits refused. So each tenant's questions wait in a line of their own,
and one of each line is asked in turn, or several that can be asked as one; what belongs to no tenant has a line too.
Knows nothing of the store.
"""

import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, ParamSpec, TypeVar

Result = TypeVar("Result")
Asked = TypeVar("Asked")
Given = ParamSpec("Given")

# Questions of a tenant that are asked as one: few enough that others' turns come soon.
_MOST_TOGETHER = 32


@dataclass(slots=True, eq=False)
class _Job:
    work: Callable[[Sequence[Any]], Sequence[Any]]  # results, one for each question
    question: Any
    can_join: bool  # others with the same work
    done: Future[Any] = field(default_factory=Future)


class StoreThread(Executor):
    """Any thread may call its methods."""

    def __init__(self, name: str) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=name)
        self._lock = threading.Lock()
        # By tenants, the one whose turn is next first. No line is empty.
        self._lines: dict[str | None, deque[_Job]] = {}

    def submit(self, work: Callable[Given, Result], /, *args: Given.args, **kwargs: Given.kwargs) -> "Future[Result]":
        """Do what belongs to no tenant."""
        return self.submit_for(None, lambda: work(*args, **kwargs))

    def submit_for(self, tenant: str | None, work: Callable[[], Result]) -> "Future[Result]":
        """Do it when it is the tenant's turn, behind what was submitted for the same tenant before."""
        return self._submit(tenant, _Job(lambda _: (work(),), None, can_join=False))

    def submit_among(
        self, tenant: str, work: Callable[[Sequence[Asked]], Sequence[Result]], question: Asked
    ) -> "Future[Result]":
        """The same; but what waits for the same work right behind it is done along with it, in one call."""
        return self._submit(tenant, _Job(work, question, can_join=True))

    def _submit(self, tenant: str | None, job: _Job) -> "Future[Any]":
        with self._lock:
            self._lines.setdefault(tenant, deque()).append(job)
        self._thread.submit(self._take_turn)
        return job.done

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        self._thread.shutdown(wait, cancel_futures=cancel_futures)

    def _take_turn(self) -> None:
        """Do the first thing of the first line, and what can be done with it."""
        # Each that was submitted has one turn. What was done along with others leaves its own to nobody.
        jobs = [job for job in self._next() if job.done.set_running_or_notify_cancel()]
        if not jobs:
            return
        try:
            results = jobs[0].work([job.question for job in jobs])
        except BaseException as error:  # noqa: BLE001 - whatever it is, it is told to whoever asked
            for job in jobs:
                job.done.set_exception(error)
        else:
            for job, result in zip(jobs, results, strict=True):
                job.done.set_result(result)

    def _next(self) -> list[_Job]:
        with self._lock:
            if not self._lines:
                return []
            tenant = next(iter(self._lines))
            line = self._lines.pop(tenant)
            jobs = [line.popleft()]
            while line and _join(jobs[0], line[0]) and len(jobs) < _MOST_TOGETHER:
                jobs.append(line.popleft())
            if line:
                self._lines[tenant] = line
            return jobs


def _join(first: _Job, other: _Job) -> bool:
    return first.can_join and other.can_join and first.work == other.work
