"""The ops of one decode step, collected from the blocks."""

from laneformer.blocks import BLOCKS
from laneformer.blocks.block import weight_of_op
from laneformer.blocks.norm import RMSNorm
from laneformer.blocks.rotary import rotary_frequencies
from laneformer.config import ModelConfig, NormOptions
from laneformer.ops import DecoderOps, Head, HeadKind, Layer, Norm, Op, Rotary, Weight


def decoder_ops(config: ModelConfig) -> DecoderOps:
    """The ops of a model: the embedding, those of every layer's blocks, and the head."""
    vocab, hidden, lanes = config.vocab_size, config.hidden_size, config.num_lanes
    in_layers, final = config.norms
    frequencies, factor = rotary_frequencies(config)
    rotary = Rotary(tuple(frequencies.tolist()), factor)

    def norm_op(options: NormOptions, path: str) -> Norm:
        return Norm(weight_of_op(RMSNorm.table(options, path), path), options.eps)

    def block_ops(options, path: str, norm_path: str) -> tuple[Op, ...]:
        norm = norm_op(in_layers, norm_path)
        return BLOCKS[type(options)].ops(options, path, norm, rotary)

    layers = tuple(
        Layer(
            block_ops(layer.attention, f"layers.{n}.attention", f"layers.{n}.attention_norm"),
            block_ops(layer.feed_forward, f"layers.{n}.feed_forward", f"layers.{n}.ffn_norm"),
        )
        for n, layer in enumerate(config.layers)
    )
    embedding = Weight("tok_embeddings", (vocab, hidden), lane_sharded=False)
    kind = HeadKind[config.lm_head_type.upper()]
    rows = vocab // lanes if kind == HeadKind.VOCAB_PARALLEL else vocab
    head = Head(
        kind,
        norm_op(final, "norm"),
        config.pre_norm_lane_agg,
        embedding if config.tie_word_embeddings else Weight("lm_head", (rows, hidden), kind != HeadKind.REPLICATE),
    )
    return DecoderOps(lanes, hidden, vocab, config.max_position_embeddings, embedding, layers, head)
