"""Tokenizers: the reference's ids, text that streams in whole characters, stop strings that never leak."""

import hashlib
import itertools
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors
from transformers import AutoTokenizer
from transformers.integrations.ggml import convert_gguf_tokenizer

from penstock.engine.tokenizer import Detokenizer, StopMatcher, Tokenizer
from penstock.errors import InvalidParameter, ModelError
from penstock.models import store
from penstock.models.gguf import GgufFile
from penstock.models.store import ModelFiles

from .sample_texts import sample_texts

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6

# SHA-256 of the JSON list of llama.cpp's ids for sample_texts(1000), with its special tokens parsed and none added.
LLAMA_CPP_DIGESTS = {
    "smollm": "0e83ed0128d3f9df692e2f1fc91f557ccfcc09673d3a1d820e9a66ea3eb1696c",
    "gpt-2": "7667960709c867b6dfc6cb80ec3ab657ae29800969e2bfbeb33fd2d290d4e688",
    "llama-bpe": "42cf819822826fc5f71d00f24d008302a88e667b13ca0ca8d1b23dcff19e1fa8",
    "deepseek-v3": "e572264ee457ea637369fd9929536a39723440b32e4503ed8673bb88f998ef89",
}


def digest(ids: list[list[int]]) -> str:
    return hashlib.sha256(json.dumps(ids).encode()).hexdigest()


@pytest.fixture(scope="module")
def smollm2(default_model_path: Path) -> Tokenizer:
    return Tokenizer.load(ModelFiles("smollm2", "gguf", default_model_path))


@pytest.fixture(scope="module")
def vocabulary(default_model_path: Path) -> dict[str, Any]:
    return dict(GgufFile.open(default_model_path).metadata)


