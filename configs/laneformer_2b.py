"""The published Laneformer with two billion parameters: 15 layers in 8 lanes, 4T + 2T + 210M tokens."""

from pathlib import Path

from laneformer.recipes.models import LANEFORMER_2B
from laneformer.train.config import DataConfig, LaterPhase, MeshConfig, OptimizerConfig, TrainConfig

CONTEXT = 4096


def laneformer_2b() -> TrainConfig:
    """Pretraining on 4T tokens, mid-training on 2T, instruction tuning on 210M; planned for 256 GPUs (--dry-run).

    Published (Kog, "Laneformer 2B"): all sizes of the model, 10 sliding and 5 full layers, delay 2, context 4,096, the
    Llama-2 vocabulary, and the tokens of the three phases. Values marked "ours" are not published.
    """
    return TrainConfig(
        name="laneformer_2b",
        model=LANEFORMER_2B,
        # Ours: a mixture of the Nemotron pretraining sets with much code, for an agent's model.
        data=DataConfig(
            path=(Path("data/nemotron_cc"), Path("data/nemotron_code"), Path("data/nemotron_math")),
            weights=(0.5, 0.35, 0.15),
            sequence_length=CONTEXT,
            batch_size=1024,  # ours: 4.2M tokens, usual for models of this size
        ),
        steps=4_000_000_000_000 // (1024 * CONTEXT),
        # Ours: a usual rate for 1 to 2 billion weights at this batch; constant, because it decays in the next phase.
        optimizer=OptimizerConfig(learning_rate=5e-4, schedule="constant", warmup_steps=2000),
        accumulate=4,
        then={
            "mid": LaterPhase(
                steps=2_000_000_000_000 // (1024 * CONTEXT),
                # Ours: the better part of the same sets, and question-and-answer text.
                data=DataConfig(
                    path=(
                        Path("data/nemotron_cc_high"),
                        Path("data/nemotron_code"),
                        Path("data/nemotron_math"),
                        Path("data/nemotron_sft"),
                    ),
                    weights=(0.3, 0.4, 0.2, 0.1),
                    sequence_length=CONTEXT,
                    batch_size=1024,
                ),
                # Ours: the decay of warmup-stable-decay, where good data matters most.
                optimizer=OptimizerConfig(learning_rate=5e-4, warmup_steps=0, decay_fraction=1.0),
                accumulate=4,
            ),
            "instruct": LaterPhase(
                steps=210_000_000 // (64 * CONTEXT),
                # Ours: whole conversations that do not attend to each other, loss on the answers.
                data=DataConfig(
                    path=(Path("data/instruct"),),
                    sequence_length=CONTEXT,
                    batch_size=64,
                    packing="best_fit",
                    attend_across_documents=False,
                ),
                # Ours: a twenty-fifth of the pretraining rate, usual for tuning.
                optimizer=OptimizerConfig(
                    learning_rate=2e-5, schedule="cosine", warmup_steps=30, final_fraction=0.1, weight_decay=0.0
                ),
            ),
        },
        mesh=MeshConfig(data=32, lane=8),
        z_loss=1e-4,  # ours: keeps logits in a range that 16 bits resolve
        remat="dots",
        validate_every=1000,
        save_every=1000,
        keep_every=50_000,
    )
