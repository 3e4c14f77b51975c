"""The training state and one optimizer step: loss, gradients and update in one compiled program over the mesh."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Generic, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from laneformer.config import ExpertsOptions
from laneformer.layout import Schedule
from laneformer.mesh import DATA, LANE, sharding
from laneformer.model import Laneformer
from laneformer.precision import Precision
from laneformer.routing import load_of, router_figures, router_losses
from laneformer.train.config import Phase, TrainConfig
from laneformer.train.distill import TEACHER, distilled_sums, final_delay
from laneformer.train.optimizer import learning_rate, make_optimizer
from laneformer.train.rounding import held
from laneformer.weights import initial_weights, parameter_table

Batch = dict[str, jax.Array]
CompilerOptions = dict[str, bool | int | str]
Leaf = TypeVar("Leaf")  # jax.Array, or what stands for one: its shape, its sharding
START_EARLY = "xla_gpu_experimental_collective_start_as_early_as_possible"
PARALLEL = "xla_gpu_experimental_parallel_collective_overlap_limit"
LIBRARY = "xla_cpu_experimental_ynn_fusion_type"
DTYPES = {"ids": jnp.int32, "weights": jnp.float32, "segments": jnp.int32}  # arrays of a batch: train/data/batches.py


def precision_of(config: TrainConfig, mesh: Mesh) -> Precision:
    """Dtypes of the run's computation on these devices."""
    on_cpu = mesh.devices.flat[0].platform == "cpu"
    return Precision(
        compute="float32"
        if config.compute_dtype == "auto" and on_cpu
        else config.compute_dtype.replace("auto", "bfloat16"),
        stream=config.stream_dtype,
        activation=config.activation_dtype,
        exchange=config.exchange_dtype,
    )


def compiler_options(schedule: Schedule, mesh: Mesh) -> CompilerOptions:
    """XLA options for compiling the step.

    On GPUs, if the schedule delays sums over lanes, every sum starts as soon as its operand exists. As many sums may
    run at once as the schedule has in flight, and as many exchanges of the data axis. By default XLA runs one at a time
    and starts it about one product before its result is needed, which is better for a schedule without delays. On CPUs
    the library YNNPACK gets matrix products only, because it is slow at sums over a leading axis.
    """
    platform = mesh.devices.flat[0].platform
    if platform == "cpu":
        return known_options({LIBRARY: "LIBRARY_FUSION_TYPE_DOT"})
    delayed = schedule.in_flight > 1 and mesh.shape[LANE] > 1 and platform == "gpu"
    return {START_EARLY: True, PARALLEL: 2 * (schedule.in_flight + 1)} if delayed else {}


def known_options(options: CompilerOptions) -> CompilerOptions:
    """Returns `options` if this jaxlib accepts them, else {}: jaxlib adds and removes experimental options."""
    try:
        jax.jit(lambda x: x, compiler_options=options).lower(0.0).compile()
    except jax.errors.JaxRuntimeError:
        return {}
    return options


@jax.tree_util.register_dataclass
@dataclass
class State(Generic[Leaf]):
    """Everything that a step changes. params: path -> float32 master weight; step: int32 scalar, steps done."""

    params: dict[str, Leaf]
    optimizer: optax.OptState
    step: Leaf


