"""What one decode step of a model does, as data: the ops of each layer, in order, and the weights that they read.

A kernel runs these ops; it does not know architectures. Each block in laneformer/blocks states its own,
laneformer/decoder.py collects them for a ModelConfig, custom_calls/plan.py turns them into words for C++, and
tests/support/plan_interpreter.py runs them in a page of NumPy.

Every lane runs the same ops on its own share of the weights. Between ops, a lane keeps a few values (`Value`): a module
begins with the residual STREAM and ends with its OUTPUT, which the schedule of laneformer/layout.py adds and exchanges.

Sizes are those of one lane. An op's fields travel in the order in which they are written here. A new field or kind of
op is added here and where a kernel computes it: custom_calls/ops_header.py makes the C++ structs of these classes and
what decodes them, custom_calls/gpu/header.py the constants of the GPU kernel. An int is a size and at least 1.

Nothing here imports JAX.
"""

import dataclasses
import re
from dataclasses import dataclass
from enum import IntEnum
from types import UnionType
from typing import Any, ClassVar, get_args

LATER = {"recorded": "unless it has its default"}
"""Metadata of options that older runs and records do not have; see `recorded_fields` in laneformer/config/model.py."""


@dataclass(frozen=True)
class Weight:
    """One array of the table in laneformer/weights.py. Vectors (norm gains, biases) are kept in float32."""

    path: str
    """Its path in that table."""
    shape: tuple[int, ...]
    """Shape of one lane's share, and of one expert's where experts have one each."""
    lane_sharded: bool = True
    """Whether each lane has its own: the array then has a leading lane axis. Otherwise all lanes read the same."""
    experts: int | None = None
    """How many experts, or heads, have one each, along an axis behind that of the lanes; None: no such axis."""
    plus: float = dataclasses.field(default=0.0, compare=False)
    """Added to a vector where it is packed: kernels have the sum alone, and a plan's words do not have this."""
    cut_from: str | None = dataclasses.field(default=None, compare=False)
    """Path of the matrix in that table, [experts * rows, columns] of a lane, of which each of the experts, here heads,
    has the rows from `first_row` on; None: it is in the table itself. A plan's words do not have this either.
    """
    first_row: int = dataclasses.field(default=0, compare=False)
    transposed: bool = dataclasses.field(default=False, compare=False)
    """Whether these rows are its columns."""
    small: bool = dataclasses.field(default=False, compare=False)
    """It is among the vectors, in float32, although it has two dimensions."""

    @property
    def is_matrix(self) -> bool:
        return len(self.shape) > 1 and not self.small


class Value(IntEnum):
    """What a lane holds between ops."""

    STREAM = 0
    """The residual stream [hidden_size]."""
    PROJECTED = 1
    """Queries, keys, values and gates, one after the other; of latent attention the latent, then the heads' values."""
    ATTENDED = 2
    """The heads' results [heads, head_dim]."""
    HIDDEN = 3
    """Hidden channels of a feed-forward network, or between the two matrices of queries."""
    OUTPUT = 4
    """The module's output [hidden_size], which the schedule adds to the stream."""
    ROUTES = 5
    """Numbers of the experts that are used, and their shares in the sum: the largest share first, or in the order of a
    table.
    """
    QUERIES = 6
    """Queries of latent or compressed attention [heads, channels], of each head those that rotate last."""
    ABSORBED = 7
    """Queries for the cached latents [heads, rank]: those that do not rotate, times the matrix of the head's keys."""
    STREAMS = 8
    """Several residual streams, end to end [streams * hidden_size]; STREAM is then what a module reads of them."""
    MIXTURE = 9
    """What decides how a module reads and writes them, before its sigmoids and softmax."""
    INDEX = 10
    """Queries that choose entries of compressed attention [heads, channels]."""


class Activation(IntEnum):
    """What a product does to its rows before it writes them; custom_calls/common/activation.h computes it. Names as
    in ModelConfig.hidden_act.
    """

    NONE = 0
    SILU = 1
    """x / (1 + exp(-x))"""
    GELU = 2
    """x times the normal distribution function of x (Hendrycks & Gimpel, arXiv 1606.08415)."""
    GELU_PYTORCH_TANH = 3
    """Its approximation x / 2 (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))), ibid."""
    RELU2 = 4
    """max(x, 0)^2 (So et al., arXiv 2109.08668)."""
    QUICK_GELU = 5
    """x / (1 + exp(-QUICK_GELU_FACTOR x)), the sigmoid's approximation of gelu (arXiv 1606.08415)."""


