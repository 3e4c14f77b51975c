"""The table of devices."""

import pytest

from laneformer.errors import ConfigError
from train.planning.cluster import DEVICES, find_device, peak_flops


def test_peak_is_found_by_device_kind():
    assert peak_flops("NVIDIA H200") == pytest.approx(989.5e12)
    assert peak_flops("cpu") is None
    assert peak_flops("NVIDIA H100 PCIe") is None, "another card than the SXM module"


def test_speeds_are_dense_and_in_one_direction():
    """Ratios that hold for all of them: a mistaken unit, a sparse peak or a sum of both directions would leave these
    bounds.
    """
    for device in DEVICES.values():
        assert 150 < device.peak_flops / device.memory_bandwidth < 350
        assert 5 < device.memory_bandwidth / device.link < 20
        assert 60e9 < device.memory < 400e9
        assert device.network is None or 5 < device.link / device.network < 20


def test_an_unknown_device_is_an_error_and_the_cpu_is_shared():
    with pytest.raises(ConfigError, match="h100, h200"):
        find_device("abacus", 1)
    assert find_device("cpu", 4).memory == pytest.approx(find_device("cpu", 1).memory / 4, rel=1e-6)
