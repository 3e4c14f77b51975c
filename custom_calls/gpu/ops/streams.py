"""The mixture of several residual streams that a module reads."""

from collections.abc import Iterator
from typing import ClassVar

import jax
import numpy as np

from laneformer.custom_calls.gpu.formats import Plain
from laneformer.custom_calls.gpu.ops.kernel import Lane, OpKernel, Stage, Tiler
from laneformer.custom_calls.gpu.tiling import Tiling, tile
from laneformer.custom_calls.plan import Dtype
from laneformer.ops import GatherStreams, Layer, Matrix

MOST_STREAMS = 6  # residual streams: a thread holds the matrix between them in registers


class GatherStreamsKernel(OpKernel[GatherStreams]):
    kinds: ClassVar = (GatherStreams,)
    in_chain: ClassVar = False
    in_float32: ClassVar = True

    def problems(self, layer: Layer, hidden: int) -> Iterator[str]:
        if self.op.count > MOST_STREAMS:
            yield f"it has {self.op.count} residual streams, more than {MOST_STREAMS}"

    def matrices(self, stage: Stage) -> tuple[Matrix, ...]:
        return (self.op.mix,)

    def tiling(self, stage: Stage | None, tiler: Tiler) -> Tiling:
        """The tiling of the mixture as `arranged` cuts it. A CTA has all rows, and the columns of its own channels of
        each stream. stage: not read, because the head's mixture is no stage.
        """
        columns = self.op.count * -(-tiler.hidden // tiler.ctas)
        return tile(tiler.ctas * self.op.mix.rows, columns, tiler.ctas, tiler.machine, Plain(Dtype.float32))

    def arranged(self, weight: np.ndarray | jax.Array, lane: Lane) -> np.ndarray:
        return by_ctas(np.asarray(weight, np.float32), self.op.count, lane.ctas, lane.stream_rows)

    def boards(self, lane: Lane, tiling: Tiling | None) -> dict[str, int]:
        """Each CTA's parts of the mixture, and the sum of squares of its channels."""
        rows = self.op.mix.rows + 1
        return {"kMixtureBoard": lane.ctas * (rows + rows % 2)}


def by_ctas(mix: np.ndarray, streams: int, ctas: int, rows: int) -> np.ndarray:
    """Rearranges a mixture's matrix [..., n, streams * hidden] into parts of the CTAs, one after the other:
    [..., ctas * n, streams * rows]. A CTA's part has all n rows, and the columns of its `rows` channels of each stream.
    """
    *lead, count, columns = mix.shape
    parts = mix.reshape(*lead, count, streams, columns // streams)
    parts = np.pad(parts, [*[(0, 0)] * (len(lead) + 2), (0, ctas * rows - parts.shape[-1])])
    parts = np.moveaxis(parts.reshape(*lead, count, streams, ctas, rows), -2, -4)
    return parts.reshape(*lead, ctas * count, streams * rows)
