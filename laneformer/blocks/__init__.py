"""The kinds of blocks in a layer. `BLOCKS[type(options)]` is the class that computes a block with these options."""

from laneformer.blocks.attention import Attention
from laneformer.blocks.block import Block
from laneformer.blocks.compressed_attention import CompressedAttention
from laneformer.blocks.delta_net import DeltaNet
from laneformer.blocks.experts import Experts
from laneformer.blocks.latent_attention import LatentAttention
from laneformer.blocks.mlp import Mlp
from laneformer.config import (
    AttentionOptions,
    CompressedAttentionOptions,
    DeltaNetOptions,
    ExpertsOptions,
    LatentAttentionOptions,
    MlpOptions,
)

BLOCKS: dict[type, type[Block]] = {
    AttentionOptions: Attention,
    CompressedAttentionOptions: CompressedAttention,
    DeltaNetOptions: DeltaNet,
    LatentAttentionOptions: LatentAttention,
    MlpOptions: Mlp,
    ExpertsOptions: Experts,
}
