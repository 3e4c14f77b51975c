"""Fixtures: the model that is called, and the call of a test file's `session`; and what emulated devices run.

Every test with emulated devices is here twice: on the kernel's source compiled for the host, and, marked exhaustive, on
the PTX that nvcc makes of it (tests/support/emulated.py). With EMULATOR_CODE in the environment it is here once.
"""

import os

import pytest

from tests.support import emulated, small
from tests.support.gpu_cases import ROOM, jitted

CODES = [
    pytest.param("port", id=pytest.HIDDEN_PARAM),
    pytest.param("ptx", id="ptx", marks=[pytest.mark.exhaustive, emulated.needs_nvcc]),
]


def pytest_generate_tests(metafunc):
    emulates = emulated.needs_gpu.mark in metafunc.definition.iter_markers()
    if emulates and not emulated.REAL and "EMULATOR_CODE" not in os.environ:
        metafunc.parametrize("emulator_code", CODES, indirect=True, scope="module")


@pytest.fixture(scope="module", autouse=True)
def emulator_code(request):
    """Sets what emulated devices run, also in the processes that a test starts."""
    with pytest.MonkeyPatch.context() as patch:
        if hasattr(request, "param"):
            patch.setenv("EMULATOR_CODE", request.param)
        yield


def pytest_fixture_setup(fixturedef, request):
    """A module's sessions end when what their devices run changes."""
    if fixturedef.scope == "module" and fixturedef.argname != "emulator_code":
        request.getfixturevalue("emulator_code")


@pytest.fixture(scope="module")
def model():
    return small.windowed_model()


@pytest.fixture(scope="module")
def call(session):
    return jitted(session, room=ROOM, top=3, logits=True)
