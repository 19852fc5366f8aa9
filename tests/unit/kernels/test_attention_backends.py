"""Every attention backend of this machine agrees with the reference, whatever the shapes and the batch."""

from dataclasses import dataclass, replace
from itertools import accumulate

import pytest
import torch
from torch import Tensor

from penstock.kernels.attention.interface import AttentionBackend, AttentionStep, HeadNorm, LayerAttention
from penstock.kernels.attention.reference import ReferenceAttention
from penstock.kernels.attention.registry import BACKENDS, able_backends

BLOCK_TOKENS = 16
PLAIN = LayerAttention(num_heads=6, num_kv_heads=2, head_dim=64, scale=64**-0.5)
CPU = torch.device("cpu")

NAMES = [name for name in able_backends([PLAIN], CPU, torch.float32) if name != "reference"]


@dataclass
class Slice:
    num_tokens: int
    context: int  # tokens, the slice's own included


DECODES = [Slice(1, context) for context in (1, 16, 17, 130, 500, 2048)]
EVEN_DECODES = [Slice(1, context) for context in (125, 130, 144, 160, 126)]
PREFILLS = [Slice(40, 40), Slice(7, 90), Slice(200, 456), Slice(300, 300)]
VERIFIED = [Slice(1, 60), Slice(3, 70), Slice(3, 200), Slice(3, 81), Slice(2, 2)]


