"""The simulated device as the engine's builder sees it: facts from a profile, and a runner that follows it."""

from penstock import machine
from penstock.engine.config import DTYPES, DeviceFacts, EngineConfig
from penstock.engine.device import Device, Progress
from penstock.engine.runner.interface import Runner
from penstock.engine.simulated.language import SimulatedLanguage
from penstock.engine.simulated.profile import Profile, read_profile
from penstock.engine.simulated.runner import SimulatedRunner, Timing
from penstock.engine.timeline import Timeline
from penstock.models.spec import ModelSpec
from penstock.models.store import ModelFiles


class SimulatedDevice(Device):
    """`--device simulated`: no weights are read, whatever the model."""

    def probe(self, spec: ModelSpec) -> DeviceFacts:
        return facts_of(read_profile(self.options.simulated_profile))

    def make_runner(
        self,
        config: EngineConfig,
        spec: ModelSpec,
        files: ModelFiles,
        timeline: Timeline,
        progress: Progress | None,
    ) -> Runner:
        return make_runner(read_profile(self.options.simulated_profile), config, spec)

    def refuse_damage(self, spec: ModelSpec, files: ModelFiles) -> None:
        """There are no weights."""


def facts_of(profile: Profile) -> DeviceFacts:
    """What the profiled device can hold and do."""
    others = [name for name in DTYPES if name != profile.dtype]
    dtypes = (profile.dtype, *others) if profile.device_kind == "cuda" else ("float32",)
    return DeviceFacts(
        kind=profile.device_kind,
        name=f"simulated {profile.device} with {profile.model}{' (provisional)' if profile.provisional else ''}",
        num_threads=max(1, int(machine.usable_cores())),
        free_bytes=profile.memory_bytes,
        fast_dtypes=dtypes,
        attention_backends=dict.fromkeys(DTYPES, ("simulated",)),
        is_simulated=True,
        weight_bytes=profile.weight_bytes,
        kv_token_bytes=profile.kv_token_bytes,
    )


def make_runner(
    profile: Profile, config: EngineConfig, spec: ModelSpec, timing: Timing | None = None
) -> SimulatedRunner:
    language = SimulatedLanguage(spec.vocab_size, spec.eos_token_ids, profile.mean_answer_tokens)
    return SimulatedRunner(profile, language, config.max_running, timing or Timing())
