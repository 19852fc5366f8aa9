"""What one model costs on one device, as data: the profile that a simulated device follows.

A JSON file; those that ship are in `profiles/`, and `penstock bench profile` measures others. Times are milliseconds.
Knows nothing of plans: what a step costs by a profile is for `step_cost`.
"""

import math
import re
from bisect import bisect_right
from pathlib import Path
from typing import Literal

import msgspec

from penstock.errors import ConfigError
from penstock.home_folder import expand_home

_FOLDER = Path(__file__).parent / "profiles"


class _Part(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A part of a profile. A field that is misspelt is an error, not a default."""


class Curve(_Part, frozen=True, kw_only=True):
    """A function of one number: straight lines between points, the first value before them, the last slope after."""

    at: tuple[float, ...]
    values: tuple[float, ...]

    def __post_init__(self) -> None:
        if not self.at or len(self.at) != len(self.values):
            raise ValueError("a curve needs as many values as places, and at least one")
        if any(after <= before for before, after in zip(self.at, self.at[1:], strict=False)):
            raise ValueError("a curve's places must rise")
        if not all(math.isfinite(value) and value >= 0 for value in self.values):
            raise ValueError("a curve's values must be numbers of at least 0")

    def __call__(self, place: float) -> float:
        at, values = self.at, self.values
        if place <= at[0] or len(at) == 1:
            return values[0]
        right = min(bisect_right(at, place), len(at) - 1)
        left = right - 1
        share = (place - at[left]) / (at[right] - at[left])
        return max(0.0, values[left] + share * (values[right] - values[left]))

    def scaled(self, factor: float) -> "Curve":
        return Curve(at=self.at, values=tuple(value * factor for value in self.values))


class DecodeCost(_Part, frozen=True, kw_only=True):
    """Steps of one token for each row, all sampled."""

    base_ms: Curve  # over rows: everything but reading the context
    context_ms: Curve  # over rows: for each thousand tokens of context that the rows have together
    graph_sizes: tuple[int, ...] = ()  # a step costs what the smallest of these that holds it does; empty: as it is


class MixedCost(_Part, frozen=True, kw_only=True):
    """Steps in which some row runs several tokens, beside rows that run one."""

    base_ms: Curve  # over all tokens of the step
    pair_ms: float  # for each million pairs of a token and one that it looks back at, in slices of several tokens
    context_ms: float  # for each thousand tokens of context of the slices of one token
    slice_ms: float  # for each slice of several tokens
    draw_ms: Curve  # over tokens drawn: what more than one of them add
    graph_tokens: tuple[int, ...] = ()  # as `graph_sizes`, for all tokens of the step


class HostCost(_Part, frozen=True, kw_only=True):
    """What passes on the host around the steps. The last three are for virtual time: a real server takes its own."""

    decode_launch_ms: float  # the host is busy so long with launching a step
    mixed_launch_ms: float
    arrival_ms: float  # from the client's sending to the engine
    delivery_ms: float  # from the engine to the client
    event_ms: float = 0.0  # for each event of the same step that is delivered before


class FitQuality(_Part, frozen=True, kw_only=True):
    """How far the profile is from steps that it was not made from."""

    num_steps: int
    median_error: float  # of |estimated / measured - 1|
    p90_error: float


class Profile(_Part, frozen=True, kw_only=True):
    """One model on one device, and how it came to be known."""

    format: Literal["penstock-profile-1"] = "penstock-profile-1"
    device: str  # its name
    device_kind: Literal["cpu", "cuda"]  # whose defaults the engine takes
    model: str
    measured: str  # how: the command, or where the figures come from
    made_at: str
    commit: str = ""
    provisional: bool = False  # put together from published figures, not measured step by step
    memory_bytes: int  # of the device, before the weights
    weight_bytes: int
    kv_token_bytes: int
    vocab_size: int
    max_context_tokens: int
    dtype: str
    decode: DecodeCost
    mixed: MixedCost
    host: HostCost
    tier_block_ms: float  # to copy one block between the device and the host tier
    mean_answer_tokens: float | None = None  # None: answers end where their limit is, never by themselves
    fit: FitQuality | None = None

    def scaled(self, factor: float) -> "Profile":
        """Return the same device with every time multiplied."""
        decode, mixed, host = self.decode, self.mixed, self.host
        return msgspec.structs.replace(
            self,
            decode=msgspec.structs.replace(
                decode, base_ms=decode.base_ms.scaled(factor), context_ms=decode.context_ms.scaled(factor)
            ),
            mixed=msgspec.structs.replace(
                mixed,
                base_ms=mixed.base_ms.scaled(factor),
                pair_ms=mixed.pair_ms * factor,
                context_ms=mixed.context_ms * factor,
                slice_ms=mixed.slice_ms * factor,
                draw_ms=mixed.draw_ms.scaled(factor),
            ),
            host=HostCost(
                decode_launch_ms=host.decode_launch_ms * factor,
                mixed_launch_ms=host.mixed_launch_ms * factor,
                arrival_ms=host.arrival_ms * factor,
                delivery_ms=host.delivery_ms * factor,
                event_ms=host.event_ms * factor,
            ),
            tier_block_ms=self.tier_block_ms * factor,
        )


def profile_names() -> list[str]:
    """The profiles that ship."""
    return sorted(file.stem for file in _FOLDER.glob("*.json"))


def read_profile(text: str, *, option: str = "--simulated-profile") -> Profile:
    """Return a profile by its name or file; "name@0.1" takes a tenth of the time.

    Raises ConfigError that names `option`, by which the profile was given.
    """
    name, has_scale, scale = text.rpartition("@")
    if not has_scale:
        return _read(text, option)
    try:
        factor = float(scale)
    except ValueError:
        factor = 0.0
    if not 0 < factor < math.inf:
        raise ConfigError(option, text, "after @ give how long a second takes, such as 0.1")
    return _read(name, option).scaled(factor)


def write_profile(profile: Profile, file: Path) -> None:
    document = msgspec.json.format(msgspec.json.encode(profile).decode(), indent=1)
    # A curve's numbers on one line: people read these files.
    document = re.sub(r"\[[^][]*\]", lambda found: re.sub(r"\s+", " ", found[0]), document)
    try:
        file.write_text(document + "\n")
    except OSError as error:
        raise ConfigError("--out", str(file), f"it cannot be written ({error.strerror})") from error


def _read(name: str, option: str) -> Profile:
    file = expand_home(name)
    if name in profile_names():
        file = _FOLDER / f"{name}.json"
    elif not file.is_file():
        raise ConfigError(option, name, f"give a file of `penstock bench profile` or one of: {_shown_names()}")
    try:
        return msgspec.json.decode(file.read_bytes(), type=Profile)
    except OSError as error:
        raise ConfigError(option, name, f"it cannot be read ({error.strerror})") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigError(option, name, f"it is no profile: {error}") from error


def _shown_names() -> str:
    return ", ".join(profile_names())
