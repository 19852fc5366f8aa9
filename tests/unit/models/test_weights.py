"""Sources of tensors: safetensors folders, GGUF files and random numbers."""

import json
import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from penstock.errors import ModelError
from penstock.models.gguf import GgufFile
from penstock.models.store import ModelFiles
from penstock.models.weights import DummySource, GgufSource, SafetensorsSource, open_weights

TENSORS = {
    "matrix": torch.arange(6, dtype=torch.float32).reshape(2, 3),
    "half": torch.arange(4, dtype=torch.float16),
    "brain": torch.tensor([1.5, -2.0, 3.25], dtype=torch.bfloat16),
    "stack": torch.arange(24, dtype=torch.float32).reshape(2, 3, 4),
}


def shape(name: str) -> tuple[int, ...]:
    return tuple(TENSORS[name].shape)


def write_raw(path: Path, header: Any, data: bytes = b"", *, length: int | None = None) -> Path:
    """A safetensors file whose header says whatever it likes."""
    encoded = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(encoded) if length is None else length) + encoded + data)
    return path


def write_shards(folder: Path) -> dict[str, str]:
    save_file({"matrix": TENSORS["matrix"]}, folder / "model-1.safetensors")
    save_file({"half": TENSORS["half"], "brain": TENSORS["brain"]}, folder / "model-2.safetensors")
    return {"matrix": "model-1.safetensors", "half": "model-2.safetensors", "brain": "model-2.safetensors"}


def write_index(folder: Path, content: object) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps(content))


# ---------------------------------------------------------------- safetensors


def test_every_float_type_is_read_as_it_was_saved(tmp_path: Path) -> None:
    save_file(TENSORS, tmp_path / "model.safetensors")
    source = SafetensorsSource(tmp_path)
    assert sorted(source.names()) == sorted(TENSORS)
    for name, expected in TENSORS.items():
        stored = source.get(name, shape(name))
        assert stored.data.dtype == expected.dtype
        assert torch.equal(stored.data, expected)
        assert not stored.is_quantised


def test_what_git_leaves_in_place_of_a_large_file_is_told_from_it(tmp_path: Path) -> None:
    for name in ("model.safetensors", "model.gguf"):
        (tmp_path / name).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0123\nsize 98\n")
    with pytest.raises(ModelError, match=r"model\.safetensors: .*`git lfs pull`"):
        SafetensorsSource(tmp_path)
    with pytest.raises(ModelError, match=r"model\.gguf: .*`git lfs pull`"):
        GgufFile.open(tmp_path / "model.gguf")


def test_shards_are_read_through_their_index(tmp_path: Path) -> None:
    write_index(tmp_path, {"weight_map": write_shards(tmp_path)})
    source = SafetensorsSource(tmp_path)
    assert sorted(source.names()) == ["brain", "half", "matrix"]
    stored = source.get("brain", (3,))
    assert torch.equal(stored.data, TENSORS["brain"])
    assert stored.file.endswith("model-2.safetensors")


def test_a_single_file_counts_more_than_an_index(tmp_path: Path) -> None:
    write_index(tmp_path, {"weight_map": write_shards(tmp_path)})
    save_file({"other": TENSORS["matrix"]}, tmp_path / "model.safetensors")
    assert list(SafetensorsSource(tmp_path).names()) == ["other"]


def test_a_tensor_that_the_index_does_not_list_is_refused_with_its_shard(tmp_path: Path) -> None:
    placed = write_shards(tmp_path)
    del placed["half"]
    write_index(tmp_path, {"weight_map": placed})
    with pytest.raises(ModelError, match=r"model-2\.safetensors, tensor half: .* does not list it"):
        SafetensorsSource(tmp_path)


