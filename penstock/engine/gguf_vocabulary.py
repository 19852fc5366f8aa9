"""A GGUF file's vocabulary built into a `tokenizers.Tokenizer` that gives the ids the model was trained with.

Two kinds exist: byte-level BPE ("gpt2"), whose `pre` names how text is split before merging, and SentencePiece BPE
("llama"), whose merges follow from scores and which falls back to bytes. No torch.
"""

from typing import NoReturn

import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, processors

from penstock.engine.word_splits import WORD_SPLITS, WordSplit
from penstock.errors import ModelError
from penstock.models.end_tokens import gguf_token_id
from penstock.models.gguf import GgufFile

SPACE_MARK = "\u2581"  # SentencePiece's visible space

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = range(1, 7)

_LLAMA3_BEGIN = "<|begin_of_text|>"
# Phi-3's tokens swallow the white space behind them, but for these. Files do not say so; the architecture tells.
_PHI3_PLAIN = frozenset({"<unk>", "<s>", "<|endoftext|>"})


def build(file: GgufFile) -> tokenizers.Tokenizer:
    """Return the tokenizer that the file's metadata describes. Raises ModelError naming the file and the key."""
    return _Builder(file).build()


class _Builder:
    def __init__(self, file: GgufFile) -> None:
        self._file = file
        self._metadata = file.metadata
        self.tokens = self._strings("tokens")
        self.types = self._integers("token_type") or [_NORMAL] * len(self.tokens)
        if len(self.types) != len(self.tokens):
            self._refuse(f"token_type has {len(self.types)} entries for {len(self.tokens)} tokens")

    def build(self) -> tokenizers.Tokenizer:
        kind = self._metadata.get("tokenizer.ggml.model")
        if kind == "gpt2":
            backend = self._byte_level()
        elif kind == "llama":
            backend = self._sentencepiece()
        else:
            self._refuse(f"model is {kind!r}; supported are gpt2 and llama")
        self._add_tokens(backend)
        self._add_frame(backend, default_bos=kind == "llama" or self._split().begins_texts)
        return backend

    def _byte_level(self) -> tokenizers.Tokenizer:
        split = self._split()
        backend = self._bpe(self._merges(), ignore_merges=split.keeps_known_words)
        backend.pre_tokenizer = split.pre_tokenizer()
        if split.composes_accents:
            backend.normalizer = normalizers.NFC()
        backend.decoder = decoders.ByteLevel()
        return backend

    def _sentencepiece(self) -> tokenizers.Tokenizer:
        prefix = self._flag("add_space_prefix", True)
        unknown = self._token_id("unknown_token_id")
        backend = self._bpe(
            self._merges_from_scores(),
            unk_token=None if unknown is None else self.tokens[unknown],
            fuse_unk=True,
            byte_fallback=_BYTE in self.types,
        )
        steps = [normalizers.Prepend(SPACE_MARK)] if prefix else []
        backend.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", SPACE_MARK)])
        strip = [decoders.Strip(" ", 1, 0)] if prefix else []
        backend.decoder = decoders.Sequence(
            [decoders.Replace(SPACE_MARK, " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
        )
        return backend

    def _bpe(self, merges: list[tuple[str, str]], **options: object) -> tokenizers.Tokenizer:
        vocabulary: dict[str, int] = {}
        for token_id, token in enumerate(self.tokens):
            vocabulary.setdefault(token, token_id)
        try:
            return tokenizers.Tokenizer(models.BPE(vocabulary, merges, **options))
        except Exception as error:  # the library raises nothing narrower
            raise ModelError(f"its tokenizer cannot be built: {error}", file=str(self._file.path)) from error

    def _merges(self) -> list[tuple[str, str]]:
        """The pairs in the order of their rank, as written: two tokens with a space between."""
        merges = []
        for merge in self._strings("merges"):
            left, _, right = merge.partition(" ")
            if not left or not right:
                self._refuse(f"merges has {merge[:80]!r}, which is not two tokens")
            merges.append((left, right))
        return merges

    def _merges_from_scores(self) -> list[tuple[str, str]]:
        """SentencePiece joins the neighbours whose union scores best: every way to cut a token in two, best first."""
        scores = self._numbers("scores")
        if len(scores) != len(self.tokens):
            self._refuse(f"scores has {len(scores)} entries for {len(self.tokens)} tokens")
        pieces = {
            token
            for token, kind in zip(self.tokens, self.types, strict=True)
            if kind in (_NORMAL, _USER_DEFINED, _UNUSED)
        }
        ranked = sorted(range(len(self.tokens)), key=lambda token_id: -scores[token_id])
        merges = []
        for token_id in ranked:
            token = self.tokens[token_id]
            if self.types[token_id] == _NORMAL:
                for cut in range(1, len(token)):
                    if token[:cut] in pieces and token[cut:] in pieces:
                        merges.append((token[:cut], token[cut:]))
        return merges

    def _add_tokens(self, backend: tokenizers.Tokenizer) -> None:
        """Tokens that text is searched for before anything else. Control tokens leave no text behind."""
        special = [
            self._added(token)
            for token, kind in zip(self.tokens, self.types, strict=True)
            if kind in (_CONTROL, _UNKNOWN) and token
        ]
        text = [
            self._added(token)
            for token, kind in zip(self.tokens, self.types, strict=True)
            if kind == _USER_DEFINED and token
        ]
        backend.add_special_tokens(special)
        backend.add_tokens(text)

    def _added(self, token: str) -> AddedToken:
        swallows = self._is_phi3_sentencepiece and token not in _PHI3_PLAIN
        # One of spaces, where the file writes them visibly, is found in text that has been written so too.
        return AddedToken(token, normalized=SPACE_MARK in token, rstrip=swallows)

    @property
    def _is_phi3_sentencepiece(self) -> bool:
        metadata = self._metadata
        return metadata.get("general.architecture") == "phi3" and metadata.get("tokenizer.ggml.model") == "llama"

    def _add_frame(self, backend: tokenizers.Tokenizer, *, default_bos: bool) -> None:
        """Put the beginning-of-text and end-of-text tokens around a text, where the model wants them."""
        bos = self._token_id("bos_token_id") if self._flag("add_bos_token", default_bos) else None
        eos = self._token_id("eos_token_id") if self._flag("add_eos_token", False) else None
        around = {name: token_id for name, token_id in (("bos", bos), ("eos", eos)) if token_id is not None}
        backend.post_processor = processors.TemplateProcessing(
            single=[*(["bos"] if "bos" in around else []), "$A", *(["eos"] if "eos" in around else [])],
            pair="$A $B:1",
            special_tokens=[
                {"id": name, "ids": [token_id], "tokens": [self.tokens[token_id]]} for name, token_id in around.items()
            ],
        )

    def _split(self) -> WordSplit:
        name = self._metadata.get("tokenizer.ggml.pre") or self._usual_split()
        if not isinstance(name, str) or name not in WORD_SPLITS:
            self._refuse(f"pre is {name!r}; supported are: {', '.join(WORD_SPLITS)}")
        return WORD_SPLITS[name]

    def _usual_split(self) -> str:
        """How models of the file's kind split, for files older than the key."""
        if str(self._metadata.get("general.architecture")).startswith("qwen"):
            return "qwen2"
        return "llama-bpe" if _LLAMA3_BEGIN in self.tokens else "default"

    def _token_id(self, key: str) -> int | None:
        value = gguf_token_id(self._metadata, key)
        if value is None:
            return None
        if type(value) is not int or not 0 <= value < len(self.tokens):
            self._refuse(f"{key} is {value!r}; it must be from 0 to {len(self.tokens) - 1}")
        return value

    def _flag(self, key: str, default: bool) -> bool:
        value = self._metadata.get(f"tokenizer.ggml.{key}", default)
        if not isinstance(value, bool):
            self._refuse(f"{key} is {value!r}; it must be true or false")
        return value

    def _strings(self, key: str) -> list[str]:
        values = self._list(key)
        if not values or not isinstance(values[0], str):
            self._refuse(f"{key} is missing or no list of strings")
        return values  # type: ignore[return-value]  # the elements of a GGUF array have one type

    def _integers(self, key: str) -> list[int]:
        values = self._list(key)
        if values and type(values[0]) is not int:
            self._refuse(f"{key} is no list of integers")
        return values  # type: ignore[return-value]

    def _numbers(self, key: str) -> list[float]:
        values = self._list(key)
        if values and not isinstance(values[0], float):
            self._refuse(f"{key} is no list of numbers")
        return values  # type: ignore[return-value]

    def _list(self, key: str) -> list[object]:
        values = self._metadata.get(f"tokenizer.ggml.{key}", [])
        if not isinstance(values, list):
            self._refuse(f"{key} is no list")
        return values

    def _refuse(self, message: str) -> NoReturn:
        raise ModelError(f"its tokenizer cannot be built: tokenizer.ggml.{message}", file=str(self._file.path))
