"""FLOPs per token of a model, counted from its config, and the share of the peak that a run reaches (MFU)."""

from laneformer.blocks import BLOCKS
from laneformer.config import ModelConfig
from laneformer.weights import parameter_table


def matmul_parameters(config: ModelConfig) -> int:
    """Weights that multiply every token: all matrices and the head, also a tied one, but not the embedding table."""
    return sum(weight.read for weight in parameter_table(config).values() if weight.group != "vector")


def attention_flops_per_token(config: ModelConfig, sequence_length: int) -> float:
    """FLOPs per token of q k^T and of the weighted sum of v, in a forward pass: sum over layers of 4 H e keys.

    Each block states its own, see `Block.context_flops`. Document boundaries are ignored.
    """
    return sum(
        BLOCKS[type(options)].context_flops(options, sequence_length) for layer in config.layers for options in layer
    )


def forward_flops_per_token(config: ModelConfig, sequence_length: int) -> float:
    """FLOPs of a forward pass per token of a sequence, 2 per multiplication and addition: 2 M + attention.

    M are the `matmul_parameters`. The convention of PaLM (arXiv 2204.02311, appendix B), except that attention counts
    only keys that a query attends to, about half of them. Norms, rotations, softmax and sums over lanes are left out.
    """
    return 2 * matmul_parameters(config) + attention_flops_per_token(config, sequence_length)


def train_flops_per_token(config: ModelConfig, sequence_length: int) -> float:
    """FLOPs of forward and backward pass, which needs two products for each: 3 x forward = 6 M + 12 H e keys.

    Recomputation is not counted.
    """
    return 3 * forward_flops_per_token(config, sequence_length)


def model_flops_utilization(
    config: ModelConfig, sequence_length: int, tokens_per_second: float, devices: int, peak_flops: float
) -> float:
    """MFU: training FLOPs per second over the peak of all devices (FLOP/s of one device in the compute dtype, without
    sparsity).
    """
    return train_flops_per_token(config, sequence_length) * tokens_per_second / (devices * peak_flops)
