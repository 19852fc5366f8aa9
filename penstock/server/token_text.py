"""How tokens and their log-probabilities are shown, in chat's form and in the completions form."""

from collections.abc import Iterable

from penstock.engine.messages import TokenLogprob
from penstock.engine.tokenizer import Tokenizer
from penstock.protocol.openai_chat import ChoiceLogprobs, ContentLogprob, TopLogprob
from penstock.protocol.openai_completions import CompletionLogprobs
from penstock.server.text_assembly import ScoredToken

# JSON has no infinity; the API writes this for a token that cannot be.
_IMPOSSIBLE = -9999.0


def chat_logprobs(tokenizer: Tokenizer, tokens: Iterable[ScoredToken]) -> ChoiceLogprobs:
    return ChoiceLogprobs([_content_logprob(tokenizer, token.score) for token in tokens])


def completion_logprobs(tokenizer: Tokenizer, tokens: Iterable[ScoredToken], *, base: int) -> CompletionLogprobs:
    """`base` is where the answer begins in the text that the caller gets."""
    name_of = tokenizer.token_names  # of which there is one for each: the likeliest are told by name
    names, logprobs, tops, offsets = [], [], [], []
    for token in tokens:
        score = token.score
        name, own = name_of[score.token_id], _finite(score.logprob)
        top = dict(zip([name_of[token_id] for token_id in score.top_ids], _all_finite(score.top_logprobs), strict=True))
        top[name] = own
        names.append(name)
        logprobs.append(own)
        tops.append(top)
        offsets.append(base + token.offset)
    return CompletionLogprobs(names, list(logprobs), list(tops), offsets)


def _content_logprob(tokenizer: Tokenizer, score: TokenLogprob) -> ContentLogprob:
    text_of, bytes_of = tokenizer.token_texts, tokenizer.token_byte_values
    top = [
        TopLogprob(text_of[token_id], logprob, bytes_of[token_id])
        for token_id, logprob in zip(score.top_ids, _all_finite(score.top_logprobs), strict=True)
    ]
    return ContentLogprob(text_of[score.token_id], _finite(score.logprob), bytes_of[score.token_id], top)


def _finite(logprob: float) -> float:
    """Return a log-probability as JSON can write it."""
    return max(logprob, _IMPOSSIBLE)


def _all_finite(logprobs: list[float]) -> list[float]:
    # Hardly ever is one not: a call for each of twenty would be most of the work.
    return logprobs if min(logprobs, default=0.0) >= _IMPOSSIBLE else [_finite(logprob) for logprob in logprobs]
