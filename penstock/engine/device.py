"""What can run a model: the devices that torch drives, and the simulated one. No torch.

A device says what it is and makes a runner. The modules that takes are loaded when it is asked for.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable

from penstock.config import Options
from penstock.engine.config import DeviceFacts, EngineConfig
from penstock.engine.runner.interface import Runner
from penstock.engine.timeline import Timeline
from penstock.models.spec import ModelSpec
from penstock.models.store import ModelFiles
from penstock.registry import Registry

Progress = Callable[[int, int, str], None]


class Device(ABC):
    """A way to run a model."""

    def __init__(self, options: Options) -> None:
        self.options = options

    @abstractmethod
    def probe(self, spec: ModelSpec) -> DeviceFacts:
        """Find out about the device. Raises ConfigError if it is not there."""

    @abstractmethod
    def make_runner(
        self,
        config: EngineConfig,
        spec: ModelSpec,
        files: ModelFiles,
        timeline: Timeline,
        progress: Progress | None,
    ) -> Runner:
        """Load the model and return what runs its plans."""

    @abstractmethod
    def refuse_damage(self, spec: ModelSpec, files: ModelFiles) -> None:
        """After a step that failed: raise ModelError naming file and tensor, where a weight is no finite number."""


DEVICES: Registry[type[Device]] = Registry(
    "device",
    {
        "torch": "penstock.engine.runner.torch_device:TorchDevice",
        "simulated": "penstock.engine.simulated.device:SimulatedDevice",
    },
)


def device_for(options: Options) -> Device:
    """Return the device that `--device` names."""
    return DEVICES.load("simulated" if options.device == "simulated" else "torch")(options)
