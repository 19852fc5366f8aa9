"""Text to token ids and back, whole or as it streams.

Ids are those of the model's own tokenizer; text is decoded from the tokens' bytes, so that a stream and a whole give
the same. Knows nothing of chat roles, requests or HTTP. No torch.
"""

import codecs
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from penstock.engine import gguf_vocabulary
from penstock.engine.gguf_vocabulary import SPACE_MARK
from penstock.errors import InvalidParameter, ModelError
from penstock.models.end_tokens import gguf_end_token_ids, gguf_token_id
from penstock.models.file_map import refuse_pointer
from penstock.models.gguf import GgufFile
from penstock.models.registry import read_json
from penstock.models.store import ModelFiles

_HALF_PAIR = re.compile("[\ud800-\udfff]")
_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")
_LONG_TEXT_CHARACTERS = 4096  # from here on the batch call, which keeps no offsets, is the faster one
_CHARACTER_BYTES = 4  # at most, in UTF-8
_NFC_SHRINKS_BY = 3  # at most: three Hangul letters of three bytes become one syllable of three

Value = TypeVar("Value")


class Tokenizer:
    """One model's tokenizer. Safe to use from several threads."""

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        file: Path,
        bos_token_id: int | None = None,
        eos_token_id: int | None = None,
        end_token_ids: Iterable[int] = (),
        chat_template: str | None = None,
    ) -> None:
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self._pieces = _Pieces(backend, file)
        self.chat_template = chat_template
        self.bos_token_id = bos_token_id
        self.eos_token_id = eos_token_id
        # Every token that ends a text or a turn, the first one of them `eos_token_id`.
        own = () if eos_token_id is None else (eos_token_id,)
        self.eos_token_ids = tuple(dict.fromkeys([*own, *end_token_ids]))
        self.special_ids = self._pieces.special_ids

    @classmethod
    def load(cls, files: ModelFiles) -> "Tokenizer":
        """Read the tokenizer of a GGUF file or of a folder with tokenizer.json."""
        if files.kind == "gguf":
            return _from_gguf(GgufFile.open(files.path))
        if (files.path / "tokenizer.json").exists():
            return _from_folder(files.path)
        if files.load_format == "dummy" and files.config is not None:
            return _for_benchmarks(files.config)
        raise ModelError("the folder has no tokenizer.json", file=str(files.path))

    @property
    def bos_text(self) -> str | None:
        return self._written(self.bos_token_id)

    @property
    def eos_text(self) -> str | None:
        return self._written(self.eos_token_id)

    def _written(self, token_id: int | None) -> str | None:
        """Return how a prompt writes a token, without what only keeps it apart from others."""
        return None if token_id is None else self.token_text(token_id).removeprefix(self._pieces.separator)

    @property
    def vocab_size(self) -> int:
        """One more than the largest id. A model may have more rows than this, which never mean anything."""
        return self._pieces.vocab_size

    def encode(self, text: str, *, add_special: bool) -> list[int]:
        """Return the ids of a text. Special tokens written out in it become what they name.

        `add_special` adds the tokens that the model wants around a text; a rendered chat template has its own.
        """
        if len(text) > _LONG_TEXT_CHARACTERS:
            return self.encode_batch([text], add_special=add_special)[0]
        _require_whole_characters(text)
        ids: list[int] = self._backend.encode(text, add_special_tokens=add_special).ids
        return ids

    def encode_batch(self, texts: Sequence[str], *, add_special: bool) -> list[list[int]]:
        for text in texts:
            _require_whole_characters(text)
        encodings = self._backend.encode_batch_fast(list(texts), add_special_tokens=add_special)
        return [encoding.ids for encoding in encodings]

    def fewest_tokens(self, text: str) -> int:
        """Return a number of tokens that the text has at the least, without tokenising it."""
        if self._pieces.longest_bytes is None:
            return 0
        num_bytes = len(_require_whole_characters(text).translate(None, self._pieces.dropped_bytes))
        return -(-num_bytes // self._pieces.longest_bytes)

    def decode(self, ids: Iterable[int], *, skip_special: bool = True) -> str:
        """Return the text of ids. Bytes that are no UTF-8 become U+FFFD; ids that do not exist are nothing."""
        detokenizer = Detokenizer(self, skip_special=skip_special)
        return detokenizer.push(ids) + detokenizer.flush()

    def unfinished_bytes(self, ids: Sequence[int]) -> bytes:
        """Return the bytes of a last character that ids begin and do not complete; most often there are none."""
        tail = b""
        for token_id in reversed(ids):
            tail = (b"" if token_id in self.special_ids else self.token_bytes(token_id)) + tail
            if len(tail) >= _CHARACTER_BYTES:
                break
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        decoder.decode(tail)
        return decoder.getstate()[0]

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token adds to a text; none for an id that does not exist."""
        return self._pieces.to_bytes(token_id)

    def token_text(self, token_id: int) -> str:
        """A token's text by itself, with U+FFFD where its bytes are not whole characters."""
        return self._pieces.texts[token_id]

    @property
    def token_texts(self) -> Mapping[int, str]:
        """`token_text` of every id, for where many are asked for."""
        return self._pieces.texts

    @property
    def token_names(self) -> Mapping[int, str]:
        """`token_text` of every id; where its bytes are not whole characters the bytes, so that it is no other's."""
        return self._pieces.names

    @property
    def token_byte_values(self) -> Mapping[int, tuple[int, ...]]:
        """`token_bytes` of every id, as numbers."""
        return self._pieces.byte_values

    @property
    def strips_first_space(self) -> bool:
        """Whether a text's first space is only there because the tokenizer put it there."""
        return self._pieces.strips_first_space


class Detokenizer:
    """Turns a stream of ids into text, never half a character. The pieces add up to `decode` of all ids.

    With `after_prompt` the ids go on from others: a first space is then text, where the tokenizer would strip it.
    `unfinished` are the bytes that the others left of a last character.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        skip_special: bool = True,
        after_prompt: bool = False,
        unfinished: bytes = b"",
    ) -> None:
        self._tokenizer = tokenizer
        self._skipped = tokenizer.special_ids if skip_special else frozenset()
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._decoder.decode(unfinished)
        self._strip = tokenizer.strips_first_space and not after_prompt

    def push(self, ids: Iterable[int]) -> str:
        """Return the text that is certain by now."""
        to_bytes, skipped = self._tokenizer.token_bytes, self._skipped
        return self._release(b"".join([to_bytes(token_id) for token_id in ids if token_id not in skipped]))

    def num_before(self, token_id: int) -> int:
        """Return how many characters that are held back end before this id: one, where it does not go on with it."""
        unfinished = self._decoder.getstate()[0]
        if not unfinished or token_id in self._skipped:
            return 0
        first = self._tokenizer.token_bytes(token_id)[:1]
        return len((unfinished + first).decode(errors="replace")) - 1

    def flush(self) -> str:
        """Return what is left when no more ids come: U+FFFD for half a character."""
        return self._release(b"", final=True)

    def _release(self, data: bytes, *, final: bool = False) -> str:
        text = self._decoder.decode(data, final)
        if self._strip and text:
            self._strip = False
            return text.removeprefix(" ")
        return text


class StopMatcher:
    """Finds stop strings in a stream of text and holds back what may become one.

    The stop string that is complete first counts; of several that end together, the longest.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        if not all(stops):
            raise InvalidParameter("stop", "", "give strings of at least one character")
        # Longest first: of those that end at the same character the first one found is the one that counts.
        self._stops = sorted(stops, key=len, reverse=True)
        self._fallbacks = [_fallbacks(stop) for stop in self._stops]
        self._matched = [0] * len(stops)  # how many characters of each stop string the text ends with
        self._held = ""
        self._found: str | None = None

    def fresh(self) -> "StopMatcher":
        """Return one for another text: what long stop strings take to prepare is shared."""
        other = StopMatcher([])
        other._stops, other._fallbacks, other._matched = self._stops, self._fallbacks, [0] * len(self._stops)
        return other

    def push(self, text: str, *, may_end: bool = True) -> tuple[str, str | None]:
        """Return the text that no stop string can reach any more, and the stop string once one is complete.

        After a match the text before it has been returned, and all that follows is dropped. A stop string that is
        complete where the text may not end is text like any other; one that only begins there can still count.
        """
        if self._found is not None:
            return "", self._found
        buffer = self._held + text
        for position in range(len(self._held), len(buffer)):
            stop = self._advance(buffer[position])
            if stop is not None and may_end:
                self._found, self._held = stop, ""
                return buffer[: position + 1 - len(stop)], stop
        num_safe = len(buffer) - max(self._matched, default=0)
        self._held = buffer[num_safe:]
        return buffer[:num_safe], None

    def flush(self) -> str:
        """Return what was held back, when no more text comes."""
        held, self._held = self._held, ""
        self._matched = [0] * len(self._stops)
        return held

    def _advance(self, character: str) -> str | None:
        """Take one character (Knuth, Morris, Pratt) and return the longest stop string that it completes."""
        complete = None
        for index, stop in enumerate(self._stops):
            matched, fallback = self._matched[index], self._fallbacks[index]
            while matched and stop[matched] != character:
                matched = fallback[matched - 1]
            matched += stop[matched] == character
            if matched == len(stop):
                complete = complete or stop
                matched = fallback[matched - 1]
            self._matched[index] = matched
        return complete


def _fallbacks(stop: str) -> list[int]:
    """For each beginning of `stop`: the length of its longest proper beginning that is also its end."""
    lengths = [0] * len(stop)
    matched = 0
    for position in range(1, len(stop)):
        while matched and stop[position] != stop[matched]:
            matched = lengths[matched - 1]
        matched += stop[position] == stop[matched]
        lengths[position] = matched
    return lengths


def _name(data: bytes) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{value:02x}" for value in data)  # as OpenAI writes them


class _Pieces:
    """The bytes of each token, which depend on how the tokenizer writes bytes as characters."""

    def __init__(self, backend: tokenizers.Tokenizer, file: Path) -> None:
        kinds = {step["type"]: step for step in _steps(backend.decoder)}
        self._byte_level = "ByteLevel" in kinds
        # Between any two tokens, as the library writes them where the file has no decoder.
        self.separator = " " if backend.decoder is None else ""
        if not self.separator and not kinds.keys() & {"ByteLevel", "Replace", "Metaspace"}:
            raise ModelError(
                f"its decoder ({', '.join(kinds) or 'none'}) is not supported; byte-level and SentencePiece ones are",
                file=str(file),
            )
        self._byte_fallback = "ByteFallback" in kinds
        self.strips_first_space = not self._byte_level and (
            bool(self.separator)
            or "Strip" in kinds
            or kinds.get("Metaspace", {}).get("prepend_scheme", "never") != "never"
        )
        added = backend.get_added_tokens_decoder()
        self._added = {token_id: token.content for token_id, token in added.items()}
        self.special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        vocabulary = backend.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocabulary.values(), default=-1) + 1
        # Byte-level vocabularies may lack rare bytes, which then become no token at all.
        missing = [byte for character, byte in _BYTE_OF.items() if character not in vocabulary]
        self.dropped_bytes = bytes(missing) if self._byte_level else b""
        # The most bytes of a text that one token can stand for; None where a token may swallow any number.
        self.longest_bytes = self._longest(backend, vocabulary) if self._keeps_all(backend, vocabulary) else None
        self._backend = backend
        self._known: dict[int, bytes] = {}
        self.texts = _Found(lambda token_id: self.to_bytes(token_id).decode("utf-8", "replace"))
        self.names = _Found(lambda token_id: _name(self.to_bytes(token_id)))
        self.byte_values = _Found(lambda token_id: tuple(self.to_bytes(token_id)))

    def _longest(self, backend: tokenizers.Tokenizer, vocabulary: Mapping[str, int]) -> int:
        # A byte-level token has one character for each byte, except those that are looked for in the text as they are.
        measure = len if self._byte_level else _num_bytes
        longest = max([*map(measure, vocabulary), *map(_num_bytes, self._added.values())], default=1)
        return longest * (_NFC_SHRINKS_BY if "NFC" in _kinds(backend.normalizer) else 1)

    def _keeps_all(self, backend: tokenizers.Tokenizer, vocabulary: Mapping[str, int]) -> bool:
        """Whether all of a text ends up in tokens, but for `dropped_bytes`."""
        falls_back = self._byte_fallback and all(f"<0x{byte:02X}>" in vocabulary for byte in range(256))
        return (
            isinstance(backend.model, models.BPE)
            and (self._byte_level or falls_back)
            and not any(token.lstrip or token.rstrip for token in backend.get_added_tokens_decoder().values())
            and _kinds(backend.normalizer) <= {"NFC", "Prepend", "Replace"}
            and all(step.get("content", SPACE_MARK) == SPACE_MARK for step in _steps(backend.normalizer))
            and _kinds(backend.pre_tokenizer) <= {"ByteLevel", "Digits", "Metaspace", "Split"}
            and all(step.get("behavior") != "Removed" for step in _steps(backend.pre_tokenizer))
        )

    def to_bytes(self, token_id: int) -> bytes:
        data = self._known.get(token_id)
        if data is None:
            data = self._known[token_id] = self._find(token_id) if 0 <= token_id < self.vocab_size else b""
        return data

    def _find(self, token_id: int) -> bytes:
        added = self._added.get(token_id)
        token = added if added is not None else self._backend.id_to_token(token_id)
        if token is None:
            return b""
        if self.separator:
            return f"{self.separator}{token}".encode()
        if self._byte_level:
            return token.encode() if added is not None else _byte_level_bytes(token)
        if self._byte_fallback and added is None and (byte := _BYTE_TOKEN.fullmatch(token)):
            return bytes.fromhex(byte[1])
        return str(token).replace(SPACE_MARK, " ").encode()