class Trainer:
    """The compiled programs of one phase on one mesh.

    `step(state, batch, asked)` does one optimizer step. `evaluate(params, batch)` returns the sums of the loss,
    `lanes(params, batch)` the statistics of the lanes, and `held(params)` the weights that the forward pass uses.

    keys: names of the arrays of a batch (train/data/batches.py): ids int32 [b, s + 1], whose position t predicts token
    t + 1, and optionally weights float32 [b, s] of the targets and segments int32 [b, s + 1].
    """

    def __init__(self, config: TrainConfig, phase: Phase, mesh: Mesh, keys: Sequence[str] = ("ids",)):
        self.config, self.phase, self.mesh, self.keys = config, phase, mesh, tuple(keys)
        self.precision = precision_of(config, mesh)
        self.optimizer = make_optimizer(phase.optimizer, phase.model)
        self.learning_rate = learning_rate(phase.optimizer, phase.steps)
        self.state_shardings = self._state_shardings()
        everywhere, rows = NamedSharding(mesh, P()), NamedSharding(mesh, P(DATA))
        self.asked_sharding = NamedSharding(mesh, P((DATA, LANE)))
        params = self.state_shardings.params
        self.step = jax.jit(
            self._step,
            donate_argnums=0,
            in_shardings=(self.state_shardings, rows, self.asked_sharding),
            out_shardings=(self.state_shardings, everywhere),
            compiler_options=compiler_options(phase.model.schedule, mesh) or None,
        )
        self.evaluate = jax.jit(
            lambda params, batch: self._sums(params, batch)[1], in_shardings=(params, rows), out_shardings=everywhere
        )
        self.lanes = jax.jit(self._lanes, in_shardings=(params, rows), out_shardings=everywhere)
        self.held = jax.jit(self._held, in_shardings=(params,), out_shardings=params)

    def init(self) -> State:
        """The state before the first step, created on the devices that hold it."""
        return self.starting_at(
            initial_weights(self.phase.model, self.config.seed, shardings=self.state_shardings.params)
        )

    def starting_at(self, weights: dict[str, jax.Array]) -> State:
        """The state before the first step with these weights, which are not copied."""
        return jax.jit(self._before, donate_argnums=0, out_shardings=self.state_shardings)(weights)

    def adopt(self, state: State, before: Phase) -> State:
        """Turns the final state of phase `before` into the first of this phase.

        The optimizer's moments are kept, unless the kind of optimizer changes.
        """
        if before.optimizer.kind == self.phase.optimizer.kind:
            return state
        fresh = jax.jit(self.optimizer.init, out_shardings=self.state_shardings.optimizer)(state.params)
        return replace(state, optimizer=fresh)

    def abstract_state(self) -> State[jax.ShapeDtypeStruct]:
        """Shapes, dtypes and shardings of the state, for restoring it."""
        shapes = jax.eval_shape(self._init)
        return jax.tree.map(
            lambda s, where: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=where), shapes, self.state_shardings
        )

    def lower_step(self) -> jax.stages.Lowered:
        """Lowers the step without compiling it; allocates no array of the model's size."""
        batch = {key: jax.ShapeDtypeStruct(self._shape(key), DTYPES[key]) for key in self.keys}
        if self.config.distill.teacher is not None:
            data = self.phase.data
            batch[TEACHER] = jax.ShapeDtypeStruct(
                (data.batch_size, data.sequence_length, self.phase.model.vocab_size), jnp.float32
            )
        return self.step.lower(self.abstract_state(), batch, jax.ShapeDtypeStruct((self.mesh.size,), jnp.int32))

    def put_batch(self, rows_of: Callable[[slice], dict[str, np.ndarray]], keys: Iterable[str] | None = None) -> Batch:
        """Makes a global batch; each host reads only its own rows.

        rows_of: slice of the batch -> {key: array [rows, ...]}. keys: names of the arrays (default: the trainer's).
        """
        read: dict[tuple, dict[str, np.ndarray]] = {}  # devices that share rows share one read

        def rows(key: str, index) -> np.ndarray:
            span = index[0].indices(self.phase.data.batch_size)
            if span not in read:
                read[span] = rows_of(slice(*span))
            return read[span][key]

        where = NamedSharding(self.mesh, P(DATA))
        return {
            key: jax.make_array_from_callback(self._shape(key), where, partial(rows, key)) for key in keys or self.keys
        }

    def put_asked(self, asked: bool) -> jax.Array:
        """Whether this process asks the run to stop, int32 [devices]; `step` returns the maximum over all processes."""
        return jax.make_array_from_callback(
            (self.mesh.size,), self.asked_sharding, lambda i: np.full(1, asked, np.int32)
        )

    def model(self, params: dict[str, jax.Array]) -> Laneformer:
        """The model of this phase with these weights, rounded to the phase's format."""
        return Laneformer(self.phase.model, self._held(params), self.precision, self.mesh)

    def _held(self, params: dict[str, jax.Array]) -> dict[str, jax.Array]:
        phase = self.phase
        return params if phase.weights == "float32" else held(params, phase.model, phase.weights, phase.group)

    def _shape(self, key: str) -> tuple[int, int]:
        data = self.phase.data
        return data.batch_size, data.sequence_length + (key != "weights")

    def _init(self) -> State:
        return self._before(initial_weights(self.phase.model, self.config.seed))

    def _before(self, params: dict[str, jax.Array]) -> State:
        return State(params, self.optimizer.init(params), jnp.zeros((), jnp.int32))

    def _state_shardings(self) -> State[NamedSharding]:
        table = parameter_table(self.phase.model)

        def place(keys, leaf):
            """Moments are sharded like their weight; counters are replicated."""
            path = getattr(keys[-1], "key", None)
            if path in table and leaf.shape == table[path].shape:
                return sharding(table[path].spec, leaf.shape, self.mesh)
            return NamedSharding(self.mesh, P())

        return jax.tree_util.tree_map_with_path(place, jax.eval_shape(self._init))

    def _sums(
        self, params: dict[str, jax.Array], batch: Batch, load: jax.Array | None = None
    ) -> tuple[jax.Array, dict[str, Any]]:
        """The objective and its parts, summed over the batch's tokens, as in Laneformer.loss."""
        if TEACHER in batch:
            distill = self.config.distill
            return distilled_sums(
                self.model(params),
                batch,
                weight=distill.kl_weight,
                temperature=distill.temperature,
                z_loss=self.config.z_loss,
                remat=self.config.remat,
            )
        ids, segments = batch["ids"], batch.get("segments")
        rows = self.phase.data.batch_size // (self.phase.accumulate * self.mesh.shape[DATA])  # per part and device
        return self.model(params).loss(
            ids[:, :-1],
            ids[:, 1:],
            batch.get("weights"),
            segments_bs=None if segments is None else segments[:, :-1],
            remat=self.config.remat,
            z_loss=self.config.z_loss,
            chunk=max(1, self.config.loss_chunk // rows),
            load_balance=self.config.load_balance_loss,
            router_z=self.config.router_z_loss,
            load_nle=load,
        )

    def _load(self, params: dict[str, jax.Array], parts: Batch) -> jax.Array | None:
        """The experts' load [n, l, e] over all parts of a batch, from an extra forward pass; None without a
        load-balancing loss.

        That loss is a product of means over the whole batch, so it is not a sum over parts.
        """
        blocks = [layer.feed_forward for layer in self.phase.model.layers]
        experts = [block for block in blocks if isinstance(block, ExpertsOptions)]
        if not experts or not self.config.load_balance_loss:
            return None

        def chosen(part: Batch) -> jax.Array:
            segments = part.get("segments")
            segments = None if segments is None else segments[:, :-1]
            return self.model(params).routers(part["ids"][:, :-1], part.get("weights"), segments_bs=segments).chosen_nle

        return load_of(jax.lax.map(chosen, parts).sum(0), experts[0].used)

    def _lanes(self, params: dict[str, jax.Array], batch: Batch) -> dict[str, jax.Array]:
        segments = batch.get("segments")
        return self.model(params).lane_statistics(
            batch["ids"][:, :-1], segments_bs=None if segments is None else segments[:, :-1]
        )

    def _step(self, state: State, batch: Batch, asked: jax.Array) -> tuple[State, dict[str, Any]]:
        """Updates the state by the gradients of the mean objective over the batch.

        If loss or gradient norm is not finite, only the step counter changes.
        """
        accumulate, differentiate = self.phase.accumulate, jax.value_and_grad(self._sums, has_aux=True)
        model = self.phase.model

        def parts_of(x: jax.Array) -> jax.Array:  # every part has rows of every data shard
            parts = x.reshape(-1, accumulate, *x.shape[1:]).swapaxes(0, 1)
            return jax.lax.with_sharding_constraint(parts, NamedSharding(self.mesh, P(None, DATA)))

        parts = jax.tree.map(parts_of, batch)
        if accumulate == 1:
            (_, sums), grads = differentiate(state.params, jax.tree.map(lambda x: x[0], parts))
        else:
            load = self._load(state.params, parts)

            def add(total, part):
                (_, sums), grads = differentiate(state.params, part, load)
                return jax.tree.map(jnp.add, total, (sums, grads)), None

            zeros = jax.tree.map(
                lambda s: jnp.zeros(s.shape, s.dtype), jax.eval_shape(self._sums, state.params, batch)[1]
            )
            (sums, grads), _ = jax.lax.scan(add, (zeros, jax.tree.map(jnp.zeros_like, state.params)), parts)
        with jax.named_scope("optimizer"):
            tokens = jnp.maximum(sums["weight"], 1e-6)  # a batch of padding alone has gradient 0
            grads = jax.tree.map(lambda g: g / tokens, grads)
            loss, norm = sums["nll"] / tokens, optax.tree.norm(grads)
            finite = jnp.isfinite(loss) & jnp.isfinite(norm)
            rate = jnp.asarray(self.learning_rate(state.step - self.phase.first_step), jnp.float32)
            updates, optimizer = self.optimizer.update(grads, state.optimizer, state.params)
            params = optax.apply_updates(state.params, jax.tree.map(lambda u: rate * u, updates))
            before = (state.params, state.optimizer)
            params, optimizer = jax.tree.map(lambda new, old: jnp.where(finite, new, old), (params, optimizer), before)
        metrics = {"loss": loss, "grad_norm": norm, "learning_rate": rate, "skipped": ~finite, "asked": asked.max()}
        if self.config.z_loss:
            metrics["z_loss"] = self.config.z_loss * sums["lse_squared"] / tokens
        if "routers" in sums:
            routers, used = sums["routers"], model.num_experts_per_tok
            losses = router_losses(routers, load_of(routers.chosen_nle, used), model.num_lanes)
            weights = {"load_balance_loss": self.config.load_balance_loss, "router_z_loss": self.config.router_z_loss}
            for (name, weight), total in zip(weights.items(), losses, strict=True):
                metrics |= {name: weight * total / tokens} if weight else {}
            metrics["experts"] = router_figures(routers, used)
        if "kl" in sums:
            metrics["kl"] = sums["kl"] / tokens
        if self.config.distill.anneal_steps:
            metrics["delay"] = jnp.float32(final_delay(model))
        return State(params, optimizer, state.step + 1), metrics
