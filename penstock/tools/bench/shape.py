"""Workloads of random prompts, described by their sizes and a seed.

The random calls and their order are part of the contract: a named workload is the same work for every engine that is
compared by it.
"""

import random
import re
from dataclasses import dataclass

from penstock.errors import ConfigError
from penstock.tools.bench.workload import VOCABULARY_TOKENS, FixedPrompt, PlannedRequest

_SHAPE = re.compile(r"(\d+)x(\d+)(?:-(\d+))?\+(\d+)(?:-(\d+))?")
_RIGHT = "give COUNTxINPUT+OUTPUT in tokens, such as 100x1024+128, or with ranges: 100x100-1024+64-128"


@dataclass(frozen=True, slots=True)
class Length:
    """A number of tokens, or a uniform range of them."""

    low: int
    high: int

    def draw(self, rng: random.Random) -> int:
        # A fixed length draws nothing: the tokens after it must not depend on how it was written.
        return self.low if self.low == self.high else rng.randint(self.low, self.high)


def exactly(tokens: int) -> Length:
    return Length(tokens, tokens)


@dataclass(frozen=True, slots=True)
class Shape:
    """So many requests with prompts and answers of such lengths; `shared` tokens begin every prompt."""

    count: int
    input: Length
    output: Length
    seed: int = 0
    shared: int = 0

    def requests(self) -> tuple[PlannedRequest, ...]:
        rng = random.Random(self.seed)
        shared = _tokens(rng, self.shared)
        prompts = [shared + _tokens(rng, self.input.draw(rng) - self.shared) for _ in range(self.count)]
        outputs = [self.output.draw(rng) for _ in range(self.count)]
        pairs = zip(prompts, outputs, strict=True)
        return tuple(PlannedRequest(FixedPrompt(prompt), max_tokens) for prompt, max_tokens in pairs)


def parse_shape(text: str, *, shared: int = 0, seed: int = 0) -> Shape:
    """Return the shape that an option spells."""
    match = _SHAPE.fullmatch(text.strip())
    if match is None:
        raise ConfigError("--shape", text, _RIGHT)
    count, low, high, output_low, output_high = (None if part is None else int(part) for part in match.groups())
    assert count is not None
    assert low is not None
    assert output_low is not None
    shape = Shape(count, Length(low, high or low), Length(output_low, output_high or output_low), seed, shared)
    if count < 1 or low < 1 or output_low < 1 or shape.input.low > shape.input.high:
        raise ConfigError("--shape", text, _RIGHT)
    if shape.output.low > shape.output.high:
        raise ConfigError("--shape", text, _RIGHT)
    if shared >= low:
        raise ConfigError("--shared-tokens", shared, f"give less than the shortest prompt ({low} tokens)")
    return shape


def _tokens(rng: random.Random, count: int) -> list[int]:
    return [rng.randint(0, VOCABULARY_TOKENS - 1) for _ in range(count)]
