"""Workloads of random prompts, described by their sizes and a seed.

The random calls and their order are part of the contract: a named workload is the same work for every engine that is
compared by it.
"""

import random
import re
from dataclasses import dataclass

from penstock.errors import ConfigError
from penstock.tools.bench.workload import VOCABULARY_TOKENS, FixedPrompt, PlannedRequest

_SHAPE = re.compile("{0}x{0}(?:-{0})?[+]{0}(?:-{0})?".format("([0-9]{1,12})"))
# Tokens of all prompts are drawn before the first is sent; more would fill the memory.
MAX_TOKENS = 100_000_000
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
    count, low, high, output_low, output_high = match.groups()
    input, output = _length(low, high), _length(output_low, output_high)
    if int(count) < 1 or not 1 <= input.low <= input.high or not 1 <= output.low <= output.high:
        raise ConfigError("--shape", text, _RIGHT)
    if int(count) * input.high > MAX_TOKENS:
        raise ConfigError("--shape", text, f"give prompts of at most {MAX_TOKENS:,} tokens in all")
    if shared >= input.low:
        raise ConfigError("--shared-tokens", shared, f"give less than the shortest prompt ({low} tokens)")
    return Shape(int(count), input, output, seed, shared)


def _length(low: str, high: str | None) -> Length:
    return Length(int(low), int(low if high is None else high))


def _tokens(rng: random.Random, count: int) -> list[int]:
    return [rng.randint(0, VOCABULARY_TOKENS - 1) for _ in range(count)]
