"""The kinds of ops that the GPU kernel runs, a file for each. To add one, write its class and name it here."""

from collections.abc import Iterator

from laneformer.custom_calls.gpu.ops.attend import AttendKernel
from laneformer.custom_calls.gpu.ops.compressed import CompressedAttendKernel, CompressedKeepKernel
from laneformer.custom_calls.gpu.ops.delta_net import DeltaNetKernel
from laneformer.custom_calls.gpu.ops.experts import RouterKernel, SharedExpertKernel
from laneformer.custom_calls.gpu.ops.kernel import OpKernel
from laneformer.custom_calls.gpu.ops.latents import LatentAttendKernel, LatentKeepKernel
from laneformer.custom_calls.gpu.ops.norm import OutputNormKernel
from laneformer.custom_calls.gpu.ops.product import ProductKernel
from laneformer.custom_calls.gpu.ops.streams import GatherStreamsKernel
from laneformer.custom_calls.gpu.ops.supported import ATTENTION, FEED_FORWARD, chain_problems
from laneformer.ops import Layer, Op, products_of

CLASSES: tuple[type[OpKernel], ...] = (
    ProductKernel,
    AttendKernel,
    OutputNormKernel,
    RouterKernel,
    SharedExpertKernel,
    LatentKeepKernel,
    LatentAttendKernel,
    DeltaNetKernel,
    GatherStreamsKernel,
    CompressedKeepKernel,
    CompressedAttendKernel,
)
_OF_KIND = {kind: each for each in CLASSES for kind in each.kinds}


def kernel(op: Op) -> OpKernel:
    """How the kernel runs the op."""
    return _OF_KIND[type(op)](op)


def problems(layer: Layer, hidden: int) -> Iterator[str]:
    """The parts of a layer that the kernel does not support, as clauses of an error message."""
    for module, chain in zip(layer.modules, (ATTENTION, FEED_FORWARD), strict=True):
        kernels = [kernel(op) for op in module.ops]
        if not any(each.own_order for each in kernels):
            yield from chain_problems([each.op for each in kernels if each.in_chain], chain)
        for each in kernels:
            yield from each.problems(layer, hidden)
            for product in products_of(each.op):
                if product is not each.op:
                    yield from kernel(product).problems(layer, hidden)
