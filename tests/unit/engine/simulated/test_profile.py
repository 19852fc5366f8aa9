"""Profiles: read by name or file, scaled, and refused with a sentence."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.engine.scheduler.step_plan import RowSlice
from penstock.engine.simulated.profile import Curve, profile_names, read_profile, write_profile
from penstock.engine.simulated.step_cost import step_ms, work_of
from penstock.errors import ConfigError
from tests.fakes.small_profile import small_profile


def test_the_profiles_that_ship_say_what_they_are_of_and_how_they_were_made():
    assert {"h200-llama-8b", "cpu-smollm2-135m"} <= set(profile_names())
    for name in profile_names():
        profile = read_profile(name)
        assert profile.device and profile.model and profile.measured and profile.made_at
        assert profile.provisional or profile.fit is not None, "a measured profile says how well it fits"


def test_a_written_profile_is_read_back(tmp_path: Path):
    profile = small_profile(mean_answer_tokens=12.5)
    write_profile(profile, tmp_path / "mine.json")
    assert read_profile(str(tmp_path / "mine.json")) == profile


def test_a_scaled_profile_takes_its_share_of_every_time():
    whole, tenth = read_profile("h200-llama-8b"), read_profile("h200-llama-8b@0.1")
    for slices in ([RowSlice(0, 0, 700, 1, 1)] * 5, [RowSlice(0, 0, 700, 1, 1), RowSlice(1, 1, 64, 300, 1)]):
        shape = work_of(slices)
        assert step_ms(tenth, shape) == pytest.approx(step_ms(whole, shape) / 10)
    assert tenth.host.mixed_launch_ms == pytest.approx(whole.host.mixed_launch_ms / 10)
    assert tenth.tier_block_ms == pytest.approx(whole.tier_block_ms / 10)
    assert tenth.memory_bytes == whole.memory_bytes


@pytest.mark.parametrize("text", ["h200-llama-8b@0", "h200-llama-8b@fast", "h200-llama-8b@inf", "h200-llama-8b@"])
def test_a_scale_that_is_none_is_refused(text: str):
    with pytest.raises(ConfigError, match="after @ give how long a second takes"):
        read_profile(text)


def test_an_unknown_name_is_told_which_there_are():
    with pytest.raises(ConfigError, match=r"--simulated-profile: 'h100' is not usable; .* h200-llama-8b"):
        read_profile("h100")


@pytest.mark.parametrize(
    ("before", "after", "reason"),
    [
        ('"device_kind"', '"devicekind"', "devicekind"),
        ('"at": [ 1, 2, 8 ]', '"at": [ 2, 1, 8 ]', "must rise"),
        ('"values": [ 10, 20, 20 ]', '"values": [ 10, 20 ]', "as many values as places"),
        ('"values": [ 10, 20, 20 ]', '"values": [ 10, 20, -1 ]', "at least 0"),
        ("penstock-profile-1", "penstock-profile-9", "format"),
    ],
)
def test_a_damaged_file_is_refused_with_the_reason(tmp_path: Path, before: str, after: str, reason: str):
    file = tmp_path / "mine.json"
    write_profile(small_profile(), file)
    text = file.read_text()
    assert before in text
    file.write_text(text.replace(before, after))
    with pytest.raises(ConfigError, match=reason):
        read_profile(str(file))


@given(st.floats(0, 50))
def test_a_curve_runs_straight_between_its_points(place: float):
    curve = Curve(at=(10, 20, 30), values=(5, 15, 10))
    if place <= 10:
        assert curve(place) == 5
    elif place <= 20:
        assert curve(place) == pytest.approx(place - 5)
    else:
        assert curve(place) == pytest.approx(max(0, 15 - (place - 20) / 2))
