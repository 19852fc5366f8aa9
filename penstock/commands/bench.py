"""`penstock bench`: what a server or an engine does under load, as tables, JSON and one HTML page.

The flags are here; measuring is `penstock.tools.bench`, imported when a command runs.
"""

import asyncio
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from penstock.commands.flags import ENGINE_OPTIONS, number_flag, output_flag, takes_options
from penstock.config import Sourced
from penstock.errors import ConfigError, PenstockError

if TYPE_CHECKING:
    from penstock.tools.bench.document import Report, Run

app = typer.Typer(help="Measure a server or an engine under load.", no_args_is_help=True)

LOAD, ASKING, RESULT = "Load", "How to ask", "Result"

ApiKey = Annotated[
    str | None,
    typer.Option(envvar=["PENSTOCK_API_KEY", "OPENAI_API_KEY"], help="Key that the server wants", show_default=False),
]
WorkloadNames = Annotated[
    str | None,
    typer.Option(metavar="NAME,…", help="Named workloads, such as rate10 or cpu8", rich_help_panel=LOAD),
]
ShapeText = Annotated[
    str | None,
    typer.Option(
        "--shape",
        metavar="COUNTxINPUT+OUTPUT",
        help="Random prompts of a size in tokens: 100x1024+128, or ranges: 100x100-1024+64-128",
        rich_help_panel=LOAD,
    ),
]
SharedTokens = Annotated[
    int, number_flag("--shared-tokens", "Tokens that begin every prompt of --shape", kind=int, rich_help_panel=LOAD)
]
TraceFile = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="Recorded arrivals: Azure CSV or Mooncake JSON lines", rich_help_panel=LOAD),
]
Speed = Annotated[
    float, number_flag("--speed", "Compress a trace's time by this factor", open_low=True, rich_help_panel=LOAD)
]
Rate = Annotated[
    float | None,
    number_flag("--rate", "Poisson arrivals, requests per second", open_low=True, rich_help_panel=LOAD),
]
Rates = Annotated[
    str | None, typer.Option(metavar="R,R,…", help="The workload once at each rate", rich_help_panel=LOAD)
]
Concurrency = Annotated[
    int | None,
    number_flag("--concurrency", "So many requests open at any time", kind=int, low=1, rich_help_panel=LOAD),
]
Limit = Annotated[
    int | None,
    number_flag("--limit", "Only the first N requests", kind=int, low=1, metavar="N", rich_help_panel=LOAD),
]
Seed = Annotated[
    int, number_flag("--seed", "Another seed gives other tokens and arrivals", kind=int, rich_help_panel=LOAD)
]
Warmup = Annotated[
    int,
    number_flag(
        "--warmup", "Requests before each run that are not measured", kind=int, metavar="N", rich_help_panel=LOAD
    ),
]
Temperature = Annotated[
    float | None,
    number_flag("--temperature", "0 is greedy (default: the workload's)", high=2.0, rich_help_panel=ASKING),
]
IgnoreEos = Annotated[bool, typer.Option(help="Answers as long as asked for, past end-of-text", rich_help_panel=ASKING)]
SloTtft = Annotated[
    float | None, number_flag("--slo-ttft", "Goodput: most time to first token", metavar="MS", rich_help_panel=RESULT)
]
SloTpot = Annotated[
    float | None,
    number_flag("--slo-tpot", "Goodput: most time per output token", metavar="MS", rich_help_panel=RESULT),
]
JsonFile = Annotated[Path | None, output_flag("--json", "Write every figure", rich_help_panel=RESULT)]
HtmlFile = Annotated[Path | None, output_flag("--html", "Write one page with plots", rich_help_panel=RESULT)]


@app.command()
def serve(
    *,
    url: Annotated[str, typer.Option(help="The server: Penstock or any with OpenAI's API")] = "http://127.0.0.1:8000",
    api_key: ApiKey = None,
    model: Annotated[str | None, typer.Option(help="Model to ask (default: the first served)")] = None,
    workload: WorkloadNames = None,
    shape: ShapeText = None,
    shared_tokens: SharedTokens = 0,
    trace: TraceFile = None,
    speed: Speed = 1.0,
    limit: Limit = None,
    rate: Rate = None,
    rates: Rates = None,
    concurrency: Concurrency = None,
    seed: Seed = 0,
    warmup: Warmup = 1,
    text: Annotated[
        bool, typer.Option("--text", help="Send prompts as text instead of token ids", rich_help_panel=ASKING)
    ] = False,
    chat: Annotated[bool, typer.Option("--chat", help="Use the chat API", rich_help_panel=ASKING)] = False,
    temperature: Temperature = None,
    ignore_eos: IgnoreEos = True,
    slo_ttft: SloTtft = None,
    slo_tpot: SloTpot = None,
    json: JsonFile = None,
    html: HtmlFile = None,
) -> None:
    """Load a server and report latency, throughput and goodput."""
    from penstock.tools.bench import serve_bench
    from penstock.tools.bench.request_body import Dialect
    from penstock.tools.bench.selection import Arrivals, Work
    from penstock.tools.bench.summary import ServiceLevel
    from penstock.tools.bench.watcher import ProgressBar

    _check_files(json, html)
    work = Work(
        names=workload,
        shape=shape,
        shared_tokens=shared_tokens,
        trace=trace,
        speed=speed,
        limit=limit,
        seed=seed,
        temperature=temperature,
    )
    arrivals = Arrivals(rate=rate, rates=rates, concurrency=concurrency, seed=seed)
    target = serve_bench.ServeTarget(
        url=url,
        api_key=api_key,
        model=model,
        dialect=Dialect(chat=chat, text=text, ignore_eos=ignore_eos),
        warm_up_requests=warmup,
    )
    workloads = arrivals.workloads(work)
    with ProgressBar(Console(stderr=True)) as bar:
        report = _run(serve_bench.bench_serve(target, workloads, ServiceLevel(slo_ttft, slo_tpot), watcher=bar))
    publish(report, json, html)
    if report.cut_short:
        _tell_cut_short()
        raise typer.Exit(130)
    if not any(run.num_completed for run in report.runs):
        raise typer.Exit(1)


