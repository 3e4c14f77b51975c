"""Grouped-query attention of every lane over its own heads. Shape letters as in laneformer/model.py."""

from functools import partial

import jax
import numpy as np
from jax.sharding import PartitionSpec as P

from laneformer.blocks.block import Group, Held, Initial, KeptArray, Memory, Mixer, Plain, Weight, weight_of_op
from laneformer.blocks.norm import rms_norm
from laneformer.blocks.rotary import Rotations, rotary_op, rotate
from laneformer.blocks.tiled_attention import attend
from laneformer.config import AttentionOptions
from laneformer.ops import Attend, Matrix, Norm, Op, Product, ProductName, Value


class Attention(Mixer):
    """o[l] = wo[l] (attend(q[l], k[l], v[l]) * sigmoid(g[l])); without a gate, the factor sigmoid(g[l]) is absent."""

    options: AttentionOptions
    sinks: Plain
    wo: Held
    wo_bias: Plain

    def project(self, names: str, h_lbsd: jax.Array) -> list[jax.Array]:
        """The projections of h that `names` lists by letter (queries q, keys k, values v, gate g), each
        [l, b, s, heads, k]. Biases (Qwen2) and norms of q and k (Qwen3, OLMo-2) are applied if the options have them.
        """
        products = self.products([f"w{name}" for name in names], h_lbsd)
        return [self._heads(name, y) for name, y in zip(names, products, strict=True)]

    def _heads(self, name: str, y: jax.Array) -> jax.Array:
        if self.options.qkv_bias:
            bias: Plain = getattr(self, f"w{name}_bias")
            y = y + bias[:, None, None, :]
        heads = (*y.shape[:-1], -1, self.options.head_dim)
        if self.options.qk_norm is None or name not in "qk":
            return y.reshape(heads)
        y = y.reshape(heads) if self.options.qk_norm == "head" else y
        gain, plus_one = getattr(self, f"{name}_norm")[...], self.options.norm_plus_one
        return rms_norm(y, gain, self.options.norm_eps, plus_one=plus_one).reshape(heads)

    def __call__(
        self, h_lbsd: jax.Array, rotary: Rotations, memory: Memory | None = None, segments_bs: jax.Array | None = None
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """h [l, b, s, d] -> o [l, b, s, d], and the keys and values to keep.

        memory: the cache, with keys and values [l, b, t, n, k] that are filled before position `start`. segments: see
        `Laneformer.__call__`.
        """
        dtype, options = self.precision.compute, self.options
        scored = partial(attend, window=options.window, scale=options.scale, softcap=options.attn_logit_softcapping)
        q, k, v = self.project("qkv", h_lbsd)
        if self.options.rotary:
            tables = rotary[self.options.rotary]
            q, k = rotate(q, tables), rotate(k, tables)
        q = q.astype(dtype)
        sinks = self.sinks[...] if self.options.sinks else None
        if memory is None:
            kept = {}
            a = scored(q, k.astype(dtype), v.astype(dtype), segments=segments_bs, sinks=sinks)
        else:
            caches, start = memory.arrays, memory.start
            kept = {
                name: jax.lax.dynamic_update_slice_in_dim(caches[name], new.astype(caches[name].dtype), start, 2)
                for name, new in (("keys", k), ("values", v))
            }
            keys, values = (kept[name].astype(dtype) for name in ("keys", "values"))
            a = scored(q, keys, values, start=start, sinks=sinks)
        if self.options.attention_gate:
            a = a * jax.nn.sigmoid(*self.project("g", h_lbsd))
        o_lbsd = self.precision.block_einsum("lbsi,ldi->lbsd", a.reshape(*a.shape[:3], -1), self.wo[...])
        return o_lbsd + self.wo_bias[...][:, None, None, :] if self.options.out_bias else o_lbsd, kept

    @staticmethod
    def table(options: AttentionOptions, path: str) -> dict[str, Weight]:
        l, d, e = options.num_lanes, options.hidden_size, options.head_dim
        queries, keys = options.heads * e, options.kv_heads * e
        found: dict[str, Weight] = {}

        def add(
            name: str, file_name: str, shape: tuple[int, ...], spec: P, initial: Initial, group: Group = "vector"
        ) -> None:
            file_name = f"model.{path}.{file_name}"
            part = "norms" if name in ("q_norm", "k_norm") else "attention"
            found[f"{path}.{name}"] = Weight(
                file_name=file_name, shape=shape, spec=spec, initial=initial, group=group, part=part
            )

        projections = {"wq": queries, "wk": keys, "wv": keys} | ({"wg": queries} if options.attention_gate else {})
        for name, rows in projections.items():
            add(name, f"{name}.weight", (l, rows, d), P("lane", None, "data"), "normal", "matrix")
            if options.qkv_bias:
                add(f"{name}_bias", f"{name}.bias", (l, rows), P("lane", None), "zeros")
        if options.qk_norm:
            for name, channels in (("q_norm", queries), ("k_norm", keys)):
                size = e if options.qk_norm == "head" else channels
                add(name, f"{name}.weight", (size,), P(None), "zeros" if options.norm_plus_one else "ones")
        if options.sinks:
            add("sinks", "sinks", (l, options.heads), P("lane", None), "zeros")
        add("wo", "wo.weight", (l, d, queries), P("lane", "data", None), "output", "matrix")
        if options.out_bias:
            add("wo_bias", "wo.bias", (l, d), P("lane", None), "zeros")
        return found

    @staticmethod
    def ops(options: AttentionOptions, path: str, norm: Norm | None) -> tuple[Op, ...]:
        weight = partial(weight_of_op, Attention.table(options, path))

        def matrix(name: str, biased: bool = options.qkv_bias) -> Matrix:
            return Matrix(weight(f"{path}.{name}"), weight(f"{path}.{name}_bias") if biased else None)

        def head_norm(name: str) -> Norm | None:
            plus = float(options.norm_plus_one)
            return Norm(weight(f"{path}.{name}", plus=plus), options.norm_eps) if options.qk_norm else None

        qkv = Product(
            ProductName.QKV,
            tuple(map(matrix, ("wq", "wk", "wv", "wg")[: 4 if options.attention_gate else 3])),
            reads=Value.STREAM,
            writes=Value.PROJECTED,
            norm=norm,
        )
        attend = Attend(
            options.heads,
            options.kv_heads,
            options.head_dim,
            scale=options.scale or float(np.float32(1) / np.sqrt(np.float32(options.head_dim))),  # in float32
            window=options.window,
            rotary=rotary_op(options.rotary, options.head_dim) if options.rotary else None,
            q_norm=head_norm("q_norm"),
            k_norm=head_norm("k_norm"),
            sinks=weight(f"{path}.sinks") if options.sinks else None,
            **options.attention_variant,
        )
        wo = matrix("wo", options.out_bias)
        return qkv, attend, Product(ProductName.OUT, (wo,), reads=Value.ATTENDED, writes=Value.OUTPUT)

    @staticmethod
    def state(options: AttentionOptions) -> tuple[KeptArray, ...]:
        """The keys (after the rotation) and the values of every position."""
        shape = (options.kv_heads, options.head_dim)
        return tuple(
            KeptArray(name=name, num_lanes=options.num_lanes, shape=shape, window=options.window)
            for name in ("keys", "values")
        )

    @staticmethod
    def context_flops(options: AttentionOptions, length: int) -> float:
        """q k^T and the weighted sum of v: each takes 2 H e FLOPs per key with H query heads of e channels."""
        return 4 * options.num_lanes * options.heads * options.head_dim * keys_seen(length, options.window)


def keys_seen(length: int, window: int | None = None) -> float:
    """Mean number of keys that a query of a causal sequence attends to, including its own: the mean of min(i, window)
    over i = 1..length.
    """
    w = length if window is None else min(window, length)
    return (w * (w + 1) / 2 + (length - w) * w) / length
