"""How much a model computes per token, counted from its config, and the share of the hardware's peak that a run reaches
(MFU).
"""

from laneformer.blocks import BLOCKS
from laneformer.config import ModelConfig
from laneformer.weights import parameter_table


def matmul_parameters(config: ModelConfig) -> int:
    """Weights that every token is multiplied by: all matrices and the head, also a tied one; the embedding table is
    only read.
    """
    return sum(weight.read for weight in parameter_table(config).values() if weight.group != "vector")


def attention_flops_per_token(config: ModelConfig, sequence_length: int) -> float:
    """FLOPs per token of q k^T and of the weighted sum of v, in a forward pass: sum over layers of 4 H e keys.

    Each block states its own, see `Block.context_flops`. Document boundaries are not known here.
    """
    return sum(
        BLOCKS[type(options)].context_flops(options, sequence_length) for layer in config.layers for options in layer
    )


def forward_flops_per_token(config: ModelConfig, sequence_length: int) -> float:
    """FLOPs of a forward pass per token of a sequence, 2 per multiplication and addition: 2 M + attention.

    M are the `matmul_parameters`. The convention of PaLM (arXiv 2204.02311, appendix B), except that attention counts
    the keys that are seen, about half of them, not all. Norms, rotations, softmax and the sums over lanes are left out.
    """
    return 2 * matmul_parameters(config) + attention_flops_per_token(config, sequence_length)


def train_flops_per_token(config: ModelConfig, sequence_length: int) -> float:
    """Forward and backward, which takes two products for each: 3 x forward = 6 M + 12 H e keys. Recomputation is not
    counted.
    """
    return 3 * forward_flops_per_token(config, sequence_length)


def model_flops_utilization(
    config: ModelConfig, sequence_length: int, tokens_per_second: float, devices: int, peak_flops: float
) -> float:
    """MFU: training FLOPs per second over the peak of all devices (FLOP/s of one device in the compute dtype, without
    sparsity).
    """
    return train_flops_per_token(config, sequence_length) * tokens_per_second / (devices * peak_flops)
