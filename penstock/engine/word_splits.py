"""How byte-level vocabularies cut a text into words before merging, by the names that GGUF files call it.

Knows patterns. Knows nothing of files, tokens or merges. No torch.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from tokenizers import Regex, pre_tokenizers


@dataclass(frozen=True, slots=True)
class WordSplit:
    """One way to cut text. It is part of a model's definition: another gives other ids."""

    patterns: tuple[str, ...] = ()  # each cuts what those before it left whole; without any, GPT-2's
    takes_digits_apart: bool = False
    composes_accents: bool = False  # NFC, before anything else
    keeps_known_words: bool = False  # a word that is a token is taken as it is, even where merges would not lead to it
    begins_texts: bool = False  # with the token for it, where the file does not say

    def pre_tokenizer(self) -> pre_tokenizers.PreTokenizer:
        steps: list[pre_tokenizers.PreTokenizer] = [
            pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in self.patterns
        ]
        if self.takes_digits_apart:
            steps.append(pre_tokenizers.Digits(individual_digits=True))
        steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not self.patterns))
        return pre_tokenizers.Sequence(steps)


_ENDINGS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = _ENDINGS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*" + _SPACES
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_QWEN35 = _ENDINGS + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*" + _SPACES
# Upper case before lower case: a word ends where the case rises.
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+%s|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*%s"
_CASED_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*" + _SPACES
_TEKKEN = _CASED % ("", "") + r"|\p{N}" + _CASED_REST
_GPT4O = _CASED % (f"{_ENDINGS}?", f"{_ENDINGS}?") + r"|\p{N}{1,3}" + _CASED_REST
_DEEPSEEK_V3 = (
    r"\p{N}{1,3}",
    "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*"
    + _SPACES,
)
_DEEPSEEK_CODER = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+")

_GPT2_WORDS = WordSplit()
_SINGLE_DIGITS = WordSplit(takes_digits_apart=True)
_LLAMA3_WORDS = WordSplit((_LLAMA3,), keeps_known_words=True, begins_texts=True)
_QWEN2_WORDS = WordSplit((_QWEN2,), composes_accents=True)

WORD_SPLITS: Mapping[str, WordSplit] = MappingProxyType(
    {
        "gpt-2": _GPT2_WORDS,
        "default": _GPT2_WORDS,
        "smollm": _SINGLE_DIGITS,
        "starcoder": _SINGLE_DIGITS,
        "refact": _SINGLE_DIGITS,
        "command-r": replace(_SINGLE_DIGITS, composes_accents=True),
        "llama-bpe": _LLAMA3_WORDS,
        "llama3": _LLAMA3_WORDS,
        "llama-v3": _LLAMA3_WORDS,
        "smaug-bpe": WordSplit((_LLAMA3,)),
        "dbrx": WordSplit((_LLAMA3,)),  # Phi-4
        "gpt-4o": WordSplit((_GPT4O,)),  # Phi-4-mini
        "qwen2": _QWEN2_WORDS,
        "deepseek-r1-qwen": _QWEN2_WORDS,
        "qwen35": WordSplit((_QWEN35,), composes_accents=True),
        "tekken": WordSplit((_TEKKEN,), keeps_known_words=True, begins_texts=True),
        "deepseek-v3": WordSplit(_DEEPSEEK_V3),
        "deepseek-coder": WordSplit(_DEEPSEEK_CODER, takes_digits_apart=True),
    }
)
