"""Compile the prefill kernel for Hopper on any machine and print what the assembler says of it.

python -m tests.hopper_compilation bf16
"""

import subprocess
import sys
import tempfile
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon._runtime import GluonASTSource

from penstock.kernels.triton import hopper_prefill

CONSTANTS = {"GROUP": 4, "HEADS": 32, "HEAD_DIM": 128, "BLOCK_TOKENS": 16, "TOKENS": 32}


def compile_kernel(number: str) -> str:
    """Return the assembly text for "bf16" or "fp16"."""
    kernel = hopper_prefill._hopper_prefill_kernel
    layout = hopper_prefill._COPY_LAYOUT.value
    signature = {
        "q_desc": f"tensordesc<{number}[32, 64],{layout!r}>",
        "k_desc": f"tensordesc<{number}[16, 64],{layout!r}>",
        "v_desc": f"tensordesc<{number}[16, 64],{layout!r}>",
        "out_ptr": f"*{number}",
        **dict.fromkeys(["tables_ptr", "lens_ptr", "starts_ptr", "tiles_ptr"], "*i32"),
        **dict.fromkeys(["num_tiles", "num_tokens", "table_stride"], "i32"),
        "sharpness": "fp32",
        **dict.fromkeys(CONSTANTS, "constexpr"),
    }
    at = {(kernel.arg_names.index(name),): value for name, value in CONSTANTS.items()}
    source = GluonASTSource(kernel, signature, at)
    options = {"num_warps": 4, "maxnreg": hopper_prefill._REGISTERS}
    text: str = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm["ptx"]
    return text


def main(number: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "kernel.ptx"
        source.write_text(compile_kernel(number))
        assembler = triton.knobs.nvidia.ptxas.path
        command = [assembler, "-v", "-arch=sm_90a", str(source), "-o", str(source.with_suffix(".cubin"))]
        print(subprocess.run(command, capture_output=True, text=True, check=True).stderr)


if __name__ == "__main__":
    main(sys.argv[1])
