"""What quantised weights take of a CPU's memory once they are packed for its kernels, before any are loaded.

Goes by what the formats in `quant/` keep of each weight where torch has their kernels. Knows no tensors; on other
devices, and in files of plain numbers, weights are dense. No torch.
"""

import re
from collections.abc import Iterable

from penstock import machine
from penstock.models.gguf import GgufFile, GgufTensor
from penstock.models.spec import QuantisedSpec

_EMBEDDING, _HEAD = "token_embd.weight", "output.weight"
_FOUR_BIT_TYPES = frozenset({"Q4_0", "Q4_1", "Q4_K"})
# Matrices that are packed as one: all in the same form.
_PACKED_TOGETHER = (
    (re.compile(r"attn_[qkv]\."), "attn_qkv."),
    (re.compile(r"ffn_(gate|up)(_exps)?\."), "ffn_gate_up."),
)

# Bytes for each weight, at most. On Arm: 4 bits with scales and offsets beside an 8-bit copy for many rows; or an 8-bit
# copy beside two that are packed for few rows, as large as dense ones. On x86: 8 bits.
_ARM_FOUR_BIT_BYTES, _ARM_OTHER_BYTES, _X86_BYTES = 1.75, 4.05, 1.1


def count_quantised(file: GgufFile) -> QuantisedSpec:
    """Count the weights that a GGUF file has in quantised matrices, by what they can be kept as."""
    matrices: dict[str, list[GgufTensor]] = {}
    for tensor in file.tensors.values():
        # A table that is looked up stays as it is; it is multiplied only where it is the head too.
        if tensor.name != _EMBEDDING or _HEAD not in file.tensors:
            matrices.setdefault(_matrix(tensor.name), []).append(tensor)
    four_bit = others = 0
    for parts in matrices.values():
        if _all_four_bit(parts):
            four_bit += sum(map(_num_values, parts))
        elif all(_is_quantised(part) for part in parts):
            others += sum(map(_num_values, parts))
    embedding = file.tensors.get(_EMBEDDING)
    table_bytes = embedding.num_bytes if embedding is not None and _is_quantised(embedding) else 0
    return QuantisedSpec(four_bit, others, table_bytes)


def packed_bytes(quantised: QuantisedSpec, dense_bytes: int) -> int:
    """Return what the counted matrices take on this CPU, at most. `dense_bytes` is what a dense weight takes."""
    features = machine.cpu_features() or ()
    four_bit = other = float(dense_bytes)
    if machine.is_arm() and "asimddp" in features:
        four_bit, other = _ARM_FOUR_BIT_BYTES, _ARM_OTHER_BYTES
    elif machine.is_x86() and ("avx512_vnni" in features or "avx_vnni" in features):
        four_bit = other = _X86_BYTES
    return int(quantised.num_four_bit * four_bit + quantised.num_others * other)


def _matrix(name: str) -> str:
    for pattern, whole in _PACKED_TOGETHER:
        name = pattern.sub(whole, name)
    return name


def _all_four_bit(parts: Iterable[GgufTensor]) -> bool:
    return all(part.type.name in _FOUR_BIT_TYPES for part in parts)


def _is_quantised(tensor: GgufTensor) -> bool:
    return tensor.type.block_values > 1


def _num_values(tensor: GgufTensor) -> int:
    return tensor.num_bytes // tensor.type.block_bytes * tensor.type.block_values
