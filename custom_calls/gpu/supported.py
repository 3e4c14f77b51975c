"""Which ops the GPU kernel runs, and in which order."""

import itertools
from collections.abc import Iterator

from laneformer.ops import (
    Activation,
    Attend,
    Blocks,
    CompressedAttend,
    CompressedKeep,
    DeltaNet,
    GatherStreams,
    LatentAttend,
    LatentKeep,
    Layer,
    Op,
    Product,
    ProductName,
    RootRoute,
    Route,
    SharedExpert,
    SigmoidRoute,
    Value,
    products_of,
)

MOST_USED = 16  # experts of a token: each has a thread in a warp, which holds the place of its pieces
MOST_GROUPS = 32  # groups of experts: each has a thread in a warp, which holds the sum of its two best scores
MOST_STREAMS = 6  # residual streams: a thread holds the matrix between them in registers

Router = Route | SigmoidRoute | RootRoute

# Values that the ops of attention, and of feed-forward, pass from one to the next
CHAINS = ((Value.STREAM, Value.PROJECTED, Value.ATTENDED, Value.OUTPUT), (Value.STREAM, Value.HIDDEN, Value.OUTPUT))


def _latent_attention(queries: tuple[tuple, ...]) -> list[tuple]:
    return [
        (Product, Value.STREAM, Value.PROJECTED),
        *queries,
        (LatentKeep, Value.PROJECTED, Value.PROJECTED),
        (Product, Value.QUERIES, Value.ABSORBED),
        (LatentAttend, Value.ABSORBED, Value.ATTENDED),
        (Product, Value.ATTENDED, Value.PROJECTED),
        (Product, Value.PROJECTED, Value.OUTPUT),
    ]


# The ops of latent attention, with queries from one product or from two
LATENT_ATTENTION = (
    _latent_attention(((Product, Value.STREAM, Value.QUERIES),)),
    _latent_attention(((Product, Value.STREAM, Value.HIDDEN), (Product, Value.HIDDEN, Value.QUERIES))),
)

# The ops of compressed attention, in layers without and with an index
COMPRESSED_ATTENTION = tuple(
    [
        (Product, Value.STREAM, Value.PROJECTED),
        (Product, Value.STREAM, Value.HIDDEN),
        (Product, Value.HIDDEN, Value.QUERIES),
        *index,
        (CompressedKeep, Value.PROJECTED, Value.PROJECTED),
        (CompressedAttend, Value.QUERIES, Value.ATTENDED),
        (Product, Value.ATTENDED, Value.PROJECTED),
        (Product, Value.PROJECTED, Value.OUTPUT),
    ]
    for index in ([], [(Product, Value.HIDDEN, Value.INDEX)])
)


def unknown(layer: Layer, hidden: int) -> Iterator[str]:
    """The parts of a layer that the kernel does not support, as clauses of an error message."""
    for module, chain in zip(layer.modules, CHAINS, strict=True):
        first, *_ = module.ops
        mixed = isinstance(first, GatherStreams)
        if mixed and first.count > MOST_STREAMS:
            yield f"it has {first.count} residual streams, more than {MOST_STREAMS}"
        all_ops = module.ops[mixed:]
        routed = module is layer.feed_forward and isinstance(all_ops[0], Router)
        shared = [op for op in all_ops if isinstance(op, SharedExpert)]
        ops = tuple(op for op in all_ops[routed:] if op not in shared)
        yield from _unknown_experts(all_ops[0] if routed else None, ops)
        if any(isinstance(op, LatentAttend) for op in ops):
            yield from _unknown_latents(ops)
        elif any(isinstance(op, CompressedAttend) for op in ops):
            yield from _unknown_compressed(ops)
        else:
            yield from _unknown_chain(ops, chain)
        for op in shared:
            yield from _unknown_shared(op, all_ops[0] if routed and len(shared) == 1 else None)
            yield from _unknown_chain(op.products, chain)
    for op in (one for whole in layer.ops for one in products_of(whole) or (whole,)):
        if isinstance(op, Attend):
            projected = _projected(layer)
            if projected != op.projected or op.heads % op.kv_heads:
                yield f"{op.heads} query and {op.kv_heads} key heads of {op.head_dim} do not fit {projected} channels"
        if isinstance(op, DeltaNet):
            projected = _projected(layer)
            if projected != op.projected or op.value_heads % op.key_heads:
                yield f"{op.value_heads} value and {op.key_heads} key heads do not fit {projected} channels"
        if not isinstance(op, Product):
            continue
        if (op.limit is not None or op.up_offset) and not op.gated:
            yield f"product {op.name.name} has limits but no gate"
        if op.norm and op.reads is not Value.STREAM and op.writes not in (Value.QUERIES, Value.INDEX):
            yield f"product {op.name.name} reads {op.reads.name} with a norm"
        if op.writes is Value.OUTPUT and (op.gated or op.activation is not Activation.NONE):
            yield f"product {op.name.name} writes OUTPUT {'gated' if op.gated else f'through {op.activation.name}'}"
        if op.writes is Value.OUTPUT and op.rows != hidden:
            yield f"product {op.name.name} writes {op.rows} of {hidden} channels"
        if len({matrix.bias is None for matrix in op.matrices}) > 1:
            yield f"product {op.name.name} has biases for only some of its matrices"