class _Found(dict[int, Value]):
    """Something of each token, found when it is first asked for."""

    def __init__(self, find: Callable[[int], Value]) -> None:
        super().__init__()
        self._find = find

    def __missing__(self, token_id: int) -> Value:
        value = self[token_id] = self._find(token_id)
        return value


def _steps(component: Any) -> list[dict[str, Any]]:
    """Return what a decoder, normalizer or pre-tokenizer is made of, one after the other."""
    return [] if component is None else _flatten(json.loads(component.__getstate__()))


def _flatten(state: dict[str, Any]) -> list[dict[str, Any]]:
    if state["type"] != "Sequence":
        return [state]
    (steps,) = (value for value in state.values() if isinstance(value, list))
    return [step for part in steps for step in _flatten(part)]


def _kinds(component: Any) -> set[str]:
    return {step["type"] for step in _steps(component)}


def _num_bytes(text: str) -> int:
    return len(text.encode())


def _byte_alphabet() -> dict[str, int]:
    """Byte-level tokenizers write each byte as one visible character: its own where it has one, else from U+0100 on."""
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in visible]
    return {chr(byte): byte for byte in visible} | {chr(256 + place): byte for place, byte in enumerate(hidden)}


_BYTE_OF = _byte_alphabet()


def _byte_level_bytes(token: str) -> bytes:
    try:
        return bytes([_BYTE_OF[character] for character in token])
    except KeyError:
        return token.encode()  # a token that was written as it reads


