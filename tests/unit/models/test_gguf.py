"""GGUF headers: what a good file says is read, what a bad file says is refused with its name."""

import struct
from collections.abc import Callable, Sequence
from pathlib import Path

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import ModelError, ModelNotFound
from penstock.models.gguf import GgufFile

U32, STRING, ARRAY = 4, 8, 9
F32, F16, Q4_0 = 0, 1, 2


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


def entry(key: str, kind: int, value: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + value


def tensor(name: str, shape: list[int], kind: int, offset: int) -> bytes:
    """One line of the tensor table; the shape is innermost first, as files have it."""
    return text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, offset)


def file_bytes(
    entries: Sequence[bytes] = (),
    tensors: Sequence[bytes] = (),
    data: bytes = b"",
    version: int = 3,
    alignment: int = 32,
) -> bytes:
    header = b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(entries)) + b"".join([*entries, *tensors])
    return header + b"\0" * (-len(header) % alignment) + data


def refusal(tmp_path: Path, content: bytes) -> str:
    path = tmp_path / "bad.gguf"
    path.write_bytes(content)
    with pytest.raises(ModelError) as caught:
        GgufFile.open(path)
    assert "bad.gguf" in str(caught.value)
    return str(caught.value)


# ---------------------------------------------------------------- good files


