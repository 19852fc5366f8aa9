"""Weight formats: what a file quantised comes out of the fast product as it comes out of float32."""

import gguf
import numpy as np
import pytest
import torch
from torch import Tensor

from penstock.kernels.quant_gemm import four_bit_supported, int8_supported
from penstock.models.dequantise import DEQUANTISERS
from penstock.models.quant.dense import DenseFormat
from penstock.models.quant.int8 import Int8Format
from penstock.models.quant.interface import WeightFormat
from penstock.models.quant.q4 import MAX_FOUR_BIT_ROWS, Q4Format, unpack
from penstock.models.quant.registry import choose_format
from penstock.models.stored_tensor import StoredTensor

CPU = torch.device("cpu")
FOUR_BIT_TYPES = ["Q4_0", "Q4_1", "Q4_K"]
OTHER_TYPES = ["Q5_0", "Q5_1", "Q8_0", "Q5_K", "Q6_K"]

needs_four_bits = pytest.mark.skipif(not four_bit_supported(), reason="this CPU or torch has no 4-bit kernel")
needs_int8 = pytest.mark.skipif(not int8_supported(), reason="this CPU or torch has no fast 8-bit kernel")


def stored(kind: str, rows: int, columns: int = 256, seed: int = 0) -> StoredTensor:
    """A matrix of random but sane blocks."""
    generator = np.random.default_rng(seed)
    dequantise = DEQUANTISERS[kind]
    blocks = generator.integers(0, 256, (rows, columns // dequantise.block_values, dequantise.block_bytes), np.uint8)
    halves = {"Q4_0": [0], "Q5_0": [0], "Q8_0": [0], "Q6_K": [208]}.get(kind, [0, 2])
    for place in halves:
        numbers = generator.uniform(0.01, 0.02, blocks.shape[:2]).astype(np.float16)
        blocks[..., place : place + 2] = numbers[..., None].view(np.uint8)
    return StoredTensor("w", "f", (rows, columns), kind, torch.from_numpy(blocks.reshape(rows, -1)), dequantise)


def dense(rows: int) -> StoredTensor:
    return StoredTensor("w", "f", (rows, 64), "F32", torch.zeros(rows, 64))


def relative_error(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


@pytest.mark.parametrize("kind", FOUR_BIT_TYPES)
def test_unpacked_levels_scales_and_offsets_are_the_stored_numbers(kind: str) -> None:
    part = stored(kind, 6, 512)
    levels, scales, offsets = unpack(part)
    assert levels.shape == (6, 512)
    assert int(levels.max()) <= 15
    numbers = scales.unsqueeze(2) * (levels.float().unflatten(1, (-1, 32)) - 8) + offsets.unsqueeze(2)
    torch.testing.assert_close(numbers.flatten(1), part.dense(), rtol=1e-5, atol=1e-5)


def test_unpacking_agrees_with_the_reference_quantiser() -> None:
    matrix = np.random.default_rng(0).standard_normal((4, 64)).astype(np.float32)
    blocks = gguf.quants.quantize(matrix, gguf.GGMLQuantizationType.Q4_1)
    part = StoredTensor("w", "f", (4, 64), "Q4_1", torch.from_numpy(blocks), DEQUANTISERS["Q4_1"])
    levels, scales, offsets = unpack(part)
    numbers = scales.unsqueeze(2) * (levels.float().unflatten(1, (-1, 32)) - 8) + offsets.unsqueeze(2)
    expected = gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType.Q4_1)
    torch.testing.assert_close(numbers.flatten(1), torch.from_numpy(expected), rtol=1e-5, atol=1e-5)


def check_product(weight_format: WeightFormat, parts: list[StoredTensor], rows: int) -> None:
    x = torch.randn(rows, parts[0].shape[1], generator=torch.Generator().manual_seed(rows))
    bias = torch.linspace(-1, 1, sum(part.shape[0] for part in parts))
    exact = DenseFormat().pack(parts, CPU, torch.float32)
    packed = weight_format.pack(parts, CPU, torch.float32)
    assert (packed.out_features, packed.in_features) == (exact.out_features, exact.in_features)
    assert relative_error(packed.apply(x), exact.apply(x)) < 0.02
    torch.testing.assert_close(packed.apply(x, bias), packed.apply(x) + bias)


@needs_four_bits
@pytest.mark.parametrize("rows", [1, 5, MAX_FOUR_BIT_ROWS, MAX_FOUR_BIT_ROWS + 1, 100])
@pytest.mark.parametrize("kind", FOUR_BIT_TYPES)
def test_stacked_four_bit_parts_multiply_as_one_matrix(kind: str, rows: int) -> None:
    check_product(Q4Format(), [stored(kind, 24, seed=1), stored(kind, 8, seed=2), stored(kind, 8, seed=3)], rows)


@needs_four_bits
def test_parts_of_different_four_bit_types_share_a_matrix() -> None:
    check_product(Q4Format(), [stored("Q4_0", 16), stored("Q4_1", 8), stored("Q4_K", 8)], 4)


@needs_int8
@pytest.mark.parametrize("rows", [1, 9, 100])
@pytest.mark.parametrize("kind", FOUR_BIT_TYPES + OTHER_TYPES)
def test_any_quantised_type_multiplies_in_8_bits(kind: str, rows: int) -> None:
    check_product(Int8Format(), [stored(kind, 24, seed=1), stored(kind, 8, seed=2)], rows)


@needs_four_bits
@needs_int8
def test_the_fastest_format_is_chosen_for_what_the_file_quantised() -> None:
    assert choose_format([stored("Q4_1", 8)], CPU, torch.float32, "auto").name == "q4"
    assert choose_format([stored("Q4_1", 8), stored("Q8_0", 8)], CPU, torch.float32, "auto").name == "int8"
    assert choose_format([stored("Q6_K", 8)], CPU, torch.float32, "auto").name == "int8"
    assert choose_format([stored("Q8_0", 8), dense(8)], CPU, torch.float32, "auto").name == "dense"


@pytest.mark.parametrize("weight_format", [Q4Format(), Int8Format()])
def test_floating_point_matrices_and_other_devices_are_left_alone(weight_format: WeightFormat) -> None:
    assert not weight_format.accepts([dense(8)], CPU)
    assert not weight_format.accepts([stored("Q4_1", 8)], torch.device("cuda"))


@needs_four_bits
@needs_int8
def test_a_four_bit_matrix_takes_less_than_half_of_float32() -> None:
    parts = [stored("Q4_1", 512)]
    packed, exact = (kind.pack(parts, CPU, torch.float32) for kind in (Q4Format(), DenseFormat()))
    assert packed.num_bytes < exact.num_bytes / 2
