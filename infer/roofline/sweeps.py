"""Tables of the speed against layout, lanes, delay, context and precision."""

import inspect
from dataclasses import replace

from laneformer.config import ModelConfig
from laneformer.errors import ConfigError
from laneformer.formats import FORMATS
from laneformer.infer.roofline.devices import Node, make_node
from laneformer.infer.roofline.model import Token, Work, hidden_up_to, module_seconds, token, token_of_bytes
from laneformer.infer.roofline.published import MoeModel
from laneformer.infer.roofline.table import PROJECTED, Column, Table
from laneformer.layout import LAYOUTS
from laneformer.weights import parameter_table

TRIED_ARGUMENTS = (2, 0.5, 1, 0)  # for layouts with arguments
_UNPACKED = "unpacking is free; the quality of the answers is not considered"
SPEED = (
    Column("us/token", ",.1f", PROJECTED),
    Column("tok/s", ",.0f", PROJECTED),
    Column("ceiling tok/s", ",.0f", PROJECTED),
)


def _speed(found: Token) -> tuple[float, float, float]:
    """The values of the columns SPEED."""
    return 1e6 * found.seconds, found.rate, found.ceiling


def layouts_of(config: ModelConfig) -> list[str]:
    """The config's layout, and every other layout that fits. A layout with an argument gets the first of
    TRIED_ARGUMENTS that fits.
    """
    found = [config.layout]
    for name, make in LAYOUTS.items():
        wanted = list(inspect.signature(make).parameters)[2:]
        texts = (
            [name] if name == "laneformer" or not wanted else [f"{name}({argument})" for argument in TRIED_ARGUMENTS]
        )
        found += [text for text in texts if _fits(config, text)][:1]
    return list(dict.fromkeys(found))


def _fits(config: ModelConfig, layout: str) -> bool:
    try:
        config.replace(layout=layout)
    except ConfigError:
        return False
    return True


def _waiting(found: Token) -> float:
    """Microseconds of waits for exchanges."""
    return 1e6 * sum(term.seconds for term in found.terms if term.name.startswith("waits"))


def _exchange_row(config: ModelConfig, node: Node, work: Work) -> tuple:
    """The values of the columns EXCHANGES."""
    found, schedule = token(config, node, work), config.schedule
    hidden = hidden_up_to(schedule, module_seconds(config, node, work))
    hides = "-" if hidden is None else 1e6 * hidden
    return schedule.num_reductions, len(schedule.exposed), _waiting(found), hides, *_speed(found)


EXCHANGES = (
    Column("exchanges", "d"),
    Column("exposed", "d"),
    Column("wait us", ",.1f", PROJECTED),
    Column("hides up to us", ",.1f", PROJECTED),
    *SPEED,
)


def by_layout(config: ModelConfig, node: Node, work: Work) -> Table:
    """A table of the speed of every layout, with the same weights and lanes."""
    rows = [(name, *_exchange_row(config.replace(layout=name), node, work)) for name in layouts_of(config)]
    return Table(
        "layout",
        f"Speed against layout, {node.name}, {config.num_lanes} lanes",
        (Column("layout"), *EXCHANGES),
        rows,
        _assumed(node, _fixed(work)),
    )


def by_delay(config: ModelConfig, node: Node, work: Work) -> Table:
    """A table of the speed of layout dtp(d) for several delays d."""
    delays = [d for d in (0, 1, 2, 3, 4, 6, 8, 12, 16) if d < 2 * config.num_hidden_layers]
    rows = [(d, *_exchange_row(config.replace(layout=f"dtp({d})"), node, work)) for d in delays]
    return Table(
        "delay",
        f"Speed against delay, {node.name}, layout dtp(delay)",
        (Column("delay, modules", "d"), *EXCHANGES),
        rows,
        _assumed(node, _fixed(work)),
    )


