"""Packs products on the devices: turns matrices into the streams and lists of the warps."""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from laneformer.custom_calls.gpu.codes import FILLED_SCALE, Header, arrays_of, equal_scales, random_codes
from laneformer.custom_calls.gpu.tiling import Tiling
from laneformer.formats import BF12_END
from laneformer.quantized import Quantized


class Placement(NamedTuple):
    """Where and how a product is packed."""

    paths: tuple[str, ...]
    """Paths of its matrices."""
    offset: int
    """First word of the product in each warp's stream."""
    tiling: Tiling
    arrangement: str
    """As in `placed`."""


class Exceptions(NamedTuple):
    """The exceptions of a product in 12 bits."""

    words: jax.Array
    """The list of each warp, uint32 [lanes, CTAs, warps, n]."""
    most: jax.Array
    """The largest number of exceptions in a warp."""
    total: jax.Array
    """The number of all exceptions."""


@partial(jax.jit, static_argnames=("tiling", "arrangement", "sharding"), donate_argnums=0)
def placed(
    packed: jax.Array,
    parts: list[jax.Array],
    offset: jax.Array,
    table: jax.Array,
    tiling: Tiling,
    arrangement: str,
    sharding,
) -> tuple[jax.Array, Exceptions | None]:
    """Packs the matrices `parts` of a product into `packed`, from word `offset` of each warp on. Returns what `_stored`
    returns.

    parts: each [lanes, rows, columns], or without the lane axis if all lanes share it; with experts each [lanes,
    experts, rows, columns], for the experts of one chunk (see `chunks`). table: the table of Bf12. arrangement: "rows"
    of one part after those of another; "pairs" of rows, so that a gate and its partner stay in one CTA; "columns" of
    the lanes, end to end; "as it is".
    """
    matrix = _arranged(parts, packed.shape[0], arrangement)
    return _stored(packed, tiling.deal(tiling.floats.encode(matrix, table)), offset, tiling, sharding)


@partial(jax.jit, static_argnames=("headers", "tiling", "arrangement", "sharding"), donate_argnums=0)
def placed_codes(
    packed: jax.Array,
    parts: list[dict[str, jax.Array]],
    offset: jax.Array,
    headers: tuple[Header, ...],
    tiling: Tiling,
    arrangement: str,
    sharding,
) -> tuple[jax.Array, jax.Array | None]:
    """`placed` for quantized matrices, whose records are given as arrays and headers. Returns the packed weights
    including the product, and the factors of the rows as words for each warp, uint32 [lanes, CTAs, warps, n], or None.
    """
    records: list[Quantized[jax.Array]] = [
        Quantized(header.kind, group=header.group, columns=header.columns, **part)
        for header, part in zip(headers, parts, strict=True)
    ]
    found = [
        arrays_of(record, header, tiling.codes, tiling.granule) for record, header in zip(records, headers, strict=True)
    ]
    arrays = {name: _arranged([each[name] for each in found], packed.shape[0], arrangement) for name in found[0]}
    lines = tiling.codes.pack(tiling.deal(arrays["codes"]))
    if "scales" in arrays:
        lines = tiling.codes.with_scales(lines, tiling.deal_granules(arrays["scales"]), tiling.cluster)
    packed = jax.lax.dynamic_update_slice(packed, _of_lanes(lines, packed, tiling, sharding), (0, 0, 0, offset))
    if "factors" not in arrays:
        return packed, None
    factors = jax.lax.bitcast_convert_type(tiling.deal_rows(arrays["factors"]), jnp.uint32)
    return packed, _of_lanes(factors, packed, tiling, sharding)