def test_a_link_to_nothing_is_refused_with_its_name(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").symlink_to(tmp_path / "pruned")
    with pytest.raises(ModelError, match=r"model\.safetensors: this is a link to nothing"):
        SafetensorsSource(tmp_path)


def test_a_single_file_of_another_name_is_read(tmp_path: Path) -> None:
    save_file(TENSORS, tmp_path / "weights.safetensors")
    assert SafetensorsSource(tmp_path).has("matrix")


def test_several_files_without_an_index_are_refused(tmp_path: Path) -> None:
    write_shards(tmp_path)
    with pytest.raises(ModelError, match=r"2 \*\.safetensors files and no model\.safetensors\.index\.json"):
        SafetensorsSource(tmp_path)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"more": "model-3.safetensors"}, "model-3.safetensors, which is not there"),
        ({"more": "model-1.safetensors"}, "tensor more: model.safetensors.index.json says that it is here"),
        ({"more": "../model-1.safetensors"}, "no .safetensors file name"),
        ({"more": "model.bin"}, "no .safetensors file name"),
        ({"more": 3}, "no .safetensors file name"),
    ],
)
def test_an_index_that_names_what_is_not_there_is_refused(
    tmp_path: Path, change: dict[str, Any], complaint: str
) -> None:
    write_index(tmp_path, {"weight_map": write_shards(tmp_path) | change})
    with pytest.raises(ModelError) as caught:
        SafetensorsSource(tmp_path)
    assert complaint in str(caught.value)
    assert "tensor more" in str(caught.value)


@pytest.mark.parametrize("content", [[], {}, {"weight_map": []}, {"weight_map": {}}])
def test_an_index_without_a_map_is_refused(tmp_path: Path, content: object) -> None:
    write_index(tmp_path, content)
    with pytest.raises(ModelError, match="it has no weight_map"):
        SafetensorsSource(tmp_path)


def test_an_index_that_is_no_json_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors.index.json").write_text("{")
    with pytest.raises(ModelError, match="not valid JSON"):
        SafetensorsSource(tmp_path)


def test_a_missing_tensor_is_an_error_that_names_it(tmp_path: Path) -> None:
    save_file(TENSORS, tmp_path / "model.safetensors")
    source = SafetensorsSource(tmp_path)
    assert not source.has("lm_head.weight")
    with pytest.raises(ModelError, match=r"tensor lm_head\.weight: the model needs it"):
        source.get("lm_head.weight", (2, 3))


def test_a_wrong_shape_is_refused_with_both_shapes(tmp_path: Path) -> None:
    save_file(TENSORS, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=r"model\.safetensors.*matrix.* \[2, 3\].* \[3, 2\]"):
        SafetensorsSource(tmp_path).get("matrix", (3, 2))


def test_a_type_that_models_cannot_use_is_refused_when_asked_for(tmp_path: Path) -> None:
    save_file({"ids": torch.arange(3), "w": torch.ones(2)}, tmp_path / "model.safetensors")
    source = SafetensorsSource(tmp_path)
    assert torch.equal(source.get("w", (2,)).data, torch.ones(2))
    with pytest.raises(ModelError, match="tensor ids: its type, I64, is not supported"):
        source.get("ids", (3,))


def test_a_tensor_at_an_odd_address_is_read_right(tmp_path: Path) -> None:
    header = {
        "byte": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]},
        "w": {"dtype": "F32", "shape": [2], "data_offsets": [1, 9]},
    }
    write_raw(tmp_path / "model.safetensors", header, b"\x07" + struct.pack("<2f", 1.5, -2.0))
    assert SafetensorsSource(tmp_path).get("w", (2,)).data.tolist() == [1.5, -2.0]


def line(dtype: object = "F32", shape: object = (2,), offsets: object = (0, 8)) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


@pytest.mark.parametrize(
    ("header", "complaint"),
    [
        ({"w": line("F33")}, "its type is F33"),
        ({"w": line(7)}, "its type is 7"),
        ({"w": line(shape="2")}, "its shape is 2"),
        ({"w": line(shape=[-2])}, r"its shape is \[-2\]"),
        ({"w": line(shape=[True])}, r"its shape is \[True\]"),
        ({"w": line(shape=[1] * 9)}, "its shape is"),
        ({"w": line(shape=[2**63, 2**63])}, "not those of F32"),
        ({"w": line(shape=[3])}, "its 8 bytes are not those of F32"),
        ({"w": line(offsets=[8, 0])}, "its data_offsets are"),
        ({"w": line(offsets=[0])}, "its data_offsets are"),
        ({"w": line(offsets=[0, 8.0])}, "its data_offsets are"),
        ({"w": line(shape=[4], offsets=[0, 16])}, "its data ends at byte .* truncated"),
        ({"w": 3}, "not an object"),
    ],
)
def test_a_hostile_entry_is_refused_with_file_and_tensor(
    tmp_path: Path, header: dict[str, object], complaint: str
) -> None:
    write_raw(tmp_path / "model.safetensors", header, bytes(8))
    with pytest.raises(ModelError, match=r"model\.safetensors, tensor w.*" + complaint):
        SafetensorsSource(tmp_path)


