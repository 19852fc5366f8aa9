"""Replicas on a Ray cluster, found through their directory; the process that asks is a fake."""

import importlib.util

import pytest

from penstock.errors import ConfigError, RemoteError
from penstock.fleet.config import RaySection, ReplicaEntry
from penstock.fleet.discovery.ray import RayDiscovery
from penstock.fleet.discovery.ray_directory import ReplicaDirectory

FAKE = "tests.fakes.ray_listing"


def test_a_replica_stays_for_as_long_as_it_says_so(clock):
    directory = ReplicaDirectory(clock)
    directory.announce("http://one:80", 5)
    directory.announce("http://other:80", 5)
    clock.now += 3
    directory.announce("http://one:80", 5)
    clock.now += 3
    assert directory.urls() == ["http://one:80"]


def test_one_that_drains_is_forgotten_at_once(clock):
    directory = ReplicaDirectory(clock)
    directory.announce("http://one:80", 5)
    directory.withdraw("http://one:80")
    directory.withdraw("http://one:80")
    assert directory.urls() == []


async def test_each_question_is_answered_by_the_same_process():
    discovery = RayDiscovery(RaySection(application="fleet", version="b", key_file="/key"), module=FAKE)
    try:
        assert await discovery.find() == [ReplicaEntry(url="http://fleet-0:80", version="b", key_file="/key")]
        assert [entry.url for entry in await discovery.find()] == ["http://fleet-0:80", "http://fleet-1:80"]
    finally:
        await discovery.close()


async def test_a_cluster_that_cannot_be_asked_is_said_and_not_asked_again_at_once():
    discovery = RayDiscovery(RaySection(address="broken"), module=FAKE)
    for _ in range(2):
        with pytest.raises(RemoteError, match="broken cannot be asked"):
            await discovery.find()


async def test_an_entry_that_is_no_url_hides_no_others():
    discovery = RayDiscovery(RaySection(address="odd", application="fleet"), module=FAKE)
    try:
        assert [entry.url for entry in await discovery.find()] == ["None", "http://fleet-0:80"]
    finally:
        await discovery.close()


async def test_without_ray_the_section_is_refused(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"penstock\[ray\]"):
        RayDiscovery(RaySection())
