"""The projected time of one token: the time of reading bytes from memory, plus all waits.

    seconds = bytes / bandwidth + dependent operations x sync + waits for exchanges + launches x time of a launch

The terms are added, which assumes that no weight is read during a wait. A kernel that streams weights across its waits
is faster. An exchange overlaps the modules between its start and its landing; the landing waits for the rest of it.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache

from laneformer.blocks.block import PARTS, Weight
from laneformer.config import ModelConfig
from laneformer.decoder import decoder_ops
from laneformer.errors import ConfigError
from laneformer.formats import FORMATS
from laneformer.infer.roofline.devices import Node
from laneformer.layout import Schedule
from laneformer.state import state_bytes_per_token
from laneformer.weights import kv_bytes_per_token, module_weights, parameter_table

EDGES = "dependent operations"
EDGES_PER_LAYER = 5  # for models known only by their bytes: q k v, attention, wo; w1 w3, w2
OUTER_EDGES = 2  # head, sampled token
EXCHANGES_PER_LAYER = 2  # plain tensor parallelism, for models known only by their bytes
# Shares of the effective bandwidth that Kog measured at 4 GB per token: 2,100 of 7,680 tok/s on 8 H200, and 3,000 of
# 8,400 tok/s on 8 MI300X.
PUBLIC_SHARES = (2100 / 7680, 3000 / 8400)


@dataclass(frozen=True)
class Work:
    """The conditions of one token: the precision of weights, that of keys and values, and the number of positions
    before it.
    """

    weights: str = "bfloat16"
    kv: str = "bfloat16"
    context: int = 0
    packed: Mapping[str, float] = field(default_factory=dict)
    """Bytes per weight of each matrix that has another format, by its path."""

    @property
    def words(self) -> str:
        """Description of the precision of the weights, for reports."""
        if not self.packed:
            return self.weights
        bits = ", ".join(f"{8 * size:g}" for size in sorted(set(self.packed.values())))
        return f"{len(self.packed):,} matrices in {bits} bits as published, the others {self.weights}"

    def bytes_of(self, weights: Mapping[str, Weight]) -> dict[str, float]:
        """Bytes that one token reads of each weight, by path, without the rows of tables that it looks up."""
        usual = FORMATS[self.weights].bytes
        return {path: weight.read * self.packed.get(path, usual) for path, weight in weights.items()}

    def __post_init__(self):
        for name, value in (("--precision", self.weights), ("--kv-precision", self.kv)):
            if value not in FORMATS:
                raise ConfigError(f"unknown {name} {value}: choose {', '.join(FORMATS)}")
        if FORMATS[self.kv].weights_only:
            raise ConfigError(f"--kv-precision {self.kv} is a format of weights: choose bfloat16")
        if self.context < 0:
            raise ConfigError(f"--context must be at least 0, got {self.context}")


@dataclass(frozen=True)
class Term:
    """One summand of a token's time."""

    name: str
    detail: str
    seconds: float
    count: int = 1
    """Number of equal parts that `seconds` is the sum of."""


@dataclass(frozen=True)
class Token:
    """The time of one token and its summands."""

    bytes: float
    """Bytes that the token reads and writes."""
    node: Node
    terms: tuple[Term, ...]

    @property
    def seconds(self) -> float:
        return math.fsum(term.seconds for term in self.terms)

    @property
    def rate(self) -> float:
        """Tokens per second."""
        return 1 / self.seconds

    @property
    def ceiling(self) -> float:
        """Tokens per second if reading were the only summand."""
        return self.node.total_bandwidth / self.bytes

    def sync_for(self, rate: float) -> float | None:
        """Seconds per dependent operation at which the speed would be `rate` tokens per second; None if at none."""
        edges = next((term for term in self.terms if term.name == EDGES), None)
        if edges is None:
            return None
        left = 1 / rate - (self.seconds - edges.seconds)
        return None if left < 0 else left / edges.count


def bytes_by_part(config: ModelConfig, work: Work) -> dict[str, float]:
    """Bytes that one token reads and writes, by part. Their sum is weight_bytes_per_token + kv_bytes_per_token."""
    table = parameter_table(config)
    read = work.bytes_of(table)
    parts = {part: sum(size for path, size in read.items() if table[path].part == part) for part in PARTS}
    parts["row of the embedding"] = _looked_up(table, work)
    parts = {part: size for part, size in parts.items() if size}
    parts[f"keys and values at context {work.context:,}"] = kv_bytes_per_token(
        config, work.context, FORMATS[work.kv].bytes
    )
    return parts


def module_bytes(config: ModelConfig, work: Work) -> list[float]:
    """Bytes that one token reads and writes in each module, in order. The rest of `bytes_by_part` is read outside the
    layers.
    """
    blocks = [options for layer in config.layers for options in layer]
    return [
        sum(work.bytes_of(weights).values())
        + _looked_up(weights, work)
        + state_bytes_per_token(options, work.context, FORMATS[work.kv].bytes)
        for options, weights in zip(blocks, module_weights(config), strict=True)
    ]


def _looked_up(weights: Mapping[str, Weight], work: Work) -> float:
    """Bytes of the rows of tables that one token looks up."""
    return sum(weight.looked_up for weight in weights.values()) * FORMATS[work.weights].bytes


