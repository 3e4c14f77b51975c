"""The functions of port.h follow their definitions."""

import numpy as np

from tests.support import emulated, small
from tests.support.emulator import port_functions

pytestmark = [small.needs_library, emulated.needs_gpu, emulated.only_emulated]


def test_functions_follow_their_definitions(tmp_path):
    failure, found = port_functions.run(port_functions.compiled(tmp_path), tmp_path)
    assert not failure
    np.testing.assert_array_equal(found, port_functions.CASE.expected)
