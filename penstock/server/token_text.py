"""How tokens and their log-probabilities are shown, in chat's form and in the completions form."""

from collections.abc import Iterable

from penstock.engine.messages import TokenLogprob
from penstock.engine.tokenizer import Detokenizer, Tokenizer
from penstock.protocol.openai_chat import ChoiceLogprobs, ContentLogprob, TopLogprob
from penstock.protocol.openai_completions import CompletionLogprobs
from penstock.server.text_assembly import ScoredToken

# JSON has no infinity; the API writes this for a token that cannot be.
_IMPOSSIBLE = -9999.0


def chat_logprobs(tokenizer: Tokenizer, tokens: Iterable[ScoredToken]) -> ChoiceLogprobs:
    return ChoiceLogprobs([_content_logprob(tokenizer, token.score) for token in tokens])


def completion_logprobs(tokenizer: Tokenizer, tokens: Iterable[ScoredToken], *, base: int) -> CompletionLogprobs:
    """`base` is where the answer begins in the text that the caller gets."""
    texts, logprobs, tops, offsets = [], [], [], []
    for token in tokens:
        text, score = tokenizer.token_text(token.score.token_id), token.score
        texts.append(text)
        logprobs.append(_finite(score.logprob))
        top = {tokenizer.token_text(token_id): _finite(logprob) for token_id, logprob in score.top}
        tops.append(top | {text: _finite(score.logprob)})
        offsets.append(base + token.offset)
    return CompletionLogprobs(texts, list(logprobs), list(tops), offsets)


def prompt_logprobs(
    tokenizer: Tokenizer, token_ids: list[int], logprobs: list[float | None] | None
) -> CompletionLogprobs:
    """Show an echoed prompt's tokens; the first has no log-probability."""
    detokenizer = Detokenizer(tokenizer)
    texts = [tokenizer.token_text(token_id) for token_id in token_ids]
    offsets, length = [], 0
    for token_id in token_ids:
        offsets.append(length)
        length += len(detokenizer.push([token_id]))
    scores = [None if score is None else _finite(score) for score in logprobs or [None] * len(token_ids)]
    tops = [None if score is None else {text: score} for text, score in zip(texts, scores, strict=True)]
    return CompletionLogprobs(texts, scores, tops, offsets)


def _content_logprob(tokenizer: Tokenizer, score: TokenLogprob) -> ContentLogprob:
    top = [
        TopLogprob(tokenizer.token_text(token_id), _finite(logprob), list(tokenizer.token_bytes(token_id)))
        for token_id, logprob in score.top
    ]
    token_bytes = list(tokenizer.token_bytes(score.token_id))
    return ContentLogprob(tokenizer.token_text(score.token_id), _finite(score.logprob), token_bytes, top)


def _finite(logprob: float) -> float:
    return max(logprob, _IMPOSSIBLE)
