"""Figures of a training step counted from its config: FLOPs, exchanges, memory traffic and memory of one device.

Nothing is compiled, so a table of many meshes takes a second. FLOPs and exchanges are those of the program that XLA:GPU
compiles from train/step.py. Memory and its traffic are weighted sums over the step's arrays; the weights (`TRAFFIC`,
`KEPT`, `WORKING`) were fitted to such programs.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from jax.sharding import AbstractMesh

from laneformer.blocks.block import Weight
from laneformer.errors import ConfigError
from laneformer.mesh import DATA, LANE, fit_spec
from laneformer.train.config import Phase, TrainConfig
from laneformer.train.optimizer import per_lane
from laneformer.weights import attention_flops_per_token, parameter_table

WIDTHS = {"float32": 4, "bfloat16": 2}

# By --remat. Fitted to 100 steps compiled by XLA:GPU (jaxlib 0.10.2) for H200s: widths of 768 to 8,192, 2 to 24 layers,
# meshes of 8 to 256 devices, tp, ladder, laneformer and dtp(4), up to 32 parts, activations and exchanges in float32
# and bfloat16. docs/training.md states the errors.
TRAFFIC = {  # passes over an array whose time adds to that of the products
    "none": {"streams": 32.8, "sums": 1.3, "columns": 12.4, "logits": 3.2, "matrices": 0.0, "share": 12.4},
    "dots": {"streams": 28.7, "sums": 2.0, "columns": 17.6, "logits": 4.7, "matrices": 0.0, "share": 16.2},
    "block": {"streams": 39.9, "sums": 0.0, "columns": 16.9, "logits": 5.4, "matrices": 1.7, "share": 11.4},
}
KEPT = {  # copies that are kept until the backward pass has used them
    "none": {"streams": 1.6, "columns": 2.6},
    "dots": {"streams": 1.2, "columns": 3.0},
    "block": {"streams": 1.1, "columns": 2.3},
}
WORKING = {  # copies in use at one time
    "none": {"stream": 0.0, "column": 5.2, "flight": 2.3, "chunk": 0.8, "matrices": 1.2},
    "dots": {"stream": 3.5, "column": 0.0, "flight": 1.7, "chunk": 1.1, "matrices": 0.6},
    "block": {"stream": 5.3, "column": 0.0, "flight": 2.0, "chunk": 0.9, "matrices": 1.0},
}


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """What one device stores, computes and sends in a step."""

    state: float
    """Bytes of weights and moments."""
    temporary: float
    """Bytes of gradients, activations and scratch at their peak."""
    flops: float
    """FLOPs of products, recomputed ones included."""
    traffic: float
    """Bytes of memory read and written whose time adds to that of `flops`."""
    sent: Mapping[tuple[str, str], float]
    """(kind of exchange, axis) -> bytes sent."""

    @property
    def memory(self) -> float:
        """Bytes in use at once."""
        return self.state + self.temporary


@dataclass(frozen=True)
class _Counts:
    """Numbers of values on one device; those that depend on tokens are for one part of the batch."""

    tokens: int
    stream: float
    """Values of the streams of the device's lanes."""
    columns: float
    """Results of the products of q, k, v, gate and up in one layer."""
    logits: float
    chunk: float
    """Logits that are in memory at once."""
    gathered: float
    """Weights of the layers' matrices, gathered along the data axis."""
    reread: float
    """The part of `gathered` that recomputing a block multiplies again: all but the last matrix of each module."""
    head: float
    """Weights of the head, gathered along the data axis."""
    table: int
    """Weights of the whole embedding table."""
    share: float
    """Weights of all kinds that the device stores."""


def estimate(config: TrainConfig, phase: Phase, mesh: Mapping[str, int]) -> Estimate:
    """Estimates a step of a phase on a mesh {"data": devices, "lane": devices}, with bfloat16 products.

    Raises ConfigError for options that are not counted: experts, heads other than replicate, tied embeddings, weights
    in 8 or 4 bits, a teacher.
    """
    _check(config, phase)
    n, parts = _counts(config, phase, mesh), phase.accumulate
    arrays = _arrays(config, phase, n)

    def total(weights: Mapping[str, float]) -> float:
        return sum(weight * arrays[name] for name, weight in weights.items())

    gradients, kept = arrays["share"], total(KEPT[config.remat])
    # Gradients of several parts are summed beside the activations; those of one part grow as activations are freed.
    held = gradients + kept if parts > 1 else max(gradients, kept)
    traffic = parts * total(TRAFFIC[config.remat]) - (parts - 1) * TRAFFIC[config.remat]["share"] * arrays["share"]
    return Estimate(
        state=_state(phase, mesh),
        temporary=held + total(WORKING[config.remat]),
        flops=parts * _flops(config, phase, n, mesh),
        traffic=traffic,
        sent=_sent(config, phase, n, mesh),
    )


def _check(config: TrainConfig, phase: Phase) -> None:
    model = phase.model
    for name, value, counted in (
        ("model.num_experts", model.num_experts, None),
        ("model.lm_head_type", model.lm_head_type, "replicate"),
        ("model.tie_word_embeddings", model.tie_word_embeddings, False),
        ("weights", phase.weights, "float32"),
        ("distill.teacher", config.distill.teacher, None),
    ):
        if value != counted:
            raise ConfigError(f"--sweep does not count {name} = {value}; leave --sweep out to compile the step instead")


