"""Settings become specs, and settings that cannot be honoured are refused with file, key and value."""

import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from penstock.errors import ModelError
from penstock.models.gguf import GgufFile
from penstock.models.registry import FAMILIES, GGUF_ARCHITECTURES, MODEL_TYPES, config_spec, gguf_spec, spec_for
from penstock.models.spec import RopeSpec
from penstock.models.store import ModelFiles
from tests.gguf_models import write_gguf
from tests.tiny_models import SIZES, edit_config, folder_files, make_reference

LLAMA = {**SIZES, "model_type": "llama"}


def write_config(folder: Path, **changes: object) -> Path:
    path = folder / "config.json"
    config = {key: value for key, value in {**LLAMA, **changes}.items() if value is not ...}
    path.write_text(json.dumps(config))
    return path


def test_every_family_can_be_loaded_under_its_own_name() -> None:
    assert [FAMILIES.load(name).name for name in FAMILIES.names] == FAMILIES.names


def test_every_alias_stands_for_a_family() -> None:
    assert {*MODEL_TYPES.values(), *GGUF_ARCHITECTURES.values()} <= set(FAMILIES.names)


def test_reading_a_spec_does_not_load_torch(tmp_path: Path) -> None:
    config = write_config(tmp_path)
    code = (
        "import sys; from pathlib import Path; from penstock.models.registry import config_spec, FAMILIES; "
        f"config_spec(Path({str(config)!r})); [FAMILIES.load(name) for name in FAMILIES.names]; "
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_sizes_and_tokens_are_read(tmp_path: Path) -> None:
    spec = config_spec(write_config(tmp_path, head_dim=24, eos_token_id=[2, 5], dtype="bfloat16"))
    assert (spec.vocab_size, spec.hidden_size, spec.num_layers) == (97, 64, 2)
    assert (spec.q_size, spec.kv_size) == (96, 48)
    assert spec.eos_token_ids == (2, 5)
    assert spec.dtype == "bfloat16"


def test_end_tokens_of_the_generation_config_count_as_well(tmp_path: Path) -> None:
    config = write_config(tmp_path)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [2, 9]}')
    assert config_spec(config).eos_token_ids == (2, 9)


def test_an_end_token_of_the_generation_config_that_the_model_lacks_is_refused(tmp_path: Path) -> None:
    config = write_config(tmp_path)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [2, 97]}')
    with pytest.raises(ModelError, match=r"generation_config\.json: eos_token_id: \[2, 97\] is not usable"):
        config_spec(config)


def test_null_counts_as_not_given(tmp_path: Path) -> None:
    spec = config_spec(write_config(tmp_path, num_key_value_heads=None, rope_scaling=None, head_dim=None))
    assert spec.num_kv_heads == spec.num_heads
    assert spec.head_dim == 16


@pytest.mark.parametrize("type_key", ["type", "rope_type"])
def test_both_spellings_of_rope_settings_mean_the_same(type_key: str, tmp_path: Path) -> None:
    old = config_spec(write_config(tmp_path, rope_theta=5e5, rope_scaling={type_key: "linear", "factor": 2.0}))
    new = config_spec(write_config(tmp_path, rope_parameters={"rope_type": "linear", "rope_theta": 5e5, "factor": 2.0}))
    assert old.ropes == new.ropes == (RopeSpec(5e5, 16, "linear", factor=2.0),)


def test_rope_scaling_counts_where_rope_parameters_are_given_too(tmp_path: Path) -> None:
    both = {
        "rope_parameters": {"rope_type": "default", "rope_theta": 5e5},
        "rope_scaling": {"rope_type": "linear", "factor": 2.0},
    }
    assert config_spec(write_config(tmp_path, **both)).ropes == (RopeSpec(1e4, 16, "linear", factor=2.0),)


def test_rope_scaling_without_content_leaves_rope_parameters_to_count(tmp_path: Path) -> None:
    both = {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 5e5}, "rope_scaling": {}}
    assert config_spec(write_config(tmp_path, **both)).ropes == (RopeSpec(5e5, 16, "linear", factor=2.0),)


def test_gemma_3_reads_its_two_ropes_in_both_spellings(tmp_path: Path) -> None:
    make_reference("gemma3_text", tmp_path, head_dim=16)
    new = spec_for(folder_files(tmp_path))
    edit_config(tmp_path, rope_parameters=None, rope_theta=1e6, rope_local_base_freq=1e4)
    assert spec_for(folder_files(tmp_path)) == new
    assert [rope.theta for rope in new.ropes] == [1e6, 1e4]


def test_phi_3_calls_longrope_by_older_names_too(tmp_path: Path) -> None:
    factors = [1.5] * 8
    section = {"type": "su", "short_factor": factors, "long_factor": factors}
    spec = config_spec(
        write_config(tmp_path, model_type="phi3", rope_scaling=section, original_max_position_embeddings=32)
    )
    assert spec.ropes[0].scaling == "longrope"
    assert spec.ropes[0].original_max_position == 32


