"""Weight formats: widths, scales, ids of the kernels."""

import numpy as np
import pytest

from laneformer.formats import FORMATS, KERNEL_FORMATS


def test_bytes_include_the_scales():
    widths = {name: 8 * format.bytes for name, format in FORMATS.items()}
    expected = {"float32": 32, "bfloat16": 16, "float16": 16, "fp8": 8, "int8": 8, "int4": 4.5, "mxfp4": 4.25}
    assert widths == expected


@pytest.mark.parametrize(("name", "number"), [("float32", 0), ("bfloat16", 1), ("float16", 2)])
def test_kernels_number_their_formats(name, number):
    assert FORMATS[name].id == number and name in KERNEL_FORMATS
    assert FORMATS[name].bytes == np.dtype(name if name != "bfloat16" else "uint16").itemsize


def test_projected_formats_have_no_number():
    assert [name for name in FORMATS if name not in KERNEL_FORMATS] == ["fp8", "int8", "int4", "mxfp4"]
