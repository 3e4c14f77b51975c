"""The ops of a decode step, collected from the layers."""

from laneformer.blocks.layer import Layer, norm_op
from laneformer.blocks.streams import Streams
from laneformer.config import ModelConfig
from laneformer.ops import DecoderOps, Head, HeadKind, Weight


def decoder_ops(config: ModelConfig) -> DecoderOps:
    """The ops of a model's decode step: the embedding, the ops of every layer's blocks, and the head."""
    vocab, hidden, lanes = config.vocab_size, config.hidden_size, config.num_lanes
    layers = tuple(Layer.ops(layer, config.norms, f"layers.{n}") for n, layer in enumerate(config.layers))
    embedding = Weight("tok_embeddings", (vocab, hidden), lane_sharded=False)
    streams = config.norms.streams
    kind = HeadKind[config.lm_head_type.upper()]
    rows = vocab // lanes if kind == HeadKind.VOCAB_PARALLEL else vocab
    head = Head(
        kind,
        norm_op(config.norms.final, "norm"),
        config.pre_norm_lane_agg,
        embedding if config.tie_word_embeddings else Weight("lm_head", (rows, hidden), kind != HeadKind.REPLICATE),
        Streams.op(streams, "head_streams", of_head=True) if streams else None,
        config.final_logit_softcapping,
    )
    multiplier = config.embedding_multiplier
    return DecoderOps(lanes, hidden, vocab, config.max_position_embeddings, embedding, multiplier, layers, head)
