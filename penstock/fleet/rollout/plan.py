"""How versions of a model share its requests, and what a rollout is to be: its steps and what its gate allows.

As the fleet's file says it; frozen. Knows nothing of how any of it is done.
"""

import math
import re

import msgspec

from penstock.errors import ConfigError

# The version of replicas that name none.
DEFAULT_VERSION = "stable"
VERSION_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
# The step in which the candidate gets copies of requests, and callers never see its answers.
SHADOW = "shadow"
WHOLE = 100.0


class GateSection(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a candidate may be worse by, and how sure the gate must be."""

    max_ttft_ratio: float = 1.25  # candidate over stable
    max_time_per_token_ratio: float = 1.25
    max_error_increase: float = 0.02  # of the part of requests that fail
    compares_outputs: bool = True
    max_divergence: float = 0.02  # part of the tokens that differ though all before them were equal
    max_logprob_distance: float = 0.1  # nats between the versions' scores of a token, where answers tell them
    asks_logprobs: bool = False  # has both versions answer more copies that do, where callers do not ask
    window_seconds: float = 5.0  # answers that ended within so long are compared, and tell one ratio of times
    error_level: float = 0.05  # the chance, in each step, of a wrong promotion and of a wrong rollback
    first_look: int = 16  # requests to each version before the first judgement; then twice as many, and so on
    min_step_seconds: float = 60.0
    max_step_seconds: float = 21600.0  # what is not shown to be good by then is rolled back


class RolloutSection(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One model's versions."""

    stable: str = DEFAULT_VERSION
    split: dict[str, float] = {}  # version to percent of the sessions, while no rollout runs
    tenants: dict[str, str] = {}  # tenant to version, unless it was rolled back
    steps: tuple[str | float, ...] = (SHADOW, 5.0, 25.0, 50.0, WHOLE)
    shadow_percent: float = 10.0  # of the sessions whose requests are copied in the step "shadow"
    max_shadows: int = 8  # copies under way at once, in each gateway; others are not made
    gate: GateSection = GateSection()


def check_rollout(model: str, section: RolloutSection, option: str) -> None:
    """Raise ConfigError for the first value that makes no sense."""
    where = f"{option}: rollouts.{model}"
    named = {"stable": [section.stable], "split": [*section.split], "tenants": [*section.tenants.values()]}
    for name, versions in named.items():
        for version in versions:
            if not VERSION_NAME.fullmatch(version):
                right = "versions have 1 to 64 letters, digits, '.', '_' or '-'"
                raise ConfigError(f"{where}.{name}", version[:200], right)
    percents = [step for step in section.steps if not isinstance(step, str)]
    names = [step for step in section.steps if isinstance(step, str)]
    if names not in ([], [SHADOW]) or (names and section.steps[0] != SHADOW):
        raise ConfigError(
            f"{where}.steps", list(section.steps), f'"{SHADOW}" may come first, once; the rest is percent'
        )
    if not percents or percents[-1] != WHOLE or percents != sorted(set(percents)) or not percents[0] > 0:
        raise ConfigError(f"{where}.steps", list(section.steps), "give rising percents that end with 100")
    if not all(0 <= share <= WHOLE for share in section.split.values()) or sum(section.split.values()) > WHOLE:
        raise ConfigError(f"{where}.split", section.split, "give percents that are at most 100 together")
    if section.stable in section.split and not math.isclose(sum(section.split.values()), WHOLE):
        right = f"leave {section.stable!r} out, which gets what is left of 100, or give percents that are 100 together"
        raise ConfigError(f"{where}.split", section.split, right)
    if not 0 < section.shadow_percent <= WHOLE:
        raise ConfigError(f"{where}.shadow_percent", section.shadow_percent, "give a percent over 0, at most 100")
    if section.max_shadows < 1:
        raise ConfigError(f"{where}.max_shadows", section.max_shadows, "give at least 1")
    _check_gate(f"{where}.gate", section.gate)


def _check_gate(where: str, gate: GateSection) -> None:
    for name in ("max_ttft_ratio", "max_time_per_token_ratio"):
        if not 1 < getattr(gate, name) < math.inf:
            raise ConfigError(f"{where}.{name}", getattr(gate, name), "give a number over 1")
    for name in ("max_error_increase", "max_divergence", "error_level"):
        if not 0 < getattr(gate, name) < 1:
            raise ConfigError(f"{where}.{name}", getattr(gate, name), "give a number between 0 and 1")
    if not 0 < gate.max_logprob_distance < math.inf:
        raise ConfigError(f"{where}.max_logprob_distance", gate.max_logprob_distance, "give a number over 0, in nats")
    if gate.asks_logprobs and not gate.compares_outputs:
        raise ConfigError(f"{where}.asks_logprobs", True, "it needs compares_outputs = true, or they are for nothing")
    if not 0 < gate.window_seconds < math.inf:
        raise ConfigError(f"{where}.window_seconds", gate.window_seconds, "give seconds, over 0")
    if gate.first_look < 1:
        raise ConfigError(f"{where}.first_look", gate.first_look, "give at least 1")
    if not 0 <= gate.min_step_seconds <= gate.max_step_seconds < math.inf:
        raise ConfigError(
            f"{where}.max_step_seconds", gate.max_step_seconds, "give seconds, no fewer than min_step_seconds"
        )
