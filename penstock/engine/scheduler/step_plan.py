"""Where the scheduler meets the runner: one plan down, one result up.

A plan says how many tokens of which rows run, and what changed in the rows since the last plan. Token ids live in the
rows on the device: a prompt is shipped once, when its row starts, and a sampled token never needs to come back before
the next step can use it. Plans are executed in the order they were launched.
"""

from dataclasses import dataclass, field

import msgspec

from penstock.engine.messages import PromptLogprobs, TokenLogprob
from penstock.request import SamplingParams


@dataclass(frozen=True, slots=True)
class RowStart:
    """A row gets a new owner: a fresh request, or one that resumes after preemption."""

    row: int
    token_ids: list[int]  # all tokens known so far: the prompt and, when resuming, what was sampled
    num_prompt_tokens: int
    params: SamplingParams
    seed: int  # drawn for requests that gave none
    adapter: str = ""


class RowSlice(msgspec.Struct, frozen=True, gc=False):
    """Run `num_tokens` tokens of a row, from position `start`.

    `num_samples` is 0 while the prompt is unfinished; otherwise the last `num_samples` positions are sampled: one for
    plain decoding, 1 + len(drafts) when the last `drafts` are guesses to be verified.
    """

    request: int  # the scheduler's number for the request; unique for the engine's life
    row: int
    start: int
    num_tokens: int
    num_samples: int
    drafts: tuple[int, ...] = ()


class BlockAssignment(msgspec.Struct, frozen=True, gc=False):
    """Entry `index` of the row's block table becomes `block`."""

    row: int
    index: int
    block: int


@dataclass(frozen=True, slots=True)
class TierCopy:
    """Copy one block between the device and the host tier, before the step's forward pass."""

    block: int
    host_slot: int
    to_host: bool


@dataclass(slots=True)
class StepPlan:
    """One forward pass. Order of effect: wipes, tier copies, row starts, block assignments, then the slices."""

    number: int
    slices: list[RowSlice] = field(default_factory=list)
    row_starts: list[RowStart] = field(default_factory=list)
    block_assignments: list[BlockAssignment] = field(default_factory=list)
    tier_copies: list[TierCopy] = field(default_factory=list)
    # Blocks to fill with zeros: a masked place of a block is multiplied by 0, which leaves a NaN a NaN.
    wipes: list[int] = field(default_factory=list)

    @property
    def has_work(self) -> bool:
        return bool(self.slices)

    @property
    def num_tokens(self) -> int:
        return sum(piece.num_tokens for piece in self.slices)


class SliceResult(msgspec.Struct):
    """What one slice gave: the accepted tokens, in order. Empty when the slice sampled nothing."""

    token_ids: list[int]
    logprobs: list[TokenLogprob] | None = None
    prompt_logprobs: PromptLogprobs | None = None  # of the prompt tokens from position start + 1 on
    failed: bool = False  # the logits were not finite


@dataclass(slots=True)
class StepResult:
    """Results in the order of the plan's slices."""

    number: int
    slices: list[SliceResult]
    seconds: float  # from launch to done
