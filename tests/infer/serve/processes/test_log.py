"""The server's log."""

import os

import pytest

from laneformer.infer.serve.processes import log


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_full_disk_is_reported_when_it_has_room_again(tmp_path):
    made, full = log.Log(), os.open("/dev/full", os.O_WRONLY)
    file = os.open(tmp_path / "log", os.O_WRONLY | os.O_CREAT)
    for descriptor, lines in ((file, ["a"]), (full, ["lost", "lost"]), (file, ["b", "c"])):
        made.descriptor = descriptor
        for line in lines:
            made.write(line)
    reported = "2 lines of the log were lost: No space left on device"
    assert (tmp_path / "log").read_text().splitlines() == ["a", reported, "b", "c"] and made.lost == 2
    for descriptor in (full, file):
        os.close(descriptor)