def chunks(matrices: list, tiling: Tiling) -> Iterator[tuple[int, list]]:
    """Cuts the matrices of all experts into chunks of experts. Yields the first line of each chunk in the memory of a
    warp, and its part of each matrix.
    """
    for number, first in enumerate(range(0, tiling.expert_pieces.experts, tiling.chunk)):
        some = slice(first, first + tiling.chunk)
        yield (
            number * tiling.chunk_lines,
            [
                one.with_arrays({name: array[:, some] for name, array in one.arrays.items()})
                if isinstance(one, Quantized)
                else one[:, some]
                for one in matrices
            ],
        )


def _arranged(parts: list[jax.Array], lanes: int, arrangement: str) -> jax.Array:
    if arrangement == "as it is":
        return parts[0]
    if arrangement == "columns":
        return parts[0].transpose(1, 0, 2).reshape(parts[0].shape[1], -1)
    parts = [part if part.ndim > 2 else jnp.broadcast_to(part, (lanes, *part.shape)) for part in parts]
    if arrangement == "rows":
        return jnp.concatenate(parts, -2)
    *lead, _, columns = parts[0].shape
    return jnp.stack(parts, -2).reshape(*lead, -1, columns)


@partial(jax.jit, static_argnames=("tiling", "sharding"), donate_argnums=0)
def filled(
    packed: jax.Array, block: jax.Array, offset: jax.Array, table: jax.Array, tiling: Tiling, sharding
) -> tuple[jax.Array, Exceptions | None]:
    """`placed` for a matrix that repeats the weights of `block`."""
    coded = tiling.floats.encode(block, table)
    if tiling.pieces:
        lines = tiling.floats.pack(jnp.resize(coded, tiling.dealt))
        return _repeated(packed, lines, offset, tiling, sharding), None
    steps = jnp.resize(coded, (*packed.shape[:3], tiling.turns, *tiling.dealt))
    steps = jnp.moveaxis(steps, 3, 2).reshape(*_dealt_to(packed, tiling), *tiling.dealt)
    return _stored(packed, steps, offset, tiling, sharding)


