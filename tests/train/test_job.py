"""A mistake that one process of a job finds ends all of them."""

import types

import numpy as np
import pytest

from laneformer.errors import ConfigError
from train import job


@pytest.fixture
def of_three(monkeypatch):
    """of_three(refusing): the other two processes of the job have come, and refuse or not; returns what this one has
    told them.
    """

    def arm(*refusing: bool) -> list[bool]:
        told = []

        def gather(own):
            told.append(bool(own))
            return np.array([own, *refusing])

        monkeypatch.setattr(job, "jax", types.SimpleNamespace(process_count=lambda: 3))
        monkeypatch.setattr(job.multihost_utils, "process_allgather", gather)
        return told

    return arm


def test_alone_a_mistake_is_raised_as_it_is():
    with pytest.raises(ConfigError, match=r"^mine$"), job.together():
        raise ConfigError("mine")
    with job.together():
        pass
    assert job.all_processes(True) and not job.all_processes(False)


def test_whoever_makes_a_mistake_says_it_and_tells_the_others(of_three):
    told = of_three(False, False)
    with pytest.raises(OSError, match="mine"), job.together():
        raise OSError("mine")
    assert told == [True]


def test_the_others_end_with_it(of_three):
    told = of_three(False, True)
    with pytest.raises(ConfigError, match=r"^refused by process 2 of the job: see what it says$"), job.together():
        pass
    assert told == [False]


def test_all_go_on_where_nobody_refuses(of_three):
    of_three(False, False)
    with job.together():
        pass
    of_three(True, False)
    assert not job.all_processes(True)
