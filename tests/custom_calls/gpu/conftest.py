"""Fixtures: the model that is called, and the call of a test file's `session`."""

import pytest

from tests.support import small
from tests.support.gpu_cases import ROOM, jitted


@pytest.fixture(scope="module")
def model():
    return small.windowed_model()


@pytest.fixture(scope="module")
def call(session):
    return jitted(session, room=ROOM, top=3, logits=True)
