"""The page that a rollout leaves for people."""

from penstock.fleet.rollout.course import go_on, start
from penstock.fleet.rollout.evidence import Evidence, Loss, merged
from penstock.fleet.rollout.plan import RolloutSection
from penstock.fleet.rollout.report import write_report
from tests.unit.fleet.rollout.simulated_traffic import Traffic


def test_it_says_what_was_decided_on_what_grounds():
    evidence = Traffic().pairs(256, slowness=2.0)
    rollout = go_on(start("tiny", "b", RolloutSection(), None, now=0.0), evidence, 90.0)
    page = write_report(rollout)
    assert "**rolled back**: ttft p50: at least" in page
    assert "From 1970-01-01 00:00:00 UTC, 90 s, looked at 1 times." in page
    assert "| time per token p50 | 20" in page and "| bad |" in page


def test_it_shows_a_step_that_is_under_way():
    evidence = Traffic().pairs(3)
    page = write_report(start("tiny", "b", RolloutSection(), None, now=0.0), evidence)
    assert "## shadow: under way" in page
    counts = "3 requests to the stable version (stable), 3 to the candidate (b), 3 answers compared"
    assert f"{counts}; looked at 0 times, next with 16 requests" in page


def test_versions_are_named_with_their_roles_whatever_they_are_called():
    section = RolloutSection(stable="a|b")
    rollout = go_on(start("tiny", "stable", section, None, now=0.0), Traffic().pairs(256, slowness=2.0), 90.0)
    assert "\n| measure | stable (a\\|b) | candidate (stable) | worse by |" in write_report(rollout)


def test_it_says_how_many_copies_told_nothing_and_why():
    here, there = Evidence(), Evidence()
    here.lose(Loss.KEY, 20)
    there.lose(Loss.KEY)
    there.lose(Loss.NO_REPLICA)
    rollout = start("tiny", "b", RolloutSection(), None, now=0.0)
    told = (
        "22 copies of requests told nothing: 21 refused for the gateway's key: the replicas' key_file must hold one "
        "with admin = true; 1 not sent: no replica of the version could take one"
    )
    assert f"\n{told}.\n" in write_report(rollout, merged([here, there]))
    assert "told nothing" not in write_report(rollout, Evidence())
    ended = go_on(rollout, merged([here, there]), now=rollout.gate.max_step_seconds)
    assert ended.reason.endswith(f"good enough; {told}")
