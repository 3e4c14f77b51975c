"""FLOPs per token of a model, counted from its config, and the share of the peak that a run reaches (MFU)."""

from laneformer.config import ModelConfig
from laneformer.weights import attention_flops_per_token, matmul_parameters


def forward_flops_per_token(config: ModelConfig, sequence_length: int) -> float:
    """FLOPs of a forward pass per token of a sequence, 2 per multiplication and addition: 2 M + attention.

    M is the number of `matmul_parameters`. This is the convention of PaLM (arXiv 2204.02311, appendix B), except that
    attention counts only keys that a query attends to, about half of them. Norms, rotations, softmax and sums over
    lanes are not counted.
    """
    return 2 * matmul_parameters(config) + attention_flops_per_token(config, sequence_length)


def train_flops_per_token(config: ModelConfig, sequence_length: int) -> float:
    """FLOPs of forward and backward pass per token: 3 x forward = 6 M + 12 H e keys, for H heads of size e.

    The backward pass needs two products for each product of the forward pass. Recomputation is not counted.
    """
    return 3 * forward_flops_per_token(config, sequence_length)


def model_flops_utilization(
    config: ModelConfig, sequence_length: int, tokens_per_second: float, devices: int, peak_flops: float
) -> float:
    """MFU: training FLOPs per second over the peak of all devices (FLOP/s of one device in the compute dtype, without
    sparsity).
    """
    return train_flops_per_token(config, sequence_length) * tokens_per_second / (devices * peak_flops)
