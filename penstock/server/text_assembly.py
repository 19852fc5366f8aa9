"""From token events to text that may be shown: whole characters only, nothing of a stop string, scores beside it.

One assembler serves one choice. Knows nothing of HTTP, of other choices or of time.
"""

from collections import deque
from dataclasses import dataclass, field

from penstock.engine.messages import TokenEvent, TokenLogprob
from penstock.engine.tokenizer import Detokenizer, StopMatcher, Tokenizer
from penstock.request import FinishReason, SamplingParams


@dataclass(frozen=True, slots=True)
class ScoredToken:
    """A token's log-probabilities and where its text begins in the answer, in characters."""

    score: TokenLogprob
    offset: int


@dataclass(frozen=True, slots=True)
class TextPiece:
    """What one event added. `tokens` are those whose text this is, when scores were asked for."""

    text: str = ""
    tokens: list[ScoredToken] = field(default_factory=list)
    finish: FinishReason | None = None

    @property
    def is_empty(self) -> bool:
        return not self.text and not self.tokens and self.finish is None


@dataclass(slots=True)
class _Waiting:
    token: ScoredToken
    end: int | None  # where its text ends so far; None while its first character is incomplete


class TextAssembler:
    """Turns the token events of one request into pieces of text.

    `num_tokens` counts the tokens made, the one that ended the answer included; after a stop string matched, those up
    to the match. `finish` is set with the last piece, and `push` may not be called after it. `unfinished` are bytes of
    a character that the prompt began and left to the answer.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        params: SamplingParams,
        matcher: StopMatcher | None = None,
        *,
        unfinished: bytes = b"",
    ) -> None:
        """`matcher` is a fresh one for the stop strings of `params`, where the caller has one already."""
        self.num_tokens = 0
        self.finish: FinishReason | None = None
        self._detokenizer = Detokenizer(tokenizer, after_prompt=True, unfinished=unfinished)
        self._matcher = matcher or (StopMatcher(list(params.stop)) if params.stop else None)
        self._min_tokens = params.min_tokens
        self.num_scores = 0 if params.logprobs is None else 1 + params.logprobs  # of each token
        self._scored = params.logprobs is not None
        self._waiting: deque[_Waiting] = deque()
        self._num_made = 0  # characters that came out of the tokens
        self._num_shown = 0  # characters that left in pieces
        self._unshown = ""  # with scores: text that waits for the end of its token
        self._num_overlapping = 0  # characters shown elsewhere that a stop string may still claim here

    @property
    def is_scored(self) -> bool:
        return self._scored

    def push(self, event: TokenEvent) -> TextPiece:
        """Take what one step gave and return what may now be shown."""
        assert self.finish is None
        token_ids = event.token_ids if event.stop_token is None else event.token_ids[:-1]
        if self._matcher is None and not self._scored:
            text = self._detokenizer.push(token_ids)
            self.num_tokens += len(token_ids)
        else:
            text = self._push_each(token_ids, event.logprobs or [])
        if self.finish is None and event.finish is not None:
            self.num_tokens += event.stop_token is not None
            text += self._flush()
            self.finish = self.finish or event.finish  # the last text may have completed a stop string
        if self._scored:
            text = self._up_to_token_end(text)
        return TextPiece(text, self._release(text), self.finish)

    def replay(self, token_ids: list[int]) -> None:
        """Take tokens whose text was shown elsewhere: what follows goes on exactly behind it.

        May be called again with more of them, unless `finish` is set.
        """
        if not self._scored:
            self.push(TokenEvent(request_id="", token_ids=token_ids))
            return
        # A scored stream tells the tokens that it has shown whole; some of that may still be held back here.
        shown = self._push_each(token_ids, None)
        self._num_overlapping += self._num_made - self._num_shown - len(shown)
        self._num_shown = self._num_made

    def _push_each(self, token_ids: list[int], scores: list[TokenLogprob] | None) -> str:
        """Go token by token, to know which of them completes a stop string and where each one's text lies."""
        shown = []
        for place, token_id in enumerate(token_ids):
            # Bytes before it that turn out to be no character are shown with it, and are not its own.
            offset = self._num_made + self._detokenizer.num_before(token_id)
            text = self._detokenizer.push([token_id])
            self.num_tokens += 1
            if self._scored and scores is not None:
                self._note(ScoredToken(scores[place], offset), text)
            self._num_made += len(text)
            shown.append(self._match(text))
            if self.finish is not None:
                break
        return "".join(shown)

    def _match(self, text: str) -> str:
        """Return the part of the text that no stop string can still claim."""
        if self._matcher is None:
            return text
        safe, matched = self._matcher.push(text, may_end=self.num_tokens >= self._min_tokens)
        if matched is not None:
            self.finish = FinishReason.STOP
        return safe

    def _flush(self) -> str:
        """Return what was held back, now that nothing more can come."""
        rest = self._detokenizer.flush()
        self._num_made += len(rest)
        text = self._match(rest)
        if self._matcher is not None and self.finish is None:
            text += self._matcher.flush()
        return text

    def _note(self, token: ScoredToken, text: str) -> None:
        self._waiting.append(_Waiting(token, None))
        if text:
            for waiting in reversed(self._waiting):
                if waiting.end is not None:
                    break
                waiting.end = self._num_made + len(text)

    def _up_to_token_end(self, text: str) -> str:
        """Return what may be shown up to the end of a token: a piece has the scores of all its text, and no others."""
        overlap = min(self._num_overlapping, len(text))
        self._num_overlapping -= overlap
        text = self._unshown + text[overlap:]
        self._unshown = ""
        if self.finish is None:
            reach = self._num_shown + len(text)
            ends = [waiting.end for waiting in self._waiting if waiting.end is not None and waiting.end <= reach]
            num_whole = max(ends, default=self._num_shown) - self._num_shown
            text, self._unshown = text[:num_whole], text[num_whole:]
        return text

    def _release(self, text: str) -> list[ScoredToken]:
        """Return the tokens whose text was shown; at the end, those of which any part was."""
        self._num_shown += len(text)
        released = []
        while self._waiting:
            waiting = self._waiting[0]
            if self.finish is None:
                ready = waiting.end is not None and waiting.end <= self._num_shown
            else:
                # Behind a matched stop string lies nothing but what was cut off.
                cut = self._num_shown < self._num_made
                ready = not cut or waiting.token.offset < self._num_shown
            if not ready:
                break
            released.append(waiting.token)
            self._waiting.popleft()
        if self.finish is not None:
            self._waiting.clear()
        return released