QUICK_GELU_FACTOR = 1.702


class ProductName(IntEnum):
    """What a product is called in traces and in the layout of a kernel's memory."""

    QKV = 0
    OUT = 1
    GATE_UP = 2
    DOWN = 3
    UP = 4
    LATENTS = 5
    QUERY_RANK = 6
    QUERIES = 7
    ABSORB = 8
    VALUES = 9
    GROUPS = 10
    INDEX = 11


@dataclass(frozen=True)
class Norm:
    """RMSNorm: x / sqrt(mean(x^2) + eps) * gain, over the last axis."""

    gain: Weight
    eps: float


@dataclass(frozen=True)
class Rotary:
    """Rotation of the pairs (x[2i], x[2i+1]) by frequencies[i] * position radians; factor multiplies cos and sin."""

    frequencies: tuple[float, ...]
    factor: float


@dataclass(frozen=True)
class Matrix:
    """Some of a product's rows."""

    weight: Weight
    bias: Weight | None = None

    @property
    def rows(self) -> int:
        return self.weight.shape[0]


@dataclass(frozen=True)
class Chosen:
    """That each expert has its own matrices and biases, and that a product is made with those in ROUTES alone."""

    used: int
    """Experts in ROUTES."""
    summed: bool
    """Each reads its own channels, the first ones those of the first expert, and the sum of the results is written,
    each times its share, in the order of ROUTES. Otherwise all read the same, and write one after the other.
    """


@dataclass(frozen=True)
class Blocks:
    """That a product is block-diagonal: each head has its own matrices, which read its own channels alone."""

    count: int
    step: int
    """Channels from one block's first to the next one's in what is read; results follow each other."""


@dataclass(frozen=True)
class Product:
    """Matrices times one vector: `reads`, after `norm` where there is one; its rows go to `writes` one matrix after the
    other, biases added, through `activation`.

    A gated product has two matrices, gate and up, and writes activation(gate) * (up + up_offset), row by row.
    """

    name: ProductName
    matrices: tuple[Matrix, ...]
    reads: Value
    writes: Value
    norm: Norm | None = None
    activation: Activation = Activation.NONE
    gated: bool = False
    limit: float | None = None
    """Gated: the gate is at most this, and the up row between -limit and limit; None for no limits."""
    up_offset: float = 0.0
    chosen: Chosen | None = None
    blocks: Blocks | None = None

    @property
    def rows(self) -> int:
        """Of one expert or block, where it is made of those."""
        return sum(matrix.rows for matrix in self.matrices)

    @property
    def columns(self) -> int:
        return self.matrices[0].weight.shape[1]

    @property
    def inputs(self) -> int:
        """Channels of what it reads."""
        if self.blocks:
            return self.blocks.count * self.blocks.step
        return self.columns * (self.chosen.used if self.chosen and self.chosen.summed else 1)

    @property
    def channels(self) -> int:
        """Channels that it writes."""
        each = self.rows // 2 if self.gated else self.rows
        if self.blocks:
            return each * self.blocks.count
        return each * (self.chosen.used if self.chosen and not self.chosen.summed else 1)

    @property
    def share(self) -> float:
        """Share of its weights that one token multiplies."""
        return self.chosen.used / self.matrices[0].weight.experts if self.chosen else 1.0


@dataclass(frozen=True)
class Route:
    """Chooses experts, in float32 whatever products compute in: ROUTES gets those with the largest logits, of equal
    ones the lowest number first. An expert's logit is its row of the matrix times STREAM, after `norm`, and its bias.
    """

    matrix: Matrix
    """[experts, hidden_size]."""
    used: int
    """Experts that it chooses."""
    normalized: bool
    """Shares are the softmax over the chosen logits; otherwise those of the softmax over all."""
    norm: Norm | None = None

    reads: ClassVar = Value.STREAM
    writes: ClassVar = Value.ROUTES


@dataclass(frozen=True)
class SigmoidRoute:
    """Route with the sigmoids of the logits as scores; ROUTES gets the largest sums of score and correction."""

    matrix: Matrix
    """[experts, hidden_size]."""
    used: int
    """Experts that it chooses."""
    normalized: bool
    """Shares are the chosen scores over their sum; otherwise the scores."""
    norm: Norm | None
    correction: Weight | None
    """[experts], not in the shares."""
    groups: int
    """Groups of experts with neighbouring numbers."""
    groups_used: int
    """Groups chosen from: those with the largest sums of their two best; of equal ones the lowest number first."""
    factor: float
    """On the shares."""

    reads: ClassVar = Value.STREAM
    writes: ClassVar = Value.ROUTES


