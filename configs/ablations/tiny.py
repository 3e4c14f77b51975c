"""Grids for a laptop: small models on Python's standard library."""

import dataclasses
from pathlib import Path

from laneformer.config import DeltaNetSizes, ModelConfig
from laneformer.recipes.ablations.variants import hybrids, layouts
from laneformer.recipes.models import LANEFORMER_2B
from laneformer.train.ablate.grid import Grid, cross
from laneformer.train.config import DataConfig, OptimizerConfig, TrainConfig


def tiny() -> Grid:
    """8 layers in 4 lanes, 0.23M tokens, 16 variants x 3 seeds: a CPU, about a minute per cell and core.

    It uses Muon, because AdamW does not converge in 450 steps; the learning rate is the better of two for tp. Needs
    data/stdlib_1k: the text of `make run` with a vocabulary of 1,024 (docs/ablations.md has the command).
    """
    return Grid(
        name="tiny",
        base=TrainConfig(
            name="tiny",
            steps=450,
            model=ModelConfig(
                vocab_size=1024,
                hidden_size=64,
                intermediate_size=192,
                num_hidden_layers=8,
                num_attention_heads=8,
                num_key_value_heads=8,
                max_position_embeddings=128,
                num_lanes=4,
                layout="tp",
                broadcast_delay=2,
                bos_token_id=0,
                eos_token_id=(0,),
            ),
            data=DataConfig(path=(Path("data/stdlib_1k"),), sequence_length=128, batch_size=4, validation_batches=64),
            optimizer=OptimizerConfig(kind="muon", learning_rate=8e-3, warmup_steps=30, decay_fraction=0.4),
            validate_every=75,
            save_every=150,
            keep=1,
        ),
        variants=(
            *layouts(),
            # tp too, because Muon updates each lane's matrices separately: the number of lanes alone has an effect.
            *cross(("tp", "dtp(4)"), num_lanes=(2, 8)),
        ),
        seeds=(0, 1, 2),
        projected=LANEFORMER_2B,
        probe={"tp": (2, 8), "dtp(2)": (0,), "dtp(4)": (0,), "dtp(8)": (0,)},
        minutes=1.2,
    )


def tiny_moe() -> Grid:
    """tiny with 8 experts per layer, two per token, so as many weights per token: what delay costs with experts.

    The projected speeds are those of the dense model of 2 billion parameters.
    """
    dense = tiny()
    model = dense.base.model.replace(num_experts=8, num_experts_per_tok=2, moe_intermediate_size=96)
    return dataclasses.replace(
        dense,
        name="tiny_moe",
        base=dataclasses.replace(dense.base, name="tiny_moe", model=model),
        variants=layouts(),
        probe={},
        minutes=None,
    )


def hybrid() -> Grid:
    """tiny with gated DeltaNet in 0, 4 or 6 of its 8 layers, with four layouts each: what delay costs with DeltaNet.

    DeltaNet has 4 heads of 16 channels, as many channels as attention. The projected speeds are those of 8 layers with
    the sizes of the 2B, and twice as many value channels as hidden ones, the proportions of Qwen3-Next.
    """
    dense = tiny()
    sizes = DeltaNetSizes(key_heads=4, value_heads=4, key_dim=16, value_dim=16)
    return dataclasses.replace(
        dense,
        name="hybrid",
        base=dataclasses.replace(dense.base, name="hybrid", model=dense.base.model.replace(delta_net=sizes)),
        variants=hybrids(dense.base.model.num_hidden_layers, (0, 2, 4), ("tp", "dtp(2)", "dtp(4)", "none")),
        projected=LANEFORMER_2B.replace(
            num_hidden_layers=8,
            sliding_window=None,
            sliding_window_n_layers=0,
            delta_net=DeltaNetSizes(key_heads=24, value_heads=48, key_dim=128, value_dim=128),
        ),
        probe={},
        minutes=None,
    )
