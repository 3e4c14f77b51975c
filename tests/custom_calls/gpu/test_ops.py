"""The classes of ops in the GPU kernel: every op that the kernel runs has one."""

from typing import get_args

from laneformer.custom_calls.gpu.ops import CLASSES
from laneformer.ops import GpuOp


def test_every_op_of_the_kernel_has_one_class():
    kinds = [kind for each in CLASSES for kind in each.kinds]
    assert len(kinds) == len({*kinds}) and {*kinds} == {*get_args(GpuOp)}
