"""A prompt as `echo` shows it, before each of its answers: made once for all of them, and a part at a time.

Knows nothing of HTTP or of the answers.
"""

from collections.abc import Sequence

from penstock.engine.tokenizer import Detokenizer, Tokenizer
from penstock.protocol.openai_completions import CompletionLogprobs
from penstock.server.answer import Prompt
from penstock.server.json_parts import Grown
from penstock.server.loop_turns import ENTRIES_A_PASS, LoopTurns
from penstock.server.token_text import finite

_SLICE_TOKENS = ENTRIES_A_PASS // 4  # each is written in four lists


class ScoredText:
    """A text and its tokens' log-probabilities in the completions form, as the insides of their JSON."""

    def __init__(self) -> None:
        self.num_characters = 0
        self.text = Grown()
        self.scores = (Grown(), Grown(), Grown(), Grown())  # in the order of CompletionLogprobs

    def add(self, text: str, logprobs: CompletionLogprobs | None) -> None:
        self.num_characters += len(text)
        self.text.add_text(text)
        if logprobs is not None:
            tokens, token_logprobs, top_logprobs, text_offset = self.scores
            tokens.add_items(logprobs.tokens)
            token_logprobs.add_items(logprobs.token_logprobs)
            top_logprobs.add_items(logprobs.top_logprobs)
            text_offset.add_items(logprobs.text_offset)


async def echo_prompt(
    tokenizer: Tokenizer, prompt: Prompt, logprobs: list[float | None] | None, turns: LoopTurns, *, with_scores: bool
) -> ScoredText:
    """Return a prompt's text, and with scores its tokens; without `logprobs` none of them has any."""
    echoed = ScoredText()
    if prompt.text is not None:
        echoed.add(prompt.text, None)
        if not with_scores:
            return echoed
    detokenizer, length = Detokenizer(tokenizer), 0
    for start in range(0, len(prompt.token_ids), _SLICE_TOKENS):
        if start:
            await turns.take(ENTRIES_A_PASS)
        token_ids = prompt.token_ids[start : start + _SLICE_TOKENS]
        pieces, offsets = [], []
        for token_id in token_ids:
            offsets.append(length)
            pieces.append(detokenizer.push([token_id]))
            length += len(pieces[-1])
        known = [None] * len(token_ids) if logprobs is None else logprobs[start : start + _SLICE_TOKENS]
        scores = _scores(tokenizer, token_ids, known, offsets) if with_scores else None
        echoed.add("".join(pieces) if prompt.text is None else "", scores)
    if prompt.text is None and not prompt.unfinished:  # the answer has a character that the prompt leaves unfinished
        echoed.add(detokenizer.flush(), None)
    return echoed


def _scores(
    tokenizer: Tokenizer, token_ids: list[int], logprobs: Sequence[float | None], offsets: list[int]
) -> CompletionLogprobs:
    texts = [tokenizer.token_texts[token_id] for token_id in token_ids]
    scores = [None if score is None else finite(score) for score in logprobs]
    tops = [None if score is None else {text: score} for text, score in zip(texts, scores, strict=True)]
    return CompletionLogprobs(texts, scores, tops, offsets)