@pytest.fixture
def written(tmp_path: Path) -> Path:
    """A file made by the `gguf` package, with a value of every kind."""
    writer = gguf.GGUFWriter(str(tmp_path / "good.gguf"), "llama")
    writer.add_uint32("a.uint32", 7)
    writer.add_int8("a.int8", -7)
    writer.add_uint64("a.uint64", 2**63)
    writer.add_float32("a.float32", 0.5)
    writer.add_float64("a.float64", 0.1)
    writer.add_bool("a.bool", True)
    writer.add_string("a.string", "grüße 😀")
    writer.add_array("a.strings", ["", "x", "日本"])
    writer.add_array("a.numbers", [1, -2, 3])
    writer.add_array("a.bools", [True, False])
    writer.add_tensor("vector", np.arange(5, dtype=np.float32))
    writer.add_tensor("matrix", np.arange(6, dtype=np.float16).reshape(2, 3))
    writer.add_tensor("blocks", np.arange(36, dtype=np.uint8).reshape(2, 18), raw_dtype=gguf.GGMLQuantizationType.Q4_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return tmp_path / "good.gguf"


def test_metadata_of_every_kind_is_read(written: Path) -> None:
    metadata = GgufFile.open(written).metadata
    assert {key: value for key, value in metadata.items() if key.startswith("a.")} == {
        "a.uint32": 7,
        "a.int8": -7,
        "a.uint64": 2**63,
        "a.float32": 0.5,
        "a.float64": 0.1,
        "a.bool": True,
        "a.string": "grüße 😀",
        "a.strings": ["", "x", "日本"],
        "a.numbers": [1, -2, 3],
        "a.bools": [True, False],
    }
    assert metadata["general.architecture"] == "llama"


def test_tensors_are_found_with_shape_and_bytes(written: Path) -> None:
    file = GgufFile.open(written)
    assert list(file.tensors) == ["vector", "matrix", "blocks"]
    assert [file.tensors[name].shape for name in file.tensors] == [(5,), (2, 3), (2, 32)]
    assert [file.tensors[name].type.name for name in file.tensors] == ["F32", "F16", "Q4_0"]
    assert file.raw("vector").view(np.float32).tolist() == [[0, 1, 2, 3, 4]]
    assert file.raw("matrix").view(np.float16).tolist() == [[0, 1, 2], [3, 4, 5]]
    assert file.raw("blocks").tolist() == np.arange(36).reshape(2, 18).tolist()
    assert file.num_bytes == 20 + 12 + 36


def test_the_default_model_is_read_to_its_last_byte(default_model_path: Path) -> None:
    file = GgufFile.open(default_model_path)
    assert len(file.tensors) == 272
    assert max(item.offset + item.num_bytes for item in file.tensors.values()) == default_model_path.stat().st_size
    assert file.raw("token_embd.weight").shape == (49152, 576 // 32 * 34)
    assert file.metadata["llama.block_count"] == 30
    assert len(file.metadata["tokenizer.ggml.tokens"]) == 49152  # type: ignore[arg-type]


def test_writing_to_a_tensor_does_not_reach_the_file(written: Path) -> None:
    before = written.read_bytes()
    GgufFile.open(written).raw("vector")[:] = 255
    assert written.read_bytes() == before


def test_version_2_and_another_alignment_are_read(tmp_path: Path) -> None:
    content = file_bytes(
        [entry("general.alignment", U32, struct.pack("<I", 64))],
        [tensor("a", [2], F32, 0), tensor("b", [1], F32, 64)],
        struct.pack("<2f", 1, 2).ljust(64, b"\0") + struct.pack("<f", 3),
        version=2,
        alignment=64,
    )
    (tmp_path / "a.gguf").write_bytes(content)
    file = GgufFile.open(tmp_path / "a.gguf")
    assert file.raw("a").view(np.float32).tolist() == [[1, 2]]
    assert file.raw("b").view(np.float32).tolist() == [[3]]


# ---------------------------------------------------------------- bad files


def test_a_missing_file_is_not_found(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match=r"none\.gguf"):
        GgufFile.open(tmp_path / "none.gguf")


def test_an_empty_file_is_refused(tmp_path: Path) -> None:
    assert "empty" in refusal(tmp_path, b"")


def test_a_file_of_another_kind_is_refused(tmp_path: Path) -> None:
    assert "not a GGUF file" in refusal(tmp_path, b"PK\x03\x04" + b"\0" * 100)


@pytest.mark.parametrize(("version", "complaint"), [(1, "version 1"), (99, "version 99"), (0x03000000, "big-endian")])
def test_an_unknown_version_is_refused(tmp_path: Path, version: int, complaint: str) -> None:
    assert complaint in refusal(tmp_path, file_bytes(version=version))


@pytest.mark.parametrize("counts", [(2**63, 0), (0, 2**63), (2**32, 2**32), (3, 3)])
def test_counts_larger_than_the_file_are_refused(tmp_path: Path, counts: tuple[int, int]) -> None:
    assert "more than fit" in refusal(tmp_path, b"GGUF" + struct.pack("<IQQ", 3, *counts) + b"\0" * 60)


@pytest.mark.parametrize(
    ("value", "complaint"),
    [
        (entry("k", STRING, struct.pack("<Q", 2**60)), "ends after the file"),
        (entry("k", STRING, struct.pack("<Q", 2**64 - 1)), "ends after the file"),
        (entry("k", ARRAY, struct.pack("<IQ", STRING, 2**61)), "truncated or damaged, fetch it again"),
        (entry("k", ARRAY, struct.pack("<IQ", STRING, 1) + struct.pack("<Q", 2**62)), "ends after the file"),
        (entry("k", ARRAY, struct.pack("<IQ", U32, 2**62)), "ends after the file"),
        (entry("k", ARRAY, struct.pack("<IQ", ARRAY, 1) + struct.pack("<IQ", ARRAY, 1)), "array of arrays"),
        (entry("k", 13, b""), "unknown value type 13"),
        (entry("k", ARRAY, struct.pack("<IQ", 13, 1)), "unknown value type 13"),
        (entry("k", STRING, struct.pack("<Q", 1) + b"\xff"), "not UTF-8"),
        (entry("k", ARRAY, struct.pack("<IQ", STRING, 1) + struct.pack("<Q", 1) + b"\xff"), "not UTF-8"),
        (entry("", STRING, text("x")), "0 characters"),
        (struct.pack("<Q", 2**62), "ends after the file"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_hostile_metadata_value_is_refused(tmp_path: Path, value: bytes, complaint: str) -> None:
    assert complaint in refusal(tmp_path, file_bytes([value], data=b"\0" * 64))


def test_a_metadata_key_that_appears_twice_is_refused(tmp_path: Path) -> None:
    assert "'k' appears twice" in refusal(tmp_path, file_bytes([entry("k", STRING, text("x"))] * 2))


@pytest.mark.parametrize("alignment", [0, 3, 4, 48, 2**31])
def test_a_senseless_alignment_is_refused(tmp_path: Path, alignment: int) -> None:
    value = entry("general.alignment", U32, struct.pack("<I", alignment))
    assert "general.alignment" in refusal(tmp_path, file_bytes([value]))


def test_one_part_of_a_split_model_is_refused(tmp_path: Path) -> None:
    value = entry("split.count", U32, struct.pack("<I", 3))
    assert "one of 3 parts" in refusal(tmp_path, file_bytes([value]))


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        (tensor("w", [], F32, 0), "0 dimensions"),
        (tensor("w", [1] * 5, F32, 0), "5 dimensions"),
        (tensor("w", [0], F32, 0), "does not fit"),
        (tensor("w", [2**63, 2**63], F32, 0), "does not fit"),
        (tensor("w", [2**32, 2**32, 2**32, 2**32], Q4_0, 0), "does not fit"),
        (tensor("w", [17], F32, 0), "truncated"),
        (tensor("w", [1], F32, 2**63), "truncated"),
        (tensor("w", [1], F32, 4), "not a multiple of the alignment"),
        (tensor("w", [33], Q4_0, 0), "not whole Q4_0 blocks"),
        (tensor("w", [1], 4, 0), "number 4, is not supported"),
        (tensor("w", [256], 10, 0), "Q2_K, is not supported; use a file with F32"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_hostile_tensor_is_refused_by_name(tmp_path: Path, line: bytes, complaint: str) -> None:
    message = refusal(tmp_path, file_bytes(tensors=[line], data=b"\0" * 64))
    assert complaint in message
    assert "tensor w" in message


def test_a_tensor_name_that_appears_twice_is_refused(tmp_path: Path) -> None:
    lines = [tensor("w", [1], F32, 0), tensor("w", [1], F32, 32)]
    assert "tensor w: the name appears twice" in refusal(tmp_path, file_bytes(tensors=lines, data=b"\0" * 64))


def test_tensors_that_overlap_are_refused(tmp_path: Path) -> None:
    lines = [tensor("first", [16], F32, 0), tensor("second", [8], F32, 32)]
    message = refusal(tmp_path, file_bytes(tensors=lines, data=b"\0" * 64))
    assert "tensor second: its data overlaps that of tensor first" in message


@pytest.mark.parametrize("mislabelled", ["first", "last"])
def test_a_tensor_that_leaves_bytes_to_no_tensor_is_refused_by_name(tmp_path: Path, mislabelled: str) -> None:
    """So a wrong type shows: 16 values of F16 take half the bytes that lie there for F32."""
    kinds = {name: F16 if name == mislabelled else F32 for name in ("first", "last")}
    lines = [tensor(name, [16], kind, 64 * index) for index, (name, kind) in enumerate(kinds.items())]
    message = refusal(tmp_path, file_bytes(tensors=lines, data=b"\0" * 128))
    assert f"tensor {mislabelled}: 32 bytes beside its data belong to no tensor; its type or shape is wrong" in message


def test_bytes_before_the_first_tensor_are_refused(tmp_path: Path) -> None:
    message = refusal(tmp_path, file_bytes(tensors=[tensor("w", [8], F32, 32)], data=b"\0" * 64))
    assert "tensor w: 32 bytes beside its data belong to no tensor" in message


def test_a_file_cut_anywhere_in_its_header_or_data_is_refused(tmp_path: Path, written: Path) -> None:
    content = written.read_bytes()
    data_end = max(item.offset + item.num_bytes for item in GgufFile.open(written).tensors.values())
    for length in range(0, data_end, 7):
        refusal(tmp_path, content[:length])


@settings(max_examples=300, deadline=None)
@given(damage=st.lists(st.tuples(st.integers(0, 700), st.integers(0, 255)), min_size=1, max_size=8))
def test_a_damaged_file_is_read_or_refused_but_never_crashes(
    damage: list[tuple[int, int]], damaged: Callable[[list[tuple[int, int]]], Path]
) -> None:
    path = damaged(damage)
    try:
        file = GgufFile.open(path)
    except ModelError:
        return
    for name in file.tensors:
        assert file.raw(name).size == file.tensors[name].num_bytes


@pytest.fixture(scope="module")
def damaged(tmp_path_factory: pytest.TempPathFactory) -> Callable[[list[tuple[int, int]]], Path]:
    path = tmp_path_factory.mktemp("damaged") / "damaged.gguf"
    content = file_bytes(
        [
            entry("tokens", ARRAY, struct.pack("<IQ", STRING, 20) + b"".join(text(f"t{i}") for i in range(20))),
            entry("numbers", ARRAY, struct.pack("<IQ", U32, 8) + bytes(32)),
        ],
        [tensor(f"w{i}", [32, 2], Q4_0, 64 * i) for i in range(4)],
        bytes(256),
    )

    def damage(changes: list[tuple[int, int]]) -> Path:
        changed = bytearray(content)
        for position, value in changes:
            changed[position % len(changed)] = value
        path.write_bytes(changed)
        return path

    return damage
