"""The model whose calls are tested, and calls of the `session` that a test file has."""

import pytest

from tests.support import small
from tests.support.gpu_cases import ROOM, jitted


@pytest.fixture(scope="module")
def model():
    return small.windowed_model()


@pytest.fixture(scope="module")
def call(session):
    return jitted(session, room=ROOM, top=3, logits=True)
