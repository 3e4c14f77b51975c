"""What processes of a job tell each other."""

import threading

import jax
import pytest

from custom_calls.processes import Group, GroupError
from tests.support import several


@pytest.fixture
def groups(monkeypatch):
    """Of two processes of a job, whose mesh has a device of each."""
    return lambda seconds: several.in_each(monkeypatch, lambda: Group(several.MESH, seconds, "count to three"))


def test_what_they_say(groups):
    first, second = groups(5)
    said = []
    thread = threading.Thread(target=lambda: said.extend(first.share({"round": i}) for i in range(3)))
    thread.start()
    others = [second.share({"round": 10 + i}) for i in range(3)]
    thread.join()
    assert said == others == [{0: {"round": i}, 1: {"round": 10 + i}} for i in range(3)]


def test_what_was_said_is_not_kept(groups):
    first, second = groups(5)
    store = several.processes.global_state.client
    for _ in range(20):
        thread = threading.Thread(target=first.share, args=({},))
        thread.start()
        second.share({})
        thread.join()
        assert len(store.values) <= 2


def test_one_that_does_not_come(groups):
    first, _ = groups(0.05)
    with pytest.raises(GroupError, match=r"process 1 did not count to three within 0\.05 s: every process"):
        first.share({})
    assert not first.meet()
    with pytest.raises(GroupError, match="have lost each other: they could not count to three together"):
        first.share({})


def test_one_that_fails_tells_the_others(groups):
    first, second = groups(5)
    with pytest.raises(OSError), second:
        raise OSError("no driver")
    with pytest.raises(GroupError, match="process 1 could not count to three: no driver"), first:
        first.share({})


def test_a_job_that_has_ended(groups, monkeypatch):
    first, _ = groups(5)

    def gone(*_):
        raise jax.errors.JaxRuntimeError("UNAVAILABLE: no coordinator")

    monkeypatch.setattr(several.processes.global_state.client, "blocking_key_value_get", gone, raising=False)
    with pytest.raises(GroupError, match="process 0 cannot be asked: UNAVAILABLE"):
        first.share({})
