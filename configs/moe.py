"""Laneformers with a mixture of experts. Every lane routes from its own stream: see docs/training.md."""

import dataclasses

from laneformer.recipes.models import LATENT_TINY, MOE_1B_A200M, MOE_TINY, V4_TINY
from laneformer.recipes.small import CONTEXT, DATA
from laneformer.recipes.stdlib import stdlib
from laneformer.train.config import DataConfig, MeshConfig, OptimizerConfig, TrainConfig


def moe_tiny() -> TrainConfig:
    """stdlib with 8 experts per layer, two per token: 8 minutes on two cores of a CPU beside other jobs.

    Needs data/stdlib from `make run`.
    """
    return dataclasses.replace(stdlib(), name="moe_tiny", steps=300, model=MOE_TINY)


def latent_tiny() -> TrainConfig:
    """moe_tiny with latent attention, a sigmoid router with groups, and a shared expert. Not run to its end yet."""
    return dataclasses.replace(moe_tiny(), name="latent_tiny", model=LATENT_TINY)


def v4_tiny() -> TrainConfig:
    """moe_tiny with the residual streams, the compressed attention and the router of DeepSeek-V4."""
    return dataclasses.replace(moe_tiny(), name="v4_tiny", model=V4_TINY)


def moe_1b_a200m() -> TrainConfig:
    """1.03B parameters, 204M per token, 18 layers in 8 lanes, 20B tokens: a node of 8 GPUs. Not run yet."""
    return TrainConfig(
        name="moe_1b_a200m",
        model=MOE_1B_A200M,
        data=DataConfig(path=(DATA,), sequence_length=CONTEXT, batch_size=256),
        steps=20_000_000_000 // (256 * CONTEXT),
        optimizer=OptimizerConfig(learning_rate=8e-4, warmup_steps=1000, decay_fraction=0.2, final_fraction=0.1),
        accumulate=8,
        mesh=MeshConfig(data=1, lane=8),
        z_loss=1e-4,
        remat="block",
        validate_every=500,
        save_every=500,
    )
