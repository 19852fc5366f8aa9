"""Sizes of launches. Triton's own functions for these are made for kernels and cost microseconds on the host."""


def power_of_2(size: int) -> int:
    """The lowest power of two that is not below `size`."""
    return 1 << (size - 1).bit_length()


def ceil_divide(total: int, part: int) -> int:
    return -(-total // part)
