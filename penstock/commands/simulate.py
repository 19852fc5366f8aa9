"""`penstock simulate`: what a server would do under load on a profiled device, in virtual time."""

from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console
from rich.text import Text

from penstock.commands.bench import publish
from penstock.config import Sourced
from penstock.engine.simulated.profile import read_profile
from penstock.errors import ConfigError
from penstock.tools.bench import document
from penstock.tools.bench.selection import Arrivals, Work
from penstock.tools.bench.summary import ServiceLevel
from penstock.tools.simulator import agreement
from penstock.tools.simulator.server import configure
from penstock.tools.simulator.simulation import simulate


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulated:
    """What is asked for."""

    profile: str
    num_replicas: int
    policy: str
    level: ServiceLevel
    json: Path | None
    against: Path | None


def run(sourced: Sourced, work: Work, arrivals: Arrivals, asked: Simulated) -> int:
    """Print the report; with a measured one to compare with, return 1 where they differ too much."""
    measured = None if asked.against is None else document.read_report(asked.against)
    workloads = arrivals.workloads(work)
    profile = read_profile(asked.profile, option="--profile")
    simulated_options = replace(sourced.options, device="simulated", simulated_profile=asked.profile)
    server = configure(
        Sourced(simulated_options, sourced.sources), profile, num_replicas=asked.num_replicas, policy=asked.policy
    )
    report = simulate(server, workloads, asked.level)
    publish(report, asked.json)
    if profile.provisional:
        Console().print(Text("The profile is provisional: not measured step by step.", style="yellow"))
    return 0 if measured is None else _compare(measured, report, asked.against)


def _compare(measured: document.Report, simulated: document.Report, file: Path | None) -> int:
    compared = agreement.agreement(measured, simulated)
    if not compared:
        labels = ", ".join(item.label for item in simulated.runs)
        raise ConfigError("--against", str(file), f"it has none of the runs that were simulated: {labels}")
    console = Console()
    console.print(agreement.agreement_table(compared))
    worst = agreement.worst_error(compared)
    console.print(Text(f"largest error {worst:.1%}; {agreement.MAX_ERROR:.0%} is the limit"))
    return 1 if worst > agreement.MAX_ERROR else 0
