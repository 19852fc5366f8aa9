"""A prompt as `echo` shows it, before each of its answers: made once for all of them, and a part at a time.

Knows nothing of HTTP or of the answers.
"""

from penstock.engine.messages import PromptLogprobs
from penstock.engine.tokenizer import Detokenizer, Tokenizer
from penstock.protocol.openai_completions import CompletionLogprobs
from penstock.server.answer import Prompt
from penstock.server.json_parts import Grown
from penstock.server.loop_turns import ENTRIES_A_PASS, LoopTurns
from penstock.server.text_assembly import ScoredToken
from penstock.server.token_text import completion_logprobs


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
    tokenizer: Tokenizer, prompt: Prompt, logprobs: PromptLogprobs | None, turns: LoopTurns, *, with_scores: bool
) -> ScoredText:
    """Return a prompt's text, and with scores its tokens; without `logprobs` none of them has any."""
    echoed = ScoredText()
    if prompt.text is not None:
        echoed.add(prompt.text, None)
        if not with_scores:
            return echoed
    detokenizer, length = Detokenizer(tokenizer), 0
    # Each token is written in four lists, in one of them with the best in its place.
    slice_tokens = ENTRIES_A_PASS // (4 + (0 if logprobs is None else logprobs.num_top))
    for start in range(0, len(prompt.token_ids), slice_tokens):
        if start:
            await turns.take(ENTRIES_A_PASS)
        token_ids = prompt.token_ids[start : start + slice_tokens]
        pieces, offsets = [], []
        for token_id in token_ids:
            offsets.append(length + detokenizer.num_before(token_id))
            pieces.append(detokenizer.push([token_id]))
            length += len(pieces[-1]) or _special_length(tokenizer, token_id, prompt.text, length)
        scores = _scores(tokenizer, token_ids, start, logprobs, offsets) if with_scores else None
        echoed.add("".join(pieces) if prompt.text is None else "", scores)
    if prompt.text is None and not prompt.unfinished:  # the answer has a character that the prompt leaves unfinished
        echoed.add(detokenizer.flush(), None)
    return echoed


def _special_length(tokenizer: Tokenizer, token_id: int, text: str | None, offset: int) -> int:
    """Return how many characters a special token has in the caller's own text: none where it was put before that."""
    if text is None or token_id not in tokenizer.special_ids:
        return 0
    shown = tokenizer.token_texts[token_id]
    return len(shown) if text.startswith(shown, offset) else 0


def _scores(
    tokenizer: Tokenizer, token_ids: list[int], start: int, logprobs: PromptLogprobs | None, offsets: list[int]
) -> CompletionLogprobs:
    """Return what is told of a prompt's tokens from place `start` on. Of its first token nothing is known."""
    num_unknown = len(token_ids) if logprobs is None else int(start == 0)
    names = [tokenizer.token_names[token_id] for token_id in token_ids[:num_unknown]]
    unknown = CompletionLogprobs(names, [None] * num_unknown, [None] * num_unknown, offsets[:num_unknown])
    if logprobs is None:
        return unknown
    found = logprobs.read(start + num_unknown - 1, token_ids[num_unknown:])
    tokens = [ScoredToken(score, offset) for score, offset in zip(found, offsets[num_unknown:], strict=True)]
    known = completion_logprobs(tokenizer, tokens, base=0)
    return CompletionLogprobs(
        unknown.tokens + known.tokens,
        unknown.token_logprobs + known.token_logprobs,
        unknown.top_logprobs + known.top_logprobs,
        unknown.text_offset + known.text_offset,
    )
