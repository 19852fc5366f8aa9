"""The `penstock` command.

Each command imports what it needs when it runs, so that `--help` and `version` load neither torch nor a web server.
"""

import errno
import io
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

import penstock
from penstock.commands import bench, deploy, keys, rollout
from penstock.commands.flags import ENGINE_OPTIONS, number_flag, options_of, takes_options
from penstock.config import Sourced, unknown_variables
from penstock.errors import PenstockError
from penstock.fleet.router.policies.registry import POLICIES
from penstock.request import SamplingParams

EPILOG = "Options can also be set in the environment (PENSTOCK_PORT for --port) or in a TOML file (--config)."

app = typer.Typer(
    name="penstock",
    help="Penstock serves language models: an OpenAI-compatible server, from a laptop to a fleet.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

app.add_typer(bench.app, name="bench")
app.add_typer(deploy.app, name="deploy")
app.add_typer(keys.app, name="keys")
app.add_typer(rollout.app, name="rollout")

Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table")]
MaxTokens = Annotated[
    int | None,
    number_flag("--max-tokens", "Most tokens to answer with (default: 128, or what fits)", kind=int, low=1),
]
Temperature = Annotated[float | None, number_flag("--temperature", "0 is greedy; more is more varied", high=2.0)]


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"penstock {penstock.__version__}")
        raise typer.Exit


@app.callback()
def penstock_command(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and leave", callback=_show_version, is_eager=True)
    ] = False,
) -> None:
    """Take the options that stand before any command, and tell of variables that no command heeds."""
    for sentence in unknown_variables():
        typer.echo(sentence, err=True)


@app.command(epilog=EPILOG)
@takes_options()
def serve(sourced: Sourced) -> int:
    """Serve a model over OpenAI's API."""
    from penstock.commands import serve

    return serve.run(sourced)


@app.command(epilog=EPILOG)
@takes_options(
    "host", "port", "keys", "store", "admin_listen", "max_body_bytes", "drain_seconds", "log_format",
    defaults={"port": 8080},  # a server on the same machine has 8000
)  # fmt: skip
def gateway(
    sourced: Sourced,
    replica: Annotated[
        list[str] | None,
        typer.Option(metavar="URL", help="A server to send requests to, without /v1; may be given again"),
    ] = None,
    fleet: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="TOML file of replicas, aliases, policies and discovery", show_default=False),
    ] = None,
    policy: Annotated[
        str | None,
        typer.Option(
            help=f"How replicas are chosen: {', '.join(POLICIES.names)} (default: least-loaded)", show_default=False
        ),
    ] = None,
) -> int:
    """Serve many servers as one: route, retry, resume."""
    from penstock.commands import gateway

    return gateway.run(sourced, gateway.Wanted(replica or (), fleet, policy))


@app.command(epilog=EPILOG)
@takes_options("model", "revision", "cache_dir")
def pull(sourced: Sourced) -> int:
    """Fetch a model into the cache folder."""
    from penstock.commands import models

    return models.pull(sourced.options)


@app.command(epilog=EPILOG)
@takes_options("cache_dir")
def models(sourced: Sourced, json: Json = False) -> int:
    """List the models that can be named and those fetched."""
    from penstock.commands import models

    return models.show(sourced.options, as_json=json)


@app.command()
def chat(
    *,
    url: Annotated[str, typer.Option(help="The server")] = "http://127.0.0.1:8000",
    api_key: bench.ApiKey = None,
    model: Annotated[
        str | None, typer.Option(help="Model to talk to (default: the first served)", show_default=False)
    ] = None,
    system: Annotated[str | None, typer.Option(help="System message", show_default=False)] = None,
    max_tokens: Annotated[
        int | None,
        number_flag(
            "--max-tokens", "Most tokens of an answer (default: 512, or half of a smaller context)", kind=int, low=1
        ),
    ] = None,
    temperature: Temperature = 0.7,
) -> None:
    """Chat with a server in the terminal; piped lines are turns too."""
    from penstock.commands import chat

    sampling = {"max_tokens": max_tokens, "temperature": temperature}
    chat.run(url, api_key, model, system, {name: value for name, value in sampling.items() if value is not None})


@app.command(epilog=EPILOG)
@takes_options(*ENGINE_OPTIONS, model_is_argument=False)
def generate(
    sourced: Sourced,
    prompt: Annotated[str, typer.Argument(help="Text to continue; - reads standard input")],
    max_tokens: MaxTokens = None,
    temperature: Temperature = 0.0,
) -> int:
    """Continue a prompt once, without a server."""
    from penstock.commands import generate

    if prompt == "-" and isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(encoding="utf-8", errors="surrogateescape")  # as in arguments: the command refuses them
    text = sys.stdin.read() if prompt == "-" else prompt
    return generate.run(sourced, text, SamplingParams(max_tokens=max_tokens, temperature=temperature or 0.0))


@app.command(epilog=EPILOG)
@takes_options()
def explain(sourced: Sourced, json: Json = False) -> int:
    """Show every option that `serve` would use, its value and why."""
    from penstock.commands import explain

    return explain.run(sourced, as_json=json)


