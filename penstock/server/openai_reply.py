"""What both completion routes write of every answer: its id, its time, its model, and whether usage is told.

Knows nothing of the shape of either.
"""

import time

from penstock.engine.tokenizer import Tokenizer
from penstock.protocol.generation import GenerationRequest
from penstock.server.continuation import Begun
from penstock.server.streaming import Reply


class OpenAiReply(Reply):
    def __init__(
        self,
        tokenizer: Tokenizer,
        completion_id: str,
        wanted: GenerationRequest,
        begun: Begun | None,
        *,
        with_logprobs: bool,
    ) -> None:
        named = wanted.continue_from
        self._tokenizer = tokenizer
        self._id = completion_id if named is None else named.id
        self._created = int(time.time()) if named is None else named.created
        self._model = wanted.model
        self._with_logprobs = with_logprobs
        self._with_usage = wanted.wants_usage_chunk
        # Choices whose beginning was sent: here, or by the server that began the answer.
        self._begun = set(begun.indices) if begun is not None else set()
