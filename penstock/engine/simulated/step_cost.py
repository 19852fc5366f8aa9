"""How long a plan takes on a profiled device. Looks at sizes only; knows nothing of clocks or tokens."""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

from penstock.engine.scheduler.step_plan import RowSlice, StepPlan
from penstock.engine.simulated.profile import Profile


@dataclass(frozen=True, slots=True)
class StepWork:
    """What a step runs, in the detail that a profile has."""

    num_tokens: int
    num_singles: int  # slices of one token
    single_context: int  # tokens that these read, together
    num_slices: int  # of several tokens
    pairs: int  # in these: how many tokens each token looks back at, itself included, summed
    num_draws: int

    @property
    def is_decode(self) -> bool:
        """Every slice is one token that is followed by one draw."""
        return self.num_slices == 0 and self.num_draws == self.num_singles


@dataclass(frozen=True, slots=True)
class StepCost:
    """Seconds."""

    launch: float  # the host is busy so long
    run: float  # and then the device


def work_of(slices: Sequence[RowSlice]) -> StepWork:
    num_tokens = num_singles = single_context = pairs = num_draws = 0
    for piece in slices:
        count, start = piece.num_tokens, piece.start
        num_tokens += count
        num_draws += piece.num_samples
        if count == 1:
            num_singles += 1
            single_context += start + 1
        else:
            pairs += count * start + count * (count + 1) // 2
    return StepWork(num_tokens, num_singles, single_context, len(slices) - num_singles, pairs, num_draws)


def step_ms(profile: Profile, shape: StepWork) -> float:
    """Milliseconds on the device."""
    if shape.is_decode:
        decode = profile.decode
        rows = captured_size(decode.graph_sizes, shape.num_singles)
        return decode.base_ms(rows) + decode.context_ms(shape.num_singles) * shape.single_context / 1e3
    mixed = profile.mixed
    return (
        mixed.base_ms(captured_size(mixed.graph_tokens, shape.num_tokens))
        + mixed.pair_ms * shape.pairs / 1e6
        + mixed.context_ms * shape.single_context / 1e3
        + mixed.slice_ms * shape.num_slices
        + mixed.draw_ms(shape.num_draws)
    )


def cost_of(profile: Profile, plan: StepPlan) -> StepCost:
    shape = work_of(plan.slices)
    host = profile.host
    launch_ms = host.decode_launch_ms if shape.is_decode else host.mixed_launch_ms
    run_ms = step_ms(profile, shape) + profile.tier_block_ms * len(plan.tier_copies)
    return StepCost(launch_ms / 1e3, run_ms / 1e3)


def captured_size(sizes: Sequence[int], count: int) -> int:
    """The smallest captured size that holds so many; the number itself where nothing is captured."""
    index = bisect_left(sizes, count)
    return sizes[index] if index < len(sizes) else count
