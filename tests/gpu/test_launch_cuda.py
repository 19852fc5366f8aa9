"""A first start compiles its kernels together, in threads of their own."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]

CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 512, "hidden_size": 512,
    "intermediate_size": 1024, "num_attention_heads": 8, "num_hidden_layers": 2, "num_key_value_heads": 2,
    "head_dim": 64, "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
    "tie_word_embeddings": False, "hidden_act": "silu", "bos_token_id": 0, "eos_token_id": 1,
}  # fmt: skip
# Builds an engine, which runs its first steps, and prints which threads compiled what.
START = """
import json, sys, threading
from triton import knobs
from penstock import LLM

found = []
def note(*, src, cache_hit, **_):
    found.append((src.fn.__name__, threading.current_thread().name, cache_hit))
knobs.compilation.listener = note
LLM(sys.argv[1], load_format="dummy", device="cuda", max_context_tokens=4096)
print(json.dumps(found))
"""


def test_a_first_start_compiles_its_kernels_together(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    environment = dict(os.environ, TRITON_CACHE_DIR=str(tmp_path / "kernels"), PENSTOCK_CACHE_DIR=str(tmp_path / "own"))

    def compiled() -> list[tuple[str, str, bool]]:
        command = [sys.executable, "-c", START, str(tmp_path)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=240)
        return [tuple(each) for each in json.loads(done.stdout.splitlines()[-1])]

    first = compiled()
    assert len(first) > 5 and not any(was_cached for _, _, was_cached in first)
    # The one that others find their way by runs at once.
    assert {name for name, thread, _ in first if not thread.startswith("penstock-compile")} <= {"_gather_kernel"}
    assert all(was_cached for _, _, was_cached in compiled())
