"""A report as one HTML file that needs nothing else: tables and plots in it.

matplotlib draws the plots; it is an extra, and its absence is told before anything is measured.
"""

import base64
import importlib.util
import io
from collections.abc import Callable, Sequence
from html import escape
from pathlib import Path
from typing import Any
from warnings import catch_warnings, filterwarnings

from penstock.errors import ConfigError
from penstock.tools.bench.document import Distribution, Report, RequestRow, Run
from penstock.tools.bench.tables import facts, latencies, shown, warnings
from penstock.tools.bench.workload import sweep_suffix

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #1b1f24; max-width: 60rem; margin: 2rem auto; padding: 0 1rem }
h1 { font-size: 1.5rem } h2 { font-size: 1.15rem; margin-top: 2.2rem }
table { border-collapse: collapse; margin: .6rem 0 } td, th { padding: .15rem .9rem .15rem 0; text-align: right }
td:first-child, th:first-child { text-align: left } .facts td { text-align: left } .facts td:first-child { color: #667 }
.warning { background: #fff4d6; padding: .4rem .7rem; border-radius: .3rem } img { max-width: 100% }
.dim { color: #667 }
"""


def check_html_possible() -> None:
    """Raise where matplotlib is missing."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError("--html", "a report with plots", "install matplotlib: pip install 'penstock[bench]'")


def write_html(report: Report, file: Path) -> None:
    try:
        file.write_text(render_html(report), encoding="utf-8")
    except OSError as error:
        raise ConfigError("--html", str(file), f"it cannot be written ({error.strerror})") from error


def render_html(report: Report) -> str:
    """Return the whole page."""
    ignored = "ignored" if report.ignored_end_of_text else "ended answers"
    about = (
        f"{report.model} at {report.target} · prompts sent as {report.prompts} · end-of-text {ignored} · "
        f"{report.made_at} · Penstock {report.version}"
    )
    parts = [
        '<!doctype html><html lang="en"><meta charset="utf-8"><title>Penstock benchmark</title>',
        f"<style>{_STYLE}</style><h1>Benchmark</h1>",
        f'<p class="dim">{escape(about)}</p>',
        *_plots(report.runs),
        *map(_run_section, report.runs),
        "</html>",
    ]
    return "\n".join(parts)


def _run_section(run: Run) -> str:
    rows = "".join(f"<tr><td>{escape(name)}</td><td>{escape(value)}</td></tr>" for name, value in facts(run))
    notes = "".join(f'<p class="warning">{escape(line)}</p>' for line in warnings(run))
    return f'<h2>{escape(run.label)}</h2>{notes}<table class="facts">{rows}</table>{_latency_table(run)}'


def _latency_table(run: Run) -> str:
    rows = latencies(run)
    if not rows:
        return ""
    columns = ("mean", "p50", "p90", "p95", "p99", "max")
    head = "".join(f"<th>{name}</th>" for name in ("ms", *columns))
    lines = [
        f"<tr><td>{escape(name)}</td>{''.join(f'<td>{shown(getattr(item, column))}</td>' for column in columns)}</tr>"
        for name, item in rows
    ]
    return f"<table><tr>{head}</tr>{''.join(lines)}</table>"


# ---------------------------------------------------------------- plots


def _plots(runs: Sequence[Run]) -> list[str]:
    measured = [run for run in runs if run.requests]
    if not measured:
        return []
    import matplotlib

    # Names are not ours: a dollar in them begins no formula, and the reader's fonts have the letters that ours lack.
    with matplotlib.rc_context({"text.parse_math": False, "svg.fonttype": "none"}), catch_warnings():
        filterwarnings("ignore", "Glyph .* missing from font")
        return [
            _image("Latency against rate", _plot_latency(measured)),
            # At a rate at which every request failed nothing was good, and that is a figure too.
            _image("Goodput against rate", _plot_goodput([run for run in runs if run.requests or run.errors])),
            _image("Latency distribution", _plot_distribution(measured)),
        ]


def _figure(num_plots: int) -> tuple[Any, Sequence[Any]]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.2 * num_plots, 3.4), layout="constrained")
    return figure, figure.subplots(1, num_plots, squeeze=False)[0]


def _rate_of(run: Run) -> float:
    """Where a run stands on the rate axis: as offered, or as served where nothing was offered at a rate."""
    return run.rate if run.rate is not None else run.requests_per_second


def _workload_of(run: Run) -> str:
    """Return a run's label without its rate: `cpu8` of `cpu8 @ 20/s`, and `rate` of `rate10`."""
    if run.rate is None:
        return run.label
    suffix = sweep_suffix(run.rate)
    return run.label.removesuffix(suffix if run.label.endswith(suffix) else f"{run.rate:g}")


def _by_workload(runs: Sequence[Run]) -> dict[str, list[Run]]:
    """Return the runs of each workload in the order of their rates."""
    found: dict[str, list[Run]] = {}
    for run in sorted(runs, key=_rate_of):
        found.setdefault(_workload_of(run), []).append(run)
    return found


def _plot_latency(runs: Sequence[Run]) -> Any:
    kinds: tuple[tuple[str, Callable[[Run], Distribution | None]], ...] = (
        ("TTFT", lambda run: run.ttft_ms),
        ("time per token", lambda run: run.time_per_token_ms),
        ("end to end", lambda run: run.end_to_end_ms),
    )
    workloads = _by_workload(runs)
    figure, axes = _figure(len(kinds))
    for axis, (title, of) in zip(axes, kinds, strict=True):
        for name, steps in workloads.items():
            for percentile in ("p50", "p90", "p99"):
                points = [(_rate_of(run), getattr(item, percentile)) for run in steps if (item := of(run)) is not None]
                _draw_line(axis, points, percentile, name if len(workloads) > 1 else "")
        _finish(axis, title, "requests/s", "ms", legend=True)
    return figure


def _plot_goodput(runs: Sequence[Run]) -> Any:
    workloads = _by_workload(runs)
    figure, (requests, tokens) = _figure(2)
    for workload, steps in workloads.items():
        name = workload if len(workloads) > 1 else ""
        _draw_line(requests, [(_rate_of(run), run.requests_per_second) for run in steps], "completed", name)
        good = [(_rate_of(run), run.goodput.requests_per_second) for run in steps if run.goodput is not None]
        if good:
            _draw_line(requests, good, "within the limits", name)
        _draw_line(tokens, [(_rate_of(run), run.output_tokens_per_second) for run in steps], "", name)
    offered = sorted({run.rate for run in runs if run.rate is not None})
    if offered:
        requests.plot(offered, offered, linestyle=":", color="grey", label="offered")
    _finish(requests, "requests", "requests/s", "requests/s", legend=True)
    _finish(tokens, "output tokens", "requests/s", "tokens/s", legend=len(workloads) > 1)
    return figure


def _draw_line(axis: Any, points: Sequence[tuple[float, float]], what: str, workload: str) -> None:
    """Draw what was measured of one workload; its name is told where there are several."""
    axis.plot([x for x, _ in points], [y for _, y in points], marker="o", label=_label(f"{workload} {what}".strip()))


def _label(text: str) -> str:
    """Return a text for a legend; matplotlib leaves out those that begin with "_"."""
    return f" {text}" if text[:1] == "_" else text


def _plot_distribution(runs: Sequence[Run]) -> Any:
    kinds: tuple[tuple[str, Callable[[RequestRow], float | None]], ...] = (
        ("TTFT", lambda row: row.ttft_ms),
        ("time per token", lambda row: row.time_per_token_ms),
        ("end to end", lambda row: row.end_to_end_ms),
    )
    figure, axes = _figure(len(kinds))
    for axis, (title, of) in zip(axes, kinds, strict=True):
        for run in runs:
            values = sorted(value for row in run.requests if (value := of(row)) is not None)
            shares = [(index + 1) / len(values) for index in range(len(values))]
            axis.step(values, shares, where="post", label=_label(run.label))
        _finish(axis, title, "ms", "share of requests", legend=len(runs) > 1)
    return figure


def _finish(axis: Any, title: str, x_label: str, y_label: str, *, legend: bool) -> None:
    axis.set_title(title, fontsize=10)
    axis.set_xlabel(x_label, fontsize=9)
    axis.set_ylabel(y_label, fontsize=9)
    # Room above the highest point: with one run, points are too close to each other for a margin by their distance.
    axis.set_ylim(0, 1.05 * axis.dataLim.y1 if axis.dataLim.y1 > 0 else None)
    axis.grid(alpha=0.3)
    if legend:
        axis.legend(fontsize=8)


def _image(title: str, figure: Any) -> str:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None})
    data = base64.b64encode(buffer.getvalue()).decode()
    return f'<h2>{escape(title)}</h2><img alt="{escape(title)}" src="data:image/svg+xml;base64,{data}">'
