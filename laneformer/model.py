"""The Laneformer: a Llama-style decoder cut into lanes that exchange their outputs as the config's layout says.

Shape letters, also in einsum strings: l lane, b batch, s query position, t key position, d model (hidden size), h query
heads per lane, n key/value heads per lane, k head dim, f feed-forward columns per lane, v vocabulary.

Every lane has an equal share of each matrix, [l, out, in], and its own residual stream, x[l, b, s, d]. On a mesh,
`jax.shard_map` splits the lane axis over the devices. The sum over lanes is then a sum over the local lanes followed by
`psum`, so the same code runs 8 lanes on 1, 2, 4 or 8 devices.
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from laneformer.blocks.block import Memory, Weights, hold, plain, within
from laneformer.blocks.layer import Layer
from laneformer.blocks.norm import RMSNorm
from laneformer.blocks.rotary import rotations
from laneformer.blocks.softcap import capped
from laneformer.blocks.streams import Mixture, Streams
from laneformer.config import LayerOptions, ModelConfig
from laneformer.errors import InputError
from laneformer.executor import run_schedule
from laneformer.loss import cross_entropy
from laneformer.mesh import DATA, LANE, check_mesh, fit_spec, lane_spec, sharding
from laneformer.precision import Precision, widen
from laneformer.quantized import WHOLE, Quantized
from laneformer.routing import RouterSums, Routing, in_common, load_of, router_losses, router_sums
from laneformer.state import Cache, make_cache
from laneformer.weights import initial_weights, parameter_table

Remat = Literal["none", "block", "dots"]
BY_LANE = P(None, LANE)  # spec of arrays [n, l, ...]
# What the backward pass keeps of a module in addition to its input: nothing, or the results of its matrix products.
REMAT = {
    "block": jax.checkpoint_policies.nothing_saveable,
    "dots": jax.checkpoint_policies.save_only_these_names("product"),
}


class Laneformer(nnx.Module):
    """`model(ids[b, s])` returns float32 logits [b, s, v]. `model.extend(ids, cache)` continues a cached sequence.

    The model is a plain pytree, which can be passed to jax.jit and jax.grad. `mesh` (from `make_mesh`) spreads lanes
    and batches over devices; without a mesh, all lanes run on the default device. Architecture: Kog, "Laneformer 2B",
    and the layouts of laneformer/layout.py.
    """

    def __init__(
        self, config: ModelConfig, weights: Weights, precision: Precision | None = None, mesh: Mesh | None = None
    ):
        """Makes a model from its weights. Raises ConfigError for a mesh that does not fit the lanes.

        weights: path -> array, or record of a quantized matrix, for every entry of `parameter_table(config)`. The
        embedding table must be an array. precision: by default `Precision.default` of the embedding table's dtype.
        """
        first = plain(weights["tok_embeddings"])
        self.config, self.mesh = config, mesh
        self.precision = precision or Precision.default(first.dtype)
        check_mesh(config.num_lanes, mesh, self.precision.stream)
        self.tok_embeddings = nnx.Param(first)
        self.layers = nnx.List(
            [
                Layer(within(weights, f"layers.{n}"), options, config.norms, self.precision)
                for n, options in enumerate(config.layers)
            ]
        )
        if config.norms.streams:
            self.head_streams = Streams(within(weights, "head_streams"), config.norms.streams)
        self.norm = RMSNorm(weights["norm"], config.norms.final)
        if "lm_head" in weights:
            self.lm_head = hold(weights["lm_head"])

    @classmethod
    def init(
        cls, config: ModelConfig, seed: int = 0, *, precision: Precision | None = None, mesh: Mesh | None = None
    ) -> "Laneformer":
        """A model with fresh weights, each of which is made on its devices."""
        check_mesh(config.num_lanes, mesh)
        precision = precision or Precision.default()
        shardings = (
            None if mesh is None else {k: sharding(p.spec, p.shape, mesh) for k, p in parameter_table(config).items()}
        )
        return cls(config, initial_weights(config, seed, precision.param, shardings), precision, mesh)

    def weights(self) -> dict[str, jax.Array | Quantized[jax.Array]]:
        """Path -> array or record of every weight, in the order of `parameter_table`, as the constructor takes them."""
        flat = {_path(keys): leaf for keys, leaf in jax.tree_util.tree_leaves_with_path(self)}
        return {path: flat[path] if path in flat else self._record(path) for path in parameter_table(self.config)}

    def _record(self, path: str) -> Quantized[jax.Array]:
        at: Any = self
        for name in path.split("."):
            at = at[int(name)] if name.isdigit() else getattr(at, name)
        record: Quantized[jax.Array] = at[...]
        return record

    def __call__(self, ids_bs: jax.Array, *, segments_bs: jax.Array | None = None, remat: Remat = "none") -> jax.Array:
        """Logits of every position, float32 [b, s, v], for token ids int [b, s].

        segments: document number of each token, int32 [b, s]; attention stays within a document. remat: what the
        backward pass recomputes: nothing (none), all of a module (block), or all but its matrix products (dots). It
        never repeats collectives. Raises InputError for ids of a wrong shape or dtype, outside the vocabulary, or
        longer than the context.
        """
        check_ids(self.config, ids_bs)
        logits: jax.Array = self._forward(jnp.asarray(ids_bs), None, segments_bs, last_only=False, remat=remat)[0]
        return logits

    def extend(
        self, ids_bs: jax.Array, cache: Cache, *, last_only: bool = False, count: jax.Array | None = None
    ) -> tuple[jax.Array, Cache]:
        """Runs ids [b, s] at the positions from cache.length on. Returns float32 logits [b, s, v] ([b, 1, v] if
        last_only) and the longer cache.

        s = 1 is a decoding step, a larger s a prefill. count: number of ids that are text, int32 scalar, if the rest is
        padding. The cache then grows by `count` positions, and the logits after them are meaningless. Raises InputError
        for more ids than the cache has room for. If cache.length is traced, the caller must check the room.
        """
        check_ids(self.config, ids_bs)
        if ids_bs.shape[0] != cache.batch:
            raise InputError(
                f"the cache is for {cache.batch} sequences, got token ids of {ids_bs.shape[0]}; make one"
                f" with make_cache(batch={ids_bs.shape[0]})"
            )
        if not isinstance(cache.length, jax.core.Tracer) and int(cache.length) + ids_bs.shape[1] > cache.capacity:
            raise InputError(
                f"{int(cache.length)} cached + {ids_bs.shape[1]} new tokens exceed the cache of {cache.capacity}"
                " positions; make it larger"
            )
        found: tuple[jax.Array, Cache] = self._forward(jnp.asarray(ids_bs), cache, count=count, last_only=last_only)
        return found

    def make_cache(self, batch: int = 1, capacity: int | None = None) -> Cache:
        """An empty cache for `extend`, in the compute dtype. capacity: positions, by default the whole context."""
        capacity = self.config.max_position_embeddings if capacity is None else capacity
        if batch < 1 or capacity < 1:
            raise InputError(f"batch = {batch} and capacity = {capacity} of a cache must be at least 1")
        return make_cache(self.config, batch, capacity, self.precision.compute, self.mesh)

    def loss(
        self,
        ids_bs: jax.Array,
        targets_bs: jax.Array,
        weights_bs: jax.Array | None = None,
        *,
        segments_bs: jax.Array | None = None,
        remat: Remat = "none",
        z_loss: float = 0.0,
        chunk: int | None = None,
        load_balance: float = 0.0,
        router_z: float = 0.0,
        load_nle: jax.Array | None = None,
    ) -> tuple[jax.Array, dict[str, Any]]:
        """The training objective, summed over tokens: sum of weight * (nll + z_loss * lse^2), float32, and its parts.

        nll = lse - logit[target] in nats, where lse is the log sum exp of the logits. The parts, which have no
        gradient, are the weighted sums nll and lse_squared, and the sum weight, by which the caller divides. weights:
        float32 [b, s], by default 1. chunk: positions whose logits are in memory at a time, by default all.

        With experts, the losses of laneformer/routing.py are added, times load_balance and router_z, and the parts
        include `routers`, a RouterSums. load: float32 load of the whole batch, if these ids are only a part of it.
        """
        config = self.config
        weights_bs = jnp.ones(targets_bs.shape, jnp.float32) if weights_bs is None else weights_bs

        def local(
            model: Laneformer,
            ids_bs: jax.Array,
            targets_bs: jax.Array,
            weights_bs: jax.Array,
            segments_bs: jax.Array | None,
            load_nle: jax.Array | None,
        ) -> tuple[jax.Array, jax.Array, jax.Array, RouterSums | None]:
            routings: list[Routing] = []
            x_lbsd, _ = model._streams(ids_bs, None, segments_bs, remat, routings=routings)
            with jax.named_scope("head"):
                y_lbsd, head_lvd = model._head_operands(x_lbsd)
            total, nll_bs, lse_bs = cross_entropy(
                y_lbsd,
                plain(head_lvd),
                targets_bs,
                weights_bs,
                chunk=chunk or ids_bs.shape[1],
                z_loss=z_loss,
                precision=self.precision,
                axis=LANE if self._head_is_split() else None,
                add_lanes=self.config.lm_head_type == "lane",
                cap=self.config.final_logit_softcapping,
            )
            routers = router_sums(routings, weights_bs)
            if routers is None:
                return total, nll_bs, lse_bs, None
            load_nle = load_of(routers.chosen_nle, config.num_experts_per_tok) if load_nle is None else load_nle
            balance, z = router_losses(routers, load_nle, config.num_lanes)
            more = load_balance * balance + router_z * z
            total = total + (jax.lax.psum(more, LANE) if self._split_mesh() is not None else more)
            return total, nll_bs, lse_bs, routers

        total, nll_bs, lse_bs, routers = self._on_lanes(
            local,
            (ids_bs, targets_bs, weights_bs, segments_bs, load_nle),
            (P(), P(), P(), P(), BY_LANE),
            (P(), P(), P(), BY_LANE),
        )
        parts = {"nll": nll_bs, "lse_squared": jnp.square(lse_bs), "weight": jnp.ones_like(nll_bs)}
        sums = {name: (weights_bs * x).sum() for name, x in parts.items()}
        return total, sums if routers is None else sums | {"routers": routers}

    def routers(
        self, ids_bs: jax.Array, weights_bs: jax.Array | None = None, *, segments_bs: jax.Array | None = None
    ) -> RouterSums:
        """The routers' sums for a batch; the head is not computed. Arguments are those of `loss`."""
        weights_bs = jnp.ones(ids_bs.shape, jnp.float32) if weights_bs is None else weights_bs

        def local(
            model: Laneformer, ids_bs: jax.Array, weights_bs: jax.Array, segments_bs: jax.Array | None
        ) -> RouterSums | None:
            routings: list[Routing] = []
            model._streams(ids_bs, None, segments_bs, "none", routings=routings)
            return router_sums(routings, weights_bs)

        sums: RouterSums = self._on_lanes(local, (ids_bs, weights_bs, segments_bs), out_specs=BY_LANE)
        return sums

    def lane_statistics(self, ids_bs: jax.Array, *, segments_bs: jax.Array | None = None) -> dict[str, jax.Array]:
        """Differences between lanes at each time of the schedule (float32, means over all tokens).

        similarity [2N + 1]: mean cosine between the streams of two lanes as module m reads them, and before the last
        landings; nan with one lane. own, landed [2N + 1]: root mean square of the additions to a stream at time m, by
        its own lane and by the other lanes. With experts also in_common [n], for each layer with experts; see
        `routing.in_common`. Raises InputError for a model with several residual streams.
        """
        config = self.config
        if config.residual_streams is not None:
            raise InputError("a model with residual_streams has no lane statistics, because its lanes are equal")

        def users(model: Laneformer, routing: Routing) -> jax.Array:
            used_lbse = jax.nn.one_hot(routing.chosen_lbsj, routing.logits_lbse.shape[-1]).sum(-2)
            return model._sum_lanes(used_lbse)[0]

        def local(model: Laneformer, ids_bs: jax.Array, segments_bs: jax.Array | None) -> dict[str, jax.Array]:
            times: list[dict[str, jax.Array]] = []
            routings: list[Routing] = []

            def observe(before: jax.Array, own: jax.Array, after: jax.Array) -> None:
                times.append(model._lane_statistics(before, own, after))

            model._streams(ids_bs, None, segments_bs, "none", observe, routings)
            found = {name: jnp.stack([values[name] for values in times]) for name in times[0]}
            if not routings:
                return found
            shared = [in_common(users(model, x), config.num_lanes, config.num_experts_per_tok) for x in routings]
            return found | {"in_common": jnp.stack(shared)}

        statistics: dict[str, jax.Array] = self._on_lanes(local, (ids_bs, segments_bs))
        return statistics

    # Without jit, shard_map would compile every operation separately.
    @partial(jax.jit, static_argnames=("last_only", "remat"))
    def _forward(
        self,
        ids_bs: jax.Array,
        cache: Cache | None,
        segments_bs: jax.Array | None = None,
        count: jax.Array | None = None,
        *,
        last_only: bool = False,
        remat: Remat = "none",
    ) -> Any:
        def local(
            model: Laneformer,
            ids_bs: jax.Array,
            cache: Cache | None,
            segments_bs: jax.Array | None,
            count: jax.Array | None,
        ) -> tuple[jax.Array, Cache | None]:
            x_lbsd, kept = model._streams(ids_bs, cache, segments_bs, remat, count=count)
            with jax.named_scope("head"):
                return model._head(x_lbsd[:, :, -1:] if last_only else x_lbsd), kept

        cache_spec = None if cache is None else Cache(P(LANE), P())  # type: ignore[arg-type]  # a tree of specs
        sliced = self._head_is_split() and self.config.lm_head_type != "lane"  # a lane head's logits are summed
        logits_spec = P(None, None, LANE) if sliced else P()
        in_specs = (P(), cache_spec, P(), P())
        return self._on_lanes(local, (ids_bs, cache, segments_bs, count), in_specs, (logits_spec, cache_spec))

    def _on_lanes(
        self,
        local: Callable[..., Any],
        args: Sequence[Any],
        in_specs: Sequence[Any] | None = None,
        out_specs: Any = None,
    ) -> Any:
        """Runs local(model, *args) on every device of the lane axis, each with its own lanes. By default all devices
        get the same args and return the same results.
        """
        mesh = self._split_mesh()
        if mesh is None:
            with nullcontext() if self.mesh is None else jax.sharding.use_abstract_mesh(self.mesh.abstract_mesh):
                return local(self, *args)
        table = parameter_table(self.config)

        def weight_spec(keys: Sequence[Any], _: Any) -> P:
            path = _path(keys)
            whole, _, part = path.rpartition(".")  # a record's path and one of its arrays
            weight = table[path if path in table else whole]
            return P() if part in WHOLE else lane_spec(fit_spec(weight.spec, weight.shape, mesh))

        weights = jax.tree_util.tree_map_with_path(weight_spec, self)
        specs = (weights, *(in_specs or [P()] * len(args)))
        out_specs = P() if out_specs is None else out_specs
        on_devices = jax.shard_map(local, mesh=mesh, axis_names={LANE}, in_specs=specs, out_specs=out_specs)
        return on_devices(self, *args)

    def _streams(
        self,
        ids_bs: jax.Array,
        cache: Cache | None,
        segments_bs: jax.Array | None,
        remat: Remat,
        observe: Callable[[jax.Array, jax.Array, jax.Array], None] | None = None,
        routings: list[Routing] | None = None,
        count: jax.Array | None = None,
    ) -> tuple[jax.Array, Cache | None]:
        """The streams of this device's lanes before the final norm, [l, b, s, d], and the longer cache.

        All exchange between lanes goes through `_sum_lanes` and `_exchange`. observe: see `run_schedule`. routings:
        list to which each router's decisions are appended. count: see `extend`.
        """
        config, start = self.config, jnp.zeros((), jnp.int32) if cache is None else cache.length
        with jax.named_scope("embed"):
            x_bsd = self.tok_embeddings[...][ids_bs].astype(self.precision.stream)
            if config.embedding_multiplier != 1:
                x_bsd = x_bsd * config.embedding_multiplier
            if self._split_mesh() is not None:
                x_bsd = jax.lax.pcast(x_bsd, (LANE,), to="varying")  # each lane has its own stream from here on
            x_lbsd = self._by_batch(jnp.broadcast_to(x_bsd, (self._local_lanes(), *x_bsd.shape)))
        if config.residual_streams is not None:
            several = (*x_lbsd.shape[:3], config.residual_streams.count, x_lbsd.shape[3])
            x_lbsd = jnp.broadcast_to(x_lbsd[..., None, :], several)
        rotary = rotations(config, start + jnp.arange(ids_bs.shape[1]))
        kept: dict[int, dict[str, jax.Array]] = {}
        mixtures: dict[int, Mixture] = {}

        def attention(layer: Layer, x: jax.Array, memory: Memory | None) -> tuple[jax.Array, dict[str, jax.Array]]:
            return layer.attend(x, rotary, memory, segments_bs)

        def feed_forward(layer: Layer, x: jax.Array) -> tuple[jax.Array, Routing | None]:
            return layer.feed(x, ids_bs)

        attend, feed = attention, feed_forward
        if remat != "none":
            attend = jax.checkpoint(attention, policy=REMAT[remat])
            feed = jax.checkpoint(feed_forward, policy=REMAT[remat])

        def module(m: int, x: jax.Array) -> jax.Array:
            n, layer = m // 2, self.layers[m // 2]
            x, mixture = layer.gather(x, LayerOptions._fields[m % 2])
            if mixture is not None:
                mixtures[m] = mixture
            with jax.named_scope(f"layer_{n}_{'mlp' if m % 2 else 'attention'}"):
                if m % 2:
                    o, routing = feed(layer, x)
                    if routing is not None and routings is not None:
                        routings.append(routing)
                else:
                    memory = None if cache is None else Memory(cache.layers[n], start, count)
                    o, kept[n] = attend(layer, x, memory)
                return self._by_batch(o.astype(x.dtype))

        def receive(m: int, total: jax.Array, o: jax.Array) -> tuple[jax.Array, jax.Array]:
            return self.layers[m // 2].receive(total, o, LayerOptions._fields[m % 2])

        def mix(m: int, x: jax.Array, total: jax.Array) -> jax.Array:
            return self._by_batch(Streams.write(x, total, mixtures[m]))

        x_lbsd = run_schedule(config.schedule, x_lbsd, module, self._exchange, config.num_lanes, observe, receive, mix)
        if config.residual_streams is not None:
            x_lbsd = self.head_streams.read(x_lbsd)[0]
        if cache is not None:
            more = ids_bs.shape[1] if count is None else count
            cache = Cache([kept[n] for n in range(len(self.layers))], start + more)
        return x_lbsd, cache

    def _head(self, x_lbsd: jax.Array) -> jax.Array:
        """Float32 logits [b, s, v], or this device's slice of v if the head is split."""
        y_lbsd, w_lvd = self._head_operands(x_lbsd)
        if self.config.lm_head_type == "lane":
            logits = self.precision.einsum("lbsd,lvd->lbsv", y_lbsd, w_lvd)
            logits = self._sum_lanes(logits.astype(jnp.float32))[0]
        else:
            logits = self.precision.einsum("lbsd,lvd->bslv", y_lbsd, w_lvd)
            logits = logits.reshape(*logits.shape[:2], -1).astype(jnp.float32)
        return capped(logits, self.config.final_logit_softcapping)

    def _head_operands(self, x_lbsd: jax.Array) -> tuple[jax.Array, jax.Array | Quantized[jax.Array]]:
        """The head's operands y [l, b, s, d] and w [l, v, d], with l = 1 if the lanes share them."""
        config = self.config
        if config.lm_head_type != "replicate":
            return self.norm(x_lbsd), self.lm_head[...]
        if config.pre_norm_lane_agg:
            y_lbsd = self.norm(self._sum_lanes(x_lbsd))[:1]
        else:
            y_lbsd = self._sum_lanes(self.norm(x_lbsd)) / config.num_lanes
        if self._head_is_split():  # before the product, so that its gradient is summed in float32
            y_lbsd = jax.lax.pcast(y_lbsd, (LANE,), to="varying")
        head = (self.tok_embeddings if config.tie_word_embeddings else self.lm_head)[...]
        return y_lbsd, (widen(head, y_lbsd) if isinstance(head, Quantized) else head)[None]

    def _sum_lanes(self, x_lbsd: jax.Array) -> jax.Array:
        """The sum over all lanes of all devices, [1, b, s, d]."""
        total = x_lbsd.sum(0, keepdims=True)
        return jax.lax.psum(total, LANE) if self._split_mesh() is not None else total

    def _exchange(self, x_lbsd: jax.Array) -> jax.Array:
        """`_sum_lanes` of what modules add to the streams. Devices send it, and the gradients of the result, in the
        exchange dtype if that is narrower. XLA:CPU cannot sum 16-bit values; there it sums rounded float32 values.
        """
        dtype, mesh = jnp.dtype(self.precision.exchange), self._split_mesh()
        if mesh is None or dtype.itemsize >= x_lbsd.dtype.itemsize:
            return self._sum_lanes(x_lbsd)
        on_cpu = mesh.devices.flat[0].platform == "cpu"

        def narrow(x: jax.Array) -> jax.Array:
            kind = jnp.finfo(dtype)
            return jax.lax.reduce_precision(x, kind.nexp, kind.nmant) if on_cpu else x.astype(dtype)

        total = jax.lax.psum(narrow(x_lbsd.sum(0, keepdims=True)), LANE)
        # Each lane's gradient of the sum is narrowed before these gradients are summed.
        total = jax.lax.pcast(total, (LANE,), to="varying")
        return narrow(total).astype(x_lbsd.dtype)

    def _lane_statistics(
        self, before_lbsd: jax.Array, own_lbsd: jax.Array, after_lbsd: jax.Array
    ) -> dict[str, jax.Array]:
        """`lane_statistics` at one time of the schedule. The sum of unit streams u_l has |sum|^2 = L + the sum of cos
        over ordered pairs of lanes.
        """
        lanes, size = self.config.num_lanes, before_lbsd[0].size
        unit = before_lbsd * jax.lax.rsqrt(jnp.sum(jnp.square(before_lbsd), -1, keepdims=True) + 1e-30)
        together = jnp.square(self._sum_lanes(unit)).sum(-1).mean()
        landed = after_lbsd - before_lbsd - own_lbsd

        def root_mean_square(x_lbsd: jax.Array) -> jax.Array:
            return jnp.sqrt(self._sum_lanes(jnp.square(x_lbsd).sum((1, 2, 3), keepdims=True)).sum() / (lanes * size))

        similarity = (together - lanes) / (lanes * (lanes - 1)) if lanes > 1 else jnp.float32(jnp.nan)
        return {"similarity": similarity, "own": root_mean_square(own_lbsd), "landed": root_mean_square(landed)}

    def _by_batch(self, x_lbsd: jax.Array) -> jax.Array:
        """The streams with their batch, not their width, split over the data axis, so that the compiler gathers weights
        (FSDP) instead of activations.
        """
        data = 1 if self.mesh is None else self.mesh.shape[DATA]
        return (
            x_lbsd if data == 1 or x_lbsd.shape[1] % data else jax.lax.with_sharding_constraint(x_lbsd, P(None, DATA))
        )

    def _split_mesh(self) -> Mesh | None:
        """The mesh, if the lanes are on several devices. Over an axis of one device, JAX (0.10) drops the shard_map but
        keeps its sums, which does not compile.
        """
        return None if self.mesh is None or self.mesh.shape[LANE] == 1 else self.mesh

    def _local_lanes(self) -> int:
        return self.config.num_lanes // (1 if self.mesh is None else self.mesh.shape[LANE])

    def _head_is_split(self) -> bool:
        """Whether each device has only a part of the head: a slice of the vocabulary, or its own lanes."""
        mesh = self._split_mesh()
        if mesh is None or self.config.tie_word_embeddings:
            return False
        weight = parameter_table(self.config)["lm_head"]
        return LANE in fit_spec(weight.spec, weight.shape, mesh)


def check_ids(config: ModelConfig, ids_bs: Any) -> None:
    """Raises InputError unless ids are integers [b, s] within the vocabulary, and no longer than the context. The
    values of traced ids are not checked.
    """
    if not hasattr(ids_bs, "ndim") or ids_bs.ndim != 2 or ids_bs.size == 0:
        found = getattr(ids_bs, "shape", type(ids_bs).__name__)
        raise InputError(f"token ids must be an array [batch, length] with at least one token, got {found}")
    if not jnp.issubdtype(ids_bs.dtype, jnp.integer):
        raise InputError(f"token ids must be integers, got {ids_bs.dtype}")
    if ids_bs.shape[1] > config.max_position_embeddings:
        raise InputError(
            f"{ids_bs.shape[1]} tokens exceed the context of {config.max_position_embeddings}; shorten the text"
        )
    if not isinstance(ids_bs, jax.core.Tracer):
        low, high = int(np.min(ids_bs)), int(np.max(ids_bs))
        if low < 0 or high >= config.vocab_size:
            wrong = low if low < 0 else high
            raise InputError(
                f"token id {wrong} is outside the vocabulary of {config.vocab_size}; check that the tokenizer fits the"
                " model"
            )


def _path(keys: Sequence[Any]) -> str:
    """The path of a weight, such as layers.0.attention.wq, from its pytree keys."""
    names = [str(getattr(key, "name", getattr(key, "key", getattr(key, "idx", None)))) for key in keys]
    return ".".join(name for name in names if name not in ("value", "scale"))