@app.command()
@takes_options(*ENGINE_OPTIONS)
def offline(
    sourced: Sourced,
    *,
    workload: WorkloadNames = None,
    shape: ShapeText = None,
    shared_tokens: SharedTokens = 0,
    trace: TraceFile = None,
    limit: Limit = None,
    seed: Seed = 0,
    warmup: Warmup = 1,
    temperature: Temperature = None,
    ignore_eos: IgnoreEos = True,
    slo_ttft: SloTtft = None,
    slo_tpot: SloTpot = None,
    json: JsonFile = None,
    html: HtmlFile = None,
) -> int:
    """Run an engine in this process, all requests at once, without a server."""
    from penstock.tools.bench.document import new_report
    from penstock.tools.bench.offline_bench import OfflineBench
    from penstock.tools.bench.selection import Work
    from penstock.tools.bench.summary import ServiceLevel
    from penstock.tools.bench.watcher import ProgressBar

    _check_files(json, html)
    work = Work(
        names=workload,
        shape=shape,
        shared_tokens=shared_tokens,
        trace=trace,
        limit=limit,
        seed=seed,
        temperature=temperature,
    )
    workloads = work.offline_workloads()

    from penstock.commands.models import fetch
    from penstock.llm import LLM

    fetch(sourced.options)
    model = sourced.options.model
    given = {name: getattr(sourced.options, name) for name in sourced.sources if name != "model"}
    with LLM(model, **given) as llm, ProgressBar(Console(stderr=True)) as bar:
        bench = OfflineBench(
            completer=llm,
            vocab_size=llm.spec.vocab_size,
            max_context_tokens=llm.config.max_context_tokens,
            ignore_eos=ignore_eos,
            warm_up_requests=warmup,
            service_level=ServiceLevel(slo_ttft, slo_tpot),
        )
        runs, ended = _until_ended(bench.run(workloads, bar))
    if runs:
        report = new_report(
            runs,
            target="this process",
            model=model,
            prompts="token ids",
            ignored_end_of_text=ignore_eos,
            cut_short=ended is not None,
        )
        publish(report, json, html)
    if ended is not None:
        if runs:
            _tell_cut_short()
        raise ended
    return 0


@app.command()
@takes_options(*ENGINE_OPTIONS)
def profile(
    sourced: Sourced,
    *,
    out: Annotated[Path, output_flag("--out", "Where to write the profile")],
    commit: Annotated[str, typer.Option(help="The commit to name in it")] = "",
) -> int:
    """Time an engine's steps: the profile that --device simulated and `penstock simulate` follow."""
    from penstock.commands import profile

    return profile.run(sourced, out, commit)


@app.command()
def compare(
    first: Annotated[Path, typer.Argument(metavar="A.json", help="A report of `penstock bench --json`")],
    second: Annotated[Path, typer.Argument(metavar="B.json", help="Another, of the same workloads")],
) -> None:
    """Show the ratios of two reports."""
    from penstock.tools.bench import comparison, document, tables

    before, after = document.read_report(first), document.read_report(second)
    compared = comparison.compare(before, after)
    if not comparison.common_labels(before, after):
        labels = ", ".join(run.label for run in before.runs)
        raise ConfigError("B.json", str(second), f"it has no run that the first has too; those are: {labels}")
    if not compared:
        raise ConfigError("B.json", str(second), "neither report has a figure of the runs that are in both")
    Console().print(tables.comparison_table(compared))


def _check_files(json: Path | None, html: Path | None) -> None:
    if html is not None:
        from penstock.tools.bench import html_report

        html_report.check_html_possible()
        if json is not None and json.resolve() == html.resolve():
            raise ConfigError("--html", str(html), "--json names the same file; name another")


def publish(report: "Report", file: Path | None, html: Path | None = None) -> None:
    """Print every run, and where there are several, all on one page; write the files that are named."""
    from penstock.tools.bench import document, tables

    if file is not None:
        document.write_report(report, file)
    console = Console()
    console.print(Text(f"{report.model} at {report.target}, prompts as {report.prompts}", style="dim"), soft_wrap=True)
    for run in report.runs:
        console.print(tables.run_table(run))
    if len(report.runs) > 1:
        console.print(tables.overview_table(report))
    if html is not None:
        from penstock.tools.bench import html_report

        html_report.write_html(report, html)


def _until_ended(measuring: Iterator["Run"]) -> "tuple[list[Run], PenstockError | KeyboardInterrupt | None]":
    """Return the runs that are done, and what ended the rest of them, if anything did."""
    runs = []
    try:
        for run in measuring:
            runs.append(run)
    except (PenstockError, KeyboardInterrupt) as error:
        return runs, error
    return runs, None


def _tell_cut_short() -> None:
    Console(stderr=True).print("Cut short: this is what was measured until then.")


def _run(measuring: "Coroutine[Any, Any, Report]") -> "Report":
    """Run on the fastest event loop there is: a generator's own time is in every latency it measures."""
    try:
        import uvloop
    except ImportError:
        return asyncio.run(measuring)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(measuring)