def write_gguf(path: Path, *, architecture: str = "llama", **metadata: Any) -> Path:
    """Write a GGUF file without tensors; keys are those below tokenizer.ggml."""
    writer = gguf.GGUFWriter(str(path), architecture)
    for key, value in metadata.items():
        full = f"tokenizer.ggml.{key}"
        if isinstance(value, list):
            writer.add_array(full, value)
        elif isinstance(value, bool):
            writer.add_bool(full, value)
        elif isinstance(value, int):
            writer.add_uint32(full, value)
        else:
            writer.add_string(full, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def load_gguf(path: Path) -> Tokenizer:
    return Tokenizer.load(store.resolve(str(path)))


def with_pre(vocabulary: dict[str, Any], path: Path, pre: str) -> Tokenizer:
    """The default model's vocabulary under another way to split words."""
    keys = ("tokens", "token_type", "merges", "bos_token_id", "eos_token_id")
    parts = {key: vocabulary[f"tokenizer.ggml.{key}"] for key in keys}
    return load_gguf(write_gguf(path, model="gpt2", pre=pre, **parts))


# ---------------------------------------------------------------- the reference's ids


@pytest.fixture(scope="module")
def reference(vocabulary: dict[str, Any]) -> tokenizers.Tokenizer:
    """transformers' own conversion of the default model's vocabulary, merges and special tokens."""
    keys = ("tokens", "token_type", "merges", "bos_token_id", "eos_token_id")
    parts = {key: vocabulary[f"tokenizer.ggml.{key}"] for key in keys}
    backend, _ = convert_gguf_tokenizer("llama", {"tokenizer_type": "gpt2", **parts})
    # It takes every GGUF "llama" to split words as GPT-2 does; SmolLM2's own tokenizer.json takes digits apart first.
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    backend.decoder = decoders.ByteLevel()
    return backend


def test_ids_equal_transformers_on_a_thousand_texts(smollm2: Tokenizer, reference: tokenizers.Tokenizer) -> None:
    for text in sample_texts(1000):
        assert smollm2.encode(text, add_special=False) == reference.encode(text, add_special_tokens=False).ids, text


def test_ids_equal_llama_cpp_on_a_thousand_texts(smollm2: Tokenizer) -> None:
    ids = [smollm2.encode(text, add_special=False) for text in sample_texts(1000)]
    assert digest(ids) == LLAMA_CPP_DIGESTS["smollm"]


@pytest.mark.parametrize("pre", ["gpt-2", "llama-bpe", "deepseek-v3"])
def test_other_ways_to_split_words_equal_llama_cpp(vocabulary: dict[str, Any], tmp_path: Path, pre: str) -> None:
    tokenizer = with_pre(vocabulary, tmp_path / "vocabulary.gguf", pre)
    ids = [tokenizer.encode(text, add_special=False) for text in sample_texts(1000)]
    assert digest(ids) == LLAMA_CPP_DIGESTS[pre]


def test_qwen2_takes_digits_apart_and_composes_accents(vocabulary: dict[str, Any], tmp_path: Path) -> None:
    tokenizer = with_pre(vocabulary, tmp_path / "vocabulary.gguf", "qwen2")
    assert tokenizer.encode("e\u0301", add_special=False) == tokenizer.encode("\u00e9", add_special=False)
    assert [tokenizer.token_text(token) for token in tokenizer.encode("a 1234", add_special=False)] == [
        "a",
        " ",
        *"1234",
    ]


def test_tekken_takes_words_that_are_tokens_as_they_are_and_begins_texts(tmp_path: Path) -> None:
    parts = {"model": "gpt2", "token_type": [CONTROL, *[NORMAL] * 5], "bos_token_id": 0, "merges": ["a b"]}
    path = write_gguf(tmp_path / "tekken.gguf", pre="tekken", tokens=["<s>", "a", "b", "ab", "A", "aba"], **parts)
    # No merge leads to "aba"; a word ends where upper case begins.
    assert load_gguf(path).encode("abaAab", add_special=True) == [0, 5, 4, 3]


@pytest.mark.parametrize(
    ("architecture", "tokens", "name"),
    [("qwen2", ["1", "11"], "qwen2"), ("llama", ["1", "11", "<|begin_of_text|>"], "llama-bpe")],
)
def test_an_old_file_that_names_no_split_is_split_as_its_kind_is(
    tmp_path: Path, architecture: str, tokens: list[str], name: str
) -> None:
    parts = {"model": "gpt2", "tokens": tokens, "merges": ["1 1"]}
    old = load_gguf(write_gguf(tmp_path / "old.gguf", architecture=architecture, **parts))
    new = load_gguf(write_gguf(tmp_path / "new.gguf", architecture=architecture, pre=name, **parts))
    plain = load_gguf(write_gguf(tmp_path / "plain.gguf", architecture=architecture, pre="gpt-2", **parts))
    ids = old.encode("1111", add_special=False)
    assert ids == new.encode("1111", add_special=False) != plain.encode("1111", add_special=False)


def test_a_batch_gives_the_ids_of_its_texts(smollm2: Tokenizer) -> None:
    texts = sample_texts(40)
    expected = [smollm2.encode(text, add_special=False) for text in texts]
    assert smollm2.encode_batch(texts, add_special=False) == expected


def test_decoding_gives_the_text_back(smollm2: Tokenizer) -> None:
    for text in sample_texts(1000):
        assert smollm2.decode(smollm2.encode(text, add_special=False), skip_special=False) == text


def test_random_ids_decode_as_the_library_decodes_them(smollm2: Tokenizer, reference: tokenizers.Tokenizer) -> None:
    generator = random.Random(3)
    for _ in range(300):
        ids = [generator.randrange(smollm2.vocab_size) for _ in range(generator.randint(1, 20))]
        assert smollm2.decode(ids) == reference.decode(ids, skip_special_tokens=True)


def test_what_the_file_says_of_special_tokens_is_known(smollm2: Tokenizer) -> None:
    assert (smollm2.bos_token_id, smollm2.bos_text) == (1, "<|im_start|>")
    assert (smollm2.eos_token_id, smollm2.eos_text) == (2, "<|im_end|>")
    assert smollm2.eos_token_ids == (2, 0)
    assert smollm2.vocab_size == 49152
    assert smollm2.chat_template is not None
    assert "<|im_start|>" in smollm2.chat_template


def test_special_tokens_leave_no_text_unless_asked(smollm2: Tokenizer) -> None:
    ids = smollm2.encode("a<|im_end|>b", add_special=False)
    assert smollm2.decode(ids) == "ab"
    assert smollm2.decode(ids, skip_special=False) == "a<|im_end|>b"


def test_the_bytes_of_tokens_add_up_to_the_text(smollm2: Tokenizer) -> None:
    text = "naïve 👩‍👩‍👧 12\n\tx"
    ids = smollm2.encode(text, add_special=False)
    assert b"".join(smollm2.token_bytes(token_id) for token_id in ids) == text.encode()


def test_no_two_tokens_have_one_name(smollm2: Tokenizer) -> None:
    names = [smollm2.token_names[token_id] for token_id in range(smollm2.vocab_size)]
    assert len(set(names)) == len(names)
    first, *_ = smollm2.encode("😀", add_special=False)
    assert smollm2.token_names[first].startswith("bytes:\\xf0\\x9f")
    assert smollm2.token_text(first) == "\ufffd"


def test_ids_that_do_not_exist_are_nothing(smollm2: Tokenizer) -> None:
    assert smollm2.decode([10**9, 49152, smollm2.encode("a", add_special=False)[0]]) == "a"
    assert smollm2.token_bytes(49152) == b""
    assert smollm2.token_text(-1) == ""


def test_a_long_text_has_the_ids_of_a_short_one(smollm2: Tokenizer, reference: tokenizers.Tokenizer) -> None:
    text = " ".join(sample_texts(200)) * 3
    assert smollm2.encode(text, add_special=False) == reference.encode(text, add_special_tokens=False).ids


@pytest.mark.parametrize(
    "text", ["", "a", "\n" + " " * 80, "#" * 8000, "\x04\x06" * 5000, "一二三" * 500, "<|im_end|>" * 9]
)
def test_a_text_never_has_fewer_tokens_than_said(smollm2: Tokenizer, text: str) -> None:
    assert smollm2.fewest_tokens(text) <= len(smollm2.encode(text, add_special=False))


def test_a_large_text_is_known_to_have_many_tokens(smollm2: Tokenizer) -> None:
    assert smollm2.fewest_tokens("word " * 20_000) > 1000


def test_a_text_that_is_composed_first_may_have_fewer_tokens(vocabulary: dict[str, Any], tmp_path: Path) -> None:
    tokenizer = with_pre(vocabulary, tmp_path / "qwen2.gguf", "qwen2")
    for text in ("\u1100\u1161\u11a8" * 500, "\u212a" * 500, "#" * 8000):
        assert 0 < tokenizer.fewest_tokens(text) <= len(tokenizer.encode(text, add_special=False))


def test_nothing_is_said_of_texts_whose_tokens_may_swallow_spaces(tmp_path: Path) -> None:
    files = write_folder(tmp_path)
    backend = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    backend.add_tokens([tokenizers.AddedToken("<gap>", rstrip=True)])
    backend.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer.load(files)
    assert tokenizer.fewest_tokens("<gap>" + " " * 10_000) == 0
    assert len(tokenizer.encode("<gap>" + " " * 10_000, add_special=False)) == 1


def test_sentencepiece_texts_never_have_fewer_tokens_than_said(tmp_path: Path) -> None:
    tokenizer = load_gguf(write_gguf(tmp_path / "tiny.gguf", **sentencepiece_parts(prefix=True)))
    for text in ("hello world " * 50, "\u2581" * 500, "\U0001f600" * 50):
        assert 0 < tokenizer.fewest_tokens(text) <= len(tokenizer.encode(text, add_special=False))


def test_half_a_surrogate_pair_is_refused(smollm2: Tokenizer) -> None:
    with pytest.raises(InvalidParameter, match="surrogate"):
        smollm2.encode("a\ud83d", add_special=False)
    with pytest.raises(InvalidParameter, match="surrogate"):
        smollm2.encode_batch(["a", "\udc00"], add_special=False)


# ---------------------------------------------------------------- SentencePiece vocabularies


def sentencepiece_parts(*, prefix: bool) -> dict[str, Any]:
    """A small vocabulary with unique scores, byte tokens, control and user-defined tokens."""
    generator = random.Random(11)
    letters = "▁abcdeéß"
    pieces: list[str] = []
    known = set(letters)
    while len(pieces) < 120:
        piece = generator.choice(sorted(known)) + generator.choice(sorted(known))
        if piece not in known and len(piece) <= 7:
            known.add(piece)
            pieces.append(piece)
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces, *letters, "<turn>", "\n\n"]
    types = (
        [UNKNOWN, CONTROL, CONTROL] + [BYTE] * 256 + [NORMAL] * (len(pieces) + len(letters)) + [CONTROL, USER_DEFINED]
    )
    scores = [0.0] * 259 + [-float(rank) for rank in range(len(pieces))] + [-1000.0] * len(letters) + [0.0, 0.0]
    ids = {"bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0}
    return {
        "model": "llama",
        "tokens": tokens,
        "token_type": types,
        "scores": scores,
        "add_space_prefix": prefix,
        **ids,
    }


def sentencepiece_ids(parts: dict[str, Any], text: str) -> list[int]:
    """The reference: join the neighbours whose union scores best, leftmost first, until none is a token."""
    ids = {token: token_id for token_id, token in enumerate(parts["tokens"])}
    symbols = list((("▁" if parts["add_space_prefix"] and text else "") + text).replace(" ", "▁"))
    while True:
        scored = [
            (-parts["scores"][ids[left + right]], place)
            for place, (left, right) in enumerate(itertools.pairwise(symbols))
            if left + right in ids
        ]
        if not scored:
            break
        place = min(scored)[1]
        symbols[place : place + 2] = [symbols[place] + symbols[place + 1]]
    result: list[int] = []
    for symbol in symbols:
        result += [ids[symbol]] if symbol in ids else [3 + byte for byte in symbol.encode()]
    return result


@pytest.mark.parametrize("prefix", [True, False])
def test_sentencepiece_ids_equal_the_reference_algorithm(tmp_path: Path, prefix: bool) -> None:
    parts = sentencepiece_parts(prefix=prefix)
    tokenizer = load_gguf(write_gguf(tmp_path / "spm.gguf", **parts))
    generator = random.Random(5)
    for _ in range(1000):
        text = "".join(generator.choice("abcdeéß  xy漢😀") for _ in range(generator.randint(0, 30)))
        assert tokenizer.encode(text, add_special=False) == sentencepiece_ids(parts, text), repr(text)
        assert tokenizer.decode(tokenizer.encode(text, add_special=True)) == text


def test_sentencepiece_texts_begin_with_bos_and_control_tokens_are_found(tmp_path: Path) -> None:
    parts = sentencepiece_parts(prefix=False)
    tokenizer = load_gguf(write_gguf(tmp_path / "spm.gguf", **parts))
    turn = parts["tokens"].index("<turn>")
    assert tokenizer.encode("<turn>", add_special=True) == [1, turn]
    assert tokenizer.encode("\n\n", add_special=False) == [turn + 1]


def test_tokens_of_phi3_swallow_the_white_space_behind_them(tmp_path: Path) -> None:
    parts = sentencepiece_parts(prefix=True)
    turn = parts["tokens"].index("<turn>")
    phi3 = load_gguf(write_gguf(tmp_path / "phi3.gguf", architecture="phi3", **parts))
    assert phi3.encode("<turn>\n ab", add_special=False) == [turn, *phi3.encode("ab", add_special=False)]
    # The one that begins a text does not, and other models' do not either.
    assert phi3.encode("<s> ab", add_special=False) == [1, *phi3.encode(" ab", add_special=False)]
    llama = load_gguf(write_gguf(tmp_path / "llama.gguf", **parts))
    assert llama.encode("<turn> ab", add_special=False) == [turn, *llama.encode(" ab", add_special=False)]


def test_a_token_of_several_spaces_is_found_however_the_file_writes_spaces(tmp_path: Path) -> None:
    parts = sentencepiece_parts(prefix=False)
    spaces = len(parts["tokens"])
    parts |= {"token_type": [*parts["token_type"], USER_DEFINED], "scores": [*parts["scores"], 0.0]}
    for name, token in (("spaces", " " * 9), ("marks", "\u2581" * 9)):
        tokenizer = load_gguf(write_gguf(tmp_path / f"{name}.gguf", **parts | {"tokens": [*parts["tokens"], token]}))
        middle = tokenizer.encode("c", add_special=False)
        assert tokenizer.encode("c" + " " * 9 + "c", add_special=False) == [*middle, spaces, *middle]


def test_a_token_that_the_file_says_it_does_not_have_is_none(tmp_path: Path) -> None:
    parts = sentencepiece_parts(prefix=False) | {"bos_token_id": 2**32 - 1, "eos_token_id": 2**32 - 1}
    tokenizer = load_gguf(write_gguf(tmp_path / "none.gguf", **parts))
    assert (tokenizer.bos_token_id, tokenizer.eos_token_ids) == (None, ())
    assert tokenizer.encode("c", add_special=True) == tokenizer.encode("c", add_special=False)


def test_a_first_space_after_a_prompt_is_text(tmp_path: Path) -> None:
    tokenizer = load_gguf(write_gguf(tmp_path / "spm.gguf", **sentencepiece_parts(prefix=True)))
    ids = tokenizer.encode("ab", add_special=False)
    assert Detokenizer(tokenizer).push(ids) == "ab"
    assert Detokenizer(tokenizer, after_prompt=True).push(ids) == " ab"


# ---------------------------------------------------------------- files that cannot be used

BYTE_LEVEL = {"model": "gpt2", "tokens": ["a", "b", "ab"], "token_type": [1, 1, 1], "merges": ["a b"]}


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"model": "bert"}, "model is 'bert'; supported are gpt2 and llama"),
        ({"pre": "unheard-of"}, "pre is 'unheard-of'; supported are: gpt-2"),
        ({"tokens": "a"}, "tokens is no list"),
        ({"token_type": [1]}, "token_type has 1 entries for 3 tokens"),
        ({"merges": ["ab"]}, "merges has 'ab', which is not two tokens"),
        ({"merges": ["a z"]}, "cannot be built"),
        ({"model": "llama"}, "scores has 0 entries for 3 tokens"),
        ({"add_bos_token": True, "bos_token_id": 3}, "bos_token_id is 3; it must be from 0 to 2"),
    ],
)
def test_an_unusable_gguf_vocabulary_is_refused_with_the_key(
    tmp_path: Path, change: dict[str, Any], complaint: str
) -> None:
    path = write_gguf(tmp_path / "bad.gguf", **{**BYTE_LEVEL, **change})
    with pytest.raises(ModelError, match="bad.gguf.*" + complaint):
        load_gguf(path)


