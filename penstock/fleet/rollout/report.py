"""A rollout for people: what was decided, step by step, and on what grounds, as Markdown.

Knows nothing of how decisions are made.
"""

import datetime

from penstock.fleet.rollout.course import Rollout
from penstock.fleet.rollout.evidence import Evidence
from penstock.fleet.rollout.gate import Finding

_SECONDS = ("ttft", "time per token")


def write_report(rollout: Rollout, evidence: Evidence | None = None) -> str:
    """Return a page about one rollout; `evidence` is what the step that it is in has shown so far."""
    lines = [
        f"# Rollout of {rollout.model}: {rollout.stable} → {rollout.candidate}",
        "",
        f"**{rollout.status.replace('_', ' ')}**" + (f": {rollout.reason}" if rollout.reason else ""),
        "",
        f"Begun {_moment(rollout.began_at)}. Steps: {', '.join(_name(step) for step in rollout.steps)}. "
        f"Error level of each step: {rollout.gate.error_level:g}.",
    ]
    for report in rollout.history:
        seconds = report.ended_at - report.began_at
        lines += ["", f"## {_name(report.step)}: {report.outcome}", ""]
        lines += [f"From {_moment(report.began_at)}, {seconds:.0f} s, looked at {report.looks} times.", ""]
        lines += _table(rollout, report.findings)
    if rollout.is_running:
        lines += ["", f"## {_name(rollout.step)}: under way", ""]
        if evidence is not None:
            lines += [
                f"{evidence.stable.requests} requests to the stable version ({rollout.stable}), "
                f"{evidence.candidate.requests} to the candidate ({rollout.candidate}), "
                f"{evidence.compared_answers} answers compared; looked at {rollout.looks} times, "
                f"next with {rollout.next_look} requests to each.",
                "",
            ]
            lines += [f"{evidence.losses}.", ""] if evidence.losses else []
        lines += _table(rollout, rollout.findings)
    return "\n".join(lines).rstrip() + "\n"


def _table(rollout: Rollout, findings: list[Finding]) -> list[str]:
    if not findings:
        return ["Nothing was judged."]
    # By role and name: whoever makes versions may call any of them "stable".
    stable, candidate = (_cell(version) for version in (rollout.stable, rollout.candidate))
    lines = [
        f"| measure | stable ({stable}) | candidate ({candidate}) | worse by | allowed | values | verdict |",
        "|---|---|---|---|---|---|---|",
    ]
    for finding in findings:
        shown = [_value(finding, value) for value in (finding.stable, finding.candidate)]
        span = f"{_number(finding.lower)} to {_number(finding.upper)}"
        cells = [finding.measure, *shown, span, f"{finding.limit:g}", str(finding.num_values), finding.verdict.value]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _value(finding: Finding, value: float | None) -> str:
    if value is not None and finding.measure.startswith(_SECONDS):
        return f"{value * 1000:.1f} ms"
    return _number(value, "–")


def _number(value: float | None, missing: str = "?") -> str:
    return missing if value is None else f"{value:.3g}"


def _name(step: str | float) -> str:
    return step if isinstance(step, str) else f"{step:g} %"


def _moment(seconds: float) -> str:
    return datetime.datetime.fromtimestamp(seconds, tz=datetime.UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
