"""A bar for what is being fetched.

On a terminal it moves; in a log it is one line when a fetch begins and one when it is done.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.text import Text

# (done bytes, total bytes where known, what is fetched)
Report = Callable[[int, int | None, str], None]


@contextmanager
def fetch_bar(console: Console | None = None) -> Iterator[Report]:
    """Yield the function to report bytes to. Draws nothing until the first report: most often there is none."""
    console = console or Console(stderr=True)
    if console.is_terminal:
        with _moving_bar(console) as report:
            yield report
    else:
        with _plain_lines(console) as report:
            yield report


@contextmanager
def _moving_bar(console: Console) -> Iterator[Report]:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(compact=True),
    )
    bar = Progress(*columns, console=console)
    tasks: dict[str, TaskID] = {}

    def report(done: int, total: int | None, what: str) -> None:
        if not tasks:
            bar.start()
        if what not in tasks:
            tasks[what] = bar.add_task(f"fetching {what}", total=total)
        bar.update(tasks[what], completed=done, total=total)

    try:
        yield report
    finally:
        if tasks:
            bar.stop()


@contextmanager
def _plain_lines(console: Console) -> Iterator[Report]:
    fetched: dict[str, int] = {}

    def report(done: int, total: int | None, what: str) -> None:
        if what not in fetched:
            size = f" ({total / 1e6:.0f} MB)" if total is not None else ""
            console.print(Text(f"fetching {what}{size}"), soft_wrap=True)
        fetched[what] = done

    yield report
    for what, done in fetched.items():
        console.print(Text(f"fetched {what}: {done / 1e6:.0f} MB"), soft_wrap=True)
