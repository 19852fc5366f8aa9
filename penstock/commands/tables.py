"""Tables on standard output: as wide as a terminal is, and as wide as they need to be in a pipe."""

from rich.console import Console
from rich.table import Table

# What reads a pipe wants one row a line; no row of ours comes near this.
_UNLIMITED = 100_000


def print_table(table: Table) -> None:
    console = Console()
    if console.is_terminal:
        console.print(table)
    else:
        Console(width=_UNLIMITED).print(table)
