"""The code that backends of the native library share: reasons of calls that failed on the devices."""

import types

import jax
import pytest

from laneformer.custom_calls import NativeError
from laneformer.infer.engine.native import failures_of


@pytest.mark.parametrize("raised", [None, jax.errors.JaxRuntimeError("INTERNAL: unspecified launch failure")])
def test_failed_call_raises_the_reason_of_the_devices(raised):
    session = types.SimpleNamespace(failure="lane 1, layer 0: timed out")
    with pytest.raises(NativeError, match="lane 1, layer 0: timed out") as error, failures_of(session):
        if raised:
            raise raised
    assert error.value.__cause__ is raised


def test_error_without_a_failure_of_the_devices_is_unchanged():
    session = types.SimpleNamespace(failure=None)
    with failures_of(session):
        pass
    with pytest.raises(jax.errors.JaxRuntimeError, match="out of memory"), failures_of(session):
        raise jax.errors.JaxRuntimeError("out of memory")
