"""Where tests of Triton kernels run: on the GPU, or in Triton's interpreter on the CPU where there is none.

Import this before anything that imports triton: the interpreter is chosen when kernels are defined.
"""

import importlib.util
import os
import sys
from typing import Any

import pytest
import torch


def _let_loops_run_to_a_loaded_bound() -> None:
    """Triton 3.6's interpreter asks numpy for int(array of one element), which numpy 2.4 and later refuse."""
    from triton.runtime import interpreter

    patch = interpreter._patch_lang_tensor

    def patch_with_index(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    interpreter._patch_lang_tensor = patch_with_index


if importlib.util.find_spec("triton") is None:
    pytest.skip("triton is not installed", allow_module_level=True)
if not torch.cuda.is_available():
    if "triton" in sys.modules and os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("triton was imported before its interpreter could be chosen", allow_module_level=True)
    os.environ["TRITON_INTERPRET"] = "1"
    _let_loops_run_to_a_loaded_bound()

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# The interpreter's matrix product is wrong for bfloat16.
DTYPES = [torch.float32, torch.float16] + ([torch.bfloat16] if torch.cuda.is_available() else [])
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}


def relative_error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """|found - wanted| / |wanted|, in float64. NaN where anything is not a number."""
    wanted = wanted.double()
    return float((found.double() - wanted).norm() / wanted.norm())
