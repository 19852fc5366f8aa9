"""Compile the kernels for Hopper on any machine and print what the assembler says of them.

python -m tests.hopper_compilation prefill bf16
"""

import subprocess
import sys
import tempfile
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon._runtime import GluonASTSource

from penstock.kernels.triton import hopper_gated, hopper_prefill

PREFILL_CONSTANTS = {"GROUP": 4, "HEADS": 32, "HEAD_DIM": 128, "BLOCK_TOKENS": 16, "TOKENS": 32}
GATED_CONSTANTS = {"GELU": False, "BAND": 16}


def prefill_signature(number: str) -> dict[str, str]:
    layout = hopper_prefill._COPY_LAYOUT.value
    return {
        "q_desc": f"tensordesc<{number}[32, 64],{layout!r}>",
        "k_desc": f"tensordesc<{number}[16, 64],{layout!r}>",
        "v_desc": f"tensordesc<{number}[16, 64],{layout!r}>",
        "out_ptr": f"*{number}",
        **dict.fromkeys(["tables_ptr", "lens_ptr", "starts_ptr", "tiles_ptr"], "*i32"),
        **dict.fromkeys(["num_tiles", "num_tokens", "table_stride"], "i32"),
        "sharpness": "fp32",
    }


def gated_signature(number: str) -> dict[str, str]:
    layout = hopper_gated._LAYOUT.value
    return {
        "x_desc": f"tensordesc<{number}[128, 64],{layout!r}>",
        "weight_desc": f"tensordesc<{number}[128, 64],{layout!r}>",
        "weight_piece_desc": f"tensordesc<{number}[32, 64],{layout!r}>",
        "out_desc": f"tensordesc<{number}[64, 128],{layout!r}>",
        "out_pair_desc": f"tensordesc<{number}[64, 64],{layout!r}>",
        "out_piece_desc": f"tensordesc<{number}[64, 32],{hopper_gated._PIECE_LAYOUT.value!r}>",
        **dict.fromkeys(["num_rows", "wide_columns", "narrow_columns", "size", "depth"], "i32"),
    }


def compile_kernel(name: str, number: str) -> str:
    """Return the assembly text of "prefill" or "gated" for "bf16" or "fp16"."""
    if name == "prefill":
        kernel, signature, constants = (
            hopper_prefill._hopper_prefill_kernel,
            prefill_signature(number),
            PREFILL_CONSTANTS,
        )
    else:
        kernel, signature, constants = hopper_gated._hopper_gated_kernel, gated_signature(number), GATED_CONSTANTS
    at = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    source = GluonASTSource(kernel, {**signature, **dict.fromkeys(constants, "constexpr")}, at)
    options = {"num_warps": 4, "maxnreg": hopper_prefill._REGISTERS}
    text: str = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm["ptx"]
    return text


def main(name: str, number: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "kernel.ptx"
        source.write_text(compile_kernel(name, number))
        assembler = triton.knobs.nvidia.ptxas.path
        command = [assembler, "-v", "-arch=sm_90a", str(source), "-o", str(source.with_suffix(".cubin"))]
        print(subprocess.run(command, capture_output=True, text=True, check=True).stderr)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