def test_phi_3_was_trained_on_4096_tokens_unless_its_settings_say_otherwise(tmp_path: Path) -> None:
    factors = {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
    scaling = {"type": "longrope", "original_max_position_embeddings": 8, **factors}
    spec = config_spec(write_config(tmp_path, model_type="phi3", rope_scaling=scaling))
    assert spec.ropes[0].original_max_position == 4096
    given = write_config(tmp_path, model_type="phi3", rope_scaling=scaling, original_max_position_embeddings=16)
    assert config_spec(given).ropes[0].original_max_position == 16


def test_yarn_lengthens_the_context(tmp_path: Path) -> None:
    section = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    assert config_spec(write_config(tmp_path, rope_scaling=section)).max_position == 256


@pytest.mark.parametrize("family", ["mistral", "qwen2", "qwen3", "qwen3_moe"])
def test_null_means_no_window_and_absence_one_of_4096(family: str, tmp_path: Path) -> None:
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    settings = {"model_type": family, "use_sliding_window": True, "max_window_layers": 0, **experts}
    absent = config_spec(write_config(tmp_path, **settings))
    null = config_spec(write_config(tmp_path, **settings, sliding_window=None))
    assert {layer.window for layer in absent.layers} == {4096}
    assert {layer.window for layer in null.layers} == {None}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "bert"}, r"model_type: 'bert' .* supported architectures are: .*gemma3.*llama.*qwen3_moe"),
        ({"model_type": ...}, "model_type is missing"),
        ({"hidden_size": ...}, "hidden_size is missing"),
        ({"hidden_size": "64"}, "hidden_size: '64' is not usable; give an integer"),
        ({"hidden_size": -64}, "hidden_size: -64 is not usable"),
        ({"hidden_size": 64.5}, "hidden_size: 64.5 is not usable"),
        ({"hidden_size": 10**400}, "hidden_size: 10000.* is not usable"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers: 1000000000 is not usable; give an integer from 1 to 4096"),
        ({"num_attention_heads": 5}, "num_key_value_heads: 2 is not usable; it must divide"),
        ({"num_attention_heads": 6}, r"num_attention_heads: 6 is not usable; it must divide hidden_size \(64\)"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps: nan is not usable"),
        ({"hidden_act": "relu"}, "hidden_act: 'relu' is not usable; supported are: silu"),
        ({"tie_word_embeddings": "no"}, "tie_word_embeddings: 'no' is not usable; give true or false"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config: .*gptq.* only unquantised"),
        ({"rope_scaling": {"type": "mrope"}}, r"type: 'mrope' is not usable; supported are: .*yarn"),
        ({"eos_token_id": 97}, r"eos_token_id: 97 is not usable; the model has tokens 0 to 96 \(vocab_size\)"),
        ({"eos_token_id": [2, 99999]}, r"eos_token_id: \[2, 99999\] is not usable; the model has tokens 0 to 96"),
        ({"bos_token_id": 97}, "bos_token_id: 97 is not usable; give an integer from 0 to 96"),
        ({"rope_scaling": {"type": "linear", "factor": 0}}, "factor: 0 is not usable"),
        ({"rope_scaling": {"type": "linear"}}, "factor is missing"),
        ({"rope_scaling": {"rope_type": "yarn"}}, "factor is missing"),
        ({"rope_scaling": "linear"}, "rope_scaling: 'linear' is not usable; give an object"),
        ({"rope_scaling": {"type": "x"}, "rope_parameters": {"rope_type": "default"}}, "type: 'x' is not usable"),
        ({"rope_scaling": 3, "rope_parameters": {"rope_type": "default"}}, "rope_scaling: 3 is not usable"),
        ({"model_type": "gemma3_text", "rope_parameters": {"rope_type": "linear"}}, "full_attention and sliding_att"),
        ({"model_type": "gemma3_text", "rope_scaling": {"type": "linear", "factor": 2}}, "call it rope_type"),
        (
            {"partial_rotary_factor": 0.5, "rope_scaling": {"rope_type": "linear", "factor": 2.0}},
            "partial_rotary_factor: 0.5 is not usable; models of this family rotate whole heads",
        ),
        ({"model_type": "phi3", "partial_rotary_factor": 0.1}, "partial_rotary_factor: 0.1 is not usable; it must"),
        ({"max_position_embeddings": 1}, "max_position_embeddings: 1 is not usable; give an integer from 2"),
        ({"head_dim": 7}, "head_dim: 7 is not usable; .* give an even number"),
        ({"hidden_size": 68}, "hidden_size: 68 is not usable; it leaves 17 for each head"),
        ({"rope_scaling": {"type": "longrope", "short_factor": [1], "long_factor": [1]}}, "give 8 positive numbers"),
        ({"model_type": "qwen2", "use_sliding_window": True, "layer_types": ["x", "y"]}, "layer_types: .*'x'"),
        ({"model_type": "mixtral", "num_local_experts": 2, "num_experts_per_tok": 3}, "there are only 2 experts"),
        ({"model_type": "gemma2", "use_bidirectional_attention": True}, "only causal attention"),
    ],
)
def test_settings_that_cannot_be_honoured_are_refused_by_key_and_value(
    changes: dict[str, object], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ModelError, match=message) as refusal:
        config_spec(write_config(tmp_path, **changes))
    assert "config.json" in str(refusal.value)


def test_weights_that_are_a_link_to_nothing_are_refused_with_the_name_of_the_file(tmp_path: Path) -> None:
    write_config(tmp_path)
    (tmp_path / "model.safetensors").symlink_to(tmp_path / "pruned")
    with pytest.raises(ModelError, match=r"model\.safetensors: this is a link to nothing"):
        spec_for(folder_files(tmp_path))


@pytest.mark.parametrize("content", [b"{", b"[]", b"\xff\xfe", b"", b'{"vocab_size": ' + b"9" * 5000 + b"}"])
def test_a_config_that_is_no_json_object_is_refused_with_its_name(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ModelError, match=r"config\.json"):
        config_spec(tmp_path / "config.json")


def test_a_missing_config_is_refused_with_its_name(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"config\.json: cannot read"):
        config_spec(tmp_path / "config.json")


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("llama.attention.head_count", 0, "0 is not usable"),
        ("llama.vocab_size", 96, r"96 is not usable; tensor token_embd\.weight has 97 rows"),
        ("llama.vocab_size", 98, r"98 is not usable; tensor token_embd\.weight has 97 rows"),
        ("tokenizer.ggml.tokens", ["t"] * 98, r".* tensor token_embd\.weight has only 97 rows"),
        ("tokenizer.ggml.eos_token_id", 1_000_000, "1000000 is not usable; the model has tokens 0 to 96"),
        ("tokenizer.ggml.eot_token_id", 97, "97 is not usable; the model has tokens 0 to 96"),
        ("tokenizer.ggml.bos_token_id", 97, "97 is not usable; give an integer from 0 to 96"),
    ],
)
def test_gguf_metadata_that_cannot_be_honoured_is_refused_by_key_and_value(
    tmp_path: Path, key: str, value: object, message: str
) -> None:
    write_gguf(make_reference("llama"), tmp_path / "tiny.gguf")
    file = GgufFile.open(tmp_path / "tiny.gguf")
    file.metadata[key] = value
    with pytest.raises(ModelError, match=rf"tiny\.gguf: {re.escape(key)}: {message}"):
        gguf_spec(file)


