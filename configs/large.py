"""Laneformers of 8 and 70 billion parameters: the sizes of Llama 3 (arXiv 2407.21783) in 8 lanes. Not run yet."""

from laneformer.config import ModelConfig
from laneformer.recipes.models import LANEFORMER_8B, LANEFORMER_70B
from laneformer.recipes.small import CONTEXT, DATA
from laneformer.train.config import DataConfig, MeshConfig, OptimizerConfig, TrainConfig


def laneformer_8b() -> TrainConfig:
    """32 layers, 8 lanes, 160B tokens: 256 GPUs. Not run yet."""
    return _recipe("laneformer_8b", LANEFORMER_8B, 160_000_000_000, 1024, 3e-4, 256)


def laneformer_70b() -> TrainConfig:
    """80 layers, 8 lanes, 1.4T tokens: 1,024 GPUs. Not run yet."""
    return _recipe("laneformer_70b", LANEFORMER_70B, 1_400_000_000_000, 2048, 1.5e-4, 1024)


def _recipe(name: str, model: ModelConfig, tokens: int, batch: int, rate: float, devices: int) -> TrainConfig:
    """A recipe at a context of 4,096. `tokens` is 20 per parameter, `rate` Llama 3's peak learning rate."""
    return TrainConfig(
        name=name,
        model=model,
        data=DataConfig(path=(DATA,), sequence_length=CONTEXT, batch_size=batch),
        steps=tokens // (batch * CONTEXT),
        optimizer=OptimizerConfig(learning_rate=rate, warmup_steps=2000),
        mesh=MeshConfig(data=devices, lane=1),
        z_loss=1e-4,
        remat="block",
        validate_every=500,
        save_every=500,
    )