def _projected(layer: Layer) -> int:
    """Channels that the first product of a layer's attention writes."""
    return next(op.channels for op in layer.attention.ops if isinstance(op, Product))


def _unknown_chain(ops: tuple[Op, ...], chain: tuple[Value, ...]) -> Iterator[str]:
    """A complaint if the ops do not pass on exactly the values of `chain`."""
    steps = [(op.reads, op.writes) for op in ops]
    values = [ops[0].reads, *(op.writes for op in ops)]  # an op in place repeats a value
    if steps != list(itertools.pairwise(values)) or tuple(value for value, _ in itertools.groupby(values)) != chain:
        yield f"its ops are {' '.join(f'{a.name} -> {b.name}' for a, b in steps)}"


def _steps(ops: tuple[Op, ...]) -> list[tuple]:
    """The kind, input and output of each op, without the ops on the module's output."""
    return [(type(op), op.reads, op.writes) for op in ops if (op.reads, op.writes) != (Value.OUTPUT, Value.OUTPUT)]


def _unknown_latents(ops: tuple[Op, ...]) -> Iterator[str]:
    """The parts of latent attention that the kernel does not support."""
    found = _steps(ops)
    if found not in LATENT_ATTENTION:
        yield f"its ops are {' '.join(f'{a.name} -> {b.name}' for _, a, b in found)}"
        return
    products = {op.name: op for op in ops if isinstance(op, Product)}
    attend = next(op for op in ops if isinstance(op, LatentAttend))
    wanted = {
        ProductName.ABSORB: (attend.rank, attend.still, Blocks(attend.heads, attend.still + attend.rotating)),
        ProductName.VALUES: (products[ProductName.VALUES].rows, attend.rank, Blocks(attend.heads, attend.rank)),
    }
    for name, sizes in wanted.items():
        op = products[name]
        if (op.rows, op.columns, op.blocks) != sizes:
            yield f"product {name.name} has blocks that do not match its {attend.heads} heads"


def _unknown_compressed(ops: tuple[Op, ...]) -> Iterator[str]:
    """The parts of compressed attention that the kernel does not support."""
    found = _steps(ops)
    keep, attend = (
        next((op for op in ops if isinstance(op, kind)), None) for kind in (CompressedKeep, CompressedAttend)
    )
    if found != COMPRESSED_ATTENTION[bool(attend.index)]:
        yield f"its ops are {' '.join(f'{a.name} -> {b.name}' for _, a, b in found)}"
        return
    groups = next(op for op in ops if isinstance(op, Product) and op.reads is Value.ATTENDED)
    if groups.blocks is None or groups.columns != groups.blocks.step or groups.columns % attend.head_dim:
        yield f"product {groups.name.name} does not read groups of whole heads"
    if attend.head_dim % 2:
        yield f"heads of compressed attention have {attend.head_dim} channels, an odd number"
    if bool(keep.index_keys) != bool(attend.index):
        yield "compressed attention keeps keys without an index, or has an index without keys"


def _unknown_shared(op: SharedExpert, route: Router | None) -> Iterator[str]:
    """The parts of a shared expert that the kernel does not support. route: the router whose experts it follows; the
    shared expert's gate is one of the router's rows.
    """
    if route is None:
        yield "a shared expert has no router, or there are several"
    elif op.gate and op.gate.bias:
        yield "a shared expert's gate has a bias"
    elif op.gate and op.products[0].norm != route.norm:
        yield "the norms of a shared expert's gate and of the router differ"


def _unknown_experts(route: Router | None, ops: tuple[Op, ...]) -> Iterator[str]:
    """The parts of a router, and of the ops after it, that the kernel does not support."""
    products = [op for op in ops if isinstance(op, Product)]
    if route is None:
        yield from (f"product {op.name.name} uses experts, but has no router" for op in products if op.chosen)
        return
    if route.used > MOST_USED:
        yield f"a token uses {route.used} experts, more than {MOST_USED}"
    if isinstance(route, SigmoidRoute) and route.groups > MOST_GROUPS:
        yield f"its experts are in {route.groups} groups, more than {MOST_GROUPS}"
    if [op.chosen and (op.chosen.used, op.chosen.summed) for op in products] != [
        (route.used, False),
        (route.used, True),
    ]:
        yield "the products after a router do not use its experts"
    elif {op.matrices[0].weight.experts for op in products} != {route.matrix.rows}:
        yield f"the number of experts of a product is not the {route.matrix.rows} of its router"
