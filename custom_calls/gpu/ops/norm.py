"""The norm of a lane's own output of a module."""

from typing import ClassVar

from laneformer.custom_calls.gpu.ops.kernel import OpKernel
from laneformer.ops import OutputNorm


class OutputNormKernel(OpKernel[OutputNorm]):
    kinds: ClassVar = (OutputNorm,)
