"""The weight formats, and the choice of one for each matrix.

The table is in order of preference; `dense`, which takes anything, is last. Knows no model.
"""

import torch

from penstock.models.quant.interface import WeightFormat
from penstock.models.stored_tensor import StoredTensor
from penstock.registry import Registry

FORMATS: Registry[type[WeightFormat]] = Registry(
    "weight format",
    {
        "q4": "penstock.models.quant.q4:Q4Format",
        "int8": "penstock.models.quant.int8:Int8Format",
        "dense": "penstock.models.quant.dense:DenseFormat",
    },
)

EXACT_PRECISIONS = frozenset({"exact", "float32"})


def choose_format(parts: list[StoredTensor], device: torch.device, dtype: torch.dtype, precision: str) -> WeightFormat:
    """Return the format to pack these parts as one matrix.

    "auto" keeps what the file quantised in the first format that accepts it; any other precision is dense.
    """
    if precision == "auto":
        for name in FORMATS.names:
            candidate = FORMATS.load(name)()
            if candidate.accepts(parts, device):
                return candidate
    return FORMATS.load("dense")()
