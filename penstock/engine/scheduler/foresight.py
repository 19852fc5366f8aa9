"""The parts that let a scheduler look ahead, made to fit each other: cost model, step times, pace,
chunks of prompts, admission, launch moment, pledges.

A scheduler without foresight (a batch of which only the end counts) runs steps as large as they may be and promises
nothing.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from penstock.engine.scheduler.admission import Admission
from penstock.engine.scheduler.answer_lengths import AnswerLengths
from penstock.engine.scheduler.cost_model import CostModel, StepCosts
from penstock.engine.scheduler.launch_moment import LaunchMoment
from penstock.engine.scheduler.pledges import Pledges
from penstock.engine.scheduler.prompt_chunks import PromptChunks
from penstock.engine.scheduler.request_state import RequestState
from penstock.engine.scheduler.serving_pace import ServingPace
from penstock.engine.scheduler.step_times import StepTimes


@dataclass(frozen=True, slots=True)
class Foresight:
    model: CostModel
    times: StepTimes
    pace: ServingPace
    chunks: PromptChunks
    admission: Admission
    launch: LaunchMoment
    pledges: Pledges

    def note_taken(self, request: RequestState, lengths: AnswerLengths) -> None:
        """A request was let in."""
        self.pace.note_arrival(request.tenant, request.num_prompt_tokens)
        self.pace.note_promise(request)
        self.pledges.note_taken(request)
        self.admission.note_taken(request, lengths)

    def note_end(self, request: RequestState) -> None:
        """A request that was let in has ended."""
        self.pace.note_end(request)
        self.pledges.note_end(request)

    @classmethod
    def make(
        cls,
        *,
        max_step_tokens: int,
        clock: Callable[[], float],
        known: StepCosts | None = None,
        step_sizes: Sequence[int] = (),
    ) -> "Foresight":
        """Return parts that learn from the steps that run, from `known` costs on where there are any.

        `step_sizes`: the runner's, see there.
        """
        model = CostModel(known)
        times = StepTimes(model, clock)
        pace = ServingPace(times, max_step_tokens, clock)
        return cls(
            model,
            times,
            pace,
            PromptChunks(pace, model, clock, step_sizes),
            Admission(times, pace, clock),
            LaunchMoment(times, clock),
            Pledges(times, pace),
        )
