"""Every quantised type against the `gguf` package's own arithmetic."""

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from gguf.quants import dequantize

from penstock.models.dequantise import DEQUANTISERS
from penstock.models.gguf import BLOCK_TYPES

# Where the float16 numbers of a block start: random bytes there would be infinities and NaNs.
HALVES = {
    "Q4_0": (0,),
    "Q4_1": (0, 2),
    "Q5_0": (0,),
    "Q5_1": (0, 2),
    "Q8_0": (0,),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
}


def random_rows(name: str, rows: int, blocks_per_row: int) -> np.ndarray:
    """Blocks whose every bit is random but whose scales are finite. [rows, bytes_per_row]"""
    generator = np.random.default_rng(7)
    block_bytes = DEQUANTISERS[name].block_bytes
    blocks = generator.integers(0, 256, (rows * blocks_per_row, block_bytes), dtype=np.uint8)
    for start in HALVES[name]:
        scales = generator.normal(0, 0.1, len(blocks)).astype(np.float16)
        blocks[:, start : start + 2] = scales.view(np.uint8).reshape(-1, 2)
    return blocks.reshape(rows, -1)


@pytest.mark.parametrize("name", sorted(DEQUANTISERS))
def test_random_blocks_give_the_reference_values(name: str) -> None:
    data = random_rows(name, rows=5, blocks_per_row=3)
    columns = 3 * DEQUANTISERS[name].block_values
    values = DEQUANTISERS[name](torch.from_numpy(data), columns)
    expected = torch.from_numpy(dequantize(data, GGMLQuantizationType[name]))
    assert values.dtype == torch.float32
    assert values.shape == (5, columns)
    torch.testing.assert_close(values, expected, rtol=1e-6, atol=1e-7)


def test_more_rows_than_one_pass_holds_give_the_reference_values() -> None:
    data = random_rows("Q4_1", rows=70, blocks_per_row=1000)
    values = DEQUANTISERS["Q4_1"](torch.from_numpy(data), 32_000)
    torch.testing.assert_close(values, torch.from_numpy(dequantize(data, GGMLQuantizationType.Q4_1)))


def test_leading_dimensions_are_kept() -> None:
    data = random_rows("Q8_0", rows=6, blocks_per_row=2)
    stacked = DEQUANTISERS["Q8_0"](torch.from_numpy(data).reshape(2, 3, -1), 64)
    assert stacked.shape == (2, 3, 64)
    assert torch.equal(stacked.reshape(6, 64), DEQUANTISERS["Q8_0"](torch.from_numpy(data), 64))


def test_rows_that_are_not_contiguous_are_read_right() -> None:
    data = torch.from_numpy(random_rows("Q6_K", rows=6, blocks_per_row=2))
    assert torch.equal(DEQUANTISERS["Q6_K"](data[::2], 512), DEQUANTISERS["Q6_K"](data, 512)[::2])


def test_every_block_type_of_a_file_has_its_sizes_here() -> None:
    in_files = {item.name: (item.block_values, item.block_bytes) for item in BLOCK_TYPES.values()}
    here = {name: (item.block_values, item.block_bytes) for name, item in DEQUANTISERS.items()}
    assert here == {name: sizes for name, sizes in in_files.items() if sizes[0] > 1}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", sorted(DEQUANTISERS))
def test_the_gpu_gives_the_values_of_the_cpu(name: str) -> None:
    data = torch.from_numpy(random_rows(name, rows=5, blocks_per_row=3))
    columns = 3 * DEQUANTISERS[name].block_values
    torch.testing.assert_close(DEQUANTISERS[name](data.cuda(), columns).cpu(), DEQUANTISERS[name](data, columns))