@partial(jax.jit, static_argnames=("tiling", "sharding"), donate_argnums=0)
def filled_codes(
    packed: jax.Array, bits: jax.Array, offset: jax.Array, tiling: Tiling, sharding
) -> tuple[jax.Array, jax.Array | None]:
    """`placed_codes` for a matrix that repeats the random bytes `bits` as codes, with equal scales."""
    format, rows = tiling.codes, tiling.rows
    of_cta = replace(tiling, all_rows=rows, ctas=1, blocks=0)
    codes = jnp.resize(bits & random_codes(format), (rows, tiling.columns))
    lines = format.pack(of_cta.deal(codes))
    if format.scale:
        scales = jnp.full((rows, -(-tiling.columns // tiling.granule)), equal_scales(format), jnp.uint32)
        lines = format.with_scales(lines, of_cta.deal_granules(scales), tiling.cluster)
    if tiling.pieces:
        lines = lines.reshape(tiling.warps, -1)[0]
        return _repeated(packed, lines, offset, tiling, sharding), None

    def of_all(array: jax.Array) -> jax.Array:
        each = array.reshape(1, 1, tiling.warps, -1)
        whole = jnp.broadcast_to(each, (*_dealt_to(packed, tiling), each.shape[-1]))
        return _of_lanes(whole, packed, tiling, sharding)

    packed = jax.lax.dynamic_update_slice(packed, of_all(lines), (0, 0, 0, offset))
    if not format.factors:
        return packed, None
    factors = of_cta.deal_rows(jnp.full((rows, 1), 1.0 if format.scale else FILLED_SCALE, jnp.float32))
    return packed, of_all(jax.lax.bitcast_convert_type(factors, jnp.uint32))


def _stored(
    packed: jax.Array, steps: jax.Array, offset: jax.Array, tiling: Tiling, sharding
) -> tuple[jax.Array, Exceptions | None]:
    """Writes a product into the packed weights. steps: its encoded weights, dealt to CTAs and warps. Returns the packed
    weights, and the exceptions if the format has a list of them.
    """
    lines, listed = _of_lanes(tiling.floats.pack(steps), packed, tiling, sharding), tiling.floats.listed(steps)
    packed = jax.lax.dynamic_update_slice(packed, lines, (0, 0, 0, offset))
    if listed is None:
        return packed, None
    listed = _of_lanes(listed, packed, tiling, sharding)
    counts = (listed != np.uint32(BF12_END)).sum(-1)
    return packed, Exceptions(listed, counts.max(), counts.sum())


def _repeated(packed: jax.Array, lines: jax.Array, offset: jax.Array, tiling: Tiling, sharding) -> jax.Array:
    """Writes the lines of one piece into the packed weights as every piece of every expert."""
    words = jnp.tile(lines.reshape(-1), tiling.stored_lines // tiling.lines)
    whole = jnp.broadcast_to(words, (*packed.shape[:3], words.size))
    if sharding is not None:
        whole = jax.lax.with_sharding_constraint(whole, sharding)
    return jax.lax.dynamic_update_slice(packed, whole, (0, 0, 0, offset))


def _dealt_to(packed: jax.Array, tiling: Tiling) -> tuple[int, int, int]:
    """The axes of a dealt matrix without experts: lanes, CTAs * turns, warps."""
    lanes, ctas, warps, _ = packed.shape
    return lanes, ctas * tiling.turns, warps


def _of_lanes(array: jax.Array, packed: jax.Array, tiling: Tiling, sharding) -> jax.Array:
    """Rearranges an array that was dealt by `tiling`, [lanes(, experts), CTAs of the tiling, warps of the tiling, ...],
    to the axes of the packed weights, [lanes, CTAs, warps, n].
    """
    lanes, ctas, warps, _ = packed.shape
    if tiling.pieces is None:
        rows = array.reshape(lanes, ctas, tiling.turns, warps, -1).swapaxes(2, 3).reshape(lanes, ctas, warps, -1)
    else:
        parts = array.reshape(lanes, array.shape[1], tiling.ctas, tiling.warps, -1)
        words, axis, over = parts.shape[-1], 1, tiling.pieces.rows
        if tiling.pieces.summed:
            parts, axis = parts.swapaxes(1, 2).reshape(lanes, ctas, -1, words), 2
        else:
            parts = parts.reshape(lanes, -1, warps, words)
        widths = [(0, 0)] * 4
        widths[axis] = (0, -parts.shape[axis] % over)
        parts = jnp.pad(parts, widths)
        parts = parts.reshape(*parts.shape[:axis], -1, over, *parts.shape[axis + 1 :])
        rows = jnp.moveaxis(parts, axis, -2).reshape(lanes, ctas, warps, -1)
    return rows if sharding is None else jax.lax.with_sharding_constraint(rows, sharding)


@partial(jax.jit, static_argnames="room")
def gathered(words: jax.Array, room: int) -> jax.Array:
    """Moves the words other than BF12_END to the beginning of each row and fills the rest with BF12_END: [..., n] ->
    [..., room].
    """
    rows = words.reshape(-1, words.shape[-1])
    here = rows != jnp.uint32(BF12_END)
    places = jnp.where(here, jnp.cumsum(here, -1) - 1, room)
    found = jnp.full((len(rows), room), BF12_END, jnp.uint32)
    found = found.at[jnp.arange(len(rows))[:, None], places].set(rows, mode="drop")
    return found.reshape(*words.shape[:-1], room)


@partial(jax.jit, donate_argnums=1)
def normal(key: jax.Array, like: jax.Array) -> jax.Array:
    """Random numbers in the shape and dtype of `like`, with the distribution of initial weights, normal with deviation
    0.02. All rows are equal, and a row repeats after 2^20 numbers.
    """
    block = 0.02 * jax.random.normal(key, (min(like.shape[-1], 1 << 20),))
    return jnp.broadcast_to(jnp.resize(block, like.shape[-1:]).astype(like.dtype), like.shape)
