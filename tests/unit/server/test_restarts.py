"""When a process that ended is started again."""

from penstock.server.restarts import Restarts


def ended(*runs):
    restarts = Restarts()
    for has_served in runs:
        restarts.note_end(has_served=has_served)
    return restarts


def test_what_served_is_started_again_at_once_however_often_it_dies():
    restarts = ended(*[True] * 1000)
    assert (restarts.are_hopeless, restarts.pause_seconds) == (False, 0.0)


def test_starts_that_fail_are_tried_ever_less_often_and_then_no_more():
    tries = [ended(*[False] * count) for count in range(1, 6)]
    assert [restarts.pause_seconds for restarts in tries[:4]] == [0.5, 1.0, 2.0, 5.0]
    assert [restarts.are_hopeless for restarts in tries] == [False] * 4 + [True]


def test_one_start_that_serves_makes_up_for_those_that_failed():
    restarts = ended(False, False, False, False, True, False, False)
    assert (restarts.are_hopeless, restarts.num_failed) == (False, 2)
