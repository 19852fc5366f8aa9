"""The default model, loaded from its GGUF file, says what transformers makes of the same file."""

from pathlib import Path

import pytest
import torch
from transformers import AutoConfig
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from penstock.models.store import ModelFiles
from tests.paged import PagedDecoder
from tests.tiny_models import load_exact
from tests.transformers_reference import load_reference

PROMPT = [1, 4093, 198, 1780, 314, 260, 3575, 282, 4649, 47, 2, 198, 1, 520, 9531, 198]
NUM_TOKENS = 24


def test_greedy_tokens_equal_those_of_transformers(default_model_path: Path) -> None:
    paged = PagedDecoder(load_exact(ModelFiles("default", "gguf", default_model_path), context_tokens=256))
    found = [int(paged.run("a", PROMPT)[-1].argmax())]
    while len(found) < NUM_TOKENS:
        found.append(int(paged.run("a", found[-1:])[-1].argmax()))
    reference = load_reference(default_model_path)
    with torch.inference_mode():
        logits = reference(torch.tensor([PROMPT + found])).logits[0]
    # Given the same beginning, each of our tokens is the one that transformers holds most likely.
    assert found == logits[len(PROMPT) - 1 : -1].argmax(dim=-1).tolist()


@pytest.mark.slow
def test_the_reference_is_what_transformers_reads_from_the_file(default_model_path: Path) -> None:
    reference = load_reference(default_model_path)
    config = AutoConfig.from_pretrained(default_model_path.parent, gguf_file=default_model_path.name)
    for key in ("rope_parameters", "rms_norm_eps", "head_dim", "tie_word_embeddings", "vocab_size"):
        assert getattr(reference.config, key) == getattr(config, key)
    read = load_gguf_checkpoint(str(default_model_path), return_tensors=True, model_to_load=reference)["tensors"]
    ours = dict(reference.named_parameters())
    assert set(read) == set(ours)
    for name, tensor in read.items():
        assert torch.equal(tensor, ours[name]), name
