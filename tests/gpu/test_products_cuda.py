"""Products of many rows: the one that also gates, and those of the library, chosen by trying."""

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import functional

if not torch.cuda.is_available():
    pytest.skip("there is no CUDA device", allow_module_level=True)

from penstock.kernels.library_product import Library, Shape
from penstock.kernels.product_tuner import ProductTuner
from penstock.kernels.triton.hopper import runs_gluon
from penstock.models.quant.dense import DenseWeight
from penstock.models.quant.interface import ProductUse

pytestmark = pytest.mark.gpu

on_hopper = pytest.mark.skipif(not runs_gluon(torch.device("cuda", 0)), reason="this is not a Hopper device")

# A product in a half-precision type that is rounded once or twice.
TOLERANCE = {torch.bfloat16: 5e-3, torch.float16: 1e-3}


def relative_error(found: Tensor, wanted: Tensor) -> float:
    return float((found.double() - wanted.double()).norm() / wanted.double().norm())


def matrices(num_rows: int, size: int, depth: int, dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, Tensor]:
    generator = torch.Generator("cuda").manual_seed(num_rows)
    x = torch.randn(num_rows, depth, device="cuda", generator=generator)
    weight = torch.randn(2 * size, depth, device="cuda", generator=generator) * depth**-0.5
    return x.to(dtype), weight.to(dtype)


def gated(x: Tensor, weight: Tensor, *, gelu: bool) -> Tensor:
    gate, up = functional.linear(x.float(), weight.float()).chunk(2, dim=-1)
    return (functional.gelu(gate, approximate="tanh") if gelu else functional.silu(gate)) * up


@on_hopper
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("gelu", [False, True])
@pytest.mark.parametrize("num_rows", [1, 63, 64, 65, 128, 130, 1000, 2304])
def test_the_gated_kernel_gives_products_and_gates(num_rows: int, gelu: bool, dtype: torch.dtype) -> None:
    from penstock.kernels.triton.hopper_gated import gated_product

    for size, depth in ((128, 64), (384, 320), (3072, 1024)):
        x, weight = matrices(num_rows, size, depth, dtype)
        found = gated_product(x, weight, gelu=gelu)
        assert relative_error(found, gated(x, weight, gelu=gelu)) < TOLERANCE[dtype]


@on_hopper
@pytest.mark.parametrize("num_rows", [250, 256, 500, 2100])
def test_the_gated_kernel_at_full_size(num_rows: int) -> None:
    from penstock.kernels.triton.hopper_gated import gated_product

    x, weight = matrices(num_rows, 14336, 4096)
    assert relative_error(gated_product(x, weight, gelu=False), gated(x, weight, gelu=False)) < 5e-3


@on_hopper
def test_the_gated_kernel_keeps_rows_apart_and_repeats_to_the_bit() -> None:
    from penstock.kernels.triton.hopper_gated import gated_product

    x, weight = matrices(300, 384, 256)
    first = gated_product(x, weight, gelu=False)
    assert torch.equal(first, gated_product(x, weight, gelu=False))
    poisoned = x.clone()
    poisoned[17] = float("nan")
    found = gated_product(poisoned, weight, gelu=False)
    assert found[17].isnan().all()
    kept = torch.arange(300, device="cuda") != 17
    assert torch.equal(found[kept], first[kept])


@on_hopper
def test_a_captured_gated_product_follows_its_input() -> None:
    from penstock.kernels.triton.hopper_gated import gated_product

    x, weight = matrices(200, 256, 128)
    gated_product(x, weight, gelu=False)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = gated_product(x, weight, gelu=False)
    x.copy_(torch.randn_like(x))
    graph.replay()
    assert relative_error(found, gated(x, weight, gelu=False)) < 5e-3


