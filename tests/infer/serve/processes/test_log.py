"""The server's log."""

import os
import re
import select
import threading
import time

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


@pytest.mark.parametrize("kind", ["pipe", "terminal"])
def test_nothing_waits_for_a_reader_that_has_stopped(kind):
    reader, writer = os.pipe() if kind == "pipe" else os.openpty()
    made = log.Log()
    made.descriptor = writer
    line = "x" * 200

    def fill():
        while not made.lost:
            made.write(line)
        for _ in range(1000):  # only the first line waits
            made.write(line)

    filling = threading.Thread(target=fill, daemon=True)
    filling.start()
    filling.join(10)
    assert not filling.is_alive() and made.lost == 1001
    assert os.get_blocking(writer), "the shell's descriptor is unchanged"
    text, end = b"", time.monotonic() + 30
    while not (found := re.search(rb"(\d+) lines of the log were lost: their reader has stopped", text)):
        assert time.monotonic() < end
        if select.select([reader], [], [], 0.1)[0]:
            text += os.read(reader, 1 << 16)
        made.write("again")
    assert 1001 <= int(found[1]) <= made.lost  # a terminal may have room only some time after it was read
    for descriptor in (reader, writer, made._opened[1]):
        os.close(descriptor)