def test_a_gguf_file_may_have_more_rows_than_tokens_and_no_end_token(tmp_path: Path) -> None:
    write_gguf(make_reference("llama"), tmp_path / "tiny.gguf")
    file = GgufFile.open(tmp_path / "tiny.gguf")
    file.metadata |= {"tokenizer.ggml.tokens": ["t"] * 90, "tokenizer.ggml.eos_token_id": 2**32 - 1}
    assert gguf_spec(file).vocab_size == 97
    assert gguf_spec(file).eos_token_ids == ()


def test_a_gguf_file_may_say_that_no_token_begins_a_text(tmp_path: Path) -> None:
    write_gguf(make_reference("llama"), tmp_path / "tiny.gguf")
    file = GgufFile.open(tmp_path / "tiny.gguf")
    file.metadata |= {"tokenizer.ggml.bos_token_id": 2**32 - 1}
    assert gguf_spec(file).bos_token_id is None


def test_random_weights_are_not_as_small_as_those_of_the_file(tmp_path: Path) -> None:
    write_gguf(make_reference("llama"), tmp_path / "tiny.gguf")
    files = ModelFiles("tiny", "gguf", tmp_path / "tiny.gguf")
    assert spec_for(files).quantised is not None
    assert spec_for(replace(files, load_format="dummy")).quantised is None


def test_an_unknown_gguf_architecture_is_refused_with_what_is_supported(tmp_path: Path) -> None:
    write_gguf(make_reference("llama"), tmp_path / "tiny.gguf")
    file = GgufFile.open(tmp_path / "tiny.gguf")
    file.metadata["general.architecture"] = "mamba"
    with pytest.raises(ModelError, match=r"general\.architecture: 'mamba' .* supported architectures are: .*qwen3moe"):
        gguf_spec(file)


def test_rope_factors_of_a_gguf_file_must_be_one_for_each_frequency(tmp_path: Path) -> None:
    llama3 = {
        "rope_type": "llama3",
        "rope_theta": 1e4,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    }
    write_gguf(make_reference("llama", rope_parameters=llama3), tmp_path / "tiny.gguf")
    file = GgufFile.open(tmp_path / "tiny.gguf")
    assert np.allclose(gguf_spec(file).ropes[0].long_factor[-1], 8.0)
    file.metadata["llama.rope.dimension_count"] = 12
    with pytest.raises(ModelError, match=r"llama\.rope\.dimension_count: 12 is not usable"):
        gguf_spec(file)