def by_lanes(config: ModelConfig, node: Node, work: Work, options: dict) -> Table:
    """A table of the speed with one lane per device, for every power of two that divides the model and that the node's
    links connect. options: arguments of `make_node`.
    """
    rows, lanes, used = [], 1, node
    while lanes <= min(config.num_attention_heads, node.per_node or config.num_attention_heads):
        try:
            cut = config.replace(num_lanes=lanes)
        except ConfigError:
            break  # no larger number of lanes fits either
        used = make_node(**options | {"devices": lanes})
        rows.append((lanes, *_exchange_row(cut, used, work)))
        lanes *= 2
    return Table(
        "lanes",
        f"Speed against lanes, one per device, layout {config.layout}",
        (Column("lanes", "d"), *EXCHANGES),
        rows,
        _assumed(used, _fixed(work)),
    )


def by_context(config: ModelConfig, node: Node, work: Work) -> Table:
    """A table of the speed at several contexts, up to the model's longest."""
    longest = config.max_position_embeddings
    rows = []
    for context in contexts(longest):
        found = token(config, node, replace(work, context=context))
        rows.append((context, found.bytes / 1e9, *_speed(found)))
    return Table(
        "context",
        f"Speed against context, {node.name}",
        (Column("context", ",d"), Column("GB/token", ",.3f", PROJECTED), *SPEED),
        rows,
        _assumed(node, f"weights: {work.words}; keys and values {work.kv}, in sliding layers the window's"),
    )


def contexts(longest: int) -> list[int]:
    """Contexts to tabulate: 0, powers of two from 512 on, and the longest."""
    steps, step = [0], 512
    while step < longest:
        steps.append(step)
        step *= 2
    return [*steps, longest]


def by_precision(config: ModelConfig, node: Node, work: Work) -> Table:
    """A table of the speed with all weights in each precision, and as published. Keys and values keep their
    precision.
    """
    table = parameter_table(config)
    works = {name: Work(name, work.kv, work.context) for name in sorted(FORMATS, key=lambda n: -FORMATS[n].bytes)}
    if work.packed:
        works = {"as published": work} | works
    rows = []
    for name, one in works.items():
        found = token(config, node, one)
        bits = 8 * sum(one.bytes_of(table).values()) / sum(weight.read for weight in table.values())
        rows.append((name, bits, found.bytes / 1e9, *_speed(found)))
    return Table(
        "precision",
        f"Speed against precision of the weights, {node.name}",
        _PRECISION,
        rows,
        _assumed(node, f"keys and values {work.kv}, context {work.context:,}; {_UNPACKED}"),
    )


_PRECISION = (Column("weights"), Column("bits", "g"), Column("GB/token", ",.3f", PROJECTED), *SPEED)


def moe_by_precision(model: MoeModel, node: Node) -> Table:
    """A table of the speed with the published mixture of precisions, and with all weights in each precision."""
    sizes: dict[str, tuple[float | None, float]] = {"as published": (None, model.weight_bytes)}
    weights = sum(part.read for part in model.parts)
    sizes |= {
        name: (8 * FORMATS[name].bytes, weights * FORMATS[name].bytes)
        for name in sorted(FORMATS, key=lambda n: -FORMATS[n].bytes)
    }
    rows = []
    for name, (bits, size) in sizes.items():
        found = token_of_bytes(size, node, model.layers)
        rows.append((name, 8 * size / weights if bits is None else bits, size / 1e9, *_speed(found)))
    return Table(
        f"precision of {model.name}",
        f"{model.name}: speed against precision of the weights, {node.name}",
        _PRECISION,
        rows,
        _assumed(node, f"weights alone; {_UNPACKED}"),
    )


def _assumed(node: Node, words: str) -> str:
    return "; ".join((words, *node.assumptions))


def _fixed(work: Work) -> str:
    return (
        f"weights: {work.words}; keys and values {work.kv}, context {work.context:,}; the quality of the answers is"
        " not considered"
    )
