"""How far a benchmark has come, shown while it runs where somebody can see it move, and what it waits for, anywhere."""

from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.text import Text


class Watcher:
    """Told of each run and request. This one keeps it to itself."""

    def begin(self, label: str, num_requests: int | None) -> None:
        """A run starts. None: its requests are not told of one by one."""

    def one_done(self) -> None:
        """One of its requests has ended."""

    def waiting(self, sentence: str) -> None:
        """Nothing happens for long."""


class ProgressBar(Watcher):
    """A bar for each run. A terminal's own drawing costs the generator little: it redraws a few times a second."""

    def __init__(self, console: Console) -> None:
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        self._bar = Progress(*columns, console=console, disable=not console.is_terminal, refresh_per_second=4)
        self._task: TaskID | None = None

    def __enter__(self) -> "ProgressBar":
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def begin(self, label: str, num_requests: int | None) -> None:
        self._task = self._bar.add_task(label, total=num_requests)

    def one_done(self) -> None:
        assert self._task is not None
        self._bar.advance(self._task)

    def waiting(self, sentence: str) -> None:
        self._bar.console.print(Text(sentence, style="dim"), soft_wrap=True)
