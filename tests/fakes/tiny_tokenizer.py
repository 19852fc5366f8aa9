"""A byte-level tokenizer small enough to reason about: one token a byte, a few longer ones, two special ones."""

import json
from pathlib import Path

import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from penstock.engine.tokenizer import Tokenizer

START, END = "<|start|>", "<|end|>"
TEMPLATE = (
    "{% for message in messages %}<|start|>{{ message.role }}\n{{ message.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)


def make_tokenizer(*, template: str | None = TEMPLATE) -> Tokenizer:
    backend = make_backend()
    end = backend.token_to_id(END)
    return Tokenizer(backend, file=Path("tiny.json"), eos_token_id=end, chat_template=template)


def write_tokenizer(folder: Path) -> None:
    """Write the files of a Hugging Face folder that hold a tokenizer."""
    make_backend().save(str(folder / "tokenizer.json"))
    settings = {"eos_token": END, "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def make_backend() -> tokenizers.Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {character: token_id for token_id, character in enumerate(alphabet)}
    merges = [("l", "l"), ("h", "e"), ("ll", "o"), ("Ġ", "w")]
    for left, right in merges:
        vocabulary[left + right] = len(vocabulary)
    backend = tokenizers.Tokenizer(models.BPE(vocabulary, merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(START, special=True), AddedToken(END, special=True)])
    return backend
