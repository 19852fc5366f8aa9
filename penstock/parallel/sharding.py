"""Which part of a dimension belongs to a rank.

Knows numbers only: the loader cuts tensors, attention and feed-forward layers never hear of it.
"""

from penstock.errors import ConfigError
from penstock.parallel.groups import Group


def shard(total: int, group: Group, *, what: str, unit: int = 1) -> tuple[int, int]:
    """Return the first and one past the last index of this rank's share, in whole units of `unit` indices.

    Raises ConfigError, naming `what`, where the units do not divide evenly.
    """
    units, rest = divmod(total, unit)
    if rest or units % group.size:
        raise ConfigError(
            "--tensor-parallel",
            group.size,
            f"the model's {what} ({total} in units of {unit}) cannot be split evenly among so many ranks",
        )
    share = units // group.size * unit
    return group.rank * share, (group.rank + 1) * share


def shard_shared(total: int, group: Group, *, what: str) -> tuple[int, int]:
    """Like `shard`, but where there are fewer than ranks, neighbouring ranks hold the same one.

    For key and value heads: a rank needs at least one, and a copy gives the same result.
    """
    if total < group.size and group.size % total == 0:
        index = group.rank * total // group.size
        return index, index + 1
    return shard(total, group, what=what)
