"""A plan's sizes by the names that the GPU kernel's layout uses: every layer of that kernel has the same ones."""

from dataclasses import dataclass

import numpy as np

from custom_calls.plan import Plan
from laneformer.ops import Activation, ProductName

DTYPES = {"float32": 0, "bfloat16": 1, "float16": 2}
HEADS = {"replicate": 0, "lane": 1, "vocab_parallel": 2}
BIASES = ("attention.wq_bias", "attention.wk_bias", "attention.wv_bias")


@dataclass(frozen=True, kw_only=True)
class Shapes:
    """What the kernel must know of a model. Heads, key/value heads and feed-forward columns are those of one lane."""

    layers: int
    lanes: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ff: int
    vocab: int
    context: int
    head_type: str
    """One of HEADS."""
    norm_of_sum: bool
    """Head replicate: one norm over the sum of the lanes, instead of the mean of their norms."""
    tied_head: bool
    lane_norms: bool
    """Each lane has its own norm scales in the layers."""
    lane_final_norm: bool
    qkv_bias: bool
    qk_norm: bool
    weight_dtype: str
    """One of DTYPES, in which the weights are packed."""
    cache_dtype: str
    rounded_activations: bool
    """Whether products read their vectors rounded to the weights' dtype; otherwise in float32."""
    norm_eps: float
    rope_factor: float

    @classmethod
    def of(cls, plan: Plan) -> "Shapes":
        """Raises ValueError for a plan that needs more than these."""
        ops, attend = plan.ops, plan.attends[0]
        products = {op.name: op for op in plan.products}
        qkv, gate_up = products[ProductName.QKV], products[ProductName.GATE_UP]
        sizes = {(op.name, op.rows, op.columns, op.activation) for op in plan.products}
        heads = {(op.heads, op.kv_heads, op.head_dim, op.rotary) for op in plan.attends}
        if len(sizes) != len(products) or len(heads) != 1 or gate_up.activation != Activation.SILU_GATED:
            raise ValueError("the GPU kernel runs models whose layers all have the same ops: use backend xla")
        return cls(
            layers=len(ops.layers),
            lanes=ops.lanes,
            hidden=ops.hidden_size,
            heads=attend.heads,
            kv_heads=attend.kv_heads,
            head_dim=attend.head_dim,
            ff=gate_up.channels,
            vocab=ops.vocab_size,
            context=ops.context,
            head_type=ops.head.kind.name.lower(),
            norm_of_sum=ops.head.norm_of_sum,
            tied_head=ops.head.weight == ops.embedding,
            lane_norms=qkv.norm.gain.lane_sharded,
            lane_final_norm=ops.head.norm.gain.lane_sharded,
            qkv_bias=qkv.matrices[0].bias is not None,
            qk_norm=attend.q_norm is not None,
            weight_dtype=plan.weight_dtype.name,
            cache_dtype=plan.cache_dtype.name,
            rounded_activations=plan.rounded_activations,
            norm_eps=ops.head.norm.eps,
            rope_factor=attend.rotary.factor,
        )


def windows_of(plan: Plan) -> tuple[int, ...]:
    """Keys that each layer sees, 0 for all."""
    return tuple(attend.window or 0 for attend in plan.attends)


def frequencies_of(plan: Plan) -> np.ndarray:
    """Radians per position of each pair of channels, float32 [head_dim / 2]."""
    return np.array(plan.attends[0].rotary.frequencies, np.float32)
