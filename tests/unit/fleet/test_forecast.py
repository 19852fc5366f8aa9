"""How soon a request has its turn, told from places that come free at moments that a test chooses."""

import itertools
import random
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.fleet.router.forecast import Forecast, PlaceKind, Want

KIND = PlaceKind("v1", can_frame=True, is_counted_here=False)
WANT = Want(("v1",), must_frame=False, counted_here=False)


class BusyPlaces:
    """Places that somebody waits for: each is taken again at the moment it comes free."""

    def __init__(self, num_places: int) -> None:
        self.now = 0.0
        self.num_places = num_places
        self.forecast = Forecast()
        self._since = dict.fromkeys(range(num_places), 0.0)
        for place in self._since:
            self.forecast.note_begin(KIND, place, self.now)

    def end(self, place: int, *, is_answered: bool = True) -> None:
        self.forecast.note_end(KIND, place, self.now, [WANT], is_answered=is_answered)
        self.forecast.note_begin(KIND, place, self.now)
        self._since[place] = self.now

    @property
    def ages(self) -> list[float]:
        return [self.now - since for since in self._since.values()]

    def wait(self, num_ahead: int = 0) -> float:
        seconds = self.forecast.expected_wait([KIND], {WANT: num_ahead}, self.now)
        assert seconds is not None
        return seconds


def test_places_that_come_free_together_do_not_promise_the_next_at_once() -> None:
    places = BusyPlaces(2)
    places.now = 10.0
    for place in range(2):
        places.end(place)
    assert places.wait() == pytest.approx(5.0)  # two places, ten seconds each
    assert places.wait(num_ahead=3) == pytest.approx(20.0)


def test_places_that_come_free_one_by_one_are_told_as_they_came() -> None:
    places = BusyPlaces(4)
    for place in range(8):
        places.now += 2.0
        places.end(place % 4)
    assert places.wait() == pytest.approx(2.0, rel=0.2)


def test_a_wait_grows_while_nothing_comes_free() -> None:
    places = BusyPlaces(1)
    for _ in range(20):
        places.now += 0.1
        places.end(0)
    assert places.wait() == pytest.approx(0.1)
    places.now += 60.0
    assert places.wait() == pytest.approx(60.0)


def test_places_that_long_answers_have_are_expected_to_be_held_as_long_as_such_were() -> None:
    forecast, now = Forecast(), 0.0

    def run(seconds: float, max_tokens: int | None) -> None:
        nonlocal now
        forecast.note_begin(KIND, "place", now, max_tokens)
        now += seconds
        forecast.note_end(KIND, "place", now, [WANT], is_answered=True)

    run(20.0, 1000)
    for _ in range(20):
        run(1.0, 16)
    for place in range(2):
        forecast.note_begin(KIND, place, now, 900)
    assert forecast.expected_wait([KIND], {}, now) == pytest.approx(10.0)  # two places, twenty seconds each
    for place in range(2):
        forecast.note_end(KIND, place, now, [], is_answered=False)
        forecast.note_begin(KIND, place, now, 20 if place else None)  # nobody has said nothing before: as any
    assert forecast.expected_wait([KIND], {}, now) == pytest.approx(1.0, rel=0.3)


_steps = st.lists(
    st.tuples(st.floats(0.0, 30.0), st.integers(0, 4), st.booleans()), min_size=1, max_size=30
)  # seconds, the place that ends then, and whether it was answered


@given(num_places=st.integers(1, 5), steps=_steps, quiet=st.floats(0.0, 300.0), num_ahead=st.integers(0, 5))
def test_the_moment_that_is_told_only_moves_away_while_nothing_comes_free(
    num_places: int, steps: list[tuple[float, int, bool]], quiet: float, num_ahead: int
) -> None:
    places = BusyPlaces(num_places)
    for seconds, place, is_answered in steps:
        places.now += seconds
        places.end(place % num_places, is_answered=is_answered)
    at_once = places.wait(num_ahead)
    longest = places.now  # no request and no pause took longer
    places.now += quiet
    told = places.wait(num_ahead)
    assert quiet + told >= at_once - 1e-6
    if quiet > longest:
        # All of them have held for longer than any did, and none has ended: as long again, each.
        assert told >= 1 / sum(1 / age for age in places.ages) * (1 - 1e-9)


def errors(num_places: int, durations: Iterator[float], *, num_ends: int, num_ahead: int = 0) -> list[float]:
    """Return by how many seconds what is told is too late, for who asks at any moment."""
    places, draw, found = BusyPlaces(num_places), random.Random(7), []
    ends = [next(durations) * (1 + place) / num_places for place in range(num_places)]  # one after the other
    asked: list[tuple[int, float]] = []  # behind which end each has its turn, and the moment that it was told
    next_asked = 0.0
    for count in range(num_ends):
        first = ends.index(min(ends))
        while next_asked < ends[first]:
            places.now = next_asked
            if count >= 40:
                asked.append((count + num_ahead, places.now + places.wait(num_ahead)))
            next_asked += draw.expovariate(4.0)
        places.now = ends[first]
        found += [moment - places.now for number, moment in asked if number == count]
        asked = [item for item in asked if item[0] > count]
        places.end(first)
        ends[first] += next(durations)
    return found


@pytest.mark.parametrize("num_places", [1, 4])
@pytest.mark.parametrize("num_ahead", [0, 3])
def test_of_requests_that_take_as_long_as_each_other_the_moment_is_exact(num_places: int, num_ahead: int) -> None:
    found = errors(num_places, itertools.repeat(1.2), num_ends=300, num_ahead=num_ahead)
    assert len(found) > 200 and max(map(abs, found)) < 0.001


def test_of_requests_that_take_about_as_long_it_is_nearly_so() -> None:
    draw = random.Random(1)
    found = errors(1, (draw.uniform(1.1, 1.3) for _ in itertools.count()), num_ends=1000)
    assert abs(sum(found) / len(found)) < 0.02
    assert sorted(map(abs, found))[int(0.95 * len(found))] <= 0.1


@pytest.mark.parametrize("num_places", [1, 4])
@pytest.mark.parametrize("num_ahead", [0, 3])
def test_of_requests_of_any_length_it_is_neither_early_nor_late_on_the_mean(num_places: int, num_ahead: int) -> None:
    draw = random.Random(1)
    durations = (draw.expovariate(1 / 1.2) for _ in itertools.count())
    found = errors(num_places, durations, num_ends=1500, num_ahead=num_ahead)
    wait = (num_ahead + 1) * 1.2 / num_places
    assert abs(sum(found) / len(found)) < 0.25 * wait
