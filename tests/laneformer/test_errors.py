"""What errors of others are told as."""

import errno
import os
from pathlib import Path

import pytest

from laneformer.errors import LaneformerError, one_line, writing


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (Exception("bare\nwith more"), "bare with more"),
        (ValueError(), "ValueError"),
        (ValueError("NOT_FOUND: cause [tensorstore_spec='{\"a\": 1}']"), "NOT_FOUND: cause"),
    ],
)
def test_an_error_in_one_line(error, text):
    assert one_line(error) == text


def test_a_long_error_keeps_its_beginning_and_its_cause():
    text = one_line(ValueError("Reading " + 1000 * "long " + "cause [source locations=x]"))
    assert text.startswith("Reading long") and text.endswith("long cause") and len(text) < 300


@pytest.mark.parametrize(
    ("number", "remedy"),
    [
        (errno.ENOSPC, "make room, then the same command goes on"),
        (errno.EDQUOT, "make room, then the same command goes on"),
        (errno.EROFS, "give another --out"),
        (errno.EACCES, "give another --out"),
    ],
)
def test_what_cannot_be_written_is_named_with_what_to_do(number, remedy):
    with pytest.raises(LaneformerError) as told, writing(Path("some/file"), "give another --out"):
        raise OSError(number, os.strerror(number))
    assert str(told.value) == f"cannot write some/file: {os.strerror(number)}; {remedy}"
