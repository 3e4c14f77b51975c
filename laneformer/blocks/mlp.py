"""The MLP of every lane over its own columns, gated (Shazeer, arXiv 2002.05202) or not. Shape letters as in
laneformer/model.py.
"""

from collections.abc import Callable
from functools import partial

import jax
from jax.sharding import PartitionSpec as P

from laneformer.blocks.block import FeedForward, Held, Initial, Weight, weight_of_op
from laneformer.config import MlpOptions
from laneformer.ops import QUICK_GELU_FACTOR, Activation, Matrix, Norm, Product, ProductName, Value

FUNCTIONS: dict[Activation, Callable[[jax.Array], jax.Array]] = {
    Activation.SILU: jax.nn.silu,
    Activation.GELU: partial(jax.nn.gelu, approximate=False),
    Activation.GELU_PYTORCH_TANH: partial(jax.nn.gelu, approximate=True),
    Activation.RELU2: lambda x: jax.numpy.square(jax.nn.relu(x)),
    Activation.QUICK_GELU: lambda x: x * jax.nn.sigmoid(QUICK_GELU_FACTOR * x),
}


class Mlp(FeedForward):
    """o[l] = w2[l] (activation(w1[l] h) * w3[l] h); without a gate, o[l] = w2[l] activation(w1[l] h)."""

    options: MlpOptions
    w1: Held
    w3: Held
    w2: Held

    def __call__(self, h_lbsd: jax.Array) -> jax.Array:
        return self.precision.block_einsum("lbsf,ldf->lbsd", self.hidden(h_lbsd), self.w2[...])

    def hidden(self, h_lbsd: jax.Array) -> jax.Array:
        """The hidden activations that w2 multiplies, [l, b, s, f]."""
        activate = FUNCTIONS[self.options.activation]
        first, *second = self.products(_read_by(self.options), h_lbsd)
        if (limit := self.options.limit) is not None:
            first, second = jax.numpy.minimum(first, limit), [jax.numpy.clip(up, -limit, limit) for up in second]
        return activate(first) * second[0] if second else activate(first)

    @staticmethod
    def table(options: MlpOptions, path: str) -> dict[str, Weight]:
        l, d, f = options.num_lanes, options.hidden_size, options.columns

        def matrix(name: str, shape: tuple[int, ...], spec: P, initial: Initial) -> Weight:
            file_name = f"model.{path}.{name}.weight"
            return Weight(file_name=file_name, shape=shape, spec=spec, initial=initial, group="matrix", part="MLP")

        read = {name: matrix(name, (l, f, d), P("lane", None, "data"), "normal") for name in _read_by(options)}
        written = {"w2": matrix("w2", (l, d, f), P("lane", "data", None), "output")}
        return {f"{path}.{name}": weight for name, weight in (read | written).items()}

    @staticmethod
    def ops(options: MlpOptions, path: str, norm: Norm | None) -> tuple[Product, ...]:
        table = Mlp.table(options, path)
        *first, down = (Matrix(weight_of_op(table, f"{path}.{name}")) for name in (*_read_by(options), "w2"))
        hidden = Product(
            ProductName.GATE_UP if options.gated else ProductName.UP,
            tuple(first),
            reads=Value.STREAM,
            writes=Value.HIDDEN,
            norm=norm,
            activation=options.activation,
            gated=options.gated,
            limit=options.limit,
        )
        return hidden, Product(ProductName.DOWN, (down,), reads=Value.HIDDEN, writes=Value.OUTPUT)


def _read_by(options: MlpOptions) -> tuple[str, ...]:
    """Names of the matrices that read the stream."""
    return ("w1", "w3") if options.gated else ("w1",)