@app.command(name="plan-memory", epilog=EPILOG)
@takes_options(
    "model",
    "revision",
    "load_format",
    "precision",
    "max_context_tokens",
    "cache_dir",
    "device",
    "simulated_profile",
    "kv_memory",
    "block_tokens",
    "max_running",
    "max_step_tokens",
)
def plan_memory(sourced: Sourced, json: Json = False) -> int:
    """Show what a model will take of the device's memory, and what fits."""
    from penstock.commands import memory

    return memory.run(sourced, as_json=json)


@app.command(epilog=EPILOG)
@takes_options("device", "cache_dir", "host", "port")
def doctor(sourced: Sourced, json: Json = False) -> int:
    """Check this computer and say what to do."""
    from penstock.commands import doctor

    return doctor.run(sourced.options, as_json=json)


@app.command(epilog=EPILOG)
@takes_options("max_context_tokens", *options_of("memory", "scheduler"))
def simulate(
    sourced: Sourced,
    *,
    profile: Annotated[
        str, typer.Option(metavar="NAME|FILE", help="Device and model; NAME@0.1 takes a tenth of the time")
    ] = "h200-llama-8b",
    replicas: Annotated[int, number_flag("--replicas", "Servers behind a gateway", kind=int, low=1, high=1024)] = 1,
    policy: Annotated[str, typer.Option(metavar="NAME", help="How it spreads requests over them")] = "least-loaded",
    workload: bench.WorkloadNames = None,
    shape: bench.ShapeText = None,
    shared_tokens: bench.SharedTokens = 0,
    trace: bench.TraceFile = None,
    speed: bench.Speed = 1.0,
    limit: bench.Limit = None,
    rate: bench.Rate = None,
    rates: bench.Rates = None,
    concurrency: bench.Concurrency = None,
    seed: bench.Seed = 0,
    slo_ttft: bench.SloTtft = None,
    slo_tpot: bench.SloTpot = None,
    json: bench.JsonFile = None,
    against: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="A measured report of `penstock bench serve --json`: show the errors"),
    ] = None,
    autoscale: Annotated[
        str | None,
        typer.Option(metavar="NAME,…", help="Scale by each: promises, queue-length, and an oracle to compare with"),
    ] = None,
    start_seconds: Annotated[float, number_flag("--start-seconds", "How long a replica takes to start", low=0.1)] = 6.5,
) -> int:
    """Tell what a server would do under load, in virtual time."""
    from penstock.commands import simulate
    from penstock.tools.bench.selection import Arrivals, Work
    from penstock.tools.bench.summary import ServiceLevel

    work = Work(
        names=workload, shape=shape, shared_tokens=shared_tokens, trace=trace, speed=speed, limit=limit, seed=seed
    )
    arrivals = Arrivals(rate=rate, rates=rates, concurrency=concurrency, seed=seed)
    level = ServiceLevel(slo_ttft, slo_tpot)
    if autoscale is not None:
        from penstock.commands import scaling

        scaled = scaling.Scaled(
            profile=profile,
            num_replicas=replicas,
            policy=policy,
            level=level,
            autoscale=autoscale,
            start_seconds=start_seconds,
            unused={"--json": json, "--against": against},
        )
        return scaling.run(sourced, work, arrivals, scaled)
    asked = simulate.Simulated(
        profile=profile, num_replicas=replicas, policy=policy, level=level, json=json, against=against
    )
    return simulate.run(sourced, work, arrivals, asked)


@app.command(epilog=EPILOG)
@takes_options("store")
def usage(
    sourced: Sourced,
    tenant: Annotated[str | None, typer.Option(help="Only this tenant's", show_default=False)] = None,
    since: Annotated[
        str | None, typer.Option(metavar="DAY", help="From this UTC day on: 2026-01-31, or 7d", show_default=False)
    ] = None,
    json: Json = False,
) -> int:
    """Show what each tenant used of each model, by day."""
    from penstock.commands import usage

    return usage.run(sourced.options, tenant=tenant, since=since, as_json=json)


@app.command()
def version() -> None:
    """Print the version."""
    _show_version(True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command. What a person can act on is one sentence on standard error, and status 2."""
    _take_any_character()
    try:
        try:
            app(args=arguments, prog_name="penstock")
        finally:
            if sys.stdout is not None:
                sys.stdout.flush()  # here, where it can be told that it failed
    except PenstockError as error:
        return _fail(str(error))
    except BrokenPipeError:
        _drop_output()
        return 1
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        _drop_output()
        return _fail(f"{error.filename or 'the output'} could not be written: {error.strerror}; make room there")
    except KeyboardInterrupt:
        return 130
    return 0


def _fail(sentence: str) -> int:
    Console(stderr=True).print(Text(sentence, style="red"), soft_wrap=True)
    return 2


def _take_any_character() -> None:
    """Have what the terminal's encoding lacks written as its code: answers and names of files may hold anything."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def _drop_output() -> None:
    """Let go of what standard output did not take: Python would try to write it once more as it ends."""
    if sys.__stdout__ is not None:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.__stdout__.fileno())
        os.close(nowhere)
