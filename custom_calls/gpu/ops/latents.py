"""Attention to latents. The stage that attends also puts the newest latent into the cache."""

import dataclasses
from collections.abc import Iterator
from typing import Any, ClassVar

from laneformer.custom_calls.gpu.ops.attend import MAX_SPLITS, AttentionKernel, AttentionSizes, splits_of
from laneformer.custom_calls.gpu.ops.kernel import Lane, ModuleStages, OpKernel
from laneformer.custom_calls.gpu.ops.struct import OpStruct, constant
from laneformer.custom_calls.gpu.ops.supported import in_words, steps_of
from laneformer.ops import Attend, Blocks, LatentAttend, LatentKeep, Layer, Product, ProductName, Value


def _order(queries: tuple[tuple, ...]) -> list[tuple]:
    return [
        (Product, Value.STREAM, Value.PROJECTED),
        *queries,
        (LatentKeep, Value.PROJECTED, Value.PROJECTED),
        (Product, Value.QUERIES, Value.ABSORBED),
        (LatentAttend, Value.ABSORBED, Value.ATTENDED),
        (Product, Value.ATTENDED, Value.PROJECTED),
        (Product, Value.PROJECTED, Value.OUTPUT),
    ]


# The ops of a module, with queries from one product or from two
ORDERS = (
    _order(((Product, Value.STREAM, Value.QUERIES),)),
    _order(((Product, Value.STREAM, Value.HIDDEN), (Product, Value.HIDDEN, Value.QUERIES))),
)


class LatentKeepKernel(OpKernel[LatentKeep]):
    kinds: ClassVar = (LatentKeep,)

    def add_stages(self, module: ModuleStages) -> None:
        """Adds none: the stage that attends keeps the latent."""


class LatentAttendKernel(AttentionKernel[LatentAttend]):
    kinds: ClassVar = (LatentAttend,)
    own_order: ClassVar = True

    def problems(self, layer: Layer, hidden: int) -> Iterator[str]:
        op, ops = self.op, layer.attention.ops
        if steps_of(ops) not in ORDERS:
            yield in_words(steps_of(ops))
            return
        products = {one.name: one for one in ops if isinstance(one, Product)}
        wanted = {
            ProductName.ABSORB: (op.rank, op.still, Blocks(op.heads, op.still + op.rotating)),
            ProductName.VALUES: (products[ProductName.VALUES].rows, op.rank, Blocks(op.heads, op.rank)),
        }
        for name, sizes in wanted.items():
            product = products[name]
            if (product.rows, product.columns, product.blocks) != sizes:
                yield f"product {name.name} has blocks that do not match its {op.heads} heads"

    def add_stages(self, module: ModuleStages) -> None:
        queries, latents = module.boards[Value.QUERIES], module.boards[Value.PROJECTED]
        stage = module.stage(self)
        keep = module.first(LatentKeep)
        module.found.append(dataclasses.replace(stage, keep=keep, queries=queries, latents=latents))

    def sizes(self, lane: Lane) -> AttentionSizes:
        op, most = self.op, max(1, lane.ctas // MAX_SPLITS)
        groups = max(n for n in range(1, op.heads + 1) if n <= most and op.heads % n == 0)
        splits = splits_of(lane.ctas, groups)
        return AttentionSizes(op.heads, groups, op.rank + op.rotating, op.rank, splits, shared=True)

    def header(self, struct: OpStruct) -> None:
        kept, gains = struct.fields_of({layer: stage.keep for layer, stage in struct.stages.items()})
        queries, latents = struct.board(struct.stage.queries), struct.board(struct.stage.latents)
        struct.constants |= kept | {"kQueries": queries, "kLatents": latents}
        struct.functions |= gains | {"window": dict.fromkeys(struct.stages, 0)}
        self.add_constants(struct, self.op.scale, _without_options())


def _without_options() -> dict[str, Any]:
    """The kernel's code of Attend runs it, without the options."""
    options: dict[str, Any] = {"kValuesEnd": 0}
    for field in dataclasses.fields(Attend):
        if isinstance(field.default, int | float):
            options[constant(field.name)] = field.default
        elif field.default is None:
            options[f"{constant(field.name)}Given"] = False
    return options