@dataclass(frozen=True, kw_only=True)
class AttentionVariant:
    """Options of attention that a kernel takes as they are: fields of ModelConfig, of each layer's AttentionOptions and
    of the op. A new one has a default, which leaves attention as it was, and is marked LATER.
    """

    attention_gate: bool = dataclasses.field(default=False, metadata=LATER)
    """Each channel of the heads' results times a sigmoid of its own projection, before wo (arXiv 2505.06708)."""

    @property
    def attention_variant(self) -> dict[str, Any]:
        """These fields by name."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(AttentionVariant)}


@dataclass(frozen=True)
class Attend(AttentionVariant):
    """Causal grouped-query attention: PROJECTED holds q [heads, head_dim], k and v [kv_heads, head_dim], and, with
    attention_gate, the gate before its sigmoid [heads, head_dim]; this position's k and v join the layer's cache; the
    result is ATTENDED. Query head h reads key head h // (heads / kv_heads).
    """

    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    """Factor on the scores q . k."""
    window: int | None
    """Newest keys that are seen, the own position included; None for all."""
    rotary: Rotary | None
    """Applied to q and k, after their norms."""
    q_norm: Norm | None = None
    """Over each query head; or over all of them together, if its gain has as many channels. k_norm likewise."""
    k_norm: Norm | None = None
    sinks: Weight | None = None
    """A logit [heads] beside each head's scores, not scaled: a key without a value, which takes its share (gpt-oss)."""

    reads: ClassVar = Value.PROJECTED
    writes: ClassVar = Value.ATTENDED

    @property
    def projected(self) -> int:
        """Channels of PROJECTED."""
        return ((2 if self.attention_gate else 1) * self.heads + 2 * self.kv_heads) * self.head_dim


@dataclass(frozen=True)
class LatentKeep:
    """Of PROJECTED [rank + rotating channels] the first `rank`, after `norm`, and the others, rotated, join the layer's
    cache: this position's latent.
    """

    rank: int
    norm: Norm
    rotary: Rotary

    reads: ClassVar = Value.PROJECTED
    writes: ClassVar = Value.PROJECTED


@dataclass(frozen=True)
class LatentAttend:
    """Causal attention to the cached latents, which are the keys and the values of all heads. A head's query is its
    part of ABSORBED, then its channels of QUERIES that rotate; its row of ATTENDED [heads, rank] is
    softmax(scale q k^T) times the first `rank` channels of the k.
    """

    heads: int
    rank: int
    still: int
    """Channels of a head's QUERIES that do not rotate: the first ones."""
    scale: float
    rotary: Rotary

    reads: ClassVar = Value.ABSORBED
    writes: ClassVar = Value.ATTENDED

    @property
    def rotating(self) -> int:
        """Channels that rotate."""
        return 2 * len(self.rotary.frequencies)


@dataclass(frozen=True)
class OutputNorm:
    """RMSNorm of OUTPUT, in place."""

    norm: Norm

    reads: ClassVar = Value.OUTPUT
    writes: ClassVar = Value.OUTPUT


@dataclass(frozen=True)
class SharedExpert:
    """An MLP that every token uses: what `products` make of STREAM is added to OUTPUT, times sigmoid(gate STREAM)."""

    products: tuple[Product, ...]
    gate: Matrix | None = None
    """One row, of the stream after the norm of the first product."""

    reads: ClassVar = Value.STREAM
    writes: ClassVar = Value.OUTPUT


