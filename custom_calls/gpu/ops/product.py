"""Products. One whose matrices differ in format becomes a stage for each run of matrices in one format. These stages
read the same board and write parts of one board, so there is no edge between them.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import ClassVar

from laneformer.custom_calls.gpu.formats import in_one_format
from laneformer.custom_calls.gpu.ops.kernel import ModuleStages, OpKernel, Stage, Tiler
from laneformer.custom_calls.gpu.ops.struct import OpStruct, title
from laneformer.custom_calls.gpu.tiling import Pieces, Tiling
from laneformer.ops import Activation, Chosen, Layer, Matrix, Product, SharedExpert, Value

MORE_TURNS = 8  # numbers of turns tried for a block-diagonal product, from the fewest on, to divide rows evenly


def projected(layer: Layer) -> int:
    """Channels that the first product of a layer's attention writes."""
    return next(op.channels for op in layer.attention.ops if isinstance(op, Product))


class ProductKernel(OpKernel[Product]):
    kinds: ClassVar = (Product,)

    @property
    def label(self) -> str:
        return title(self.op.name.name)

    def problems(self, layer: Layer, hidden: int) -> Iterator[str]:
        op, name = self.op, self.op.name.name
        if op.chosen and not any(one.writes is Value.ROUTES for one in layer.feed_forward.ops):
            yield f"product {name} uses experts, but has no router"
        if (op.limit is not None or op.up_offset) and not op.gated:
            yield f"product {name} has limits but no gate"
        if op.norm and op.reads is not Value.STREAM and op.writes not in (Value.QUERIES, Value.INDEX):
            yield f"product {name} reads {op.reads.name} with a norm"
        if op.writes is Value.OUTPUT and (op.gated or op.activation is not Activation.NONE):
            yield f"product {name} writes OUTPUT {'gated' if op.gated else f'through {op.activation.name}'}"
        if op.writes is Value.OUTPUT and op.rows != hidden:
            yield f"product {name} writes {op.rows} of {hidden} channels"
        if len({matrix.bias is None for matrix in op.matrices}) > 1:
            yield f"product {name} has biases for only some of its matrices"

    def add_stages(self, module: ModuleStages, shared: SharedExpert | None = None) -> None:
        """shared: the shared expert that has the product."""
        whole = module.stage(self, shared)
        steps = {op.reads: op.blocks.step for op in module.ops if isinstance(op, Product) and op.blocks}
        first = 0
        for part in in_one_format(self.op, module.formats):
            of_head = steps.get(self.op.writes, 0)
            module.found.append(replace(whole, kernel=ProductKernel(part), first=first, of_head=of_head))
            first += part.channels

    def matrices(self, stage: Stage) -> tuple[Matrix, ...]:
        return self.op.matrices

    def words(self, stage: Stage) -> int:
        """The channels of each expert or head begin at an even word."""
        op = self.op
        if stage.of_head:
            return op.channels // stage.of_head * (stage.of_head + stage.of_head % 2)
        each = op.rows // 2 if op.gated else op.rows
        return (each + each % 2) * op.chosen.used if op.chosen else op.channels

    def tiling(self, stage: Stage, tiler: Tiler) -> Tiling:
        op = self.op
        path, unit = op.matrices[0].weight.path, 2 if op.gated else 1
        if op.blocks:
            return self._blocks(op.blocks.count, path, tiler)
        if not op.chosen:
            return tiler.product(path, op.rows, op.columns, tiler.ctas, unit)
        return self._experts(op.chosen, path, unit, tiler)

    def _blocks(self, count: int, path: str, tiler: Tiler) -> Tiling:
        """The tiling of a block-diagonal product with the fewest lines; of equal ones, with the fewest products in a
        CTA.
        """
        op = self.op
        fewest, found = -(-count // tiler.ctas), []
        for turns in range(fewest, fewest + MORE_TURNS):
            parts = tiler.ctas * turns // count
            one = tiler.product(path, op.rows, op.columns, parts, machine=tiler.machine)
            found.append(replace(one, ctas=tiler.ctas * turns, turns=turns, blocks=count))
        return min(found, key=lambda tiling: (tiling.all_lines, tiling.turns))

    def _experts(self, chosen: Chosen, path: str, unit: int, tiler: Tiler) -> Tiling:
        """The tiling of a product with experts whose pieces take the least time; of equal ones, with the fewest
        pieces.
        """
        op = self.op
        used, summed, ctas, warps = chosen.used, chosen.summed, tiler.ctas, tiler.machine.warps
        found = []
        for each in range(1, used + 1):
            parts = (warps if summed else ctas) * each // used
            if parts == 0:
                continue
            machine = replace(tiler.machine, warps=parts if summed else warps)
            tiling = tiler.product(path, op.rows, op.columns, ctas if summed else parts, unit, machine)
            pieces = Pieces(op.matrices[0].weight.experts or 1, used, summed, each, ctas, warps)
            cost = tiling.cost / (15 + tiling.segments) if tiler.in_codes(path) else tiling.lines
            time = each * cost * (15 + each * tiling.segments)
            found.append((time, each, replace(tiling, pieces=pieces)))
        return min(found, key=lambda one: one[:2])[2]

    def header(self, struct: OpStruct) -> None:
        struct.add_tiling()
        op, stage = self.op, struct.stage
        scaled = stage.adds and bool(stage.shared.gate)
        struct.constants |= {"kChannels": op.channels, "kAdds": stage.adds, "kScaled": scaled}
        if op.reads is Value.ATTENDED:
            struct.aliases["Attended"] = struct.names.attended
        if scaled:
            struct.aliases["Router"] = struct.names.router
        struct.constants |= {"kOfBlocks": op.blocks is not None, "kOddHead": stage.of_head * (stage.of_head % 2)}
        if op.blocks:
            step = op.blocks.step + op.blocks.step % 2
            struct.constants |= {"kBlocks": op.blocks.count, "kBlockStep": step, "kBlockRows": op.rows}
        if op.chosen:
            struct.add_stored()
            struct.constants["kSummed"] = op.chosen.summed
            struct.aliases["Router"] = struct.names.router
            if not op.chosen.summed and isinstance(struct.following, Product):
                struct.aliases["Then"] = f"struct {title(struct.following.name.name)}{struct.kind}"
