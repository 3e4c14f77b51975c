"""Grids after the Ladder-Residual paper (arXiv 2501.06589), for nodes of 8 GPUs. Not run yet.

From its abstract: standard and Ladder Transformers of 1.2B parameters, trained from scratch and compared at equal
tokens, and Desync-Residual as the second family. Everything else is our choice, marked "ours": sizes of the layers,
tokens, data, batch and learning rate.
"""

import dataclasses
from pathlib import Path

from laneformer.config import ModelConfig
from laneformer.recipes.ablations.variants import layouts
from laneformer.recipes.models import LANEFORMER_2B
from laneformer.train.ablate.grid import Grid
from laneformer.train.config import DataConfig, MeshConfig, OptimizerConfig, TrainConfig

CONTEXT = 2048  # ours
DATA = Path("data/fineweb_edu")  # ours: as in configs/small.py


def ladder_1p2b() -> Grid:
    """1.26B parameters, 22 layers in 8 lanes, 100B tokens, 13 variants, one seed: a node of 8 GPUs, 90 h per cell.

    The time is projected from the FLOPs at 30 % of the peak of 8 H100. Several nodes can share the work, each with
    --only and a separate --run; copy their cells into one folder for the report.
    """
    return Grid(
        name="1p2b",
        base=TrainConfig(
            name="1p2b",
            steps=100_000_000_000 // (2048 * CONTEXT),  # ours: 100B tokens in batches of 4.2M
            # Ours: the proportions of public models of this size.
            model=ModelConfig(
                vocab_size=32_000,
                hidden_size=2048,
                intermediate_size=5632,
                num_hidden_layers=22,
                num_attention_heads=16,
                num_key_value_heads=16,
                max_position_embeddings=CONTEXT,
                num_lanes=8,
                layout="tp",
                broadcast_delay=2,
            ),
            data=DataConfig(path=(DATA,), sequence_length=CONTEXT, batch_size=2048),
            # Ours.
            optimizer=OptimizerConfig(learning_rate=3e-4, schedule="cosine", warmup_steps=2000, final_fraction=0.1),
            accumulate=64,
            mesh=MeshConfig(data=1, lane=8),
            remat="block",
            validate_every=500,
            save_every=500,
            keep=1,
        ),
        variants=layouts("desync(4)"),
        seeds=(0,),
        projected=LANEFORMER_2B,
        probe={"tp": (1, 2, 4, 8), "dtp(4)": (0,)},
    )


def ladder_350m() -> Grid:
    """`ladder_1p2b` at 349M parameters and 24 layers, 7B tokens, 13 variants x 2 seeds: 8 GPUs, 2 h per cell."""
    large = ladder_1p2b()
    model = large.base.model.replace(
        hidden_size=1024, intermediate_size=2816, num_hidden_layers=24, num_key_value_heads=8
    )
    return dataclasses.replace(
        large,
        name="350m",
        base=dataclasses.replace(
            large.base,
            name="350m",
            model=model,
            steps=7_000_000_000 // (512 * CONTEXT),
            accumulate=16,
            data=dataclasses.replace(large.base.data, batch_size=512),
            optimizer=dataclasses.replace(large.base.optimizer, learning_rate=1.5e-3, warmup_steps=500),
        ),
        seeds=(0, 1),
    )