def module_seconds(config: ModelConfig, node: Node, work: Work) -> list[float]:
    """Seconds that one token takes in each module, without exchanges."""
    sizes = module_bytes(config, work)
    return [
        size / node.total_bandwidth + edges * node.sync for size, edges in zip(sizes, module_edges(config), strict=True)
    ]


@cache
def module_edges(config: ModelConfig) -> tuple[int, ...]:
    """Number of dependent operations in each module: results that a whole device waits for."""
    return tuple(module.edges for layer in decoder_ops(config).layers for module in layer.modules)


def waits(schedule: Schedule, modules: Sequence[float], node: Node, hidden_size: int) -> float:
    """Total seconds that landings wait for exchanges. modules: seconds of each module."""
    clock, waited, ready = 0.0, 0.0, {}
    last = len(modules) - 1
    for m, seconds in enumerate(modules):
        clock += seconds
        for payload in schedule.payloads:
            if payload.complete_at == m:
                ready[payload] = clock + node.exchange_seconds(payload.channels * hidden_size)
        for landing in schedule.landings:
            if min(landing.at, last) == m:
                wait = max(0.0, ready[landing.payload] - clock)
                clock, waited = clock + wait, waited + wait
    return waited


def hidden_up_to(schedule: Schedule, modules: Sequence[float]) -> float | None:
    """Seconds of the longest exchange that every delayed landing would hide; None if no landing is delayed. modules:
    seconds of each module.
    """
    last, exposed = len(modules) - 1, set(schedule.exposed)
    return min(
        (
            math.fsum(modules[x.payload.complete_at + 1 : min(x.at, last) + 1])
            for x in schedule.landings
            if x not in exposed
        ),
        default=None,
    )


def check_devices(config: ModelConfig, devices: int) -> None:
    """Raises ConfigError unless the lanes spread evenly over `devices` devices."""
    if config.num_lanes % devices:
        fitting = [n for n in range(1, config.num_lanes + 1) if config.num_lanes % n == 0]
        raise ConfigError(
            f"--devices {devices}: the model's {config.num_lanes} lanes spread over {', '.join(map(str, fitting))}"
            " devices"
        )


def token(config: ModelConfig, node: Node, work: Work) -> Token:
    """The time of one token of a Laneformer, or of a dense model cut into lanes. Raises ConfigError for devices or a
    context that the model does not allow.
    """
    check_devices(config, node.devices)
    if work.context > config.max_position_embeddings:
        raise ConfigError(f"--context {work.context}: the model's longest context is {config.max_position_embeddings}")
    size = math.fsum(bytes_by_part(config, work).values())
    modules = module_seconds(config, node, work)
    edges = sum(module_edges(config)) + OUTER_EDGES
    schedule, d = config.schedule, config.hidden_size
    head = {"replicate": d, "lane": config.vocab_size, "vocab_parallel": None}[config.lm_head_type]
    terms = [_reading(size, node), _edges(edges, node)]
    if node.devices > 1:
        one = node.exchange_seconds(d)
        detail = f"{schedule.num_reductions} exchanges of {1e6 * one:.2f} us, {len(schedule.exposed)} exposed landings"
        terms.append(Term(f"waits of layout {config.layout}", detail, waits(schedule, modules, node, d)))
        if head is not None:
            terms.append(
                Term(
                    f"sum over lanes of the {config.lm_head_type} head",
                    f"1 x {1e6 * node.exchange_seconds(head):.2f} us",
                    node.exchange_seconds(head),
                )
            )
        terms.append(
            Term("agreeing on the token", f"1 x {1e6 * node.exchange_seconds():.2f} us", node.exchange_seconds())
        )
    return Token(size, node, (*terms, *_launches(node)))


def token_of_bytes(size: float, node: Node, layers: int | None) -> Token:
    """The time of one token if only its bytes and the number of layers are known, with plain tensor parallelism. With
    `layers` None, no waits are counted.
    """
    terms = [_reading(size, node)]
    if layers is not None:
        edges = EDGES_PER_LAYER * layers + OUTER_EDGES
        terms.append(_edges(edges, node))
        if node.devices > 1:
            count = EXCHANGES_PER_LAYER * layers + 1
            one = node.exchange_seconds()
            terms.append(Term("waits for exchanges", f"{count} x {1e6 * one:.2f} us", count * one))
    return Token(size, node, (*terms, *_launches(node)))


def _reading(size: float, node: Node) -> Term:
    detail = f"{size / 1e9:,.3f} GB at {node.total_bandwidth / 1e12:,.2f} TB/s"
    return Term("reading", detail, size / node.total_bandwidth)


def _edges(count: int, node: Node) -> Term:
    return Term(EDGES, f"{count} x {1e6 * node.sync:.2f} us", count * node.sync, count)


def _launches(node: Node) -> list[Term]:
    if not node.launches:
        return []
    return [Term("kernel launches", f"{node.launches:g} x {1e6 * node.launch:g} us", node.launches * node.launch)]


def weights_in_memory(config: ModelConfig, work: Work) -> float:
    """Bytes of all weights of a model."""
    usual = FORMATS[work.weights].bytes
    return sum(weight.size * work.packed.get(path, usual) for path, weight in parameter_table(config).items())
