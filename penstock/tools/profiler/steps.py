"""Which steps are timed to make a profile, and which to check it: sizes only.

Knows nothing of runners or clocks.
"""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from penstock.engine.scheduler.step_plan import RowSlice
from penstock.engine.simulated.step_cost import captured_size

# Dense where a step is short or common: a prompt of a round length beside some decoding rows is just above it.
_ROWS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 160, 192, 224, 256, 384, 512)
_TOKENS = (
    2, 4, 8, 16, 32, 48, 64, 96, 128, 192, 256, 320, 384, 512, 640, 768, 1024, 1152, 1280, 1536, 1792, 2048, 2176, 2560,
    3072, 4096, 6144, 8192, 12288, 16384,
)  # fmt: skip
_CONTEXTS = (64, 640, 2048, 5120)
_NUM_RANDOM = 24


@dataclass(frozen=True, slots=True)
class TimedStep:
    """Rows that run one token at the end of a context, then rows that run several from a start."""

    contexts: tuple[int, ...] = ()
    pieces: tuple[tuple[int, int], ...] = ()  # (start, tokens)

    @property
    def slices(self) -> list[RowSlice]:
        """The step as a plan has it, on the first rows. Every row is sampled, as the last chunk of a prompt is."""
        singles = [RowSlice(row, row, context - 1, 1, 1) for row, context in enumerate(self.contexts)]
        first = len(singles)
        return singles + [
            RowSlice(first + index, first + index, start, tokens, 1)
            for index, (start, tokens) in enumerate(self.pieces)
        ]

    def __str__(self) -> str:
        parts = []
        if self.contexts:
            parts.append(f"{len(self.contexts)} rows of {sum(self.contexts) // len(self.contexts)}")
        if self.pieces:
            parts.append(" + ".join(f"{tokens} after {start}" for start, tokens in self.pieces[:4]))
        return ", ".join(parts) + ("…" if len(self.pieces) > 4 else "")


@dataclass(frozen=True, slots=True)
class Limits:
    """What the engine allows, and the sizes that it has captured (empty: none)."""

    max_rows: int
    max_tokens: int
    max_context: int
    cache_tokens: int
    graph_sizes: tuple[int, ...] = ()
    graph_tokens: tuple[int, ...] = ()

    def allow(self, step: TimedStep) -> bool:
        rows = len(step.contexts) + len(step.pieces)
        tokens = len(step.contexts) + sum(count for _, count in step.pieces)
        ends = [*step.contexts, *(start + count for start, count in step.pieces)]
        return (
            rows <= self.max_rows
            and tokens <= self.max_tokens
            and max(ends) < self.max_context
            and sum(ends) <= self.cache_tokens
        )


def row_knots(limits: Limits) -> list[int]:
    """The numbers of rows between which a profile draws straight lines."""
    return sorted({*_up_to(_ROWS, limits.max_rows), limits.max_rows})


def decode_steps(limits: Limits) -> list[TimedStep]:
    """Rows × context."""
    steps = [TimedStep(_spread(context, rows)) for rows in row_knots(limits) for context in _CONTEXTS]
    return [step for step in steps if limits.allow(step)]


def token_knots(limits: Limits) -> list[int]:
    """The sizes of a mixed step between which a profile draws straight lines."""
    wanted = [*_up_to(_TOKENS, limits.max_tokens), limits.max_tokens]
    return sorted({captured_size(limits.graph_tokens, tokens) for tokens in wanted})


def mixed_steps(limits: Limits) -> list[TimedStep]:
    """Every size as one prompt, after a context, as several prompts, and beside decoding rows; then some at random."""
    steps = [step for tokens in token_knots(limits) for step in _variants(tokens, limits)]
    steps += [step for step in random_steps(limits, _NUM_RANDOM, "made from") if step.pieces]
    return [step for step in dict.fromkeys(steps) if limits.allow(step)]


def random_steps(limits: Limits, count: int, seed: str) -> list[TimedStep]:
    """Mixed steps, and among them some of decoding alone."""
    rng = random.Random(seed)
    found: list[TimedStep] = []
    while len(found) < count:
        step = _random_step(rng, limits)
        if limits.allow(step):
            found.append(step)
    return found


def _variants(tokens: int, limits: Limits) -> Iterator[TimedStep]:
    if tokens > 1:
        # A prompt longer than the context allows runs as several.
        yield TimedStep(pieces=_cut(tokens, -(-tokens // (limits.max_context - 1))))
    if tokens >= 4:
        yield TimedStep(pieces=_cut(tokens, min(4, tokens // 2)))
        yield TimedStep(pieces=((min(2048, limits.max_context // 2), tokens),))
    # Long steps take long to time, and rows beside them are a small part of them.
    for share, context in ((16, 640), (4, 640), (2, 640), (4, 2048)) if tokens <= 2048 else ((4, 2048),):
        rows = limits.max_rows // share
        if rows > 0 and tokens - rows > 1:
            yield TimedStep(_spread(min(context, limits.max_context // 2), rows), ((0, tokens - rows),))


def _spread(context: int, rows: int) -> tuple[int, ...]:
    """Contexts around a mean: rows of one length all through are no step that a server ever sees."""
    return tuple(max(1, round(context * (0.6 + 0.8 * (row + 0.5) / rows))) for row in range(rows))


def _cut(tokens: int, num_pieces: int) -> tuple[tuple[int, int], ...]:
    """Split tokens into prompts of nearly equal length."""
    share, rest = divmod(tokens, num_pieces)
    return tuple((0, share + (index < rest)) for index in range(num_pieces))


def _random_step(rng: random.Random, limits: Limits) -> TimedStep:
    rows = int(limits.max_rows ** rng.random())
    contexts = tuple(rng.randint(16, max(16, min(2048, limits.max_context // 2))) for _ in range(rows))
    pieces = []
    for _ in range(rng.choice((0, 1, 1, 2, 3))):
        tokens = max(2, int(limits.max_tokens ** rng.uniform(0.3, 1.0)) // 2)
        pieces.append((rng.choice((0, 0, rng.randint(0, limits.max_context // 2))), tokens))
    return TimedStep(contexts, tuple(pieces))


def _up_to(values: Sequence[int], most: int) -> list[int]:
    return [value for value in values if value <= most]
