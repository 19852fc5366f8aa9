"""How far a simulation is from a server that was measured under the same workloads."""

from collections.abc import Sequence

from rich.table import Table
from rich.text import Text

from penstock.tools.bench.comparison import Comparison, compare
from penstock.tools.bench.document import Report
from penstock.tools.bench.tables import shown

# What a simulation is judged by, and how far it may be off.
JUDGED = ("TTFT p50, ms", "TTFT p95, ms", "time per token p50, ms", "time per token p95, ms")
MAX_ERROR = 0.10


def agreement(measured: Report, simulated: Report) -> list[Comparison]:
    """Return the judged figures of every run that both have."""
    return [item for item in compare(measured, simulated) if item.figure in JUDGED and item.has_ratio]


def worst_error(compared: Sequence[Comparison]) -> float:
    return max(abs(item.ratio - 1) for item in compared)


def agreement_table(compared: Sequence[Comparison]) -> Table:
    """Return a line for each figure; an error beyond the limit is red."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("run", "figure", "measured", "simulated", "error"):
        table.add_column(name, justify="left" if name in ("run", "figure") else "right")
    previous = None
    for item in compared:
        label = item.label if item.label != previous else ""
        previous = item.label
        error = item.ratio - 1
        style = "green" if abs(error) <= MAX_ERROR else "red"
        cells = (shown(item.first), shown(item.second), Text(f"{error:+.1%}", style=style))
        table.add_row(Text(label, style="bold"), Text(item.figure), *cells)
    return table
