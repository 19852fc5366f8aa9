"""One request as routing sees it: which model, for whom, and what its prompt begins with.

Read once from the body; what only some policies need is worked out when they ask. Knows nothing of replicas or HTTP.
"""

import functools
import hashlib
import re
from collections.abc import Mapping
from typing import Any

import msgspec

from penstock.errors import MalformedBody, RequestError

# Prompts are compared piece by piece. A token is about four characters, in English as in code.
PIECE_TOKENS = 64
_CHARACTERS_PER_TOKEN = 4
_PIECE_CHARACTERS = PIECE_TOKENS * _CHARACTERS_PER_TOKEN


class RequestHead(msgspec.Struct, frozen=True):
    """The fields of a body that a gateway looks at."""

    model: str
    stream: bool | None = None
    n: int | None = None
    user: str | None = None
    prompt_cache_key: str | None = None
    adapter: str | None = None
    lora_path: Any = None  # SGLang's name for it
    adapter_id: Any = None  # TGI's
    messages: list[Any] | None = None
    prompt: Any = None
    input: Any = None  # the prompt of other APIs
    # Wrong values of these are for the replica to refuse.
    max_tokens: Any = None
    max_completion_tokens: Any = None
    min_tokens: Any = None
    ignore_eos: Any = None
    stop: Any = None
    stop_token_ids: Any = None
    stream_options: Any = None
    priority: Any = None
    deadline_ms: Any = None
    targets: Any = None
    best_effort: Any = None
    logprobs: Any = None

    @property
    def num_choices(self) -> int:
        return max(1, self.n or 1)

    @property
    def most_output_tokens(self) -> int | None:
        """How long one answer may become, where the caller says."""
        wanted = self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens
        return wanted if _is_count(wanted) else None

    def fewest_output_tokens(self, most: int) -> int:
        """How many of at most `most` tokens one answer has for certain."""
        if self.ignore_eos is True and not (self.stop or self.stop_token_ids):
            return most
        return min(most, self.min_tokens) if _is_count(self.min_tokens) else 0

    @property
    def wants_usage(self) -> bool:
        """Whether a stream's last chunk is to tell what it cost."""
        options = self.stream_options
        return options is not None and isinstance(options, Mapping) and bool(options.get("include_usage"))


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


_decoder = msgspec.json.Decoder(RequestHead)


def read_head(body: bytes) -> RequestHead:
    """Return what routing needs of a body. Raises RequestError."""
    try:
        return _decoder.decode(body)
    except msgspec.ValidationError as error:
        raise RequestError(f"the request body is not usable: {error}", param=_field_in(str(error))) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise MalformedBody(f"the request body is not valid JSON: {error}") from None
    except RecursionError:
        raise too_deep() from None


