"""The published two-billion-parameter Laneformer: 15 layers in 8 lanes, 4T + 2T + 210M tokens."""

from pathlib import Path

from configs.models import LANEFORMER_2B
from train.config import DataConfig, LaterPhase, MeshConfig, OptimizerConfig, TrainConfig

CONTEXT = 4096


def laneformer_2b() -> TrainConfig:
    """Pretraining on 4T tokens, mid-training on 2T, instruction tuning on 210M; planned for 256 GPUs (--dry-run).

    Published (Kog, "Laneformer 2B"): all sizes of the model, 10 sliding and 5 full layers, delay 2, context 4,096, the
    Llama-2 vocabulary, and the tokens of the three phases. Everything marked "ours" is not, and chosen for the reason
    beside it.
    """
    return TrainConfig(
        name="laneformer_2b",
        model=LANEFORMER_2B,
        # Ours: the mixture of the Nemotron pretraining sets, more code than web text for an agent's model
        data=DataConfig(
            path=(Path("data/nemotron_cc"), Path("data/nemotron_code"), Path("data/nemotron_math")),
            weights=(0.5, 0.35, 0.15),
            sequence_length=CONTEXT,
            batch_size=1024,  # ours: 4.2M tokens, a usual batch for models of this size
        ),
        steps=4_000_000_000_000 // (1024 * CONTEXT),
        # ours: a rate that models of one to two billion weights are trained with at this batch, constant, to decay in
        # the next phase
        optimizer=OptimizerConfig(learning_rate=5e-4, schedule="constant", warmup_steps=2000),
        accumulate=4,
        then={
            "mid": LaterPhase(
                steps=2_000_000_000_000 // (1024 * CONTEXT),
                data=DataConfig(  # ours: the better part of the same sets, and question-and-answer text
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
                # ours: the decay of warmup-stable-decay, where good data counts most
                optimizer=OptimizerConfig(learning_rate=5e-4, warmup_steps=0, decay_fraction=1.0),
                accumulate=4,
            ),
            "instruct": LaterPhase(
                steps=210_000_000 // (64 * CONTEXT),
                data=DataConfig(  # ours: whole conversations, each for itself, loss on the answers
                    path=(Path("data/instruct"),),
                    sequence_length=CONTEXT,
                    batch_size=64,
                    packing="best_fit",
                    attend_across_documents=False,
                ),
                # ours: a twenty-fifth of the pretraining rate, usual for tuning
                optimizer=OptimizerConfig(
                    learning_rate=2e-5, schedule="cosine", warmup_steps=30, final_fraction=0.1, weight_decay=0.0
                ),
            ),
        },
        mesh=MeshConfig(data=32, lane=8),
        z_loss=1e-4,  # ours: keeps logits near what 16 bit resolve over so many steps
        remat="dots",
        validate_every=1000,
        save_every=1000,
        keep_every=50_000,
    )