def _require_whole_characters(text: str) -> bytes:
    """Return the text's bytes. JSON may hold half of a surrogate pair, which is no text in any encoding."""
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise InvalidParameter(
            "prompt", text[error.start : error.end], "send whole Unicode characters, not half of a surrogate pair"
        ) from error


def _from_gguf(file: GgufFile) -> Tokenizer:
    backend = gguf_vocabulary.build(file)
    bos, eos = (gguf_token_id(file.metadata, f"{name}_token_id") for name in ("bos", "eos"))
    template = file.metadata.get("tokenizer.chat_template")
    return Tokenizer(
        backend,
        file=file.path,
        bos_token_id=bos if isinstance(bos, int) else None,
        eos_token_id=eos if isinstance(eos, int) else None,
        end_token_ids=gguf_end_token_ids(file.metadata),
        chat_template=template if isinstance(template, str) else None,
    )


def _from_folder(folder: Path) -> Tokenizer:
    file = folder / "tokenizer.json"
    try:
        backend = tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises nothing narrower
        refuse_pointer(file)
        raise ModelError(f"it cannot be read as a tokenizer: {error}", file=str(file)) from error
    settings = _read_object(folder / "special_tokens_map.json") | _read_object(folder / "tokenizer_config.json")
    return Tokenizer(
        backend,
        file=file,
        bos_token_id=_special_id(backend, settings.get("bos_token")),
        eos_token_id=_special_id(backend, settings.get("eos_token")),
        end_token_ids=_end_token_ids(folder),
        chat_template=_chat_template(folder, settings),
    )


