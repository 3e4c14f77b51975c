"""Stages of a layer: the plan's ops, and the products inside them, in the order in which the GPU kernel runs them. Ops
whose stages are in another order than the plan's say so in custom_calls/gpu/ops.
"""

from collections import Counter
from collections.abc import Mapping

from laneformer.custom_calls.gpu.ops import kernel
from laneformer.custom_calls.gpu.ops.kernel import ModuleStages, Stage
from laneformer.ops import Layer


def stages(layer: Layer, formats: Mapping[str, object]) -> tuple[Stage, ...]:
    """The stages of a layer that custom_calls/gpu/ops accepts. formats: formats of quantized matrices, by path."""
    results: Counter = Counter()
    found: list[Stage] = []
    for number, module in enumerate(layer.modules):
        collected = ModuleStages(module.ops, number, formats, results)
        for op in module.ops:
            kernel(op).add_stages(collected)
        found += _with_early(collected.found)
    return tuple(found)


def _with_early(found: list[Stage]) -> list[Stage]:
    """The stages of a module, with those that read the stream for a shared expert behind the router."""
    early = [stage for stage in found if stage.shared and not stage.adds]
    rest = [stage for stage in found if stage not in early]
    behind = 1 + next((at for at, stage in enumerate(rest) if stage.kernel.routes), 0)
    return [*rest[:behind], *early, *rest[behind:]]
