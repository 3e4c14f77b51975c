"""The training state and one optimizer step: loss, gradients, AdamW, all in one compiled program over the (data, lane) mesh."""

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from laneformer.mesh import DATA, sharding
from laneformer.model import Laneformer
from laneformer.parameters import initial_weights, parameter_table
from laneformer.precision import Precision
from train.config import OptimizerConfig, TrainConfig


@jax.tree_util.register_dataclass
@dataclass
class State:
    """All that a step changes. params: path -> float32 master weight; step: int32 scalar, steps done."""

    params: dict[str, jax.Array]
    optimizer: optax.OptState
    step: jax.Array


def schedule(config: OptimizerConfig, steps: int) -> optax.Schedule:
    """Learning rate by step: linear warm-up, constant, linear decay to 0 at `steps`."""
    decay = math.ceil(config.decay_fraction * steps)
    warmup = min(config.warmup_steps, steps - decay)
    parts = [
        optax.linear_schedule(config.learning_rate / max(warmup, 1), config.learning_rate, max(warmup - 1, 1)),
        optax.constant_schedule(config.learning_rate),
        optax.linear_schedule(config.learning_rate, 0.0, max(decay, 1)),
    ]
    return optax.join_schedules(parts, [warmup, steps - decay])


def make_optimizer(config: TrainConfig) -> optax.GradientTransformation:
    """Clipping by the norm over all weights, then AdamW; only matrices and embeddings decay."""
    decays = {path: p.initial not in ("ones", "zeros") for path, p in parameter_table(config.model).items()}
    o = config.optimizer
    return optax.chain(
        optax.clip_by_global_norm(o.clip_norm),
        optax.adamw(schedule(o, config.steps), b1=o.beta1, b2=o.beta2, eps=o.eps, weight_decay=o.weight_decay, mask=decays),
    )


class Trainer:
    """The compiled programs of a run on one mesh: `init()`, `step(state, batch)`, `evaluate(params, batch)`."""

    def __init__(self, config: TrainConfig, mesh: Mesh):
        self.config, self.mesh = config, mesh
        platform = mesh.devices.flat[0].platform
        bf16 = config.compute_dtype == "bfloat16" or (config.compute_dtype == "auto" and platform != "cpu")
        self.precision = Precision(compute="bfloat16" if bf16 else "float32")
        self.optimizer = make_optimizer(config)
        self.learning_rate = schedule(config.optimizer, config.steps)
        self.state_shardings = self._state_shardings()
        self.batch_sharding = NamedSharding(mesh, P(DATA))
        scalar = NamedSharding(mesh, P())
        self.step = jax.jit(
            self._step,
            donate_argnums=0,
            in_shardings=(self.state_shardings, self.batch_sharding),
            out_shardings=(self.state_shardings, scalar),
        )
        self.evaluate = jax.jit(self._loss, in_shardings=(self.state_shardings.params, self.batch_sharding), out_shardings=scalar)

    def init(self) -> State:
        """The state before the first step, made on the devices that hold it."""
        return jax.jit(self._init, out_shardings=self.state_shardings)()

    def abstract_state(self) -> State:
        """Shapes, dtypes and places of the state, for restoring it."""
        shapes = jax.eval_shape(self._init)
        return jax.tree.map(lambda s, where: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=where), shapes, self.state_shardings)

    def put_batch(self, rows_of) -> jax.Array:
        """A global batch int32 [batch, s + 1] of which each host reads its rows: rows_of(slice) -> numpy."""
        shape = (self.config.data.batch_size, self.config.data.sequence_length + 1)
        read: dict[tuple, object] = {}  # devices that share rows share one read

        def rows(index):
            key = index[0].indices(shape[0])
            if key not in read:
                read[key] = rows_of(slice(*key))
            return read[key]

        return jax.make_array_from_callback(shape, self.batch_sharding, rows)

    def _init(self) -> State:
        params = initial_weights(self.config.model, self.config.seed)
        return State(params, self.optimizer.init(params), jnp.zeros((), jnp.int32))

    def _state_shardings(self) -> State:
        table = parameter_table(self.config.model)

        def place(keys, leaf):
            """Moments lie as their weight does; counters are everywhere."""
            path = getattr(keys[-1], "key", None)
            if path in table and leaf.shape == table[path].shape:
                return sharding(table[path].spec, leaf.shape, self.mesh)
            return NamedSharding(self.mesh, P())

        return jax.tree_util.tree_map_with_path(place, jax.eval_shape(self._init))

    def _loss(self, params: dict[str, jax.Array], batch: jax.Array) -> jax.Array:
        """Mean cross-entropy in nats per token of int32 [b, s + 1]: position t predicts token t + 1."""
        model = Laneformer(self.config.model, params, self.precision, self.mesh)
        logits = model(batch[:, :-1], remat=self.config.remat)
        with jax.named_scope("loss"):
            return optax.softmax_cross_entropy_with_integer_labels(logits, batch[:, 1:]).mean()

    def _step(self, state: State, batch: jax.Array) -> tuple[State, dict[str, jax.Array]]:
        parts = batch.reshape(-1, self.config.accumulate, batch.shape[1]).swapaxes(0, 1)  # every part has rows of every data shard
        parts = jax.lax.with_sharding_constraint(parts, NamedSharding(self.mesh, P(None, DATA)))

        def part(total, rows):
            return jax.tree.map(jnp.add, total, jax.value_and_grad(self._loss)(state.params, rows)), None

        if self.config.accumulate == 1:
            loss, grads = jax.value_and_grad(self._loss)(state.params, parts[0])
        else:
            zeros = (jnp.zeros(()), jax.tree.map(jnp.zeros_like, state.params))
            (loss, grads), _ = jax.lax.scan(part, zeros, parts)
            loss, grads = jax.tree.map(lambda x: x / self.config.accumulate, (loss, grads))
        with jax.named_scope("optimizer"):
            updates, optimizer = self.optimizer.update(grads, state.optimizer, state.params)
            params = optax.apply_updates(state.params, updates)
        metrics = {"loss": loss, "grad_norm": optax.tree.norm(grads), "learning_rate": jnp.asarray(self.learning_rate(state.step))}
        return State(params, optimizer, state.step + 1), metrics
