"""The ranks that share one model, seen from one of them.

Knows torch.distributed and nothing of models. A group of one needs no processes and costs nothing.
"""

import os
import sys
from dataclasses import dataclass

import torch
import torch.distributed
from torch.distributed import ProcessGroup


@dataclass(frozen=True, slots=True)
class Group:
    """`size` ranks that split the work; this process is `rank`."""

    rank: int = 0
    size: int = 1
    processes: ProcessGroup | None = None  # None: this rank does not talk to the others

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.size:
            raise ValueError(f"rank {self.rank} is outside a group of {self.size}")


SINGLE = Group()


def join(rank: int, size: int, *, rendezvous: str, device: torch.device) -> Group:
    """Meet the other ranks of a group and return once all have come.

    `rendezvous` is the path of a file that does not exist yet, the same for all ranks.
    """
    if size == 1:
        return SINGLE
    # The ranks share one machine, so what they say to each other stays on it.
    loopback = "lo0" if sys.platform == "darwin" else "lo"
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        os.environ.setdefault(variable, loopback)
    torch.distributed.init_process_group(
        backend="nccl" if device.type == "cuda" else "gloo",
        init_method=f"file://{rendezvous}",
        rank=rank,
        world_size=size,
    )
    return Group(rank, size, torch.distributed.group.WORLD)


def leave(group: Group) -> None:
    """End this process's part in the group."""
    if group.processes is not None:
        torch.distributed.destroy_process_group(group.processes)
