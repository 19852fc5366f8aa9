"""Rotations where a server must choose what the reference leaves to the moment; the rest is in test_families."""

from dataclasses import replace

import pytest
import torch

from penstock.models.layers.rope import Rope, rope_frequencies
from penstock.models.spec import RopeSpec

PLAIN = RopeSpec(theta=10_000.0, rotary_dim=16)
DYNAMIC = replace(PLAIN, scaling="dynamic", factor=2.0, original_max_position=64)
LONGROPE = replace(
    PLAIN,
    scaling="longrope",
    factor=4.0,
    original_max_position=64,
    short_factor=(1.0,) * 8,
    long_factor=(3.0,) * 8,
)


def frequencies(spec: RopeSpec, context_tokens: int) -> list[float]:
    return rope_frequencies(spec, context_tokens)[0].tolist()


def test_dynamic_scaling_changes_nothing_up_to_the_trained_length() -> None:
    assert frequencies(DYNAMIC, 64) == pytest.approx(frequencies(PLAIN, 64))


def test_dynamic_scaling_slows_all_but_the_fastest_pair_beyond_the_trained_length() -> None:
    stretched, plain = frequencies(DYNAMIC, 128), frequencies(PLAIN, 128)
    assert stretched[0] == plain[0]
    assert all(slow < fast for slow, fast in zip(stretched[1:], plain[1:], strict=True))


def test_longrope_uses_short_factors_when_the_served_context_fits_the_trained_length() -> None:
    assert frequencies(LONGROPE, 64) == pytest.approx(frequencies(PLAIN, 64))


def test_longrope_uses_long_factors_when_the_served_context_is_longer() -> None:
    assert frequencies(LONGROPE, 65) == pytest.approx([plain / 3 for plain in frequencies(PLAIN, 65)])


def test_a_position_has_one_rotation_whatever_else_is_in_the_step() -> None:
    rope = Rope(PLAIN, 64, torch.device("cpu"))
    together = rope.rotations(torch.tensor([5, 9, 63]))
    alone = rope.rotations(torch.tensor([9]))
    assert torch.equal(together[1], alone[0])


def test_rotations_have_the_length_that_yarn_asks_for() -> None:
    yarn = replace(PLAIN, scaling="yarn", factor=4.0, original_max_position=16, attention_factor=0.75)
    rotations = Rope(yarn, 64, torch.device("cpu")).rotations(torch.arange(64))
    assert rotations.abs().flatten().tolist() == pytest.approx([0.75] * rotations.numel())
