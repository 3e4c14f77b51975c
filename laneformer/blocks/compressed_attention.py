"""Attention of every lane's own heads to the newest positions and to compressed entries (DeepSeek-V4).

Shape letters as in laneformer/model.py, and: k channels of a head, r channels of the query rank, e entries, p newest
positions, i query heads of the indexer, c channels of the indexer, g groups of heads, o rows of a group's projection.

One vector per position, norm(wkv h) with its last channels rotated, is key and value of all heads. A query attends to
the newest `window` positions, to complete entries (laneformer/blocks/compressor.py), and to one sink per head. Where
windows overlap, an indexer chooses among the entries. As values are rotated like keys, each head's result is rotated
back. All lanes have the same positions and entries, each lane in its own copy.
"""

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P

from laneformer import ops
from laneformer.blocks.attention import keys_seen
from laneformer.blocks.block import (
    Group,
    Held,
    Initial,
    KeptArray,
    Memory,
    Mixer,
    Plain,
    Weight,
    Weights,
    attention_weight,
    hold,
    weight_of_op,
    within,
)
from laneformer.blocks.compressor import Compressor
from laneformer.blocks.norm import rms_norm
from laneformer.blocks.rotary import Rotations, Tables, rotary_op, rotate_last
from laneformer.config import CompressedAttentionOptions
from laneformer.errors import InputError
from laneformer.ops import Blocks, Matrix, Norm, Op, Product, ProductName, Value
from laneformer.precision import Precision, widen
from laneformer.quantized import Quantized

QUERIES = 64  # largest number of queries that are computed together
SCORES = 2**24  # largest number of scores in memory, over all heads