def _counts(config: TrainConfig, phase: Phase, mesh: Mapping[str, int]) -> _Counts:
    model, table = phase.model, parameter_table(phase.model)
    tokens = phase.tokens_per_step // (phase.accumulate * mesh[DATA])
    lanes = model.num_lanes // mesh[LANE]
    matrices = [weight for weight in table.values() if weight.group == "matrix"]
    reading = [weight for weight in matrices if weight.initial == "normal"]

    def whole(weights) -> float:
        return sum(weight.size for weight in weights) / mesh[LANE]

    columns = sum(math.prod(weight.shape[:-1]) for weight in reading) / model.num_hidden_layers / mesh[LANE]
    logits = tokens * model.vocab_size / mesh[LANE]
    return _Counts(
        tokens=tokens,
        stream=tokens * lanes * model.hidden_size,
        columns=tokens * columns,
        logits=logits,
        chunk=logits * min(1.0, config.loss_chunk / tokens),
        gathered=whole(matrices),
        reread=whole(reading),
        head=table["lm_head"].size / mesh[LANE],
        table=table["tok_embeddings"].size,
        share=sum(_share(weight, mesh) for weight in table.values()),
    )


def _share(weight: Weight, mesh: Mapping[str, int]) -> float:
    """Number of values of a weight that one device stores."""
    spec = fit_spec(weight.spec, weight.shape, AbstractMesh(tuple(mesh.values()), tuple(mesh)))
    return weight.size / math.prod(mesh[axis] for axis in spec if axis is not None)


def _state(phase: Phase, mesh: Mapping[str, int]) -> float:
    """Bytes of float32 weights and their moments on one device: two moments for AdamW, one for Muon's matrices."""
    muon = phase.optimizer.kind == "muon"
    table = parameter_table(phase.model).values()
    return sum(4 * _share(weight, mesh) * (2 if muon and per_lane(weight) else 3) for weight in table)


def _flops(config: TrainConfig, phase: Phase, n: _Counts, mesh: Mapping[str, int]) -> float:
    """FLOPs of one part on one device: three products with each weight, cuDNN's attention (two products forward, five
    backward from its inputs alone), and recomputation.
    """
    again = {"none": 0.0, "dots": 0.0, "block": 2 * n.tokens * n.reread}[config.remat]
    attention = attention_flops_per_token(phase.model, phase.data.sequence_length) * n.tokens / mesh[LANE]
    return 6 * n.tokens * (n.gathered + n.head) + again + attention * (3.5 if config.remat == "none" else 4.5)


def _sent(config: TrainConfig, phase: Phase, n: _Counts, mesh: Mapping[str, int]) -> dict[tuple[str, str], float]:
    """Bytes that a device sends in a step, in rings: (g - 1)/g of an array, twice that for an all-reduce."""
    parts, data, lane, width = phase.accumulate, mesh[DATA], mesh[LANE], phase.model.hidden_size
    found = {}
    if lane > 1:
        stream = WIDTHS[config.stream_dtype]
        narrow = min(WIDTHS[config.exchange_dtype], stream)
        payloads = sum(payload.channels for payload in phase.model.schedule.payloads)
        # Each sum and its gradient; the head's sum and gradient, in float32; the gradient of the embedded tokens.
        sums = n.tokens * width * (2 * payloads * narrow + 2 * 4 + stream)
        found["all-reduce", LANE] = 2 * (lane - 1) / lane * parts * sums
    if data > 1:
        share = (data - 1) / data * parts
        again = n.reread if config.remat == "block" and config.activation_dtype == "float32" else 0
        tokens = 4 * n.tokens * width  # embedded tokens; a table smaller than these is gathered
        looked_up = 4 * n.table < tokens
        gathered = 2 * (2 * n.gathered + n.head + again) + (4 * n.table if looked_up else 0)
        found["all-gather", DATA] = share * gathered
        found["reduce-scatter", DATA] = share * (WIDTHS[config.activation_dtype] * n.gathered + 4 * n.head)
        found["all-to-all", DATA] = share * (tokens if looked_up else 2 * tokens)
    return found


def _arrays(config: TrainConfig, phase: Phase, n: _Counts) -> dict[str, float]:
    """Bytes of the arrays that `TRAFFIC`, `KEPT` and `WORKING` count."""
    model = phase.model
    stream = n.stream * WIDTHS[config.stream_dtype]
    narrow = min(WIDTHS[config.exchange_dtype], WIDTHS[config.stream_dtype])
    columns = n.columns * WIDTHS[config.activation_dtype]
    sums = n.tokens * model.hidden_size * narrow
    return {
        "streams": model.num_hidden_layers * stream,
        "stream": stream,
        "sums": len(model.schedule.payloads) * sums,
        "flight": model.schedule.in_flight * sums,
        "columns": model.num_hidden_layers * columns,
        "column": columns,
        "logits": 4 * n.logits,
        "chunk": 4 * n.chunk,
        "matrices": 2 * (n.gathered + n.head),
        "share": 4 * n.share,
    }
