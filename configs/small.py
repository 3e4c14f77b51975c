"""Laneformers of 120M and 350M parameters in 8 lanes, with 20 tokens per parameter (Hoffmann et al., arXiv
2203.15556).
"""

from pathlib import Path

from laneformer.recipes.models import LANEFORMER_120M, LANEFORMER_350M, LANEFORMER_350M_LONG
from laneformer.train.config import DataConfig, LaterPhase, MeshConfig, OptimizerConfig, TrainConfig

CONTEXT, LONG = 4096, 131_072
# scripts.tokenize --dataset HuggingFaceFW/fineweb-edu --config sample-10BT --streaming, with at most 32,000 tokens
DATA = Path("data/fineweb_edu")


def laneformer_120m() -> TrainConfig:
    """12 layers, 8 lanes, 2.5B tokens: hours on one GPU."""
    return TrainConfig(
        name="laneformer_120m",
        model=LANEFORMER_120M,
        data=DataConfig(path=(DATA,), sequence_length=CONTEXT, batch_size=128),
        steps=2_500_000_000 // (128 * CONTEXT),
        optimizer=OptimizerConfig(learning_rate=2e-3, warmup_steps=400),
        accumulate=16,
        remat="block",
        validate_every=250,
        save_every=250,
    )


def laneformer_350m() -> TrainConfig:
    """24 layers, 8 lanes, 7B tokens at a context of 4,096, then 0.5B tokens at 131,072: a node of 8 GPUs."""
    return TrainConfig(
        name="laneformer_350m",
        model=LANEFORMER_350M,
        data=DataConfig(path=(DATA,), sequence_length=CONTEXT, batch_size=256),
        steps=7_000_000_000 // (256 * CONTEXT),
        optimizer=OptimizerConfig(learning_rate=1.5e-3, warmup_steps=500, decay_fraction=0.1, final_fraction=0.1),
        accumulate=8,
        then={
            "long": LaterPhase(
                steps=500_000_000 // (8 * LONG),
                data=DataConfig(
                    path=(DATA,),
                    sequence_length=LONG,
                    batch_size=8,
                    attend_across_documents=False,
                    validation_batches=1,
                ),
                optimizer=OptimizerConfig(learning_rate=1.5e-4, warmup_steps=20, decay_fraction=0.5),
                accumulate=8,
                rope_scaling=LANEFORMER_350M_LONG.rope_scaling,
            )
        },
        mesh=MeshConfig(data=1, lane=8),
        remat="block",
        validate_every=250,
        save_every=250,
    )
