"""Gated DeltaNet: a state per head instead of keys and values."""

from collections.abc import Iterator
from typing import ClassVar

from laneformer.custom_calls.gpu.ops.kernel import Lane, OpKernel
from laneformer.custom_calls.gpu.ops.product import projected
from laneformer.custom_calls.gpu.ops.struct import OpStruct
from laneformer.custom_calls.gpu.tiling import Tiling
from laneformer.ops import ENTRIES, DeltaNet, Layer


class DeltaNetKernel(OpKernel[DeltaNet]):
    kinds: ClassVar = (DeltaNet,)
    keeps: ClassVar = True

    def problems(self, layer: Layer, hidden: int) -> Iterator[str]:
        op, channels = self.op, projected(layer)
        if channels != op.projected or op.value_heads % op.key_heads:
            yield f"{op.value_heads} value and {op.key_heads} key heads do not fit {channels} channels"

    def boards(self, lane: Lane, tiling: Tiling | None) -> dict[str, int]:
        return {"kPartsBoard": self.op.value_heads * (self.op.value_dim + self.op.head_tiles)}

    def merged_floats(self, lane: Lane) -> int:
        return self.op.value_heads

    def task_floats(self, lane: Lane, rows: int) -> int:
        warps = lane.machine.warps
        task = ENTRIES * (ENTRIES + 1) + 2 * self.op.key_dim + 2 * ENTRIES + 2 + warps * (4 * ENTRIES + 3)
        return max(task, self.op.value_heads * self.op.head_tiles)

    def header(self, struct: OpStruct) -> None:
        struct.names.attended = struct.name
        struct.constants |= {"kQueryScale": self.op.key_dim**-0.5}
        struct.add_cache()
