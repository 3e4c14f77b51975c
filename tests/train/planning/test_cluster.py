"""Devices of dry runs: their peaks, bandwidths, links and networks."""

import dataclasses

import pytest

from laneformer.errors import ConfigError
from laneformer.train.planning.cluster import DEVICES, find_device, find_kind, peak_flops, speeds_of


def test_peak_is_found_by_device_kind():
    assert peak_flops("NVIDIA H200") == pytest.approx(989.5e12)
    assert peak_flops("cpu") is None
    assert peak_flops("NVIDIA H100 PCIe") is None, "the table has only the SXM module"


def test_speeds_are_dense_and_in_one_direction():
    """A wrong unit, a sparse peak or the sum of both directions would violate these bounds on ratios."""
    for device in DEVICES.values():
        assert 150 < device.peak_flops / device.memory_bandwidth < 350
        assert 5 < device.memory_bandwidth / device.link < 20
        assert 60e9 < device.memory < 400e9
        assert device.network is None or 5 < device.link / device.network < 20


def test_unknown_device_raises_and_cpu_is_divided():
    with pytest.raises(ConfigError, match="h100, h200"):
        find_device("abacus", 1)
    assert find_device("cpu", 4).memory == pytest.approx(find_device("cpu", 1).memory / 4, rel=1e-6)


def test_speeds_follow_the_mesh():
    """Lanes use the links of their node. The data axis uses the network, but the links if there is only one node."""
    h200 = find_kind("NVIDIA H200")
    assert h200 == DEVICES["h200"] and find_kind("cpu") is None
    many, one = (speeds_of(h200, {"data": data, "lane": 8}, 0.5) for data in (32, 1))
    assert many.products == h200.peak_flops / 2
    assert many.kernel_seconds(0, 4.8e12) == pytest.approx(1.0) and many.kernel_seconds(many.products, 1) == 1.0
    assert many.exchange_seconds("all-reduce", "lane", 450e9) == ("links", pytest.approx(1.0))
    assert many.exchange_seconds("all-gather", "data", h200.network) == ("network", pytest.approx(1.0))
    assert many.exchange_seconds("all-reduce", "data x lane", h200.network)[0] == "network"
    assert {one.exchange_seconds("all-reduce", axis, 450e9)[0] for axis in ("data x lane", "?")} == {"links"}
    assert speeds_of(find_device("cpu", 8), {"data": 1, "lane": 8}) is None
    assert speeds_of(DEVICES["mi300x"], {"data": 2, "lane": 8}) is None, "the table has no network of the MI300X"


@pytest.mark.parametrize(("lane", "members"), [(8, 1), (4, 2), (1, 8)])
def test_rings_leave_a_node_over_the_network_of_all_their_members(lane, members):
    speeds = speeds_of(DEVICES["h200"], {"data": 64 // lane, "lane": lane})
    for kind, rings in (("all-gather", members), ("all-reduce", members), ("all-to-all", 1)):
        link, seconds = speeds.exchange_seconds(kind, "data", 100e9)
        assert link == "network" and seconds == pytest.approx(2.0 / rings), kind
    crowded = speeds_of(dataclasses.replace(DEVICES["h200"], network=400e9), {"data": 64, "lane": 1})
    assert crowded.exchange_seconds("all-gather", "data", 450e9)[1] == pytest.approx(1.0), "links of the node"
