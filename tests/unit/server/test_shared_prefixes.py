"""Declared prefixes: counted token by token, read from a file, and nothing beyond them is public."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import ConfigError, TemplateFailed
from penstock.server.prefix_file import DeclaredPrefix, load_prefixes
from penstock.server.shared_prefixes import SharedPrefixes, tokenize_prefixes
from tests.fakes.tiny_tokenizer import make_tokenizer
from tests.unit.server.conftest import running_service

tokens = st.lists(st.integers(0, 2), max_size=12)


@given(st.lists(tokens, max_size=4), tokens)
def test_a_prompt_is_public_as_far_as_it_follows_a_declared_prefix(declared, prompt):
    count = SharedPrefixes(declared).count_tokens(prompt)
    lengths = [length for prefix in declared for length in range(len(prefix) + 1) if prompt[:length] == prefix[:length]]
    assert count == max((length for length in lengths if length <= len(prompt)), default=0)


SYSTEM = "You are a helpful assistant of the house. " * 3


async def test_a_declared_system_message_is_public_and_the_users_words_are_not():
    declared = (DeclaredPrefix(system=SYSTEM),)
    async with running_service(shared_prefixes=declared) as service:
        for question in ("secret", "something else"):
            messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}]
            await service.post("/v1/chat/completions", messages=messages)
        first, second = service.engine.submitted
        assert first.num_public_tokens == second.num_public_tokens > len(SYSTEM) // 8
        public = service.tokenizer.decode(first.prompt[: first.num_public_tokens], skip_special=False)
        assert SYSTEM.strip() in public
        assert "secret" not in public


async def test_a_declared_text_is_public_in_completions():
    async with running_service(shared_prefixes=(DeclaredPrefix(text="Once upon a time"),)) as service:
        await service.complete("Once upon a time there was")
        await service.complete("Twice upon a time")
        first, second = service.engine.submitted
        assert first.num_public_tokens > 0
        assert second.num_public_tokens < first.num_public_tokens


async def test_without_declared_prefixes_nothing_is_public(service):
    await service.chat()
    assert service.engine.submitted[0].num_public_tokens == 0


async def test_a_system_message_needs_a_chat_template():
    with pytest.raises(TemplateFailed):
        await tokenize_prefixes([DeclaredPrefix(system="x")], make_tokenizer(), None)


def write(tmp_path, text):
    path = tmp_path / "prefixes.toml"
    path.write_text(text)
    return str(path)


def test_prefixes_are_read_from_a_file(tmp_path):
    text = '[[prefixes]]\ntext = "Once"\n[[prefixes]]\nsystem = "Be brief."\n'
    assert load_prefixes(write(tmp_path, text)) == (DeclaredPrefix(text="Once"), DeclaredPrefix(system="Be brief."))


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("", "entries"),
        ("prefixes = []", "1 to 256"),
        ("[[prefixes", "TOML"),
        ("[[prefixes]]\n", "either text or system"),
        ('[[prefixes]]\ntext = "a"\nsystem = "b"', "either text or system"),
        ('[[prefixes]]\ntext = ""', "either text or system"),
        ("[[prefixes]]\ntext = 1", "entry 1"),
        ('[[prefixes]]\ntext = "a"\n[[prefixes]]\nuser = "b"', "entry 2"),
    ],
)
def test_a_wrong_file_is_refused_with_the_reason(tmp_path, text, word):
    with pytest.raises(ConfigError, match=word):
        load_prefixes(write(tmp_path, text))


def test_a_missing_file_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="cannot be read"):
        load_prefixes(str(tmp_path / "none.toml"))
