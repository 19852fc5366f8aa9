"""Words are cut as the tokenizers that the models came with cut them."""

import pytest
import tokenizers
from tokenizers import Regex, pre_tokenizers
from transformers import CohereTokenizer, Qwen2Tokenizer
from transformers.convert_slow_tokenizer import TikTokenConverter
from transformers.models.qwen3_5.tokenization_qwen3_5 import Qwen3_5Tokenizer

from penstock.engine.word_splits import WORD_SPLITS

from .sample_texts import sample_texts

# As the tokenizer.json files of Mistral-Nemo, Phi-4-mini, DeepSeek-V3 and DeepSeek-Coder have them.
PUBLISHED = {
    "tekken": [
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}"
        r"\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ],
    "gpt-4o": [
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
        r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
        r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ],
    "deepseek-v3": [
        r"\p{N}{1,3}",
        "[一-龥぀-ゟ゠-ヿ]+",
        r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
        r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    ],
    "deepseek-coder": [r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-퟿]+", r"\p{N}"],
}


def words(splitter: pre_tokenizers.PreTokenizer, text: str) -> list[str]:
    return [word for word, _ in splitter.pre_tokenize_str(text)]


def of_patterns(*patterns: str) -> pre_tokenizers.PreTokenizer:
    splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in patterns]
    return pre_tokenizers.Sequence([*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


@pytest.mark.parametrize("name", sorted(PUBLISHED))
def test_words_equal_those_of_the_published_patterns(name: str) -> None:
    published, ours = of_patterns(*PUBLISHED[name]), WORD_SPLITS[name].pre_tokenizer()
    for text in sample_texts(300):
        assert words(ours, text) == words(published, text), text


@pytest.mark.parametrize("name", ["llama-bpe", "smaug-bpe", "dbrx"])
def test_words_equal_those_of_tiktoken_vocabularies(name: str) -> None:
    reference, ours = of_patterns(TikTokenConverter().pattern), WORD_SPLITS[name].pre_tokenizer()
    for text in sample_texts(300):
        assert words(ours, text) == words(reference, text), text


@pytest.mark.parametrize(
    ("name", "reference"),
    [
        ("qwen2", Qwen2Tokenizer),
        ("deepseek-r1-qwen", Qwen2Tokenizer),
        ("qwen35", Qwen3_5Tokenizer),
        ("command-r", CohereTokenizer),
    ],
)
def test_words_and_accents_equal_those_of_transformers(name: str, reference: type) -> None:
    backend: tokenizers.Tokenizer = reference(vocab={"<|endoftext|>": 0, "<UNK>": 1}, merges=[]).backend_tokenizer
    split = WORD_SPLITS[name]
    assert split.composes_accents and "NFC" in repr(backend.normalizer)
    for text in sample_texts(300):
        assert words(split.pre_tokenizer(), text) == words(backend.pre_tokenizer, text), text