class Case:
    """A pool with random contents, and one step over it."""

    def __init__(self, slices: list[Slice], shape: LayerAttention, *, shuffled: bool = True, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)

        def normal(*size: int) -> Tensor:
            return torch.randn(*size, generator=generator, dtype=torch.float64)

        needed = [-(-piece.context // BLOCK_TOKENS) for piece in slices]
        num_blocks = sum(needed) + 3
        order = torch.randperm(num_blocks, generator=generator) if shuffled else torch.arange(num_blocks)
        tables = torch.zeros(len(slices), max(needed), dtype=torch.int32)
        slots: list[Tensor] = []
        for index, (piece, first) in enumerate(zip(slices, accumulate([0, *needed]), strict=False)):
            tables[index, : needed[index]] = order[first : first + needed[index]]
            positions = torch.arange(piece.context - piece.num_tokens, piece.context)
            slots.append(tables[index, positions // BLOCK_TOKENS].long() * BLOCK_TOKENS + positions % BLOCK_TOKENS)
        self.shape = shape
        self.step = AttentionStep(
            num_decodes=next((i for i, piece in enumerate(slices) if piece.num_tokens > 1), len(slices)),
            query_starts=[0, *accumulate(piece.num_tokens for piece in slices)],
            context_lens=[piece.context for piece in slices],
            slots=torch.cat(slots),
            block_tables=tables,
        )
        num_tokens = self.step.query_starts[-1]
        self.pool = normal(2, num_blocks, BLOCK_TOKENS, shape.num_kv_heads, shape.head_dim)
        self.heads = normal(num_tokens, shape.num_heads + 2 * shape.num_kv_heads, shape.head_dim)
        self.q, self.k, self.v = self.heads.split((shape.num_heads, shape.num_kv_heads, shape.num_kv_heads), dim=1)
        angles = normal(num_tokens, 1, shape.head_dim // 2)
        self.rotation = torch.polar(torch.ones_like(angles), angles)
        self.norm = HeadNorm(1 + normal(shape.num_heads + shape.num_kv_heads, shape.head_dim) / 10, 1e-6)

    def backend(self, kind: type[AttentionBackend], dtype: torch.dtype) -> AttentionBackend:
        backend = kind([self.shape], [self.pool.to(dtype, copy=True)])
        backend.prepare(self.step)
        return backend


def check(name: str, slices: list[Slice], shape: LayerAttention, *, shuffled: bool = True) -> None:
    case = Case(slices, shape, shuffled=shuffled)
    exact, tested = case.backend(ReferenceAttention, torch.float64), case.backend(BACKENDS.load(name), torch.float32)
    expected = exact.run(case.q, case.k, case.v, 0)
    found = tested.run(case.q.float(), case.k.float(), case.v.float(), 0)
    torch.testing.assert_close(found.double(), expected, atol=2e-5, rtol=1e-4)
    torch.testing.assert_close(tested.kv_pool[0], exact.kv_pool[0].float())


pytestmark = pytest.mark.parametrize("name", NAMES)


@pytest.mark.parametrize("shuffled", [False, True])
@pytest.mark.parametrize(
    "slices",
    [DECODES, EVEN_DECODES, PREFILLS, VERIFIED, DECODES + PREFILLS, EVEN_DECODES + VERIFIED[1:] + PREFILLS],
)
def test_ragged_batches_agree(name: str, slices: list[Slice], shuffled: bool) -> None:
    check(name, slices, PLAIN, shuffled=shuffled)


@pytest.mark.parametrize("slices", [[Slice(1, 1)], [Slice(1, 333)], [Slice(5, 5)], [Slice(129, 129)], [Slice(20, 700)]])
def test_a_slice_alone_agrees(name: str, slices: list[Slice]) -> None:
    check(name, slices, PLAIN, shuffled=False)
    check(name, slices, PLAIN, shuffled=True)


@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(1, 1), (4, 4), (9, 3), (8, 1)])
def test_head_sizes_and_sharing_agree(name: str, num_heads: int, num_kv_heads: int, head_dim: int) -> None:
    shape = LayerAttention(num_heads, num_kv_heads, head_dim, scale=head_dim**-0.5)
    check(name, [Slice(1, 33), Slice(1, 40), Slice(3, 50), Slice(30, 60)], shape)


@pytest.mark.parametrize("window", [1, 15, 16, 100, 5000])
@pytest.mark.parametrize("slices", [DECODES, EVEN_DECODES, PREFILLS, VERIFIED])
def test_windows_agree(name: str, slices: list[Slice], window: int) -> None:
    check(name, slices, replace(PLAIN, window=window))


@pytest.mark.parametrize("window", [None, 50])
@pytest.mark.parametrize("slices", [DECODES, EVEN_DECODES, PREFILLS, VERIFIED])
def test_softcaps_agree(name: str, slices: list[Slice], window: int | None) -> None:
    check(name, slices, replace(PLAIN, softcap=5.0, window=window))


def test_layers_of_different_windows_share_a_step(name: str) -> None:
    case = Case(DECODES + PREFILLS, PLAIN)
    layers = [PLAIN, replace(PLAIN, window=50), replace(PLAIN, window=4000)]
    tested = BACKENDS.load(name)(layers, [case.pool.float() for _ in layers])
    tested.prepare(case.step)
    for number, shape in enumerate(layers):
        case.shape = shape
        expected = case.backend(ReferenceAttention, torch.float64).run(case.q, case.k, case.v, 0)
        found = tested.run(case.q.float(), case.k.float(), case.v.float(), number)
        torch.testing.assert_close(found.double(), expected, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("with_norm", [False, True])
@pytest.mark.parametrize("slices", [EVEN_DECODES, DECODES + PREFILLS])
def test_heads_are_normed_and_rotated(name: str, slices: list[Slice], with_norm: bool) -> None:
    case = Case(slices, PLAIN)
    norm = replace(case.norm, weight=case.norm.weight.float()) if with_norm else None
    rotation = case.rotation.to(torch.complex64)
    exact, tested = (case.backend(kind, torch.float32) for kind in (ReferenceAttention, BACKENDS.load(name)))
    expected = exact.run_heads(case.heads.float(), rotation, norm, 0)
    found = tested.run_heads(case.heads.float(), rotation, norm, 0)
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=1e-4)
    torch.testing.assert_close(tested.kv_pool[0], exact.kv_pool[0])