@dataclass(frozen=True)
class DeltaNet:
    """Gated delta rule (Yang et al., arXiv 2412.06464): PROJECTED holds, for each key head, q and k [key_dim] and, for
    each of its value heads, v and then z [value_dim]; then, for each key head, b and then a of its value heads. The
    result is ATTENDED [value_heads, value_dim]. laneformer/blocks/delta_net.py has the equations.
    """

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    convolution: Weight
    """[channels of q, then k, then v; tokens], the oldest token first; small."""
    decay: Weight
    """[value_heads]: the logarithm of a rate."""
    step: Weight
    """[value_heads]: added to a."""
    norm: Norm
    """Of each head's result, before its gate."""
    unit_eps: float
    """Added to the squared lengths of q and of k, by whose roots they are divided."""

    reads: ClassVar = Value.PROJECTED
    writes: ClassVar = Value.ATTENDED

    @property
    def ratio(self) -> int:
        """Value heads of a key head."""
        return self.value_heads // self.key_heads

    @property
    def head_tiles(self) -> int:
        """Tiles of 16 rows that a value head's channels take."""
        return -(-self.value_dim // 16)

    @property
    def projected(self) -> int:
        """Channels of PROJECTED."""
        return 2 * self.key_heads * self.key_dim + 2 * self.value_heads * (self.value_dim + 1)


@dataclass(frozen=True)
class RootRoute:
    """SigmoidRoute without groups, with sqrt(softplus(logit)) as score, or with a table of each token's experts."""

    matrix: Matrix
    """[experts, hidden_size]."""
    used: int
    """Experts that it chooses."""
    normalized: bool
    """Shares are the chosen scores over their sum; otherwise the scores."""
    norm: Norm | None
    correction: Weight | None
    """[experts], not in the shares."""
    factor: float
    """On the shares."""
    by_token: Weight | None
    """[vocabulary, used]; small."""

    reads: ClassVar = Value.STREAM
    writes: ClassVar = Value.ROUTES


@dataclass(frozen=True)
class GatherStreams:
    """STREAM gets the sum of the residual streams, each times its share in MIXTURE = mix STREAMS / rms(STREAMS). The
    other rows of MIXTURE say how the module's OUTPUT joins the streams, where the schedule adds it.
    laneformer/blocks/streams.py has the equations.
    """

    count: int
    """Streams."""
    mix: Matrix
    """[count, count * hidden_size] of the head, [2 count + count^2, ...] of a module."""
    factors: Weight
    """On the rows: of what is read, of what is written, of what is between the streams."""
    offsets: Weight
    """Added to the rows."""
    eps: float
    norm_eps: float
    iterations: int
    """Of the matrix between the streams, which make its rows and columns sum to 1."""

    reads: ClassVar = Value.STREAMS
    writes: ClassVar = Value.STREAM


@dataclass(frozen=True)
class EntrySize:
    """Of entries that are made of several positions each."""

    channels: int
    ratio: int
    """Positions of a window."""
    overlaps: bool
    """An entry also contains the window before."""

    @property
    def width(self) -> int:
        """Channels of a position's vectors."""
        return self.channels * (1 + self.overlaps)

    @property
    def earlier(self) -> int:
        """Positions before a new one that may be in its window's entry, at most."""
        return self.ratio * (1 + self.overlaps) - 1


@dataclass(frozen=True)
class Compressor(EntrySize):
    """Entries of a cache. Of PROJECTED the channels from `first` on are a position's vectors, then as many gates; where
    windows overlap, the first half of either is for the next window's entry. laneformer/blocks/compressor.py has the
    equations.
    """

    first: int
    biases: Weight
    """[ratio, channels of a position's vectors], on the gates; small."""
    norm: Norm
    rotary: Rotary
    """Of an entry's last channels, at the first position of its window."""


@dataclass(frozen=True)
class CompressedKeep:
    """Of PROJECTED the first `channels`, after `norm`, the last of them rotated, join the layer's cache: this
    position's vector. So do entries whose last position this is.
    """

    channels: int
    norm: Norm
    rotary: Rotary
    entries: Compressor | None
    index_keys: Compressor | None
    """Of the index, one for each entry."""

    reads: ClassVar = Value.PROJECTED
    writes: ClassVar = Value.PROJECTED


@dataclass(frozen=True)
class Index:
    """Chooses the `most` entries with the largest sums over its heads of weight * relu(query . key), of equal ones
    those with the lowest numbers. Queries are INDEX, rotated; weights are in PROJECTED.
    """

    heads: int
    channels: int
    first: int
    """Channel of PROJECTED that is the first weight."""
    most: int


@dataclass(frozen=True)
class CompressedAttend:
    """Attention to the cached vectors of the newest positions and to entries, which are keys and values of all heads.
    Queries are those of QUERIES over their root mean square, rotated; each head's result is rotated back.
    """

    heads: int
    head_dim: int
    window: int
    """Newest positions that are seen, the own one included."""
    ratio: int | None
    """Positions of an entry; None: there are none."""
    norm_eps: float
    scale: float
    rotary: Rotary
    """Of the last channels."""
    sinks: Weight
    """As in Attend."""
    index: Index | None
    """None: all entries are seen whose positions are all there."""

    reads: ClassVar = Value.QUERIES
    writes: ClassVar = Value.ATTENDED


GpuOp = (
    Product
    | Attend
    | OutputNorm
    | Route
    | SharedExpert
    | SigmoidRoute
    | LatentKeep
    | LatentAttend
    | DeltaNet
    | RootRoute
    | GatherStreams
    | CompressedKeep
    | CompressedAttend
)
"""What the decode kernel on GPUs computes."""
Op = GpuOp
"""What the decode kernel on CPUs computes. A dataclass of this file that is not among them is for backend xla alone."""


def without_kernel(ops: "DecoderOps", kinds: UnionType = Op) -> str | None:
    """What of a model the decode kernel with these kinds of ops does not compute, and the remedy; None if it computes
    all of it.
    """
    for n, layer in enumerate(ops.layers):
        for op in layer.ops:
            if not isinstance(op, kinds):
                return f"it has no {trace_name(op)}, the block of layer {n}: use backend xla"
            if isinstance(op, Attend) and op.rotary and op.rotary.factor != 1 and 0.0 in op.rotary.frequencies:
                return f"it does not scale some channels of a head by {op.rotary.factor:g}: use backend xla"
    return None


def products_of(op: Op) -> tuple[Product, ...]:
    """The products that an op is made of, in the order in which they are computed."""
    return op.products if isinstance(op, SharedExpert) else (op,) if isinstance(op, Product) else ()


def trace_name(op: Op | type[Op]) -> str:
    """An op's name in traces; a product has its own."""
    if isinstance(op, Product):
        return op.name.name.lower()
    kind = op if isinstance(op, type) else type(op)
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", kind.__name__).lower()


TRACE_NAMES = (*(name.name.lower() for name in ProductName), *map(trace_name, get_args(Op)[1:]))
"""Those of all ops, in the order of their numbers: of products their ProductName, then the other kinds of Op."""


@dataclass(frozen=True)
class Module:
    """What a lane computes between two times of the schedule, from STREAM to OUTPUT, and what becomes of the latter."""

    ops: tuple[Op, ...]
    sum_norm: Norm | None = None
    """RMSNorm of the sum over the lanes that this output completes, where the schedule adds it; all lanes have the same
    gain.
    """

    @property
    def edges(self) -> int:
        """Results that all of a lane's workers wait for: of each op, and of the norm of the sum."""
        return len(self.ops) + (self.sum_norm is not None)


@dataclass(frozen=True)
class Layer:
    """A layer's two modules."""

    attention: Module
    feed_forward: Module

    @property
    def modules(self) -> tuple[Module, ...]:
        return self.attention, self.feed_forward

    @property
    def ops(self) -> tuple[Op, ...]:
        return tuple(op for module in self.modules for op in module.ops)

    @property
    def products(self) -> tuple[Product, ...]:
        return tuple(product for op in self.ops for product in products_of(op))


class HeadKind(IntEnum):
    """How lanes make logits; names as in ModelConfig.lm_head_type."""

    REPLICATE = 0
    """One matrix over the mean of the lanes' normed streams, or over the norm of their sum."""
    LANE = 1
    """Each lane has columns [vocab, hidden_size] of a matrix that reads all lanes' normed streams end to end."""
    VOCAB_PARALLEL = 2
    """Each lane has the matrix of its slice of the vocabulary."""


@dataclass(frozen=True)
class Head:
    """Logits from the streams after the last module."""

    kind: HeadKind
    norm: Norm
    norm_of_sum: bool
    """Head REPLICATE: one norm over the sum of the lanes, instead of the mean of their norms."""
    weight: Weight
    """Of one lane, as HeadKind says; the embedding table where they are tied."""
    gather: GatherStreams | None = None
    """How it reads several residual streams; each module begins with GatherStreams then, too."""


@dataclass(frozen=True)
class DecoderOps:
    """All ops of a decode step: a row of the embedding table becomes every lane's stream, the layers' modules run as
    the schedule says, the head makes logits.
    """

    lanes: int
    hidden_size: int
    vocab_size: int
    context: int
    """Positions at most."""
    embedding: Weight
    layers: tuple[Layer, ...]
    head: Head