class CompressedAttention(Mixer):
    """o[l] = wo_b[l] y[l], where y[l] joins each group's wo_a[l] times the results of its heads."""

    options: CompressedAttentionOptions
    q_norm: Plain
    kv_norm: Plain
    sinks: Plain
    wo_a: Held
    wo_b: Held

    def __init__(self, weights: Weights, options: CompressedAttentionOptions, precision: Precision):
        parts = {name: within(weights, name) for name in ("compressor", "indexer", "index_compressor")}
        super().__init__({name: weight for name, weight in weights.items() if "." not in name}, options, precision)
        if options.ratio:
            self.compressor = Compressor(parts["compressor"], options, options.head_dim, precision)
        if options.overlaps:
            self.indexer = Indexer(parts["indexer"], options, precision)
            own = parts["index_compressor"]
            self.index_compressor = Compressor(own, options, options.index_head_dim, precision)

    def __call__(
        self, h_lbsd: jax.Array, rotary: Rotations, memory: Memory | None = None, segments_bs: jax.Array | None = None
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """h [l, b, s, d] -> o [l, b, s, d], and the arrays that `state` lists. Raises InputError for segments, because
        an entry may combine positions of several documents.
        """
        if segments_bs is not None:
            raise InputError("compressed attention does not support segments; put one document in each sequence")
        options, dtype, turns = self.options, self.precision.compute, rotary[self.options.rotary]
        start = jnp.int32(0) if memory is None else memory.start
        rank_lbsr = rms_norm(self._product("lbsd,rd->lbsr", h_lbsd, "wq_a"), self.q_norm[...], options.norm_eps)
        q = self._product("lbsr,lkr->lbsk", rank_lbsr, "wq_b").reshape(*h_lbsd.shape[:3], options.heads, -1)
        q = q * jax.lax.rsqrt(jnp.mean(q * q, -1, keepdims=True) + options.norm_eps)
        q_lbshk = rotate_last(q, turns).astype(dtype)
        newest = rms_norm(self._product("lbsd,kd->lbsk", h_lbsd, "wkv"), self.kv_norm[...], options.norm_eps)
        newest = rotate_last(newest[..., None, :], turns)[..., 0, :]
        kept = {}
        if memory is not None:
            old = memory.arrays["positions"]
            newest = jax.lax.dynamic_update_slice_in_dim(old, newest.astype(old.dtype), start, 2)
            kept["positions"] = newest
        entries = index = None
        if options.ratio:
            entries, own = self.compressor(h_lbsd, memory, "entries")
            kept |= own
        if options.overlaps:
            keys, own = self.index_compressor(h_lbsd, memory, "index_keys")
            kept |= own
            if keys.shape[2] > options.index_topk:
                index = (*self.indexer(h_lbsd, rank_lbsr, turns), keys)
        a = self._attend(q_lbshk, newest.astype(dtype), entries, index, start)
        cos, sin = turns
        a = rotate_last(a, (cos, -sin))
        a = a.reshape(*a.shape[:3], options.o_groups, -1)
        w = self.wo_a[...]
        w = widen(w, a) if isinstance(w, Quantized) else w
        w_lgoi = w.reshape(len(a), options.o_groups, options.o_lora_rank, -1)
        y = self.precision.block_einsum("lbsgi,lgoi->lbsgo", a, w_lgoi)
        y = self.precision.widened(checkpoint_name(y, "product")).reshape(*a.shape[:3], -1)
        return self.precision.block_einsum("lbso,ldo->lbsd", y, self.wo_b[...]), kept

    def _product(self, formula: str, x: jax.Array, name: str) -> jax.Array:
        y = self.precision.block_einsum(formula, x, getattr(self, name)[...])
        return self.precision.widened(checkpoint_name(y, "product"))

    def _attend(
        self,
        q_lbshk: jax.Array,
        newest_lbtk: jax.Array,
        entries_lbek: jax.Array | None,
        index: tuple[jax.Array, jax.Array, jax.Array] | None,
        start: jax.Array,
    ) -> jax.Array:
        """The heads' results, float32 [l, b, s, h, k], computed for a few queries at a time so that the scores fit in
        memory. index: what `chosen_entries` needs, its queries, weights and keys; None: all entries are chosen.
        """
        options, (lanes, batch, tokens) = self.options, q_lbshk.shape[:3]
        count = 0 if entries_lbek is None else entries_lbek.shape[2]
        heads = max(options.heads, options.index_heads if index else 0)
        each = lanes * batch * heads * (count + options.window + QUERIES)
        size = max(1, min(QUERIES, tokens, SCORES // each))
        blocks = -(-tokens // size)

        def cut(x: jax.Array) -> jax.Array:
            x = jnp.pad(x, [(0, 0), (0, 0), (0, blocks * size - tokens), *[(0, 0)] * (x.ndim - 3)])
            return jnp.moveaxis(x.reshape(lanes, batch, blocks, size, *x.shape[3:]), 2, 0)

        positions = newest_lbtk.shape[2]
        reach = min(size + options.window - 1, positions)

        def block(_: tuple[()], inputs: tuple[jax.Array, ...]) -> tuple[tuple[()], jax.Array]:
            first, q, *of_index = inputs
            at = start + first + jnp.arange(size)
            oldest = jnp.clip(at[0] - options.window + 1, 0, positions - reach)
            keys = [jax.lax.dynamic_slice_in_dim(newest_lbtk, oldest, reach, 2)]
            behind = at[:, None] - (oldest + jnp.arange(reach))
            seen = [jnp.broadcast_to((behind >= 0) & (behind < options.window), (lanes, batch, size, reach))]
            if entries_lbek is not None:
                closed = jnp.broadcast_to(closed_before(at, count, options.ratio), (lanes, batch, size, count))
                if index is not None:
                    index_q, index_weights = of_index
                    closed = chosen_entries(index_q, index_weights, index[2], closed, options.index_topk)
                keys, seen = [*keys, entries_lbek], [*seen, closed]
            return (), self._of_keys(q, keys, seen)

        inputs = (jnp.arange(blocks) * size, *map(cut, (q_lbshk, *(index[:2] if index else ()))))
        if blocks == 1:
            return block((), jax.tree.map(lambda x: x[0], inputs))[1]
        a = jnp.moveaxis(jax.lax.scan(block, (), inputs)[1], 0, 2)
        return a.reshape(lanes, batch, -1, *a.shape[4:])[:, :, :tokens]

    def _of_keys(self, q_lbshk: jax.Array, keys: list[jax.Array], seen: list[jax.Array]) -> jax.Array:
        """The heads' results for given keys, float32 [l, b, s, h, k].

        keys: arrays [l, b, t, k], not joined, to avoid copies. seen: for each array, whether each query attends to each
        key, bool [l, b, s, t].
        """
        scores = jnp.concatenate([_product("lbshk,lbtk->lbhst", q_lbshk, own) for own in keys], -1)
        scores = jnp.where(jnp.concatenate(seen, -1)[:, :, None], scores * self.options.head_dim**-0.5, -jnp.inf)
        sinks = self.sinks[...].astype(jnp.float32)[:, None, :, None, None]
        top = jnp.maximum(scores.max(-1, keepdims=True), sinks)
        p = jnp.exp(scores - top)
        p = p / (p.sum(-1, keepdims=True) + jnp.exp(sinks - top))
        parts = jnp.split(p.astype(keys[0].dtype), [own.shape[2] for own in keys[:-1]], -1)
        results = [_product("lbhst,lbtk->lbshk", part, own) for part, own in zip(parts, keys, strict=True)]
        return sum(results[1:], results[0])

    @staticmethod
    def table(options: CompressedAttentionOptions, path: str) -> dict[str, Weight]:
        l, d, heads, size = options.num_lanes, options.hidden_size, options.heads, options.head_dim
        rank, rows = options.q_lora_rank, options.o_groups * options.o_lora_rank
        found: dict[str, Weight] = {}

        def add(
            name: str, shape: tuple[int, ...], spec: P, initial: Initial = "normal", dtype: str | None = None
        ) -> None:
            group: Group = "vector" if len(shape) == 1 or name == "sinks" else "matrix"
            found[f"{path}.{name}"] = attention_weight(f"{path}.{name}", shape, spec, initial, group, dtype=dtype)

        shared = P(None, "data")
        add("wq_a", (rank, d), shared)
        add("q_norm", (rank,), P(None), "ones")
        add("wq_b", (l, heads * size, rank), P("lane", None, "data"))
        add("wkv", (size, d), shared)
        add("kv_norm", (size,), P(None), "ones")
        add("sinks", (l, heads), P("lane", None), "zeros", "float32")
        if options.ratio:
            found |= Compressor.table(options, f"{path}.compressor", size)
        if options.overlaps:
            add("indexer.wq", (options.index_heads * options.index_head_dim, rank), shared)
            add("indexer.weights", (options.index_heads, d), shared)
            found |= Compressor.table(options, f"{path}.index_compressor", options.index_head_dim)
        add("wo_a", (l, rows, heads * size // options.o_groups), P("lane", None, "data"))
        add("wo_b", (l, d, rows), P("lane", "data", None), "output")
        return found

    @staticmethod
    def state(options: CompressedAttentionOptions) -> tuple[KeptArray, ...]:
        """The vector of every position, and the arrays of the compressors."""
        size, lanes = (options.head_dim,), options.num_lanes
        found: tuple[KeptArray, ...] = (
            KeptArray(name="positions", num_lanes=lanes, shape=size, window=options.window),
        )
        if options.ratio:
            most = options.index_topk if options.overlaps else None
            found += Compressor.state(options, "entries", options.head_dim, most)
        if options.overlaps:
            found += Compressor.state(options, "index_keys", options.index_head_dim, None)
        return found

    @staticmethod
    def ops(options: CompressedAttentionOptions, path: str, norm: Norm | None) -> tuple[Op, ...]:
        table, groups = CompressedAttention.table(options, path), options.o_groups

        def matrices(*names: str) -> tuple[Matrix, ...]:
            return tuple(Matrix(weight_of_op(table, f"{path}.{name}")) for name in names)

        def inner(name: str) -> Norm:
            return Norm(weight_of_op(table, f"{path}.{name}"), options.norm_eps)

        def of_rank(name: ProductName, weight: str, writes: Value) -> Product:
            return Product(name, matrices(weight), reads=Value.HIDDEN, writes=writes, norm=inner("q_norm"))

        rotary, size = rotary_op(options.rotary), options.head_dim
        entries = index_keys = index = None
        projected = [*matrices("wkv")]
        queries = [of_rank(ProductName.QUERIES, "wq_b", Value.QUERIES)]
        first = size  # channel of PROJECTED
        if options.ratio:
            entries = Compressor.op(options, f"{path}.compressor", size, first)
            projected += matrices("compressor.wkv", "compressor.wgate")
            first += 2 * entries.width
        if options.overlaps:
            each = options.index_head_dim
            index_keys = Compressor.op(options, f"{path}.index_compressor", each, first)
            index = ops.Index(options.index_heads, each, first + 2 * index_keys.width, options.index_topk)
            projected += matrices("index_compressor.wkv", "index_compressor.wgate", "indexer.weights")
            queries.append(of_rank(ProductName.INDEX, "indexer.wq", Value.INDEX))
        wo_a = weight_of_op(table, f"{path}.wo_a")
        of_groups = dataclasses.replace(
            wo_a,
            path=f"{path}.wo_a_groups",
            shape=(options.o_lora_rank, wo_a.shape[1]),
            experts=groups,
            cut_from=wo_a.path,
        )
        return (
            Product(ProductName.LATENTS, (*projected,), reads=Value.STREAM, writes=Value.PROJECTED, norm=norm),
            Product(ProductName.QUERY_RANK, matrices("wq_a"), reads=Value.STREAM, writes=Value.HIDDEN, norm=norm),
            *queries,
            ops.CompressedKeep(size, inner("kv_norm"), rotary, entries, index_keys),
            ops.CompressedAttend(
                heads=options.heads,
                head_dim=size,
                window=options.window,
                ratio=options.ratio or None,
                norm_eps=options.norm_eps,
                scale=size**-0.5,
                rotary=rotary,
                sinks=weight_of_op(table, f"{path}.sinks"),
                index=index,
            ),
            Product(
                ProductName.GROUPS,
                (Matrix(of_groups),),
                reads=Value.ATTENDED,
                writes=Value.PROJECTED,
                blocks=Blocks(groups, wo_a.shape[1]),
            ),
            Product(ProductName.OUT, matrices("wo_b"), reads=Value.PROJECTED, writes=Value.OUTPUT),
        )

    @staticmethod
    def context_flops(options: CompressedAttentionOptions, length: int) -> float:
        """Scores and weighted sums over the window and the entries, and the indexer's scores."""
        seen = keys_seen(length, options.window)
        entries = keys_seen(length) / options.ratio if options.ratio else 0.0
        index = 2 * options.index_heads * options.index_head_dim * entries if options.overlaps else 0.0
        chosen = min(entries, options.index_topk) if options.overlaps else entries
        return options.num_lanes * (4 * options.heads * options.head_dim * (seen + chosen) + index)


class Indexer(nnx.Module):
    """Computes what chooses the entries of each token: rotated queries [l, b, s, i, c] and the weights of their heads
    [l, b, s, i].
    """

    wq: Held
    weights: Held

    def __init__(self, weights: Weights, options: CompressedAttentionOptions, precision: Precision):
        for name, weight in weights.items():
            setattr(self, name, hold(weight))
        self.options, self.precision = options, precision

    def __call__(self, h_lbsd: jax.Array, rank_lbsr: jax.Array, turns: Tables) -> tuple[jax.Array, jax.Array]:
        options, einsum = self.options, self.precision.einsum
        q = einsum("lbsr,kr->lbsk", rank_lbsr, self.wq[...]).reshape(*h_lbsd.shape[:3], options.index_heads, -1)
        weights = einsum("lbsd,id->lbsi", h_lbsd, self.weights[...]).astype(jnp.float32)
        scale = options.index_head_dim**-0.5 * options.index_heads**-0.5
        return rotate_last(q, turns).astype(self.precision.compute), weights * scale


def closed_before(at_s: jax.Array, count: int, ratio: int) -> jax.Array:
    """Whether each of `count` entries covers only positions up to the query's own, bool [s, e]. at: positions of the
    queries, int [s].
    """
    return ratio * (jnp.arange(count) + 1) <= at_s[:, None] + 1


def chosen_entries(
    q_lbsic: jax.Array, weights_lbsi: jax.Array, keys_lbec: jax.Array, closed_lbse: jax.Array, count: int
) -> jax.Array:
    """Whether an entry is among the `count` closed ones with the largest sums over the heads of weight * relu(q . k),
    bool [l, b, s, e]. Of equal sums, the entry with the lower number is chosen.
    """
    scores = jax.nn.relu(_product("lbsic,lbec->lbsie", q_lbsic, keys_lbec))
    scores = jnp.einsum("lbsie,lbsi->lbse", scores, weights_lbsi, precision=jax.lax.Precision.HIGHEST)
    scores = jnp.where(closed_lbse, scores, -jnp.inf)
    best = jax.lax.top_k(jax.lax.stop_gradient(scores), count)[1]
    chosen = jnp.put_along_axis(jnp.zeros(scores.shape, bool), best, True, -1, inplace=False)
    return chosen & closed_lbse


def _product(formula: str, x: jax.Array, y: jax.Array) -> jax.Array:
    """The einsum in float32; float32 operands are never rounded to TF32."""
    exact = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    return jnp.einsum(formula, x, y, precision=exact, preferred_element_type=jnp.float32)
