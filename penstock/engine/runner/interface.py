"""What the engine asks of whatever runs its plans: a model, a fleet of ranks, a simulator or a test."""

from abc import ABC, abstractmethod
from collections.abc import Sequence

from penstock.engine.scheduler.step_plan import StepPlan, StepResult


class LaunchedStep(ABC):
    """A step under way."""

    @property
    @abstractmethod
    def is_done(self) -> bool:
        """Whether `wait` would return at once."""

    @abstractmethod
    def wait(self) -> StepResult:
        """Block until the step is done. Raises StepFailed if it could not be."""


class Runner(ABC):
    """Runs plans in the order they are launched."""

    @property
    def step_sizes(self) -> Sequence[int]:
        """Numbers of tokens, ascending, to which steps with prompts are filled up. Empty: they are not."""
        return ()

    @abstractmethod
    def launch(self, plan: StepPlan) -> LaunchedStep:
        """Start a step and return at once."""

    @abstractmethod
    def read_blocks(self, blocks: Sequence[int]) -> list[bytes]:
        """Return the KV of these blocks as they are after every launched step. Waits for those steps."""

    @abstractmethod
    def write_blocks(self, blocks: Sequence[int], contents: Sequence[bytes]) -> None:
        """Fill blocks with what another engine read, before any step that is launched later."""

    def use_idle_moment(self) -> bool:
        """Do a little of what makes later steps faster, while nobody waits. False: there is nothing left to do."""
        return False

    @abstractmethod
    def close(self) -> None:
        """Let go of threads, processes and memory."""


class StepFailed(Exception):
    """A step raised; its requests cannot go on, later steps can."""
