"""The default model as transformers runs it: the reference for tokens and logits of the real weights."""

from pathlib import Path

import gguf
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.initialization import no_init_weights

from penstock.models.gguf import GgufFile
from tests.gguf_models import halves_apart


def load_reference(path: Path) -> LlamaForCausalLM:
    """Make transformers' Llama of a GGUF file's numbers, in float32.

    transformers can read the file by itself, but takes half a minute for it; a slow test compares the two.
    """
    file = GgufFile.open(path)
    with no_init_weights():
        model = LlamaForCausalLM._from_config(_config(file), dtype=torch.float32, attn_implementation="eager").eval()
    model.tie_weights()
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, model.config.num_hidden_layers)
    heads = {"q_proj": model.config.num_attention_heads, "k_proj": model.config.num_key_value_heads}
    for name, parameter in model.named_parameters():
        stored = names.get_name(name, try_suffixes=(".weight",))
        assert stored is not None
        kind = gguf.GGMLQuantizationType[file.tensors[stored].type.name]
        array = gguf.quants.dequantize(file.raw(stored), kind).reshape(parameter.shape)
        for projection, num_heads in heads.items():
            if f".{projection}." in name:
                array = halves_apart(array, num_heads)
        parameter.data.copy_(torch.from_numpy(array))
    return model


def _config(file: GgufFile) -> LlamaConfig:
    settings = {key.removeprefix("llama."): value for key, value in file.metadata.items()}
    return LlamaConfig(
        vocab_size=settings["vocab_size"],
        hidden_size=settings["embedding_length"],
        intermediate_size=settings["feed_forward_length"],
        num_hidden_layers=settings["block_count"],
        num_attention_heads=settings["attention.head_count"],
        num_key_value_heads=settings["attention.head_count_kv"],
        max_position_embeddings=settings["context_length"],
        rms_norm_eps=settings["attention.layer_norm_rms_epsilon"],
        rope_parameters={"rope_type": "default", "rope_theta": settings["rope.freq_base"]},
        tie_word_embeddings="output.weight" not in file.tensors,
        bos_token_id=settings["tokenizer.ggml.bos_token_id"],
        eos_token_id=settings["tokenizer.ggml.eos_token_id"],
        pad_token_id=settings["tokenizer.ggml.padding_token_id"],
    )
