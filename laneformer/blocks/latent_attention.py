"""Multi-head latent attention of every lane over its own heads (DeepSeek-V2, arXiv 2405.04434, section 2.1). Shape
letters as in laneformer/model.py, and: c channels of the vector that keys and values are made of, e those of a head's
queries and keys that are not rotated, r those that are, g those of a head's values, i any.

All lanes read the same matrices that lead to the vectors, and each makes both vectors of its own stream.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P

from laneformer.blocks.attention import keys_seen
from laneformer.blocks.block import Block, KeptArray, Memory, Weight, attention_weight, hold, weight_of_op
from laneformer.blocks.norm import rms_norm
from laneformer.blocks.rotary import rotate
from laneformer.blocks.tiled_attention import attend
from laneformer.config import LatentAttentionOptions
from laneformer.ops import Blocks, LatentAttend, LatentKeep, Matrix, Norm, Op, Product, ProductName, Rotary, Value
from laneformer.precision import Precision, widen
from laneformer.quantized import Quantized


class LatentAttention(Block):
    """With x = norm(wkv_a h) [c] and z = rotate(the other rows of wkv_a, times h) [r], both the same for all heads:
    keys of a head are [wk x, z], its values wv x, where wkv_b is wk and wv of each head. Queries are wq_b norm(wq_a h),
    or wq h, their last r channels rotated.

    Two forms of one function: keys and values are made where all positions are there, as in training. With a cache,
    which has [x, z] alone, wk multiplies the queries instead of x, and wv the attended x: keys and values of earlier
    positions are never made. A prompt uses that form too: it takes 2 c + r instead of e + r + g multiply-adds for each
    query and key (1,088 and 320 in DeepSeek-V3), and the other form keys and values of all its positions and heads in
    memory, made again for each part of a prompt.
    """

    def __init__(self, weights: dict[str, jax.Array], options: LatentAttentionOptions, precision: Precision):
        for name, weight in weights.items():
            setattr(self, name, hold(weight))
        self.options, self.precision = options, precision

    def __call__(self, h_lbsd, rotary, memory: Memory | None = None, segments_bs=None):
        """h [l, b, s, d] -> o [l, b, s, d] and what to keep; segments: see `Laneformer.__call__`.

        memory: the cache, latents [l, b, t, c + r] filled before position `start`, which is that of the
        first query.
        """
        dtype, options = self.precision.compute, self.options
        q_lbshe, q_lbshr = jnp.split(self._queries(h_lbsd), [options.qk_nope_head_dim], -1)
        q_lbshr = rotate(q_lbshr, rotary)
        x_lbsc, z_lbsr = self._latents(h_lbsd, rotary)
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
        """[l, b, s, h, e + r], not rotated."""
        if self.options.q_lora_rank is None:
            q = self._product("lbsd,lid->lbsi", h_lbsd, "wq")
        else:
            y = self._product("lbsd,id->lbsi", h_lbsd, "wq_a")
            y = rms_norm(y, self.q_norm[...], self.options.latent_norm_eps)
            q = self._product("lbsj,lij->lbsi", y, "wq_b")
        return q.reshape(*q.shape[:3], self.options.heads, -1)

    def _latents(self, h_lbsd: jax.Array, rotary) -> tuple[jax.Array, jax.Array]:
        """x [l, b, s, c] after its norm, z [l, b, s, r] after the rotation."""
        y = self._product("lbsd,id->lbsi", h_lbsd, "wkv_a")
        x_lbsc, z_lbsr = jnp.split(y, [self.options.kv_lora_rank], -1)
        x_lbsc = rms_norm(x_lbsc, self.kv_norm[...], self.options.latent_norm_eps)
        return x_lbsc, rotate(z_lbsr[..., None, :], rotary)[..., 0, :]

    def _by_head(self, h_lbsd: jax.Array) -> list[jax.Array]:
        """wk [l, h, e, c] and wv [l, h, g, c]. h: what they are used for, see `widen`."""
        w = self.wkv_b[...]
        w = widen(w, h_lbsd) if isinstance(w, Quantized) else w
        return jnp.split(w.reshape(len(w), self.options.heads, -1, w.shape[-1]), [self.options.qk_nope_head_dim], 2)

    @staticmethod
    def table(options: LatentAttentionOptions, path: str) -> dict[str, Weight]:
        l, d, heads = options.num_lanes, options.hidden_size, options.heads
        nope, rotated, values = options.qk_nope_head_dim, options.qk_rope_head_dim, options.v_head_dim
        queries, rank, found = heads * (nope + rotated), options.q_lora_rank, {}

        def add(name: str, shape: tuple[int, ...], spec: P, initial: str = "normal") -> None:
            group = "vector" if initial == "ones" else "matrix"
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
    def ops(options: LatentAttentionOptions, path: str, norm: Norm | None, rotary: Rotary) -> tuple[Op, ...]:
        table = LatentAttention.table(options, path)

        def matrix(name: str) -> Matrix:
            return Matrix(weight_of_op(table, f"{path}.{name}"))

        def inner(name: str) -> Norm:
            return Norm(weight_of_op(table, f"{path}.{name}"), options.latent_norm_eps)

        def of_heads(name: str, first: int, rows: int, transposed: bool = False) -> Matrix:
            shape = (rank, rows) if transposed else (rows, rank)
            own = {"path": f"{path}.{name}", "shape": shape, "experts": heads}
            cut = {"cut_from": f"{path}.wkv_b", "first_row": first, "transposed": transposed}
            return Matrix(dataclasses.replace(weight_of_op(table, f"{path}.wkv_b"), **own, **cut))

        rotary = Rotary(rotary.frequencies[: options.qk_rope_head_dim // 2], rotary.factor)  # the others are still
        heads, rank = options.heads, options.kv_lora_rank
        still, values = options.qk_nope_head_dim, options.v_head_dim
        stream = {"reads": Value.STREAM, "norm": norm}
        latents = Product(ProductName.LATENTS, (matrix("wkv_a"),), writes=Value.PROJECTED, **stream)
        if options.q_lora_rank is None:
            queries = (Product(ProductName.QUERIES, (matrix("wq"),), writes=Value.QUERIES, **stream),)
        else:
            inside = {"reads": Value.HIDDEN, "writes": Value.QUERIES, "norm": inner("q_norm")}
            queries = (
                Product(ProductName.QUERY_RANK, (matrix("wq_a"),), writes=Value.HIDDEN, **stream),
                Product(ProductName.QUERIES, (matrix("wq_b"),), **inside),
            )
        return (
            latents,
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
        """Of every position the vector that keys and values are made of, after its norm, and the rotated key."""
        size = options.kv_lora_rank + options.qk_rope_head_dim
        return (KeptArray(name="latents", num_lanes=options.num_lanes, shape=(size,)),)

    @staticmethod
    def context_flops(options: LatentAttentionOptions, length: int) -> float:
        """q k^T and the weighted sum of v, without a cache: each head takes 2 (e + r) and 2 g per key."""
        each = options.qk_nope_head_dim + options.qk_rope_head_dim + options.v_head_dim
        return 2 * options.num_lanes * options.heads * each * keys_seen(length)
