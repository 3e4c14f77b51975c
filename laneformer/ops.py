"""What one decode step of a model computes, as data: the ops of each layer, in order, and the weights that they read.

A kernel runs these ops and knows no architectures. Each block in laneformer/blocks states its own ops,
laneformer/decoder.py collects them for a ModelConfig, custom_calls/plan.py writes them as words for C++, and
tests/support/plan_interpreter.py runs them in NumPy.

Every lane runs the same ops on its own share of the weights; all sizes here are those of one lane. Between ops a lane
holds a few values (`Value`): a module begins with the residual STREAM and ends with its OUTPUT, which the schedule of
laneformer/layout.py adds to the streams and exchanges between lanes.

To add a field or a kind of op, write it here and compute it in the kernels: custom_calls/ops_header.py writes the C++
structs of these classes and what decodes them, custom_calls/gpu/header.py the constants of a GPU kernel. Fields travel
in the order in which they are written. A field of type int is a size and at least 1. What an op keeps between tokens is
a `kept` property of its class, from which the state of a call follows in Python and in C++.

Nothing here imports JAX or another file of ours.
"""

import dataclasses
import math
import re
import typing
from dataclasses import dataclass
from enum import IntEnum
from types import UnionType
from typing import Any, ClassVar, Literal, get_args, overload

LATER = {"recorded": "unless it has its default"}
"""Metadata of options that older runs and records do not have; see `recorded_fields` in laneformer/config/model.py."""

ENTRIES = 16
"""Positions of a gated DeltaNet whose deltas join its matrices together, and rows that a pass can take back."""


class size(property):
    """A property that is a whole number computed from fields. The C++ struct has it as a member function: its getter is
    one `return` of +, -, *, // and `a if flag else b`, which custom_calls/ops_header.py translates. Operands of // are
    not negative. custom_calls/common/plan.h has the sizes of Weight and Rotary.
    """

    if typing.TYPE_CHECKING:  # not imported by name: ops_header.py writes the whole numbers of this file to C++

        @overload
        def __get__(self, instance: None, owner: type, /) -> "size": ...
        @overload
        def __get__(self, instance: Any, owner: type | None = None, /) -> int: ...
        def __get__(self, instance: Any, owner: type | None = None, /) -> "int | size": ...


class KeptDtype(IntEnum):
    """Dtype of a kept array."""

    CACHE = 0
    """The dtype of the cache, which each plan chooses."""
    FLOAT32 = 1
    INT32 = 2