@pytest.mark.parametrize(
    ("header", "complaint"),
    [
        ({"a": line(), "b": line(offsets=[4, 12])}, "tensor b: its data overlaps"),
        ({"a": line(), "b": line(offsets=[0, 8])}, "overlaps"),
        ({"a": line(shape=[1], offsets=[0, 4]), "b": line(shape=[1], offsets=[8, 12])}, "tensor b: .*gap"),
        ({"a": line()}, "4 bytes after the last tensor"),
        ([], "not a JSON object"),
        (b"{", "not valid JSON"),
        (b'{"a": 1, "a": 2}', "twice"),
        (b"[" * 100_000, "not valid JSON"),
        (b"\xff\xfe", "not valid JSON"),
    ],
)
def test_a_hostile_header_is_refused(tmp_path: Path, header: object, complaint: str) -> None:
    write_raw(tmp_path / "model.safetensors", header, bytes(12))
    with pytest.raises(ModelError, match=r"model\.safetensors.*" + complaint):
        SafetensorsSource(tmp_path)


@pytest.mark.parametrize("length", [11, 2**40, 2**64 - 1])
def test_a_header_longer_than_the_file_is_refused(tmp_path: Path, length: int) -> None:
    write_raw(tmp_path / "model.safetensors", b"{}", length=length)
    with pytest.raises(ModelError, match=f"should have {length} bytes"):
        SafetensorsSource(tmp_path)


def test_a_file_cut_anywhere_is_refused(tmp_path: Path) -> None:
    save_file(TENSORS, tmp_path / "whole.safetensors")
    content = (tmp_path / "whole.safetensors").read_bytes()
    folder = tmp_path / "cut"
    folder.mkdir()
    for length in range(0, len(content), 13):
        (folder / "model.safetensors").write_bytes(content[:length])
        with pytest.raises(ModelError, match=r"model\.safetensors"):
            SafetensorsSource(folder)


@settings(max_examples=200, deadline=None)
@given(damage=st.lists(st.tuples(st.integers(0, 400), st.integers(0, 255)), min_size=1, max_size=6))
def test_a_damaged_file_is_read_or_refused_but_never_crashes(
    tmp_path_factory: pytest.TempPathFactory, damage: list[tuple[int, int]]
) -> None:
    folder = tmp_path_factory.mktemp("damaged")
    save_file(TENSORS, folder / "model.safetensors")
    content = bytearray((folder / "model.safetensors").read_bytes())
    for position, value in damage:
        content[position % len(content)] = value
    (folder / "model.safetensors").write_bytes(content)
    try:
        source = SafetensorsSource(folder)
        for name in TENSORS:
            source.get(name, shape(name)).dense()
    except ModelError:
        pass


# ---------------------------------------------------------------- GGUF


