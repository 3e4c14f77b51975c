"""Grids for one or a few GPUs, on web text. Not run yet; times are projected from FLOPs at 30 % of an H100's peak."""

import dataclasses
from pathlib import Path

from laneformer.config import ModelConfig
from laneformer.recipes.ablations.variants import knobs, layouts
from laneformer.recipes.models import LANEFORMER_2B
from laneformer.recipes.small import laneformer_120m
from laneformer.train.ablate.grid import Grid, cross
from laneformer.train.config import DataConfig, OptimizerConfig, TrainConfig

CONTEXT = 1024


def web_30m() -> Grid:
    """27.5M parameters, 12 layers in 8 lanes, 0.6B tokens, 20 variants x 3 seeds: one GPU, 6 min per cell (projected).

    Needs data/fineweb_edu_8k: python -m scripts.tokenize --out data/fineweb_edu_8k --dataset HuggingFaceFW/fineweb-edu
    --config sample-10BT --streaming --train-bpe 8192. All settings are our choice, including 20 tokens per parameter.
    """
    return Grid(
        name="30m",
        base=TrainConfig(
            name="30m",
            steps=600_000_000 // (128 * CONTEXT),
            model=ModelConfig(
                vocab_size=8192,
                hidden_size=384,
                intermediate_size=1024,
                num_hidden_layers=12,
                num_attention_heads=8,
                num_key_value_heads=8,
                max_position_embeddings=CONTEXT,
                num_lanes=8,
                layout="tp",
                broadcast_delay=2,
            ),
            data=DataConfig(
                path=(Path("data/fineweb_edu_8k"),), sequence_length=CONTEXT, batch_size=128, validation_batches=16
            ),
            optimizer=OptimizerConfig(learning_rate=3e-3, warmup_steps=200),
            accumulate=2,
            validate_every=500,
            save_every=500,
            keep=1,
        ),
        variants=(*layouts("desync(4)"), *knobs("dtp(4)"), *cross(("dtp(4)",), num_lanes=(2, 4))),
        projected=LANEFORMER_2B,
        probe={"tp": (1, 2, 4, 8), "dtp(2)": (0,), "dtp(4)": (0,), "dtp(8)": (0,)},
    )


def web_120m() -> Grid:
    """The model and the 2.5B tokens of `laneformer_120m`, 13 variants x 2 seeds: one GPU, 2 h per cell (projected).

    With several GPUs, --devices 0 1 2 3 trains four cells at a time. The data are those of the recipe
    (configs/small.py).
    """
    base = laneformer_120m()
    return Grid(
        name="120m",
        base=dataclasses.replace(base, name="120m", model=base.model.replace(layout="tp"), keep=1),
        variants=layouts("desync(4)"),
        seeds=(0, 1),
        projected=LANEFORMER_2B,
        probe={"tp": (1, 2, 4, 8), "dtp(2)": (0,), "dtp(4)": (0,), "dtp(8)": (0,)},
    )