@dataclass(frozen=True)
class Kept:
    """An array that a layer keeps between tokens, for each lane and slot: t entries of this shape."""

    shape: tuple[int, ...]
    """Shape of one entry in one lane."""
    dtype: KeptDtype = KeptDtype.CACHE
    fixed: bool = False
    """Whether t is 1; otherwise t depends on the number of positions."""
    every: int = 1
    """Positions of one entry."""

    def entries(self, positions: int) -> int:
        """The number of entries t of an array with room for `positions` positions."""
        return 1 if self.fixed else -(-positions // self.every)


class kept(property):
    """A property of an op: a `Kept` array, or None if the op has no such array. The array has the property's name in
    each layer and in the C++ enumeration Kept; a layer has one array of a name. The getter is one `return` of
    `Kept(...)` or `Kept(...) if self.field else None`, whose numbers are expressions as in a `size`.
    """

    if typing.TYPE_CHECKING:

        @overload
        def __get__(self, instance: None, owner: type, /) -> "kept": ...
        @overload
        def __get__(self, instance: Any, owner: type | None = None, /) -> Kept | None: ...
        def __get__(self, instance: Any, owner: type | None = None, /) -> "Kept | kept | None": ...


def vector(elements: str) -> dict[str, str]:
    """Metadata of a field that is a vector, or None, with this number of elements: the name of an int field or a `size`
    of its class. custom_calls/common/plan.cc checks it when it decodes a plan.
    """
    return {"elements": elements}


@dataclass(frozen=True)
class Weight:
    """One array of the table in laneformer/weights.py. Vectors (norm gains, biases) are kept in float32."""

    path: str
    """Path of the array in that table."""
    shape: tuple[int, ...]
    """Shape of one lane's share; with `experts`, of one expert's array in it."""
    lane_sharded: bool = True
    """Each lane has its own array, along a leading axis. False: all lanes read the same array."""
    experts: int | None = None
    """Number of experts (or heads) that have an array each, along the axis after that of the lanes. None: no such axis.
    """
    plus: float = dataclasses.field(default=0.0, compare=False)
    """Number added to a vector when it is packed. Kernels and a plan's words know the sum alone."""
    cut_from: str | None = dataclasses.field(default=None, compare=False)
    """Path of a matrix [experts * rows, columns] in the table. Each expert's array is made of its rows there, from
    `first_row` on. None: the array itself is in the table. Not part of a plan's words.
    """
    first_row: int = dataclasses.field(default=0, compare=False)
    """Row of each expert in `cut_from` at which its array begins."""
    transposed: bool = dataclasses.field(default=False, compare=False)
    """The rows of `cut_from` are the columns of the array."""
    small: bool = dataclasses.field(default=False, compare=False)
    """The array is stored among the vectors, in float32, although it has two dimensions."""

    @property
    def is_matrix(self) -> bool:
        return len(self.shape) > 1 and not self.small

    @size
    def elements(self) -> int:
        """Values of one lane's share; with `experts`, of one expert's array in it."""
        return math.prod(self.shape)


class Value(IntEnum):
    """What a lane holds between ops."""

    STREAM = 0
    """The residual stream [hidden_size]."""
    PROJECTED = 1
    """Queries, keys, values and gates end to end. In latent attention first the latent, later the values of the heads.
    """
    ATTENDED = 2
    """Results of the heads [heads, head_dim]."""
    HIDDEN = 3
    """Hidden channels of a feed-forward network, or those between the two matrices that make queries."""
    OUTPUT = 4
    """The module's output [hidden_size], which the schedule adds to the stream."""
    ROUTES = 5
    """Numbers of the chosen experts and their shares in the sum: the largest share first, or in the order of a table.
    """
    QUERIES = 6
    """Queries of latent or compressed attention [heads, channels]. The last channels of each head are rotated."""
    ABSORBED = 7
    """Queries for the cached latents [heads, rank]: a head's channels that are not rotated, times its key matrix."""
    STREAMS = 8
    """Several residual streams end to end [streams * hidden_size]. STREAM is then what a module reads of them."""
    MIXTURE = 9
    """Numbers, before sigmoids and softmax, that decide how a module reads and writes the residual streams."""
    INDEX = 10
    """Queries that choose the entries of compressed attention [heads, channels]."""


class Activation(IntEnum):
    """The function that a product applies to its rows, in custom_calls/common/activation.h. ModelConfig.hidden_act has
    the same names.
    """

    NONE = 0
    SILU = 1
    """x / (1 + exp(-x))"""
    GELU = 2
    """x times the normal distribution function of x (Hendrycks & Gimpel, arXiv 1606.08415)."""
    GELU_PYTORCH_TANH = 3
    """x / 2 (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))), an approximation of GELU from the same paper."""
    RELU2 = 4
    """max(x, 0)^2 (So et al., arXiv 2109.08668)."""
    QUICK_GELU = 5
    """x / (1 + exp(-QUICK_GELU_FACTOR x)), an approximation of GELU by a sigmoid from the same paper."""


QUICK_GELU_FACTOR = 1.702


class ProductName(IntEnum):
    """Name of a product in traces and in the memory layout of a kernel."""

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

    @size
    def channels(self) -> int:
        """Channels that rotate."""
        return 2 * len(self.frequencies)


@dataclass(frozen=True)
class Matrix:
    """One of the matrices of a product, with its bias."""

    weight: Weight
    bias: Weight | None = None

    @property
    def rows(self) -> int:
        return self.weight.shape[0]


@dataclass(frozen=True)
class Chosen:
    """Marks a mixture-of-experts product: each expert has its own matrices and biases; only those in ROUTES compute."""

    used: int
    """Number of experts in ROUTES."""
    summed: bool
    """True: each expert reads its own channels, in the order of ROUTES, and the product writes the sum of their results
    times their shares. False: all experts read the same channels and write their results end to end.
    """


@dataclass(frozen=True)
class Blocks:
    """Marks a block-diagonal product: each head has its own matrices, which read only the head's channels."""

    count: int
    """Number of blocks (heads)."""
    step: int
    """Channels between the first ones of two neighbouring blocks in the input; results are written end to end."""


@dataclass(frozen=True)
class Product:
    """Matrices times the vector `reads`, which is normalized first if there is a `norm`. The rows of all matrices, plus
    biases, pass through `activation` and are written to `writes` end to end.

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
    """Limit of a gated product: gate is clamped to at most this, up to between -limit and limit. None: no limit."""
    up_offset: float = 0.0
    """Number that a gated product adds to up."""
    chosen: Chosen | None = None
    blocks: Blocks | None = None

    @property
    def rows(self) -> int:
        """Rows of all matrices of the product; of one expert or block if it has several."""
        return sum(matrix.rows for matrix in self.matrices)

    @property
    def columns(self) -> int:
        """Columns of each matrix."""
        return self.matrices[0].weight.shape[1]

    @property
    def inputs(self) -> int:
        """Channels of the value that the product reads."""
        if self.blocks:
            return self.blocks.count * self.blocks.step
        return self.columns * (self.chosen.used if self.chosen and self.chosen.summed else 1)

    @property
    def channels(self) -> int:
        """Channels of the value that the product writes."""
        each = self.rows // 2 if self.gated else self.rows
        if self.blocks:
            return each * self.blocks.count
        return each * (self.chosen.used if self.chosen and not self.chosen.summed else 1)

    @property
    def share(self) -> float:
        """Share of the product's weights that one token is multiplied with."""
        experts = self.matrices[0].weight.experts
        return self.chosen.used / experts if self.chosen and experts else 1.0


@dataclass(frozen=True)
class Route:
    """Chooses the experts with the largest logits for ROUTES, of equal ones the lowest number first. An expert's logit
    is its row of the matrix times STREAM (after `norm`), plus its bias, in float32 whatever products compute in.
    """

    matrix: Matrix
    """Router [experts, hidden_size]."""
    used: int
    """Number of experts to choose."""
    normalized: bool
    """Shares are the softmax over the chosen logits. False: they are taken from the softmax over all logits."""
    norm: Norm | None = None

    reads: ClassVar = Value.STREAM
    writes: ClassVar = Value.ROUTES


@dataclass(frozen=True)
class SigmoidRoute:
    """Route whose scores are sigmoids of the logits. It chooses the experts with the largest sum of score and
    correction (DeepSeek-V3, arXiv 2412.19437).
    """

    matrix: Matrix
    """Router [experts, hidden_size]."""
    used: int
    """Number of experts to choose."""
    normalized: bool
    """Shares are the chosen scores divided by their sum. False: they are the scores."""
    norm: Norm | None
    correction: Weight | None
    """Vector [experts] added to the scores for the choice; shares are computed without it."""
    groups: int
    """Number of groups; experts with neighbouring numbers form a group."""
    groups_used: int
    """Number of groups to choose from: those with the largest sums of their two best experts, of equal ones the lowest
    number first.
    """
    factor: float
    """Factor on the shares."""

    reads: ClassVar = Value.STREAM
    writes: ClassVar = Value.ROUTES


@dataclass(frozen=True, kw_only=True)
class ModuleVariant:
    """Options of what surrounds a module: fields of ModelConfig and of Norms, computed in laneformer/blocks/layer.py. A
    new option has a default that changes nothing and is marked LATER.
    """

    norm_before: bool = dataclasses.field(default=True, metadata=LATER)
    """RMSNorm of the stream before each module."""
    norm_after: Literal["lane", "sum"] | None = dataclasses.field(default=None, metadata=LATER)
    """RMSNorm of each module's output: of each lane's output before it is added or sent (lane), or of the sum over
    all lanes (sum). A sum keeps the results of a published model that is cut into lanes (OLMo-2, arXiv 2501.00656).
    """

    @property
    def module_variant(self) -> dict[str, Any]:
        """Values of the fields of ModuleVariant, by name."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(ModuleVariant)}

    def unfit(self, layout: str, adds_whole_sums: bool) -> str | None:
        """Which of these options do not work together or with the layout, and the remedy; None if they do.

        adds_whole_sums: each module's output is added as one sum over all lanes.
        """
        if not self.norm_before and self.norm_after is None:
            return "norm_before = false requires norm_after; set it to lane or sum"
        if self.norm_after == "sum" and not adds_whole_sums:
            return (
                "norm_after = 'sum' requires a layout that adds each module's output as one sum over all lanes, as tp"
                f" and ladder do, got {layout}; set norm_after = 'lane' or change the layout"
            )
        return None


@dataclass(frozen=True, kw_only=True)
class AttentionVariant:
    """Options of attention that need no conversion: fields of ModelConfig, of each layer's AttentionOptions and of the
    op. A new option has a default that changes nothing and is marked LATER.
    """

    attention_gate: bool = dataclasses.field(default=False, metadata=LATER)
    """Each channel of the heads' results is multiplied by the sigmoid of a projection, before wo (arXiv 2505.06708)."""
    attn_logit_softcapping: float | None = dataclasses.field(default=None, metadata=LATER)
    """Softcap of the scaled scores: cap tanh(score / cap) (Gemma 2, arXiv 2408.00118); None: no cap."""

    @property
    def attention_variant(self) -> dict[str, Any]:
        """Values of the fields of AttentionVariant, by name."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(AttentionVariant)}


@dataclass(frozen=True)
class Attend(AttentionVariant):
    """Causal grouped-query attention. PROJECTED holds q [heads, head_dim], k and v [kv_heads, head_dim] and, with
    attention_gate, the gate before its sigmoid [heads, head_dim]. The position's k and v are appended to the layer's
    cache; the result is ATTENDED. Query head h reads key head h // (heads / kv_heads).
    """

    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    """Factor on the scores q . k."""
    window: int | None
    """Number of newest keys that a query attends to, its own position included. None: all."""
    rotary: Rotary | None
    """Rotation of q and k, after their norms."""
    q_norm: Norm | None = None
    """Norm over each query head, or over all of them together if its gain has that many channels."""
    k_norm: Norm | None = None
    """Norm of the key heads, as q_norm."""
    sinks: Weight | None = dataclasses.field(default=None, metadata=vector("heads"))
    """Logits [heads] that join each head's scaled scores in the softmax: a key that has no value (gpt-oss)."""

    reads: ClassVar = Value.PROJECTED
    writes: ClassVar = Value.ATTENDED

    @size
    def width(self) -> int:
        """Channels of ATTENDED."""
        return self.heads * self.head_dim

    @size
    def values_end(self) -> int:
        """Channels of PROJECTED up to the end of v."""
        return (self.heads + 2 * self.kv_heads) * self.head_dim

    @size
    def projected(self) -> int:
        """Channels of PROJECTED."""
        return self.values_end + (self.width if self.attention_gate else 0)

    @kept
    def keys(self) -> Kept:
        """The key of each position, after its norm and rotation."""
        return Kept((self.kv_heads, self.head_dim))

    @kept
    def values(self) -> Kept:
        """The value of each position."""
        return Kept((self.kv_heads, self.head_dim))


@dataclass(frozen=True)
class LatentKeep:
    """Appends the position's latent to the layer's cache: the first `rank` channels of PROJECTED after `norm`, then its
    other channels, rotated.
    """

    rank: int
    norm: Norm
    rotary: Rotary

    reads: ClassVar = Value.PROJECTED
    writes: ClassVar = Value.PROJECTED

    @size
    def channels(self) -> int:
        """Channels of a latent, and of PROJECTED."""
        return self.rank + self.rotary.channels

    @kept
    def latents(self) -> Kept:
        """The latent of each position."""
        return Kept((self.channels,))


@dataclass(frozen=True)
class LatentAttend:
    """Causal attention to the cached latents, which are keys and values of all heads. A head's query is its part of
    ABSORBED, then its channels of QUERIES that rotate. Its row of ATTENDED [heads, rank] is softmax(scale q k^T) times
    the first `rank` channels of the latents k (DeepSeek-V2, arXiv 2405.04434).
    """

    heads: int
    rank: int
    still: int
    """Number of the first channels of a head's QUERIES, which do not rotate."""
    scale: float
    rotary: Rotary

    reads: ClassVar = Value.ABSORBED
    writes: ClassVar = Value.ATTENDED

    @size
    def rotating(self) -> int:
        """Channels of a head that rotate."""
        return self.rotary.channels


@dataclass(frozen=True)
class OutputNorm:
    """RMSNorm of a module's OUTPUT, in place."""

    norm: Norm

    reads: ClassVar = Value.OUTPUT
    writes: ClassVar = Value.OUTPUT


@dataclass(frozen=True)
class SharedExpert:
    """An MLP that every token uses. Its result is added to OUTPUT, times sigmoid(gate . STREAM) if there is a gate."""

    products: tuple[Product, ...]
    """Products of the MLP, in order; the first reads STREAM."""
    gate: Matrix | None = None
    """One row [1, hidden_size], times the stream after the norm of the first product."""

    reads: ClassVar = Value.STREAM
    writes: ClassVar = Value.OUTPUT


@dataclass(frozen=True)
class DeltaNet:
    """Gated delta rule (Yang et al., arXiv 2412.06464); laneformer/blocks/delta_net.py has the equations. PROJECTED
    holds for each key head q, k [key_dim], then v of all its value heads, then z of all of them [value_dim each].
    After that it holds for each key head b of its value heads, then a of them. The result is ATTENDED
    [value_heads, value_dim].
    """

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    convolution: Weight
    """Taps [channels of q, then k, then v; tokens] of the convolution, the oldest token first; small."""
    decay: Weight = dataclasses.field(metadata=vector("value_heads"))
    """Logarithms of the rates of decay [value_heads]."""
    step: Weight = dataclasses.field(metadata=vector("value_heads"))
    """Vector [value_heads] added to a."""
    norm: Norm
    """Norm of each head's result, before the gate z."""
    unit_eps: float
    """Number added to the squared lengths of q and k, whose roots divide them."""

    reads: ClassVar = Value.PROJECTED
    writes: ClassVar = Value.ATTENDED

    @size
    def ratio(self) -> int:
        """Value heads of one key head."""
        return self.value_heads // self.key_heads

    @size
    def width(self) -> int:
        """Channels of ATTENDED."""
        return self.value_heads * self.value_dim

    @size
    def head_channels(self) -> int:
        """Channels of the convolution that one key head has: q, k and v."""
        return 2 * self.key_dim + self.ratio * self.value_dim

    @size
    def channels(self) -> int:
        """Channels of the convolution."""
        return self.key_heads * self.head_channels

    @size
    def taps(self) -> int:
        """Tokens that the convolution reads."""
        return self.convolution.elements // self.channels

    @size
    def head_rows(self) -> int:
        """Channels of PROJECTED that one key head has: q, k, v and z."""
        return self.head_channels + self.ratio * self.value_dim

    @size
    def steps_begin(self) -> int:
        """First channel of PROJECTED that holds b and a."""
        return self.key_heads * self.head_rows

    @size
    def projected(self) -> int:
        """Channels of PROJECTED."""
        return self.steps_begin + 2 * self.value_heads

    @size
    def head_tiles(self) -> int:
        """Tiles of 16 rows that the channels of one value head take."""
        return (self.value_dim + 15) // 16

    @size
    def delta_width(self) -> int:
        """Channels of all value heads of a key head, in whole tiles of 16."""
        return 16 * self.ratio * self.head_tiles

    @size
    def stretch_floats(self) -> int:
        """Floats of ENTRIES entries of a key head: keys, deltas and decays."""
        return ENTRIES * (self.key_dim + self.delta_width + self.ratio)

    @size
    def ring(self) -> int:
        """Positions whose inputs of the convolution are kept."""
        return self.taps - 1 + ENTRIES

    @kept
    def base(self) -> Kept:
        """For each key head, the position up to which `state` contains all earlier positions, a multiple of ENTRIES."""
        return Kept((self.key_heads,), KeptDtype.INT32, fixed=True)

    @kept
    def entries(self) -> Kept:
        """Keys, deltas and decays of 2 * ENTRIES positions from `base` on (custom_calls/cpu/ops/delta_net.cc)."""
        return Kept((self.key_heads, 2 * self.stretch_floats), KeptDtype.FLOAT32, fixed=True)

    @kept
    def inputs(self) -> Kept:
        """The newest inputs of the convolution, a ring with position p at p modulo its size."""
        return Kept((self.key_heads, self.ring, self.head_channels), fixed=True)

    @kept
    def state(self) -> Kept:
        """The transposed matrices of each key head's value heads, in tiles of 16 rows."""
        return Kept((self.key_heads, self.delta_width // 16, self.key_dim, 16), KeptDtype.FLOAT32, fixed=True)


@dataclass(frozen=True)
class RootRoute:
    """SigmoidRoute without groups whose scores are sqrt(softplus(logit)). A table may choose the experts instead, by
    the token's id (DeepSeek-V4).
    """

    matrix: Matrix
    """Router [experts, hidden_size]."""
    used: int
    """Number of experts to choose."""
    normalized: bool
    """Shares are the chosen scores divided by their sum. False: they are the scores."""
    norm: Norm | None
    correction: Weight | None
    """Vector [experts] added to the scores for the choice; shares are computed without it."""
    factor: float
    """Factor on the shares."""
    by_token: Weight | None
    """Table of the experts of each token [vocabulary, used]; small. None: the scores choose."""

    reads: ClassVar = Value.STREAM
    writes: ClassVar = Value.ROUTES


@dataclass(frozen=True)
class GatherStreams:
    """Computes STREAM as the sum of the residual streams, each times its share in MIXTURE = mix STREAMS / rms(STREAMS).
    The other rows of MIXTURE decide how the module's OUTPUT joins the streams, where the schedule adds it.
    laneformer/blocks/streams.py has the equations.
    """

    count: int
    """Number of residual streams."""
    mix: Matrix
    """Matrix [2 count + count^2, count * hidden_size] of a module, or [count, count * hidden_size] of the head."""
    factors: Weight
    """Factors on the rows of MIXTURE: one for reading, one for writing, one for the matrix between the streams."""
    offsets: Weight
    """Vector added to the rows of MIXTURE."""
    eps: float
    """Number added to the shares, to the matrix between the streams and to the sums that divide it."""
    norm_eps: float
    """Number added to the mean square of STREAMS."""
    iterations: int
    """Sinkhorn iterations on the matrix between the streams, which make its rows and columns sum to 1."""

    reads: ClassVar = Value.STREAMS
    writes: ClassVar = Value.STREAM


@dataclass(frozen=True)
class EntrySize:
    """Size of cache entries that summarize a window of several positions each."""

    channels: int
    """Channels of an entry."""
    ratio: int
    """Positions in a window."""
    overlaps: bool
    """An entry also contains the positions of the window before."""

    @size
    def width(self) -> int:
        """Channels of one position's vectors."""
        return self.channels * (2 if self.overlaps else 1)

    @size
    def earlier(self) -> int:
        """Largest number of earlier positions that share an entry with a position."""
        return self.ratio * (2 if self.overlaps else 1) - 1

    @size
    def tail(self) -> int:
        """Positions whose vectors and gates are kept until their entries are complete."""
        return self.earlier + ENTRIES


@dataclass(frozen=True)
class Compressor(EntrySize):
    """Computes cache entries; laneformer/blocks/compressor.py has the equations. From channel `first` of PROJECTED on
    are the position's vectors, then as many gates. Where windows overlap, the first half of each is for the next
    window's entry.
    """

    first: int
    """First channel of PROJECTED that is read."""
    biases: Weight
    """Biases [ratio, width] of the gates; small."""
    norm: Norm
    """Norm of an entry."""
    rotary: Rotary
    """Rotation of an entry's last channels, by the first position of its window."""


@dataclass(frozen=True)
class CompressedKeep:
    """Appends the position's vector to the layer's cache: the first `channels` of PROJECTED after `norm`, the last of
    them rotated. It also appends the entries that this position completes.
    """

    channels: int
    """Channels of a position's vector."""
    norm: Norm
    """Norm of that vector."""
    rotary: Rotary
    """Rotation of its last channels."""
    entries: Compressor | None
    """Entries that summarize windows of positions; None: the layer has none."""
    keys: Compressor | None
    """Keys by which the index chooses entries, one for each entry; None: the layer has no index."""

    reads: ClassVar = Value.PROJECTED
    writes: ClassVar = Value.PROJECTED

    @kept
    def base(self) -> Kept | None:
        """The first position whose vectors and gates may still be discarded."""
        return Kept((1,), KeptDtype.INT32, fixed=True) if self.entries else None

    @kept
    def positions(self) -> Kept:
        """The vector of each position."""
        return Kept((self.channels,))

    @kept
    def compressed(self) -> Kept | None:
        """The entries."""
        return Kept((self.entries.channels,), every=self.entries.ratio) if self.entries else None

    @kept
    def compressed_tail(self) -> Kept | None:
        """Vectors and gates of the newest positions until their entries are complete, a ring as in DeltaNet."""
        return (
            Kept((self.entries.tail, 2 * self.entries.width), KeptDtype.FLOAT32, fixed=True) if self.entries else None
        )

    @kept
    def index_keys(self) -> Kept | None:
        """The keys of the entries."""
        return Kept((self.keys.channels,), every=self.keys.ratio) if self.keys else None

    @kept
    def index_keys_tail(self) -> Kept | None:
        """Vectors and gates of the newest positions, for the keys."""
        return Kept((self.keys.tail, 2 * self.keys.width), KeptDtype.FLOAT32, fixed=True) if self.keys else None


@dataclass(frozen=True)
class Index:
    """Chooses the `most` entries with the largest sum over the heads of weight * relu(query . key), of equal ones the
    lowest numbers. The queries are INDEX, rotated; the weights are in PROJECTED.
    """

    heads: int
    """Number of heads."""
    channels: int
    """Channels of a query and of a key."""
    first: int
    """Channel of PROJECTED that is the first head's weight."""
    most: int
    """Largest number of entries to choose."""


@dataclass(frozen=True)
class CompressedAttend:
    """Attention to the cached vectors of the newest positions and to the entries, which are keys and values of all
    heads. A head's query is its part of QUERIES, divided by its root mean square and rotated; its result is rotated
    back (DeepSeek-V4).
    """

    heads: int
    """Number of query heads."""
    head_dim: int
    """Channels of a head."""
    window: int
    """Number of newest positions that a query attends to, its own included."""
    ratio: int | None
    """Positions in an entry's window; None: the layer has no entries."""
    norm_eps: float
    """Number added to the mean square of a query."""
    scale: float
    """Factor on the scores."""
    rotary: Rotary
    """Rotation of a head's last channels."""
    sinks: Weight = dataclasses.field(metadata=vector("heads"))
    """Logits [heads] that join each head's scaled scores, as in Attend."""
    index: Index | None
    """The choice of the entries that a query attends to; None: all complete ones."""

    reads: ClassVar = Value.QUERIES
    writes: ClassVar = Value.ATTENDED

    @size
    def width(self) -> int:
        """Channels of ATTENDED."""
        return self.heads * self.head_dim


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
"""The ops that the decode kernel on GPUs computes."""
Op = GpuOp
"""The ops that the decode kernel on CPUs computes. Only backend xla computes an op of this file that is not here."""


def without_kernel(ops: "DecoderOps", kinds: UnionType = Op) -> str | None:
    """The first part of a model that a kernel with these kinds of ops cannot compute, and the remedy; None if it can
    compute the whole model.
    """
    for n, layer in enumerate(ops.layers):
        for op in layer.ops:
            if not isinstance(op, kinds):
                return f"it has no {trace_name(op)}, the block of layer {n}: use backend xla"
            if isinstance(op, Attend) and op.rotary and op.rotary.factor != 1 and 0.0 in op.rotary.frequencies:
                return f"it does not scale some channels of a head by {op.rotary.factor:g}: use backend xla"
    return None


def kept_by(op: Op) -> dict[str, Kept]:
    """The arrays that an op keeps between tokens, by name, in the order in which its class has them."""
    members = (member for base in reversed(type(op).__mro__) for member in vars(base).items())
    arrays = {name: getattr(op, name) for name, member in members if isinstance(member, kept)}
    return {name: array for name, array in arrays.items() if array is not None}


def products_of(op: Op) -> tuple[Product, ...]:
    """The products that an op contains, in the order in which they are computed."""
    return op.products if isinstance(op, SharedExpert) else (op,) if isinstance(op, Product) else ()


def trace_name(op: Op | type[Op]) -> str:
    """The name of an op in traces: a product's own name, or that of its class."""
    if isinstance(op, Product):
        return op.name.name.lower()
    kind = op if isinstance(op, type) else type(op)
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", kind.__name__).lower()


TRACE_NAMES = (*(name.name.lower() for name in ProductName), *map(trace_name, get_args(Op)[1:]))
"""Names of all ops in traces, in the order of their numbers: each ProductName, then the other kinds of Op."""


@dataclass(frozen=True)
class Module:
    """The ops of a lane between two times of the schedule, from STREAM to OUTPUT."""

    ops: tuple[Op, ...]
    sum_norm: Norm | None = None
    """RMSNorm, where the schedule adds it, of the sum over all lanes that OUTPUT completes; lanes share its gain."""

    @property
    def edges(self) -> int:
        """Number of results that all workers of a lane wait for: one for each op and one for the norm of the sum."""
        return len(self.ops) + (self.sum_norm is not None)


@dataclass(frozen=True)
class Layer:
    """The two modules of a layer."""

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
    """How the lanes compute logits. ModelConfig.lm_head_type has the same names."""

    REPLICATE = 0
    """One matrix times the mean of the lanes' normed streams, or times the norm of their sum."""
    LANE = 1
    """A matrix times the normed streams of all lanes end to end; each lane has its columns [vocab, hidden_size]."""
    VOCAB_PARALLEL = 2
    """Each lane has the rows of its slice of the vocabulary."""


@dataclass(frozen=True)
class Head:
    """Logits from the streams after the last module."""

    kind: HeadKind
    """How the lanes share the matrix."""
    norm: Norm
    """Final norm of the streams."""
    norm_of_sum: bool
    """HeadKind.REPLICATE: the norm of the sum over the lanes is read, instead of the mean of the lanes' norms."""
    weight: Weight
    """Matrix of one lane, with the shape of its HeadKind; the embedding table if the two are tied."""
    gather: GatherStreams | None = None
    """How the head reads several residual streams; then each module begins with GatherStreams too."""
    softcap: float | None = None
    """The logits are softcap tanh(logits / softcap); None: unchanged."""


@dataclass(frozen=True)
class DecoderOps:
    """All ops of a decode step. A row of the embedding table becomes every lane's stream, the modules of the layers run
    in the order of the schedule, the head computes logits.
    """

    lanes: int
    """Number of lanes."""
    hidden_size: int
    """Channels of a stream."""
    vocab_size: int
    """Tokens in the vocabulary."""
    context: int
    """Largest number of positions."""
    embedding: Weight
    """Embedding table [vocab_size, hidden_size], which all lanes share."""
    embedding_multiplier: float
    """Factor on its rows."""
    layers: tuple[Layer, ...]
    head: Head