def test_a_gguf_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="tokens is missing"):
        load_gguf(write_gguf(tmp_path / "none.gguf", model="gpt2"))


# ---------------------------------------------------------------- Hugging Face folders


def write_folder(folder: Path, **files: Any) -> ModelFiles:
    """A folder with a small byte-level tokenizer.json; other files by their stem, as objects."""
    vocabulary = {token: token_id for token_id, token in enumerate(["<s>", "</s>", "<end>", "a", "b", "ab", "Ġ"])}
    backend = tokenizers.Tokenizer(models.BPE(vocabulary, [("a", "b")]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<s>", "</s>", "<end>"])
    backend.enable_truncation(3)
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    backend.save(str(folder / "tokenizer.json"))
    for stem, content in files.items():
        (folder / f"{stem}.json").write_text(json.dumps(content))
    return ModelFiles("tiny", "folder", folder, config=folder / "config.json")


def test_a_folder_gives_ids_texts_and_every_end_token(tmp_path: Path) -> None:
    files = write_folder(
        tmp_path,
        tokenizer_config={"bos_token": "<s>", "eos_token": {"content": "</s>"}},
        generation_config={"eos_token_id": [2, 1]},
    )
    tokenizer = Tokenizer.load(files)
    assert tokenizer.encode("ab a", add_special=True) == [0, 5, 6, 3]
    assert tokenizer.encode("ab a", add_special=False) == [5, 6, 3]
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.eos_token_ids) == (0, 1, (1, 2))


def test_a_text_is_never_truncated(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(write_folder(tmp_path))
    assert len(tokenizer.encode("a " * 50, add_special=False)) == 100


def test_what_is_put_around_a_text_equals_transformers(tmp_path: Path) -> None:
    config = {"add_bos_token": False, "add_eos_token": True, "bos_token": "<s>", "eos_token": "</s>"}
    tokenizer = Tokenizer.load(write_folder(tmp_path, tokenizer_config=config))
    assert tokenizer.encode("ab", add_special=True) == AutoTokenizer.from_pretrained(tmp_path).encode("ab") == [0, 5]


@pytest.mark.parametrize(
    "value", ["plain", [{"name": "tool_use", "template": "x"}, {"name": "default", "template": "plain"}]]
)
def test_a_chat_template_is_read_from_the_settings(tmp_path: Path, value: object) -> None:
    assert Tokenizer.load(write_folder(tmp_path, tokenizer_config={"chat_template": value})).chat_template == "plain"


@pytest.mark.parametrize(
    "settings",
    [
        {"bos_token": "\ud800"},
        {"bos_token": {"content": ["<s>"]}},
        {"chat_template": [{"name": [], "template": "t"}]},
        {"chat_template": [{"name": "default", "template": 5}]},
    ],
)
def test_settings_that_mean_nothing_are_left_aside(settings: dict[str, Any], tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(write_folder(tmp_path, tokenizer_config=settings))
    assert (tokenizer.bos_token_id, tokenizer.chat_template) == (None, None)


def test_a_chat_template_file_wins_over_the_settings(tmp_path: Path) -> None:
    files = write_folder(tmp_path, tokenizer_config={"chat_template": "old"})
    (tmp_path / "chat_template.jinja").write_text("new")
    assert Tokenizer.load(files).chat_template == "new"


def test_a_damaged_tokenizer_file_is_refused_with_its_name(tmp_path: Path) -> None:
    files = write_folder(tmp_path)
    (tmp_path / "tokenizer.json").write_text((tmp_path / "tokenizer.json").read_text()[:100])
    with pytest.raises(ModelError, match=r"tokenizer\.json: it cannot be read as a tokenizer"):
        Tokenizer.load(files)


def test_gits_pointer_to_a_tokenizer_file_says_how_to_get_the_file(tmp_path: Path) -> None:
    files = write_folder(tmp_path)
    (tmp_path / "tokenizer.json").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0123\nsize 98\n")
    with pytest.raises(ModelError, match=r"tokenizer\.json: .*`git lfs pull`"):
        Tokenizer.load(files)


def test_a_decoder_that_is_not_understood_is_refused(tmp_path: Path) -> None:
    backend = tokenizers.Tokenizer(models.WordPiece({"[UNK]": 0}, unk_token="[UNK]"))
    backend.decoder = decoders.WordPiece()
    backend.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(ModelError, match=r"decoder \(WordPiece\) is not supported"):
        Tokenizer.load(ModelFiles("tiny", "folder", tmp_path))


def test_a_sentencepiece_tokenizer_file_decodes_spaces_and_bytes(tmp_path: Path) -> None:
    vocabulary = {"<unk>": 0, "▁": 1, "a": 2, "▁a": 3, "<0xC3>": 4, "<0xA9>": 5}
    backend = tokenizers.Tokenizer(models.BPE(vocabulary, [("▁", "a")], unk_token="<unk>", byte_fallback=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer.load(ModelFiles("tiny", "folder", tmp_path))
    assert tokenizer.encode("a é", add_special=False) == [3, 1, 4, 5]
    assert tokenizer.decode([3, 1, 4, 5]) == "a é"


def test_a_bare_config_has_a_tokenizer_for_benchmarks(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"vocab_size": 1000, "eos_token_id": 7}')
    tokenizer = Tokenizer.load(store.resolve(str(tmp_path), load_format="dummy"))
    assert tokenizer.vocab_size == 1000
    assert tokenizer.eos_token_ids == (7,)
    assert tokenizer.decode(tokenizer.encode("Grüße 😀", add_special=True)) == "Grüße 😀"
    assert tokenizer.token_text(999) == " t999"


def test_a_bare_config_may_have_anything_where_others_have_their_text_settings(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 300, "text_config": "none"}))
    files = ModelFiles("tiny", "folder", tmp_path, tmp_path / "config.json", load_format="dummy")
    assert Tokenizer.load(files).vocab_size == 300


def test_a_bare_config_with_too_few_tokens_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"vocab_size": 255}')
    with pytest.raises(ModelError, match="at least 256"):
        Tokenizer.load(store.resolve(str(tmp_path), load_format="dummy"))


def test_a_folder_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no tokenizer\.json"):
        Tokenizer.load(ModelFiles("tiny", "folder", tmp_path))


def word_tokenizer() -> tokenizers.Tokenizer:
    words = ["<s>", "▁a", "b", "Ġc", "<0xC3>", "é", " d", "", "[UNK]", "</s>"]
    backend = tokenizers.Tokenizer(models.WordLevel({word: place for place, word in enumerate(words)}, "[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.add_special_tokens(["<s>", "</s>"])
    backend.add_tokens(["new word", "▁x"])
    return backend


def pair_tokenizer() -> tokenizers.Tokenizer:
    vocabulary = {token: token_id for token_id, token in enumerate(["a", "b", "ab", "▁", "é", "<0xA9>", "</s>"])}
    backend = tokenizers.Tokenizer(models.BPE(vocabulary, [("a", "b")]))
    backend.add_special_tokens(["</s>"])
    return backend


def load_backend(backend: tokenizers.Tokenizer, folder: Path) -> Tokenizer:
    backend.save(str(folder / "tokenizer.json"))
    return Tokenizer.load(ModelFiles("tiny", "folder", folder))


@pytest.mark.parametrize("make", [word_tokenizer, pair_tokenizer])
def test_without_a_decoder_texts_stream_as_the_library_decodes_the_whole(
    make: Callable[[], tokenizers.Tokenizer], tmp_path: Path
) -> None:
    backend = make()
    tokenizer = load_backend(backend, tmp_path)

    @settings(max_examples=200, deadline=None)
    @given(data=st.data(), skip_special=st.booleans())
    def check(data: st.DataObject, skip_special: bool) -> None:
        ids = data.draw(st.lists(st.integers(0, 13), max_size=12))
        detokenizer = Detokenizer(tokenizer, skip_special=skip_special)
        pieces = [detokenizer.push(ids[part]) for part in chunks_of(data, len(ids))]
        assert "".join(pieces) + detokenizer.flush() == backend.decode(ids, skip_special_tokens=skip_special)

    check()


def test_without_a_decoder_an_answer_goes_on_behind_its_prompt(tmp_path: Path) -> None:
    tokenizer = load_backend(word_tokenizer(), tmp_path)
    prompt, answer = tokenizer.encode("b new word", add_special=False), [5, 2]
    text = tokenizer.decode(prompt) + Detokenizer(tokenizer, after_prompt=True).push(answer)
    assert text == tokenizer.decode(prompt + answer) == "b new word é b"


def test_without_a_decoder_a_template_writes_special_tokens_as_they_are(tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text('{"bos_token": "<s>", "eos_token": "</s>"}')
    tokenizer = load_backend(word_tokenizer(), tmp_path)
    assert (tokenizer.bos_text, tokenizer.eos_text) == ("<s>", "</s>")


# ---------------------------------------------------------------- streams


def chunks_of(data: st.DataObject, length: int) -> list[slice]:
    """Cut 0..length anywhere."""
    cuts = sorted(data.draw(st.lists(st.integers(0, length), max_size=10)))
    return [slice(start, stop) for start, stop in zip([0, *cuts], [*cuts, length], strict=True)]


@settings(max_examples=200, deadline=None)
@given(data=st.data(), skip_special=st.booleans())
def test_streamed_text_adds_up_to_the_whole(smollm2: Tokenizer, data: st.DataObject, skip_special: bool) -> None:
    ids = smollm2.encode(data.draw(st.text(max_size=20)), add_special=False)
    ids += data.draw(st.lists(st.integers(0, 49200), max_size=20))
    detokenizer = Detokenizer(smollm2, skip_special=skip_special)
    pieces = [detokenizer.push(ids[part]) for part in chunks_of(data, len(ids))]
    assert "".join(pieces) + detokenizer.flush() == smollm2.decode(ids, skip_special=skip_special)


@settings(max_examples=100, deadline=None)
@given(text=st.text(st.characters(exclude_categories=["Cs", "Cc", "Cn", "Co"]), max_size=30))
def test_a_stream_never_shows_half_a_character(smollm2: Tokenizer, text: str) -> None:
    detokenizer = Detokenizer(smollm2, skip_special=False)
    shown = ""
    for token_id in smollm2.encode(text, add_special=False):
        shown += detokenizer.push([token_id])
        assert text.startswith(shown)
    assert shown == text


def naive_stop(text: str, stops: list[str]) -> tuple[str, str | None]:
    """The stop string that is complete first, the longest of those; text before it."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            stop = max(ending, key=len)
            return text[: end - len(stop)], stop
    return text, None


@settings(max_examples=500, deadline=None)
@given(
    text=st.text("abc", max_size=40),
    stops=st.lists(st.text("abc", min_size=1, max_size=6), max_size=4),
    data=st.data(),
)
def test_stop_strings_are_found_as_in_the_whole_text(text: str, stops: list[str], data: st.DataObject) -> None:
    expected, stop = naive_stop(text, stops)
    matcher = StopMatcher(stops)
    shown, found = "", None
    for part in chunks_of(data, len(text)):
        safe, found = matcher.push(text[part])
        shown += safe
        # Whatever may come, what is shown never has to be taken back.
        assert expected.startswith(shown)
        if found is not None:
            break
    assert found == stop
    assert shown + matcher.flush() == expected


@settings(max_examples=300, deadline=None)
@given(text=st.text("ab", max_size=20), stops=st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=3))
def test_text_is_held_back_exactly_while_it_may_become_a_stop_string(text: str, stops: list[str]) -> None:
    matcher = StopMatcher(stops)
    shown, found = matcher.push(text)
    if found is None:
        held = text[len(shown) :]
        longest = max(
            length
            for stop in stops
            for length in range(len(stop))
            if length <= len(text) and text.endswith(stop[:length])
        )
        assert len(held) == longest


def test_after_a_match_nothing_more_is_shown() -> None:
    matcher = StopMatcher(["END"])
    assert matcher.push("text END more") == ("text ", "END")
    assert matcher.push("more") == ("", "END")
    assert matcher.flush() == ""


def test_a_fresh_matcher_knows_nothing_of_the_text_before() -> None:
    used = StopMatcher(["abc", "xy"])
    assert used.push("..ab") == ("..", None)
    fresh = used.fresh()
    assert fresh.push("c..x") == ("c..", None)
    assert fresh.push("y") == ("", "xy")
    assert used.push("c") == ("", "abc")


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(InvalidParameter, match="stop"):
        StopMatcher(["a", ""])
