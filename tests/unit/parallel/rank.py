"""One rank of a tensor-parallel group: runs each model given and leaves its logits in a file.

Usage: python -m tests.unit.parallel.rank RANK SIZE RENDEZVOUS OUTPUT_FOLDER MODEL...
"""

import sys
from pathlib import Path

import numpy as np
import torch

from penstock.models.loader import load_model
from penstock.models.registry import spec_for
from penstock.models.store import ModelFiles
from penstock.parallel.groups import join, leave
from tests.paged import PagedDecoder

TOKEN_IDS = [(7 * number) % 96 for number in range(21)]


def main(rank: int, size: int, rendezvous: str, output: Path, models: list[Path]) -> None:
    torch.set_num_threads(1)
    device = torch.device("cpu")
    group = join(rank, size, rendezvous=rendezvous, device=device)
    for path in models:
        kind = "gguf" if path.suffix == ".gguf" else "folder"
        files = ModelFiles("tiny", kind, path, None if kind == "gguf" else path / "config.json")
        decoder = load_model(files, spec_for(files), device=device, precision="exact", group=group)
        logits = PagedDecoder(decoder, group=group).run("a", TOKEN_IDS, 8)
        np.save(output / f"{path.name}-{rank}.npy", logits.numpy())
    leave(group)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], Path(sys.argv[4]), [Path(name) for name in sys.argv[5:]])
