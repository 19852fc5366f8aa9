"""`penstock simulate --autoscale`: how well, and how cheaply, a fleet of changing size serves a workload."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from penstock.config import Sourced
from penstock.engine.simulated.profile import read_profile
from penstock.errors import ConfigError
from penstock.fleet.autoscaler.policies.registry import SCALE_POLICIES
from penstock.fleet.config import AutoscalerSection
from penstock.tools.bench.selection import Arrivals, Work, split
from penstock.tools.bench.summary import ServiceLevel
from penstock.tools.bench.workload import Workload
from penstock.tools.simulator.oracle import find_oracle
from penstock.tools.simulator.scaling import AutoscaledSize, ScaledRun, run_scaled
from penstock.tools.simulator.server import SimulatedServer, configure

ORACLE = "oracle"
_ATTAINMENT = 0.99
_MAX_REPLICAS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Scaled:
    """What is asked for."""

    profile: str
    num_replicas: int  # ready when the workload begins
    policy: str
    level: ServiceLevel
    autoscale: str  # scale policies, and `oracle`
    start_seconds: float
    unused: Mapping[str, Path | None]  # flags of a simulation that writes a report


def run(sourced: Sourced, work: Work, arrivals: Arrivals, asked: Scaled) -> int:
    """Print a line for each policy; return 1 where the first of them keeps the level for too few."""
    names = split("--autoscale", asked.autoscale)
    known = [*SCALE_POLICIES.names, ORACLE]
    if names[0] == ORACLE or any(name not in known for name in names):
        raise ConfigError("--autoscale", asked.autoscale, f"give a policy, then others: {', '.join(known)}")
    for name, file in asked.unused.items():
        if file is not None:
            raise ConfigError(name, str(file), "leave it out: --autoscale prints a table of its own, and no report")
    if not asked.level.is_set:
        raise ConfigError("--autoscale", asked.autoscale, "say what is to be kept: --slo-ttft, --slo-tpot or both")
    workloads = arrivals.workloads(work)
    if len(workloads) != 1:
        raise ConfigError("--autoscale", asked.autoscale, "give one workload, and one rate")
    server = _server(sourced, asked)
    runs = _run_all(names, server, workloads[0], asked)
    console = Console()
    console.print(scaling_table(runs))
    console.print(Text(f"The work alone is {sum(runs[0].work):.0f} replica-seconds: no schedule can take less."))
    if server.profile.provisional:
        console.print(Text("The profile is provisional: not measured step by step.", style="yellow"))
    return 0 if runs[0].attainment >= _ATTAINMENT else 1


def section_for(policy: str, start_seconds: float) -> AutoscalerSection:
    """The section that a simulation runs: a second between looks, and the patience of one start."""
    return AutoscalerSection(
        backend={"kind": "simulated"},
        policy=policy,
        max_replicas=_MAX_REPLICAS,
        interval_seconds=1.0,
        scale_down_seconds=start_seconds,
        start_seconds=start_seconds,
    )


def scaling_table(runs: list[ScaledRun]) -> Table:
    """Return a line for each run; costs are compared with the oracle's, where there is one."""
    oracle = next((item for item in runs if item.name == ORACLE), None)
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("ms where times", "within", "replica-s", "× oracle", "most", "TTFT p99", "per token p99"):
        table.add_column(name, justify="left" if name == "ms where times" else "right", no_wrap=True)
    for item in runs:
        ratio = "" if oracle is None else f"{item.replica_seconds / oracle.replica_seconds:.3f}"
        style = "green" if item.attainment >= _ATTAINMENT else "red"
        table.add_row(
            Text(item.name, style="bold"),
            Text(f"{item.attainment:.2%}", style=style),
            f"{item.replica_seconds:.0f}",
            ratio,
            str(item.most_replicas),
            f"{item.ttft_p99_ms:.0f}",
            f"{item.time_per_token_p99_ms:.1f}",
        )
    return table


def _server(sourced: Sourced, asked: Scaled) -> SimulatedServer:
    """The service level is what replicas promise, unless options say otherwise."""
    options = replace(sourced.options, device="simulated", simulated_profile=asked.profile)
    if options.target_ttft_ms is None and options.target_time_per_token_ms is None:
        level = asked.level
        options = replace(options, target_ttft_ms=level.ttft_ms, target_time_per_token_ms=level.time_per_token_ms)
    profile = read_profile(asked.profile, option="--profile")
    return configure(Sourced(options, sourced.sources), profile, num_replicas=asked.num_replicas, policy=asked.policy)


def _run_all(names: list[str], server: SimulatedServer, workload: Workload, asked: Scaled) -> list[ScaledRun]:
    progress = Console(stderr=True)
    runs: list[ScaledRun] = []
    for name in names:
        if name == ORACLE:
            oracle = find_oracle(
                server,
                workload,
                asked.level,
                runs[0].work,
                start_seconds=asked.start_seconds,
                attainment=_ATTAINMENT,
                on_progress=lambda line: progress.print(Text(f"oracle {line}", style="dim")),
            )
            if oracle is not None:
                runs.append(oracle.run)
            continue
        scaler = AutoscaledSize(section_for(name, asked.start_seconds))
        runs.append(run_scaled(name, server, workload, asked.level, scaler, asked.start_seconds))
    return runs
