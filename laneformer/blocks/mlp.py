"""SwiGLU (Shazeer, arXiv 2002.05202) of every lane over its own columns. Shape letters as in laneformer/model.py."""

import jax
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P

from laneformer.blocks.block import Block, Weight, weight_of_op
from laneformer.config import MlpOptions
from laneformer.ops import Activation, Matrix, Norm, Op, Product, ProductName, Rotary, Value
from laneformer.precision import Precision


class Mlp(Block):
    """o[l] = w2[l] (silu(w1[l] h) * w3[l] h)."""

    def __init__(self, weights: dict[str, jax.Array], options: MlpOptions, precision: Precision):
        self.w1, self.w3, self.w2 = (nnx.Param(weights[name]) for name in ("w1", "w3", "w2"))
        self.options, self.precision = options, precision

    def __call__(self, h_lbsd: jax.Array) -> jax.Array:
        return self.precision.einsum("lbsf,ldf->lbsd", self.hidden(h_lbsd), self.w2[...])

    def hidden(self, h_lbsd: jax.Array) -> jax.Array:
        """What w2 multiplies, [l, b, s, f]."""
        gate = checkpoint_name(self.precision.einsum("lbsd,lfd->lbsf", h_lbsd, self.w1[...]), "product")
        up = checkpoint_name(self.precision.einsum("lbsd,lfd->lbsf", h_lbsd, self.w3[...]), "product")
        return jax.nn.silu(gate) * up

    @staticmethod
    def table(options: MlpOptions, path: str) -> dict[str, Weight]:
        l, d, f = options.num_lanes, options.hidden_size, options.columns

        def matrix(name: str, shape: tuple[int, ...], spec: P, initial: str) -> Weight:
            file_name = f"model.{path}.{name}.weight"
            return Weight(file_name=file_name, shape=shape, spec=spec, initial=initial, group="matrix", part="MLP")

        return {
            f"{path}.w1": matrix("w1", (l, f, d), P("lane", None, "data"), "normal"),
            f"{path}.w3": matrix("w3", (l, f, d), P("lane", None, "data"), "normal"),
            f"{path}.w2": matrix("w2", (l, d, f), P("lane", "data", None), "output"),
        }

    @staticmethod
    def ops(options: MlpOptions, path: str, norm: Norm, rotary: Rotary) -> tuple[Op, ...]:
        table = Mlp.table(options, path)
        gate, up, down = (Matrix(weight_of_op(table, f"{path}.{name}")) for name in ("w1", "w3", "w2"))
        gate_up = Product(
            ProductName.GATE_UP,
            (gate, up),
            reads=Value.STREAM,
            writes=Value.HIDDEN,
            norm=norm,
            activation=Activation.SILU,
            gated=True,
        )
        return gate_up, Product(ProductName.DOWN, (down,), reads=Value.HIDDEN, writes=Value.OUTPUT)
