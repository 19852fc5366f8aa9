"""Writes a transformers model as a GGUF file, by the rules of llama.cpp's converter.

Tensor names and metadata keys come from the `gguf` package, so that our own tables are checked against theirs.
"""

import re
from pathlib import Path

import gguf
import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedModel

ARCHITECTURES = {
    "llama": gguf.MODEL_ARCH.LLAMA,
    "mistral": gguf.MODEL_ARCH.LLAMA,
    "mixtral": gguf.MODEL_ARCH.LLAMA,
    "qwen2": gguf.MODEL_ARCH.QWEN2,
    "qwen3": gguf.MODEL_ARCH.QWEN3,
    "qwen3_moe": gguf.MODEL_ARCH.QWEN3MOE,
    "gemma2": gguf.MODEL_ARCH.GEMMA2,
    "gemma3_text": gguf.MODEL_ARCH.GEMMA3,
    "phi3": gguf.MODEL_ARCH.PHI3,
}

Array = NDArray[np.float32]


def write_gguf(model: PreTrainedModel, path: Path, quantise: gguf.GGMLQuantizationType | None = None) -> None:
    """Write the model. `quantise` applies to matrices whose rows are whole blocks; all else stays float32."""
    architecture = ARCHITECTURES[model.config.model_type]
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[architecture])
    _write_settings(writer, model)
    names = gguf.get_tensor_name_map(architecture, model.config.num_hidden_layers)
    for name, array in _tensors(model).items():
        stored = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert stored is not None, name
        _add(writer, stored, _converted(model, name, array), quantise)
    for name, factors in _rope_factors(model).items():
        writer.add_tensor(name, factors)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add(writer: gguf.GGUFWriter, name: str, array: Array, quantise: gguf.GGMLQuantizationType | None) -> None:
    if quantise is None or array.ndim < 2 or "ffn_gate_inp" in name:
        writer.add_tensor(name, array)
    else:
        writer.add_tensor(name, gguf.quants.quantize(array, quantise), raw_dtype=quantise)


def _write_settings(writer: gguf.GGUFWriter, model: PreTrainedModel) -> None:
    config = model.config
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    if getattr(config, "head_dim", None):
        writer.add_key_length(config.head_dim)
        writer.add_value_length(config.head_dim)
    rope = config.rope_parameters.get("full_attention", config.rope_parameters)
    writer.add_rope_freq_base(rope["rope_theta"])
    if rope["rope_type"] in ("yarn", "linear"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(rope["rope_type"]))
        writer.add_rope_scaling_factor(rope["factor"])
    if rope["rope_type"] in ("yarn", "longrope"):
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    if getattr(config, "sliding_window", None):
        writer.add_sliding_window(config.sliding_window)
    if getattr(config, "attn_logit_softcapping", None):
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
    if getattr(config, "final_logit_softcapping", None):
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    if getattr(config, "num_local_experts", None):
        writer.add_expert_count(config.num_local_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
    if getattr(config, "moe_intermediate_size", None):
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)


def _tensors(model: PreTrainedModel) -> dict[str, Array]:
    """Parameters by the names of their files, tied ones once, experts stacked under their joint name."""
    tied = model.config.tie_word_embeddings
    arrays: dict[str, Array] = {}
    for name, tensor in model.state_dict().items():
        array = tensor.numpy()
        if name == "lm_head.weight" and tied:
            continue
        if name.endswith("experts.gate_up_proj"):  # [experts, 2 * intermediate, hidden]
            gate, up = np.split(array, 2, axis=1)
            base = name.removesuffix("gate_up_proj")
            arrays |= {f"{base}gate_proj.weight": gate, f"{base}up_proj.weight": up}
        elif name.endswith("experts.down_proj"):
            arrays[f"{name}.weight"] = array
        else:
            arrays[name] = array
    if model.config.model_type == "mixtral":
        experts = {"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"}
        renamed = {name.replace(".mlp.", ".block_sparse_moe."): array for name, array in arrays.items()}
        return {
            re.sub(r"experts\.(\w+)", lambda match: f"experts.{experts[match[1]]}", name): array
            for name, array in renamed.items()
        }
    return arrays


def _converted(model: PreTrainedModel, name: str, array: Array) -> Array:
    kind, config = model.config.model_type, model.config
    if kind.startswith("gemma") and "norm" in name:
        return array + np.float32(1.0)
    if kind in ("llama", "mistral", "mixtral") and ".q_proj." in name:
        return _pairs_together(array, config.num_attention_heads)
    if kind in ("llama", "mistral", "mixtral") and ".k_proj." in name:
        return _pairs_together(array, config.num_key_value_heads)
    return array


def _pairs_together(array: Array, num_heads: int) -> Array:
    """Halves of each head interleaved, for the rotation of neighbours."""
    halves = array.reshape(num_heads, 2, array.shape[0] // num_heads // 2, *array.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(array.shape))


def halves_apart(array: Array, num_heads: int) -> Array:
    """What `_pairs_together` undoes: neighbours of each head half a head apart."""
    pairs = array.reshape(num_heads, array.shape[0] // num_heads // 2, 2, *array.shape[1:])
    return np.ascontiguousarray(pairs.swapaxes(1, 2).reshape(array.shape))


def _rope_factors(model: PreTrainedModel) -> dict[str, Array]:
    rope = model.config.rope_parameters
    if rope.get("rope_type") == "longrope":
        return {
            "rope_factors_long.weight": np.array(rope["long_factor"], dtype=np.float32),
            "rope_factors_short.weight": np.array(rope["short_factor"], dtype=np.float32),
        }
    if rope.get("rope_type") == "llama3":
        scaled = model.model.rotary_emb.inv_freq.numpy()
        plain = rope["rope_theta"] ** (-np.arange(len(scaled), dtype=np.float32) / len(scaled))
        return {"rope_freqs.weight": (plain / scaled).astype(np.float32)}
    return {}
