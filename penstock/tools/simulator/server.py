"""What is simulated: a profile, an engine configured for it, and how many of them behind which policy."""

from dataclasses import dataclass

from penstock.config import Sourced
from penstock.engine.config import EngineConfig, resolve
from penstock.engine.simulated.device import facts_of
from penstock.engine.simulated.profile import Profile
from penstock.errors import ConfigError
from penstock.fleet.router.policies.registry import POLICIES
from penstock.models.spec import ModelSpec
from penstock.request import NO_TARGETS, Targets

DEFAULT_POLICY = "least-loaded"


@dataclass(frozen=True, slots=True)
class SimulatedServer:
    """One kind of replica, and the fleet that it begins with."""

    profile: Profile
    config: EngineConfig
    spec: ModelSpec
    num_replicas: int = 1
    policy: str = DEFAULT_POLICY
    targets: Targets = NO_TARGETS  # what every request is promised


def configure(
    sourced: Sourced, profile: Profile, *, num_replicas: int = 1, policy: str = DEFAULT_POLICY
) -> SimulatedServer:
    """Resolve options for the profiled model, as a server on that device would."""
    if policy not in POLICIES:
        raise ConfigError("--policy", policy, f"give one of: {', '.join(POLICIES.names)}")
    spec = spec_of(profile)
    config, _ = resolve(sourced, spec, facts_of(profile))
    options = sourced.options
    wanted = (options.target_ttft_ms, options.target_time_per_token_ms, options.target_deadline_ms)
    targets = Targets(*map(_seconds, wanted))
    return SimulatedServer(profile, config, spec, num_replicas, policy, targets)


def spec_of(profile: Profile) -> ModelSpec:
    """The profiled model, as far as a scheduler sees it: its sizes are in the profile, and nothing runs its layers."""
    return ModelSpec(
        family="simulated",
        vocab_size=profile.vocab_size,
        hidden_size=0,
        intermediate_size=0,
        num_heads=0,
        num_kv_heads=0,
        head_dim=0,
        max_position=profile.max_context_tokens,
        norm_eps=0.0,
        layers=(),
        ropes=(),
        eos_token_ids=(profile.vocab_size - 1,),
    )


def _seconds(milliseconds: float | None) -> float | None:
    return None if milliseconds is None else milliseconds / 1000