@pytest.fixture
def gguf_path(tmp_path: Path) -> Path:
    writer = gguf.GGUFWriter(str(tmp_path / "model.gguf"), "llama")
    generator = np.random.default_rng(1)
    dense = generator.normal(size=(6, 64)).astype(np.float32)
    writer.add_tensor("float", dense)
    writer.add_tensor("half", dense.astype(np.float16))
    for name in ("BF16", "Q8_0"):
        kind = gguf.GGMLQuantizationType[name]
        writer.add_tensor(name, gguf.quants.quantize(dense, kind), raw_dtype=kind)
    experts = gguf.quants.quantize(generator.normal(size=(2, 3, 64)).astype(np.float32), gguf.GGMLQuantizationType.Q8_0)
    writer.add_tensor("experts", experts, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return tmp_path / "model.gguf"


def test_a_quantised_tensor_stays_quantised_until_it_is_asked_for(gguf_path: Path) -> None:
    source = GgufSource(GgufFile.open(gguf_path))
    dense = source.get("float", (6, 64)).dense()
    stored = source.get("Q8_0", (6, 64))
    assert stored.is_quantised
    assert stored.data.shape == (6, 68)
    assert stored.data.dtype == torch.uint8
    torch.testing.assert_close(stored.dense(), dense, atol=0.05, rtol=0)
    assert torch.equal(stored.select_rows(torch.tensor([4, 1])).dense(), stored.dense()[[4, 1]])
    assert torch.equal(stored.row_range(2, 5).dense(), stored.dense()[2:5])


@pytest.mark.parametrize(
    ("name", "dtype"), [("float", torch.float32), ("half", torch.float16), ("BF16", torch.bfloat16)]
)
def test_a_plain_tensor_of_a_gguf_file_is_read(gguf_path: Path, name: str, dtype: torch.dtype) -> None:
    source = GgufSource(GgufFile.open(gguf_path))
    stored = source.get(name, (6, 64))
    assert stored.data.dtype == dtype
    torch.testing.assert_close(stored.dense(), source.get("float", (6, 64)).dense(), atol=0.02, rtol=0.01)


def test_stacked_matrices_are_taken_apart_by_their_first_dimension(gguf_path: Path) -> None:
    stored = GgufSource(GgufFile.open(gguf_path)).get("experts", (2, 3, 64))
    assert stored.dense().shape == (2, 3, 64)
    assert torch.equal(stored.row_range(1, 2).dense(), stored.dense()[1:2])


def test_a_gguf_tensor_that_is_missing_or_wrong_is_refused(gguf_path: Path) -> None:
    source = GgufSource(GgufFile.open(gguf_path))
    assert not source.has("output.weight")
    with pytest.raises(ModelError, match=r"model\.gguf, tensor output\.weight: the model needs it"):
        source.get("output.weight", (6, 64))
    with pytest.raises(ModelError, match=r"model\.gguf, tensor float: its shape is \[6, 64\].* \[64, 6\]"):
        source.get("float", (64, 6))


def test_progress_counts_each_tensor_once_up_to_the_total(gguf_path: Path) -> None:
    told: list[tuple[int, int, str]] = []
    files = ModelFiles("m", "gguf", gguf_path)
    source = open_weights(files, progress=lambda done, total, name: told.append((done, total, name)))
    for name in ("float", "half", "BF16", "Q8_0", "float"):
        source.get(name, (6, 64))
    source.get("experts", (2, 3, 64))
    assert [name for _, _, name in told] == ["float", "half", "BF16", "Q8_0", "experts"]
    assert told[-1][0] == told[-1][1] == GgufFile.open(gguf_path).num_bytes


# ---------------------------------------------------------------- random weights


def test_random_weights_are_the_same_for_the_same_name_and_seed() -> None:
    first = DummySource(torch.float32, seed=1).get("layer.weight", (50, 70)).data
    assert torch.equal(first, DummySource(torch.float32, seed=1).get("layer.weight", (50, 70)).data)
    assert not torch.equal(first, DummySource(torch.float32, seed=2).get("layer.weight", (50, 70)).data)
    assert not torch.equal(first, DummySource(torch.float32, seed=1).get("other.weight", (50, 70)).data)


def test_random_matrices_keep_the_scale_of_activations() -> None:
    weight = DummySource(torch.float32).get("layer.weight", (1000, 400)).data
    assert weight.mean().abs() < 0.001
    assert abs(weight.std() * 400**0.5 - 1) < 0.02


def test_random_norms_are_near_one_and_biases_near_zero() -> None:
    source = DummySource(torch.float32)
    assert (source.get("model.norm.weight", (500,)).data - 1).abs().max() < 0.2
    assert source.get("layer.bias", (500,)).data.abs().max() < 0.2


def test_random_tensors_larger_than_the_pool_have_rows_that_differ() -> None:
    weight = DummySource(torch.bfloat16).get("embedding", (3000, 1024)).data
    assert weight.dtype == torch.bfloat16
    assert len({row.numpy().tobytes() for row in weight.view(torch.int16)}) == 3000


def test_open_weights_chooses_by_the_kind_of_files(tmp_path: Path, gguf_path: Path) -> None:
    save_file(TENSORS, tmp_path / "model.safetensors")
    assert isinstance(open_weights(ModelFiles("m", "gguf", gguf_path)), GgufSource)
    assert isinstance(open_weights(ModelFiles("m", "folder", tmp_path)), SafetensorsSource)
    assert isinstance(open_weights(ModelFiles("m", "folder", tmp_path, load_format="dummy")), DummySource)
