"""Laneformers of 120M and 350M parameters in 8 lanes, trained on 20 tokens per parameter (Hoffmann et al., arXiv
2203.15556).
"""

from pathlib import Path

from laneformer.config import ModelConfig, RopeScaling
from train.config import DataConfig, LaterPhase, MeshConfig, OptimizerConfig, TrainConfig

CONTEXT, LONG = 4096, 131_072
DATA = Path(
    "data/fineweb_edu"
)  # --dataset HuggingFaceFW/fineweb-edu --config sample-10BT --streaming, with a tokenizer of at most 32,000


def laneformer_120m() -> TrainConfig:
    """12 layers, 8 lanes, 2.5B tokens: hours on one GPU."""
    return TrainConfig(
        name="laneformer_120m",
        model=ModelConfig(
            vocab_size=32_000,
            hidden_size=768,
            intermediate_size=2048,
            num_hidden_layers=12,
            num_attention_heads=16,
            num_key_value_heads=8,
            max_position_embeddings=CONTEXT,
            num_lanes=8,
            layout="laneformer",
            broadcast_delay=2,
        ),
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
        model=ModelConfig(
            vocab_size=32_000,
            hidden_size=1024,
            intermediate_size=2816,
            num_hidden_layers=24,
            num_attention_heads=16,
            num_key_value_heads=8,
            max_position_embeddings=CONTEXT,
            num_lanes=8,
            layout="laneformer",
            broadcast_delay=2,
            sliding_window=512,
            sliding_window_n_layers=16,
        ),
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
                rope_scaling=RopeScaling(type="yarn", factor=LONG / CONTEXT, original_max_position_embeddings=CONTEXT),
            )
        },
        mesh=MeshConfig(data=1, lane=8),
        remat="block",
        validate_every=250,
        save_every=250,
    )
