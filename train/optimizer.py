"""The optimizers and the learning rate over a phase, all from optax."""

import math

import jax
import jax.numpy as jnp
import optax
from optax.contrib import MuonDimensionNumbers, scale_by_muon

from laneformer.blocks.block import Weight
from laneformer.config import ModelConfig
from laneformer.mesh import LANE
from laneformer.train.config import OptimizerConfig
from laneformer.weights import parameter_table


def learning_rate(config: OptimizerConfig, steps: int) -> optax.Schedule:
    """Learning rate by step for a phase of `steps` steps: a linear warm-up, then `config.schedule`."""
    top, end = config.learning_rate, config.learning_rate * config.final_fraction
    warmup, decay = config.warmup_steps, config.decay_steps(steps)
    rise = optax.linear_schedule(top / max(warmup, 1), top, max(warmup - 1, 1))
    if config.schedule == "cosine":
        return optax.join_schedules(
            [rise, optax.cosine_decay_schedule(top, max(steps - warmup, 1), config.final_fraction)], [warmup]
        )
    fall = optax.linear_schedule(top, end, max(decay, 1))
    if config.decay == "1-sqrt":  # Haegele et al., arXiv 2405.18392
        fall = lambda step: end + (top - end) * (1 - jnp.sqrt(jnp.clip(step / max(decay, 1), 0, 1)))  # noqa: E731
    return optax.join_schedules([rise, optax.constant_schedule(top), fall], [warmup, steps - decay])


def make_optimizer(config: OptimizerConfig, model: ModelConfig) -> optax.GradientTransformation:
    """The optimizer at learning rate 1: clipping by the norm over all weights, AdamW or Muon, decay, and the factors of
    the rates of embeddings and head, which multiply their decay too.

    Muon orthogonalises each lane's share of a matrix, and each expert's, separately. It scales the result to the size
    of an AdamW update, so that one learning rate serves both (Liu et al., arXiv 2502.16982). With Muon, embeddings,
    head, routers, norms and biases still use AdamW.
    """
    table = parameter_table(model)
    decays = {
        path: weight.group == "matrix" or (weight.group == "embedding" and config.decay_embeddings)
        for path, weight in table.items()
    }
    rates = {"tok_embeddings": config.embedding_rate, "lm_head": config.head_rate}
    rule = optax.scale_by_adam(config.beta1, config.beta2, config.eps)
    if config.kind == "muon":
        labels = {path: "muon" if per_lane(weight) else "adam" for path, weight in table.items()}
        rule = optax.partition({"muon": _muon(config), "adam": rule}, labels)
    return optax.chain(
        optax.clip_by_global_norm(config.clip_norm),
        rule,
        optax.add_decayed_weights(config.weight_decay, decays),
        # Without state like `optax.scale`, so that checkpoints of older runs have the same tree.
        optax.stateless(lambda updates, _: {path: -rates.get(path, 1.0) * update for path, update in updates.items()}),
    )


def per_lane(weight: Weight) -> bool:
    """Whether the weight is a separate matrix in each lane; a router, which all lanes share, is not."""
    return weight.group == "matrix" and weight.spec[0] == LANE


def _muon(config: OptimizerConfig) -> optax.GradientTransformation:
    """Muon for weights [l, out, in] and [l, e, out, in]."""

    def dimensions(params):
        return jax.tree.map(lambda _: MuonDimensionNumbers(reduction_axis=-1, output_axis=-2), params)

    def to_adam_size(updates, _):
        return jax.tree.map(lambda u: 0.2 * math.sqrt(max(u.shape[-2:])) * u, updates)

    orthogonal = scale_by_muon(beta=config.momentum, eps=config.eps, weight_dimension_numbers=dimensions)
    return optax.chain(orthogonal, optax.stateless(to_adam_size))
