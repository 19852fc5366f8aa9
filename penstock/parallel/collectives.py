"""What ranks say to each other in a step. In a group of one each of these returns its argument.

Knows tensors and groups only.
"""

import torch
import torch.distributed
from torch import Tensor

from penstock.parallel.groups import Group


def all_reduce(x: Tensor, group: Group) -> Tensor:
    """Return the sum of the ranks' tensors, written over `x`."""
    if group.size > 1:
        torch.distributed.all_reduce(x, group=group.processes)
    return x


def all_gather(x: Tensor, group: Group) -> Tensor:
    """Return the ranks' tensors side by side, in rank order. x: [tokens, columns] -> [tokens, size * columns]."""
    if group.size == 1:
        return x
    parts = [torch.empty_like(x) for _ in range(group.size)]
    torch.distributed.all_gather(parts, x.contiguous(), group=group.processes)
    return torch.cat(parts, dim=-1)
