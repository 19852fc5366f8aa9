"""Results as tables for a terminal."""

from collections.abc import Sequence
from statistics import geometric_mean

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from penstock.tools.bench.comparison import Comparison
from penstock.tools.bench.document import FIGURES, Distribution, Report, Run

_LATENCIES = (
    ("TTFT", "ttft_ms"),
    ("time per token", "time_per_token_ms"),
    ("inter-token", "inter_token_ms"),
    ("end to end", "end_to_end_ms"),
)


def run_table(run: Run) -> RenderableType:
    """Return everything about one run."""
    parts: list[RenderableType] = [Text(run.label, style="bold"), _facts(run)]
    latencies = _latencies(run)
    if latencies is not None:
        parts.append(latencies)
    parts += [Text(line, style="yellow") for line in warnings(run)]
    return Group(*parts, "")


def overview_table(report: Report) -> Table:
    """Return one line for each run, with the first figures that any of them has. Latencies are in ms."""
    figures = [item for item in FIGURES if item.short and any(item.of(run) is not None for run in report.runs)]
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("run")
    for figure in figures:
        table.add_column(figure.short or figure.name, justify="right", no_wrap=True)
    for run in report.runs:
        table.add_row(Text(run.label), *(shown(figure.of(run)) for figure in figures))
    return table


def comparison_table(compared: Sequence[Comparison]) -> Table:
    """Return a line for each figure; the ratio is the second's to the first's, where both have one over zero."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("run", "figure", "A", "B", "B/A", ""):
        table.add_column(name, justify="left" if name in ("run", "figure", "") else "right")
    previous = None
    for item in compared:
        style = "green" if item.gain > 1.02 else "red" if item.gain < 0.98 else "dim"
        word = "better" if item.gain > 1.02 else "worse" if item.gain < 0.98 else "same"
        label = item.label if item.label != previous else ""
        previous = item.label
        cells = (shown(item.first), shown(item.second), f"{item.ratio:.3f}" if item.has_ratio else "–")
        table.add_row(Text(label, style="bold"), Text(item.figure), *cells, Text(word, style=style))
    gains = [item.gain for item in compared if item.has_ratio]
    if gains:
        left_out = len(compared) - len(gains)
        name = "geometric mean of gains" + (f", without {left_out} that have no ratio" if left_out else "")
        table.add_row("", Text(name, style="bold"), "", "", f"{geometric_mean(gains):.3f}", "")
    return table


def warnings(run: Run) -> list[str]:
    """Return what a reader must know before believing the figures."""
    lines = []
    if run.num_unfinished:
        lines.append(f"Cut short: {run.num_unfinished} of {run.num_requests} requests had not ended.")
    if run.generator is not None and run.generator.warnings:
        lines.append(f"The load generator may be the bottleneck: {'; '.join(run.generator.warnings)}.")
    for kind, count in run.errors.items():
        example = run.error_examples.get(kind)
        lines.append(f"{count} of {run.num_requests} requests failed: {kind}{f' ({example})' if example else ''}")
    textless = sum(row.ttft_ms is None for row in run.requests)
    if textless:
        lines.append(f"{textless} answers ended well but brought no text that was recognised: no token has a time.")
    if run.num_short:
        lines.append(f"{run.num_short} answers were shorter than asked for.")
    return lines


def shown(value: float | None) -> str:
    """Return a number to three figures or so."""
    if value is None:
        return "–"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.1f}" if abs(value) >= 100 else f"{value:.2f}"


def facts(run: Run) -> list[tuple[str, str]]:
    """Return what happened, as names and values."""
    arrival = f"{run.rate:g} requests/s (Poisson)" if run.rate else None
    if run.concurrency:
        arrival = f"{run.concurrency} at a time"
    cached = f", {run.cached_tokens:,} of them cached" if run.cached_tokens else ""
    rows = [
        ("arrivals", arrival),
        ("requests", f"{run.num_completed} of {run.num_requests} in {run.seconds:.2f} s"),
        ("requests/s", shown(run.requests_per_second)),
        ("input tokens/s", f"{shown(run.input_tokens_per_second)}  ({run.input_tokens:,} tokens{cached})"),
        (
            "output tokens/s",
            f"{shown(run.output_tokens_per_second)}  ({run.output_tokens:,} tokens, counted by {run.counted_by})",
        ),
        ("decode", None if run.decode_ms_per_token is None else f"{run.decode_ms_per_token:.3f} ms per token"),
        ("goodput", _goodput(run)),
        ("fleet", _fleet(run)),
    ]
    return [(name, value) for name, value in rows if value is not None]


def latencies(run: Run) -> list[tuple[str, Distribution]]:
    found = [(name, getattr(run, attribute)) for name, attribute in _LATENCIES]
    return [(name, distribution) for name, distribution in found if distribution is not None]


def _fleet(run: Run) -> str | None:
    fleet = run.fleet
    if fleet is None:
        return None
    found = (run.cached_tokens or 0) / fleet.infinite_cache_tokens if fleet.infinite_cache_tokens else 1.0
    return (
        f"{len(fleet.busy_seconds)} replicas, {fleet.policy}, {fleet.utilization:.0%} of their time used: "
        f"{found:.1%} of what one infinite cache would find, most work {fleet.imbalance:.2f} × the mean"
    )


def _goodput(run: Run) -> str | None:
    if run.goodput is None:
        return None
    limits = [
        f"{name} ≤ {limit:g} ms"
        for name, limit in (
            ("TTFT", run.goodput.ttft_limit_ms),
            ("time per token", run.goodput.time_per_token_limit_ms),
        )
        if limit is not None
    ]
    kept = f"{run.goodput.num_requests} of {run.num_requests} kept {' and '.join(limits)}"
    return f"{shown(run.goodput.requests_per_second)} requests/s  ({kept})"


def _facts(run: Run) -> Table:
    table = Table.grid(padding=(0, 2))
    for name, value in facts(run):
        table.add_row(Text(name, style="dim"), Text(value))
    return table


def _latencies(run: Run) -> Table | None:
    rows = latencies(run)
    if not rows:
        return None
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("ms")
    for name in ("mean", "p50", "p90", "p95", "p99", "max"):
        table.add_column(name, justify="right")
    for name, item in rows:
        table.add_row(Text(name), *map(shown, (item.mean, item.p50, item.p90, item.p95, item.p99, item.max)))
    return table
