"""What decides about a request's first token, at one moment: now, or one that is foreseen.

Changes nothing. Knows nothing of how the load goes on, nor of refusals.
"""

from collections.abc import Callable
from dataclasses import dataclass

from penstock.engine.scheduler.cost_model import StepShape
from penstock.engine.scheduler.load import Claim, Load, Queue, ahead_of, prompt_tokens
from penstock.engine.scheduler.request_state import RequestState
from penstock.engine.scheduler.rows import Endings
from penstock.engine.scheduler.step_times import StepTimes


@dataclass(frozen=True, slots=True)
class Scene:
    """What a request finds that comes at this moment."""

    rest_seconds: float  # until the steps under way are done
    decoding: StepShape  # a step of all that draw tokens and do not give way to the request
    tightest_target: float | None  # the least time per token that was promised to one of those
    ahead: Queue
    tokens_behind: float  # of prompts that run behind its own, beside its answer
    is_behind: bool  # all but a worse tier have ended
    has_prompts: bool  # before it or behind it: with its last tokens others' run
    num_free_rows: int
    num_free_blocks: int
    may_displace: Callable[[int], bool]  # whether the request would get so many rows although none is free
    endings: Callable[[], Endings]  # of those that have rows
    mean_waiting_answer: Callable[[], float | None]  # tokens that those who wait will draw; None where nobody does


def scene_now(request: RequestState, load: Load, times: StepTimes, now: float) -> Scene:
    """What the request finds where it comes now."""
    claim = Claim.of(request, load)
    num_rows = context = 0
    tightest: float | None = None
    has_prompts = any([load.waiting.num_of_tier(tier) for tier in range(request.level[0] + 1)])
    for group in load.rows.groups:
        # Who was promised a time per token pauses only if it has saved enough by then: that is not counted on.
        pauses = claim.passes(group.level, group.account)
        num_rows += group.num_paced if pauses else group.num_drawing
        context += group.paced_context_tokens if pauses else group.context_tokens
        if group.tightest_target is not None:
            tightest = group.tightest_target if tightest is None else min(tightest, group.tightest_target)
        has_prompts = has_prompts or (group.num_prompts > 0 and group.level[0] <= request.level[0])
    ahead = ahead_of(claim, load)
    return Scene(
        rest_seconds=max(0.0, times.free_at(now) - now),
        decoding=StepShape(num_rows, context),
        tightest_target=tightest,
        ahead=ahead,
        tokens_behind=max(0.0, prompt_tokens(request.level[0], load) - ahead.tokens),
        is_behind=False,
        has_prompts=has_prompts,
        num_free_rows=load.num_free_rows,
        num_free_blocks=load.num_free_blocks,
        may_displace=load.may_displace,
        endings=lambda: load.rows.endings,
        mean_waiting_answer=load.mean_waiting_answer,
    )