@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("num_rows", [17, 100, 256])
def test_every_algorithm_that_the_library_names_gives_the_product(num_rows: int, out_dtype: torch.dtype) -> None:
    x, weight = matrices(num_rows, 512, 1024)
    library = Library(x.device)
    products = library.candidates(Shape(num_rows, 1024, 1024, torch.bfloat16, out_dtype))
    assert products
    wanted = functional.linear(x.float(), weight.float())
    for product in products:
        found = product.multiply(x, weight)
        assert found.dtype == out_dtype
        assert relative_error(found, wanted) < 5e-3
        if out_dtype == torch.bfloat16:
            total = torch.ones_like(found)
            product.add(x, weight, total)
            assert relative_error(total, 1.0 + wanted) < 5e-3
        restored = library.restore(Shape(num_rows, 1024, 1024, torch.bfloat16, out_dtype), product.algorithm)
        assert restored is not None and torch.equal(restored.multiply(x, weight), found)
    assert library.restore(Shape(num_rows, 1024, 1024, torch.bfloat16, out_dtype), [1 << 60] * 8) is None


@pytest.mark.parametrize("use", ["plain", "gated", "wide"])
def test_a_tuned_weight_gives_what_it_gave(use: ProductUse) -> None:
    tuner = ProductTuner(torch.device("cuda", 0), None)
    tuner.allow(60.0)
    weights = [DenseWeight(matrices(seed, 1024, 1024)[1]) for seed in range(3)]
    for num_rows in (40, 192, 448):
        x, _ = matrices(num_rows, 1024, 1024)
        weights[0].tune(weights[1:], num_rows, use, tuner)
        assert tuner.num_skipped == 0
        for weight in weights:
            wanted = functional.linear(x.float(), weight.weight.float())
            assert relative_error(weight.apply(x), wanted) < 5e-3
            assert relative_error(weight.apply_wide(x), wanted) < 5e-3
            total = torch.ones_like(wanted, dtype=torch.bfloat16)
            assert weight.add(x, total)
            assert relative_error(total, 1.0 + wanted) < 5e-3
            assert relative_error(weight.apply_gated(x, gelu=False), gated(x, weight.weight, gelu=False)) < 8e-3


def test_a_tuned_product_can_be_captured() -> None:
    weight = DenseWeight(matrices(1, 1024, 1024)[1])
    x, _ = matrices(192, 1024, 1024)
    tuner = ProductTuner(x.device, None)
    tuner.allow(60.0)
    weight.tune((), 192, "plain", tuner)
    weight.apply(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = weight.apply(x)
    x.copy_(torch.randn_like(x))
    graph.replay()
    assert relative_error(found, functional.linear(x.float(), weight.weight.float())) < 5e-3


def test_what_was_found_is_known_to_the_next_process(tmp_path: Path) -> None:
    device = torch.device("cuda", 0)
    sizes = [(40, torch.bfloat16), (192, torch.bfloat16), (448, torch.bfloat16), (192, torch.float32)]
    weight = matrices(1, 1024, 1024)[1]
    first = ProductTuner(device, tmp_path / "tuned")
    assert first.product([weight], 40, torch.bfloat16) is None and first.num_skipped == 1  # not allowed yet
    first.allow(60.0)
    found = [first.product([weight], *size) for size in sizes]
    first.save()
    (file,) = (tmp_path / "tuned").iterdir()
    assert len(json.loads(file.read_text())["found"]) == len(sizes)
    second = ProductTuner(device, tmp_path / "tuned")
    restored = [second.product([weight], *size) for size in sizes]
    assert [known and known.algorithm for known in restored] == [known and known.algorithm for known in found]


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"found": 3}', '{"found": {"192 x 2048 x 1024": "x"}}'])
def test_a_file_that_makes_no_sense_is_no_file(tmp_path: Path, content: str) -> None:
    device = torch.device("cuda", 0)
    tuner = ProductTuner(device, tmp_path)
    tuner.allow(60.0)
    weight = matrices(1, 1024, 1024)[1]
    tuner.product([weight], 192, torch.bfloat16)
    tuner.save()
    (file,) = tmp_path.iterdir()
    file.write_text(content)
    again = ProductTuner(device, tmp_path)
    again.allow(60.0)
    again.product([weight], 192, torch.bfloat16)
    again.save()
    assert len(json.loads(file.read_text())["found"]) == 1


def test_a_folder_that_cannot_be_written_costs_nothing_but_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "tuned").write_text("a file where a folder should be")
    tuner = ProductTuner(torch.device("cuda", 0), tmp_path / "tuned")
    tuner.allow(60.0)
    tuner.product([matrices(1, 1024, 1024)[1]], 192, torch.bfloat16)
    tuner.save()
    assert "cannot be kept" in caplog.text