def read_document(body: bytes) -> dict[str, Any]:
    """Return all of a body whose head was read: what that passed over may be wrong too. Raises MalformedBody."""
    try:
        return msgspec.json.decode(body, type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise MalformedBody(f"the request body is not valid JSON: {error}") from None
    except RecursionError:
        raise too_deep() from None


def too_deep() -> MalformedBody:
    """Return what to tell who sent a body that cannot be followed to its innermost value."""
    return MalformedBody("the request body is nested too deeply; give plainer values")


def _field_in(message: str) -> str | None:
    """Return the field that a message of the decoder is about; None where the body as a whole is wrong."""
    found = re.search(r"at `\$\.([a-z_]+)|required field `([a-z_]+)`", message)
    return found and (found[1] or found[2])


class RouteQuery:
    """What a policy may know of a request."""

    def __init__(
        self, head: RequestHead, *, model: str, tenant: str, session: str | None = None, version: str | None = None
    ) -> None:
        self.model = model  # as the replicas call it
        self.asked_model = head.model  # as the caller does
        self.tenant = tenant
        self.version = version  # that the caller named
        told = (head.adapter, head.lora_path, head.adapter_id)
        self.adapter = next((name for name in told if name and isinstance(name, str)), "")
        self._head = head
        self._session = session

    @property
    def wants_logprobs(self) -> bool:
        """Whether the answer is to tell what the model thinks of each token; 0 of a text completion says so too."""
        return self._head.logprobs is not None and self._head.logprobs is not False

    @property
    def most_output_tokens(self) -> int | None:
        """How long one answer may become, where the caller says."""
        return self._head.most_output_tokens

    @functools.cached_property
    def session(self) -> str:
        """What requests that belong together have in common: what the caller says, or how the conversation began."""
        named = self._session or self._head.prompt_cache_key or self._head.user
        return named or hashlib.sha256(self._beginning().encode("utf-8", "replace")).hexdigest()

    @functools.cached_property
    def prompt_token_ids(self) -> list[int] | None:
        """The prompt, or the first of several, where the caller gave token ids."""
        prompt = _first_of(self._head.prompt if self._head.prompt is not None else self._head.input, list)
        return prompt if isinstance(prompt, list) and prompt and isinstance(prompt[0], int) else None

    @functools.cached_property
    def prompt_text(self) -> str:
        """The prompt as text: messages in order, each behind its role. Not what the chat template makes of them."""
        messages = self._messages
        if messages is not None:
            return "\n".join(f"{_field(message, 'role')}: {_text(message)}" for message in messages)
        prompt = _first_of(self._head.prompt if self._head.prompt is not None else self._head.input, str)
        return prompt if isinstance(prompt, str) else ""

    @property
    def _messages(self) -> list[Any] | None:
        """The conversation, under whichever name the API has it."""
        if self._head.messages is not None:
            return self._head.messages
        told = self._head.input
        return told if isinstance(told, list) and told and isinstance(told[0], Mapping) else None

    @functools.cached_property
    def num_prompt_tokens(self) -> int:
        """How long the prompt is: exact for token ids, a guess for text."""
        tokens = self.prompt_token_ids
        return len(tokens) if tokens is not None else len(self.prompt_text) // _CHARACTERS_PER_TOKEN + 1

    @functools.cached_property
    def prefix_hashes(self) -> list[bytes]:
        """Chained hashes of the prompt's beginnings, each one piece longer. Equal ones mean equal beginnings.

        Pieces are of text or, where the caller gave token ids, of those; they are not the engine's blocks.
        """
        tokens = self.prompt_token_ids
        if tokens is not None:
            texts = [str(tokens[at : at + PIECE_TOKENS]) for at in _starts(len(tokens), PIECE_TOKENS)]
        else:
            text = self.prompt_text
            texts = [text[at : at + _PIECE_CHARACTERS] for at in _starts(len(text), _PIECE_CHARACTERS)]
        # One tenant's prompts are never in another's cache.
        parent = hashlib.blake2b(f"{self.tenant}\0{self.adapter}".encode(), digest_size=16).digest()
        hashes = []
        for text in texts:
            parent = hashlib.blake2b(text.encode("utf-8", "replace"), key=parent, digest_size=16).digest()
            hashes.append(parent)
        return hashes

    def _beginning(self) -> str:
        messages = self._messages
        if not messages:
            tokens = self.prompt_token_ids
            return self.prompt_text[:_PIECE_CHARACTERS] if tokens is None else str(tokens[:PIECE_TOKENS])
        # System messages are often everybody's; the first turn of a user is a conversation's own.
        first = next((item for item in messages if _field(item, "role") == "user"), messages[0])
        return _text(first)


def _starts(length: int, size: int) -> range:
    """Where whole pieces begin: a last, shorter one will not be met again."""
    return range(0, length - size + 1, size)


def _first_of(prompts: Any, kind: type) -> Any:
    """Return the first of several prompts of this kind, or what there is instead."""
    return prompts[0] if isinstance(prompts, list) and prompts and isinstance(prompts[0], kind) else prompts


def _field(message: Any, name: str) -> str:
    value = message.get(name) if isinstance(message, Mapping) else None
    return value if isinstance(value, str) else ""


def _text(message: Any) -> str:
    content = message.get("content") if isinstance(message, Mapping) else None
    if isinstance(content, list):
        return "\n".join(_field(part, "text") for part in content)
    return content if isinstance(content, str) else ""
