"""Routers, and shared experts. The products of a shared expert are stages in another order than the plan's. Those that
read the stream follow the router, and are computed while its edge is open. The last one is added after the sum of the
chosen experts.
"""

import dataclasses
from collections.abc import Iterator
from dataclasses import replace
from typing import ClassVar

from laneformer.custom_calls.gpu.formats import Plain
from laneformer.custom_calls.gpu.ops.kernel import Lane, ModuleStages, OpKernel, Stage, Tiler
from laneformer.custom_calls.gpu.ops.product import ProductKernel
from laneformer.custom_calls.gpu.ops.struct import OpStruct
from laneformer.custom_calls.gpu.ops.supported import FEED_FORWARD, chain_problems
from laneformer.custom_calls.gpu.tiling import Tiling, tile
from laneformer.custom_calls.plan import Dtype
from laneformer.ops import Layer, Matrix, Product, RootRoute, Route, SharedExpert, SigmoidRoute

MOST_USED = 16  # experts of a token: each has a thread in a warp, which holds the place of its pieces
MOST_GROUPS = 32  # groups of experts: each has a thread in a warp, which holds the sum of its two best scores

Router = Route | SigmoidRoute | RootRoute


class RouterKernel(OpKernel[Router]):
    kinds: ClassVar = (Route, SigmoidRoute, RootRoute)
    routes: ClassVar = True
    in_chain: ClassVar = False
    in_float32: ClassVar = True

    def problems(self, layer: Layer, hidden: int) -> Iterator[str]:
        op = self.op
        if op not in layer.feed_forward.ops:
            yield "its attention has a router"
            return
        if op.used > MOST_USED:
            yield f"a token uses {op.used} experts, more than {MOST_USED}"
        if isinstance(op, SigmoidRoute) and op.groups > MOST_GROUPS:
            yield f"its experts are in {op.groups} groups, more than {MOST_GROUPS}"
        products = [one for one in layer.feed_forward.ops if isinstance(one, Product)]
        used = [one.chosen and (one.chosen.used, one.chosen.summed) for one in products]
        if used != [(op.used, False), (op.used, True)]:
            yield "the products after a router do not use its experts"
        elif {one.matrices[0].weight.experts for one in products} != {op.matrix.rows}:
            yield f"the number of experts of a product is not the {op.matrix.rows} of its router"

    def add_stages(self, module: ModuleStages) -> None:
        shared = module.first(SharedExpert)
        module.found.append(replace(module.stage(self), gate=shared.gate if shared else None))

    def matrices(self, stage: Stage) -> tuple[Matrix, ...]:
        return (self.op.matrix, *([stage.gate] if stage.gate else []))

    def signature(self) -> object:
        """A router with a table of experts shares code with a router with a correction."""
        if not isinstance(self.op, RootRoute):
            return self.op
        chosen = self.op.correction is not None or self.op.by_token is not None
        return dataclasses.replace(self.op, correction=None, by_token=None), chosen

    def tiling(self, stage: Stage, tiler: Tiler) -> Tiling:
        rows = sum(matrix.rows for matrix in stage.matrices)
        return tile(rows, tiler.hidden, tiler.ctas, tiler.machine, Plain(Dtype.float32))

    def boards(self, lane: Lane, tiling: Tiling | None) -> dict[str, int]:
        return {"kRoutesBoard": tiling.all_rows} if tiling else {}

    def header(self, struct: OpStruct) -> None:
        struct.add_tiling()
        struct.names.router = struct.name
        given = {"kGroups": 1, "kCorrectionGiven": False, "kByTokenGiven": False}
        struct.constants = given | struct.constants | {"kExperts": self.op.matrix.rows}


class SharedExpertKernel(OpKernel[SharedExpert]):
    kinds: ClassVar = (SharedExpert,)
    in_chain: ClassVar = False

    def problems(self, layer: Layer, hidden: int) -> Iterator[str]:
        op, ops = self.op, layer.feed_forward.ops
        routers = [one for one in ops if isinstance(one, Router)]
        if len(routers) != 1 or sum(isinstance(one, SharedExpert) for one in ops) != 1:
            yield "a shared expert has no router, or there are several"
        elif op.gate and op.gate.bias:
            yield "a shared expert's gate has a bias"
        elif op.gate and op.products[0].norm != routers[0].norm:
            yield "the norms of a shared expert's gate and of the router differ"
        yield from chain_problems(op.products, FEED_FORWARD)

    def add_stages(self, module: ModuleStages) -> None:
        own = replace(module, boards={})  # its values are its own
        for product in self.op.products:
            ProductKernel(product).add_stages(own, self.op)