def _for_benchmarks(config: Path) -> Tokenizer:
    """A tokenizer for a bare config.json: one token per byte, and words without meaning up to the model's size."""
    settings = _read_object(config)
    text = settings.get("text_config")
    vocab_size = (text if isinstance(text, dict) else settings).get("vocab_size")
    if type(vocab_size) is not int or not 256 <= vocab_size <= 1 << 24:
        raise ModelError(
            f"vocab_size is {vocab_size!r}; without a tokenizer.json it must be at least 256", file=str(config)
        )
    vocabulary = dict(_BYTE_OF) | {f"Ġt{token_id}": token_id for token_id in range(256, vocab_size)}
    backend = tokenizers.Tokenizer(models.BPE(vocabulary, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return Tokenizer(backend, file=config, end_token_ids=_end_token_ids(config.parent))


def _read_object(path: Path) -> dict[str, Any]:
    """Return a JSON file's object; an empty one where there is no file."""
    return read_json(path) if path.exists() else {}


def _special_id(backend: tokenizers.Tokenizer, value: object) -> int | None:
    """Settings give a token as its text or as an object with its `content`."""
    text = value.get("content") if isinstance(value, dict) else value
    # JSON may hold half of a surrogate pair, which no token is.
    return backend.token_to_id(text) if isinstance(text, str) and not _HALF_PAIR.search(text) else None


def _end_token_ids(folder: Path) -> list[int]:
    """What the model's own settings end a generation with."""
    for name in ("generation_config.json", "config.json"):
        value = _read_object(folder / name).get("eos_token_id")
        values = value if isinstance(value, list) else [value]
        ids = [item for item in values if type(item) is int and item >= 0]
        if ids:
            return ids
    return []


def _chat_template(folder: Path, settings: dict[str, Any]) -> str | None:
    file = folder / "chat_template.jinja"
    if file.exists():
        try:
            return file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ModelError(f"it cannot be read ({error})", file=str(file)) from error
    template = _read_object(folder / "chat_template.json").get("chat_template") or settings.get("chat_template")
    if isinstance(template, list):  # several, by name
        named = (item.get("template") for item in template if isinstance(item, dict) and item.get("name") == "default")
        template = next(named, None)
    return template if isinstance(template, str) else None
