"""What a routing policy is: one request and the replicas that could take it in, one of them and why out."""

import random
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from penstock.fleet.replica import Replica
from penstock.fleet.router.query import RouteQuery
from penstock.protocol.prompt_note import PromptNote


@dataclass(frozen=True, slots=True, eq=False)
class Choice:
    """Where one request goes: no two are the same."""

    replica: Replica
    reason: str  # for the response's header and /admin/decisions; one short phrase without ';'
    predicted_ttft_seconds: float | None = None  # where the policy reckons with it
    cached_tokens: int | None = None  # of the prompt, that it expects the replica to have


class Policy(ABC):
    """One way to spread requests. One object serves one model, for the gateway's life."""

    uses_blocks: ClassVar[bool] = False  # whether it looks at `Replica.blocks`, so that somebody must listen for them

    def __init__(self, seed: int | None = None) -> None:
        """Policies that draw do it with `self.random`; with a seed they draw the same every time."""
        self.random = random.Random(seed)

    @abstractmethod
    def choose(self, query: RouteQuery, candidates: Sequence[Replica]) -> Choice:
        """Return one of the candidates, of which there is at least one; all can take the request now.

        Called again, with fewer candidates, where a replica failed before its first byte or in the middle of a stream.
        """

    def on_first_byte(self, choice: Choice, seconds: float | None, prompt: PromptNote | None) -> None:  # noqa: B027
        """Learn when a choice's request was answered, and what the replica says of its prompt.

        `seconds` count from the choice to the first token; None where the answer came whole.
        """

    def on_end(self, choice: Choice) -> None:  # noqa: B027
        """Learn that a choice's request has ended, with an answer or without."""
