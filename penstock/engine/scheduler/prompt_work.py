"""How much is to run until the first tokens of all answers of a call: answers to one prompt share its blocks.

Knows lengths only; nothing of time, nor of who else is there.
"""

from collections.abc import Sequence
from dataclasses import dataclass

# A prompt's blocks are shared once their step is settled. What is planned until then runs unshared: the rest of the
# step with the prompt's last tokens, the step behind it, and what of a prompt these two began and did not end.
_UNSHARED_STEPS = 3


@dataclass(frozen=True, slots=True)
class PromptWork:
    """What a request asks for, and with it the call that it stands for."""

    tokens: int  # to run until the first tokens of all answers
    context: int  # what lies before each of these, on the mean
    read_tokens: int  # what a step reads that draws one token of each answer
    num_each: int  # answers to each prompt
    prompt_tokens: float  # of a prompt, on the mean: what its first answer holds
    rest_tokens: float  # what each of its others holds beside that

    @classmethod
    def of_one(cls, num_tokens: int) -> "PromptWork":
        return cls(num_tokens, num_tokens // 2, num_tokens, 1, num_tokens, num_tokens)

    @classmethod
    def of_call(
        cls, prompts: Sequence[int], num_answers: int, *, step_tokens: int, shared_block_tokens: int | None
    ) -> "PromptWork":
        """The most that a call to prompts of these lengths may need, each with equally many answers.

        `step_tokens` of prompts run in a step, and only whole blocks are shared; None where nothing is.
        """
        num_each = -(-num_answers // len(prompts))
        tokens = pairs = rests = 0
        for length in prompts:
            others = (num_each - 1) * length
            other_pairs = others * length // 2
            rest = length
            if shared_block_tokens is not None:
                # At least one token is always run.
                rest = (length - 1) % shared_block_tokens + 1
                others = min(others, _UNSHARED_STEPS * step_tokens + (num_each - 1) * rest)
                other_pairs = min(other_pairs, others * length)
            tokens += length + others
            pairs += length * length // 2 + other_pairs
            rests += rest
        total, count = sum(prompts), len(prompts)
        return cls(tokens, pairs // tokens, num_each * total, num_each, total / count, rests / count)

    def held_tokens(self, num_answers: int) -> float:
        """What so many answers hold at their first tokens."""
        num_prompts = -(-num_answers // self.num_each)
        return num_prompts * self.prompt_tokens + (num_answers - num_prompts) * self.rest_tokens
