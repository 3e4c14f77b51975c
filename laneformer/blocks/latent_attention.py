"""Multi-head latent attention of every lane over its own heads (DeepSeek-V2, arXiv 2405.04434, section 2.1).

Shape letters as in laneformer/model.py, and: c channels of the latent vector of keys and values, e channels of a head's
queries and keys that are not rotated, r channels that are rotated, g channels of a head's values, i any channels.

All lanes share the matrices that compute the latent vectors (one of keys and values, one of queries). Each lane
computes these vectors from its own stream.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P

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
    attention_weight,
    weight_of_op,
)
from laneformer.blocks.norm import rms_norm
from laneformer.blocks.rotary import Rotations, Tables, rotary_op, rotate
from laneformer.blocks.tiled_attention import attend
from laneformer.config import LatentAttentionOptions
from laneformer.ops import Blocks, LatentAttend, LatentKeep, Matrix, Norm, Op, Product, ProductName, Value
from laneformer.precision import widen
from laneformer.quantized import Quantized


class LatentAttention(Mixer):
    """Keys and values of all heads are computed from one latent vector per position.

    All heads share x = norm(first c rows of wkv_a h) [c] and z = rotate(last r rows of wkv_a h) [r]. A head's keys are
    [wk x, z] and its values wv x; wkv_b contains wk and wv of each head. Queries are wq_b norm(wq_a h), or wq h without
    a query rank; their last r channels are rotated.

    The function has two equivalent forms. Without a cache, as in training, it computes the keys and values of all
    positions. With a cache, which contains only [x, z], wk multiplies the queries instead of x, and wv multiplies the
    attended x; the keys and values of earlier positions are never computed. Prompts use this form too. It takes
    2 c + r instead of e + r + g multiply-adds per query and key (1,088 and 320 in DeepSeek-V3). The other form would
    hold the keys and values of all positions and heads in memory and recompute them for each part of a prompt.
    """

    options: LatentAttentionOptions
    q_norm: Plain
    kv_norm: Plain
    wkv_b: Held
    wo: Held

    def __call__(
        self, h_lbsd: jax.Array, rotary: Rotations, memory: Memory | None = None, segments_bs: jax.Array | None = None
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """h [l, b, s, d] -> o [l, b, s, d], and the latents to keep.

        memory: the cache, with latents [l, b, t, c + r] that are filled before `start`, the position of the first
        query. segments: see `Laneformer.__call__`.
        """
        dtype, options = self.precision.compute, self.options
        q_lbshe, q_lbshr = jnp.split(self._queries(h_lbsd), [options.qk_nope_head_dim], -1)
        tables = rotary[options.rotary]
        q_lbshr = rotate(q_lbshr, tables)
        x_lbsc, z_lbsr = self._latents(h_lbsd, tables)
        if memory is None:
            kept = {}
            heads = self._product("lbsc,lic->lbsi", x_lbsc, "wkv_b").reshape(*x_lbsc.shape[:3], options.heads, -1)
            k_lbshe, v_lbshg = jnp.split(heads, [options.qk_nope_head_dim], -1)
            z_lbshr = jnp.broadcast_to(z_lbsr[..., None, :], q_lbshr.shape)
            q, k = (jnp.concatenate(pair, -1).astype(dtype) for pair in ((q_lbshe, q_lbshr), (k_lbshe, z_lbshr)))
            a = attend(q, k, v_lbshg.astype(dtype), segments=segments_bs, scale=options.scale)
        else:
            latents, start = memory.arrays["latents"], memory.start
            new = jnp.concatenate([x_lbsc, z_lbsr], -1).astype(latents.dtype)
            kept = {"latents": jax.lax.dynamic_update_slice_in_dim(latents, new, start, 2)}
            k_lhec, v_lhgc = self._by_head(h_lbsd)
            q_lbshc = self.precision.einsum("lbshe,lhec->lbshc", q_lbshe, k_lhec)
            q = jnp.concatenate([q_lbshc, q_lbshr.astype(q_lbshc.dtype)], -1).astype(dtype)
            entries = kept["latents"].astype(dtype)[..., None, :]  # keys of one head, which all queries read
            a = attend(q, entries, entries[..., : options.kv_lora_rank], start=start, scale=options.scale)
            a = self.precision.einsum("lbshc,lhgc->lbshg", a, v_lhgc)
        return self.precision.block_einsum("lbsi,ldi->lbsd", a.reshape(*a.shape[:3], -1), self.wo[...]), kept

    def _product(self, formula: str, x: jax.Array, name: str) -> jax.Array:
        y = self.precision.block_einsum(formula, x, getattr(self, name)[...])
        return self.precision.widened(checkpoint_name(y, "product"))

    def _queries(self, h_lbsd: jax.Array) -> jax.Array:
        """The queries before the rotation, [l, b, s, h, e + r]."""
        if self.options.q_lora_rank is None:
            q = self._product("lbsd,lid->lbsi", h_lbsd, "wq")
        else:
            y = self._product("lbsd,id->lbsi", h_lbsd, "wq_a")
            y = rms_norm(y, self.q_norm[...], self.options.latent_norm_eps)
            q = self._product("lbsj,lij->lbsi", y, "wq_b")
        return q.reshape(*q.shape[:3], self.options.heads, -1)

    def _latents(self, h_lbsd: jax.Array, tables: Tables) -> tuple[jax.Array, jax.Array]:
        """The normed latents x [l, b, s, c] and the rotated keys z [l, b, s, r]."""
        y = self._product("lbsd,id->lbsi", h_lbsd, "wkv_a")
        x_lbsc, z_lbsr = jnp.split(y, [self.options.kv_lora_rank], -1)
        x_lbsc = rms_norm(x_lbsc, self.kv_norm[...], self.options.latent_norm_eps)
        return x_lbsc, rotate(z_lbsr[..., None, :], tables)[..., 0, :]

    def _by_head(self, h_lbsd: jax.Array) -> list[jax.Array]:
        """The matrices wk [l, h, e, c] and wv [l, h, g, c]. h: array on which the widening depends, see `widen`."""
        w = self.wkv_b[...]
        w = widen(w, h_lbsd) if isinstance(w, Quantized) else w
        return jnp.split(w.reshape(len(w), self.options.heads, -1, w.shape[-1]), [self.options.qk_nope_head_dim], 2)

    @staticmethod
    def table(options: LatentAttentionOptions, path: str) -> dict[str, Weight]:
        l, d, heads = options.num_lanes, options.hidden_size, options.heads
        nope, rotated, values = options.qk_nope_head_dim, options.qk_rope_head_dim, options.v_head_dim
        queries, rank = heads * (nope + rotated), options.q_lora_rank
        found: dict[str, Weight] = {}

        def add(name: str, shape: tuple[int, ...], spec: P, initial: Initial = "normal") -> None:
            group: Group = "vector" if initial == "ones" else "matrix"
            found[f"{path}.{name}"] = attention_weight(f"{path}.{name}", shape, spec, initial, group)

        shared, by_head = P(None, "data"), P("lane", None, "data")
        if rank is None:
            add("wq", (l, queries, d), by_head)
        else:
            add("wq_a", (rank, d), shared)
            add("q_norm", (rank,), P(None), "ones")
            add("wq_b", (l, queries, rank), by_head)
        add("wkv_a", (options.kv_lora_rank + rotated, d), shared)
        add("kv_norm", (options.kv_lora_rank,), P(None), "ones")
        add("wkv_b", (l, heads * (nope + values), options.kv_lora_rank), by_head)
        add("wo", (l, d, heads * values), P("lane", "data", None), "output")
        return found

    @staticmethod
    def ops(options: LatentAttentionOptions, path: str, norm: Norm | None) -> tuple[Op, ...]:
        table = LatentAttention.table(options, path)

        def matrix(name: str) -> Matrix:
            return Matrix(weight_of_op(table, f"{path}.{name}"))

        def inner(name: str) -> Norm:
            return Norm(weight_of_op(table, f"{path}.{name}"), options.latent_norm_eps)

        def of_heads(name: str, first: int, rows: int, transposed: bool = False) -> Matrix:
            weight = dataclasses.replace(
                weight_of_op(table, f"{path}.wkv_b"),
                path=f"{path}.{name}",
                shape=(rank, rows) if transposed else (rows, rank),
                experts=heads,
                cut_from=f"{path}.wkv_b",
                first_row=first,
                transposed=transposed,
            )
            return Matrix(weight)

        def of_stream(name: ProductName, weight: str, writes: Value) -> Product:
            return Product(name, (matrix(weight),), reads=Value.STREAM, writes=writes, norm=norm)

        rotary, heads, rank = rotary_op(options.rotary), options.heads, options.kv_lora_rank
        still, values = options.qk_nope_head_dim, options.v_head_dim
        if options.q_lora_rank is None:
            queries = [of_stream(ProductName.QUERIES, "wq", Value.QUERIES)]
        else:
            queries = [
                of_stream(ProductName.QUERY_RANK, "wq_a", Value.HIDDEN),
                Product(
                    ProductName.QUERIES,
                    (matrix("wq_b"),),
                    reads=Value.HIDDEN,
                    writes=Value.QUERIES,
                    norm=inner("q_norm"),
                ),
            ]
        return (
            of_stream(ProductName.LATENTS, "wkv_a", Value.PROJECTED),
            *queries,
            LatentKeep(rank, inner("kv_norm"), rotary),
            Product(
                ProductName.ABSORB,
                (of_heads("wk", 0, still, transposed=True),),
                reads=Value.QUERIES,
                writes=Value.ABSORBED,
                blocks=Blocks(heads, still + options.qk_rope_head_dim),
            ),
            LatentAttend(heads, rank, still, options.scale, rotary),
            Product(
                ProductName.VALUES,
                (of_heads("wv", still, values),),
                reads=Value.ATTENDED,
                writes=Value.PROJECTED,  # the next module may write HIDDEN while the last op here reads
                blocks=Blocks(heads, rank),
            ),
            Product(ProductName.OUT, (matrix("wo"),), reads=Value.PROJECTED, writes=Value.OUTPUT),
        )

    @staticmethod
    def state(options: LatentAttentionOptions) -> tuple[KeptArray, ...]:
        """The normed latent vector and the rotated key of every position."""
        size = options.kv_lora_rank + options.qk_rope_head_dim
        return (KeptArray(name="latents", num_lanes=options.num_lanes, shape=(size,)),)

    @staticmethod
    def context_flops(options: LatentAttentionOptions, length: int) -> float:
        """q k^T and the weighted sum of v, without a cache: each head takes 2 (e + r) and 2 g FLOPs per key."""
        each = options.qk_nope_head_dim + options.qk_rope_head_dim + options.v_head_dim
        return 2 * options.num_lanes * options.heads * each * keys_seen(length)
