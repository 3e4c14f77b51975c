"""Matrices in 8 and 4 bits per weight: one record for all packings in which models are published. This file is plain
data and does not import JAX.

    weight = (value of the code - zero point) * scale / global scale

E2M1 and E8M0 are defined by the OCP Microscaling Formats 1.0, E4M3 (float8_e4m3fn, without infinities) by the OCP 8-bit
Floating Point Specification 1.0.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

import ml_dtypes
import numpy as np
from numpy.typing import DTypeLike

from laneformer.formats import FORMATS, Format

NAN_E8M0, NAN_E4M3 = 0xFF, 0x7F
"""Bits of NaN in E8M0, and in E4M3 without the sign."""
DTYPES = {"int4": "uint8", "int8": "int8", "fp8": "uint8", "mxfp4": "uint8", "nvfp4": "uint8"}
"""Dtype of the codes, by kind."""

WHOLE = ("global_scale", "order")
"""Names of the fields that all lanes share."""


def _e2m1() -> np.ndarray:
    sizes = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
    return np.concatenate([sizes, -sizes])


def _e4m3() -> np.ndarray:
    code = np.arange(128)
    exponent, mantissa = code >> 3, code & 7
    sizes = np.where(exponent == 0, mantissa * 2.0**-9, (8 + mantissa) * 2.0 ** (exponent - 10)).astype(np.float32)
    sizes[NAN_E4M3] = np.nan
    return np.concatenate([sizes, -sizes])


E2M1, E4M3 = _e2m1(), _e4m3()
"""Value of each code, float32 [16] and [256]."""
_VALUES: dict[str | None, np.ndarray] = {"e2m1": E2M1, "e4m3": E4M3}  # by Format.code


class Array(Protocol):
    """What a record needs to know about NumPy's and JAX's arrays."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def ndim(self) -> int: ...
    @property
    def size(self) -> int: ...
    @property
    def nbytes(self) -> int: ...


B = TypeVar("B", bound=Array)
if TYPE_CHECKING:
    from typing_extensions import TypeVar as _TypeVar  # before Python 3.13, typing's has no default

    A = _TypeVar("A", bound=Array, default=np.ndarray)
else:
    A = TypeVar("A")


@dataclass(frozen=True, eq=False)
class Quantized(Generic[A]):
    """A quantized matrix [*lanes, rows, columns], where `lanes` is no axis, a lane axis, or a lane and an expert axis.
    The arrays are NumPy arrays, or in a model, as the type Quantized[jax.Array] says, JAX arrays.
    """

    kind: str
    """A row of laneformer/formats.py: int4, int8, fp8, mxfp4 or nvfp4."""
    codes: A
    """4 bits: uint8 [*lanes, rows, ceil(columns / 2)], with the even column in the low half of a byte, and 0 in a half
    without a column. int8: int8 [*lanes, rows, columns]. fp8: the bits of E4M3, uint8 [*lanes, rows, columns].
    """
    scales: A
    """[*lanes, ceil(rows / group[0]), ceil(columns / group[1])] in float32, bfloat16 or float16. mxfp4: the bits of
    E8M0, uint8. nvfp4: the bits of E4M3, uint8.
    """
    group: tuple[int, int]
    """Rows and columns that share a scale, such as (1, 32), (1, columns) for one scale per row, (128, 128), or (rows,
    columns) for a single scale. The last group of a row or column may be smaller.
    """
    columns: int
    zero_points: A | None = None
    """Zero points in the shape of the scales. int4: code of the integer 0, uint8 0 to 15; None for 8. int8: int8; None
    for 0.
    """
    global_scale: A | None = None
    """nvfp4: divisor of all weights, float32 []."""
    order: A | None = None
    """Permutation of the columns, int32 [columns]: column j multiplies entry order[j] of the vector. None for the
    identity.
    """

    @property
    def format(self) -> Format:
        return FORMATS[self.kind]

    @property
    def shape(self) -> tuple[int, ...]:
        return (*self.codes.shape[:-1], self.columns)

    @property
    def ndim(self) -> int:
        return self.codes.ndim

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays. A zero point counts as many bits as a code, as packings store it."""
        zeros = 0 if self.zero_points is None else self.zero_points.size * self.format.bits // 8
        rest = sum(0 if array is None else array.nbytes for array in (self.global_scale, self.order))
        return self.codes.nbytes + self.scales.nbytes + zeros + rest

    @property
    def arrays(self) -> dict[str, A]:
        """Field name -> array, without the fields that are None."""
        names = ("codes", "scales", "zero_points", *WHOLE)
        return {name: array for name in names if (array := getattr(self, name)) is not None}

    def with_arrays(self, arrays: Mapping[str, B]) -> "Quantized[B]":
        """The record with some arrays changed, by field name. To change their type, give all."""
        record: Any = self
        changed: Quantized[B] = replace(record, **arrays)
        return changed

    def on_host(self) -> "Quantized":
        """The record with NumPy arrays, which the methods that decode and cut it require."""
        return self.with_arrays({name: np.asarray(array) for name, array in self.arrays.items()})

    @property
    def name(self) -> str:
        """The format and the weights that share a scale, for reports: int4 group 32, fp8 block 128 x 128, int8 row."""
        rows, columns = self.group
        if rows == 1:
            shared = "row" if columns >= self.columns else f"group {columns}"
        else:
            whole = rows >= self.shape[-2] and columns >= self.columns
            shared = "tensor" if whole else f"block {rows} x {columns}"
        return f"{self.kind} {shared}{'' if self.zero_points is None else ', zero points'}"

    def problem(self: "Quantized") -> str | None:
        """What is wrong with the record's shapes, dtypes or values; None if nothing is."""
        if self.kind not in DTYPES:
            return f"kind {self.kind!r} is not one of {', '.join(DTYPES)}"
        return self._wrong_shape() or self._wrong_value()

    def _wrong_shape(self: "Quantized") -> str | None:
        codes, scales, (rows, columns) = self.codes, self.scales, self.group
        if codes.dtype != DTYPES[self.kind] or codes.ndim not in (2, 3, 4):
            return f"codes are {codes.dtype} {list(codes.shape)}, not {DTYPES[self.kind]} of 2, 3 or 4 axes"
        if codes.shape[-1] != (wanted := math.ceil(self.columns * self.format.bits / 8)):
            return f"a row of codes has {codes.shape[-1]} bytes, but {self.columns} columns need {wanted}"
        if rows < 1 or columns < 1:
            return f"group {self.group} must have at least 1 row and 1 column"
        if scales.dtype.name not in self.format.scales:
            return f"scales are {scales.dtype.name}, not {' or '.join(self.format.scales)}"
        grid = (*codes.shape[:-2], -(-codes.shape[-2] // rows), -(-self.columns // columns))
        if scales.shape != grid:
            return f"scales have shape {list(scales.shape)}, but groups of {rows} x {columns} need {list(grid)}"
        if (zeros := self.zero_points) is not None:
            if self.format.code != "int":
                return f"{self.kind} has no zero points"
            if (zeros.dtype, zeros.shape) != (codes.dtype, grid):
                return f"zero points are {zeros.dtype} {list(zeros.shape)}, not {codes.dtype} {list(grid)}"
        one, order = self.global_scale, self.order
        if one is not None and (self.kind != "nvfp4" or one.dtype != "float32" or one.shape != ()):
            return f"the global scale is {one.dtype} {list(one.shape)} of {self.kind}, not float32 [] of nvfp4"
        if order is not None and (order.dtype != "int32" or order.shape != (self.columns,)):
            return f"the order is {order.dtype} {list(order.shape)}, not int32 [{self.columns}]"
        return None

    def _wrong_value(self: "Quantized") -> str | None:
        if self.kind == "fp8" and (place := _first(self.codes & 0x7F == NAN_E4M3)):
            return f"code {self.codes[place]:#04x} at {list(place)} is not a number"
        if place := _first(~np.isfinite(self.scale_values())):
            return f"scale {self.scales[place]} at {list(place)} is not a finite number"
        if self.global_scale is not None and not (np.isfinite(self.global_scale) and self.global_scale != 0):
            return f"global scale {self.global_scale} must be finite and not 0"
        if self.kind == "int4" and self.zero_points is not None and (place := _first(self.zero_points > 15)):
            return f"zero point {self.zero_points[place]} at {list(place)} must be at most 15"
        if self.format.per_byte > 1 and self.columns % 2 and (self.codes[..., -1] > 15).any():
            return f"the high half of a row's last byte must be 0, as there are {self.columns} columns"
        if self.order is not None and (np.sort(self.order) != np.arange(self.columns)).any():
            return f"the order must have each of the {self.columns} columns once"
        return None

    def each(self: "Quantized") -> np.ndarray:
        """The codes as one number per weight, [*lanes, rows, columns]: int8 for kind int8, otherwise uint8."""
        codes: np.ndarray = self.format.unpack(self.codes, self.columns)
        return codes

    def _packed(self: "Quantized", codes: np.ndarray) -> np.ndarray:
        """The inverse of `each`, for codes of this record."""
        return self.format.pack(codes)

    def scale_values(self: "Quantized") -> np.ndarray:
        """The scales in float32, not divided by the global scale."""
        if self.kind == "mxfp4":
            return e8m0_values(self.scales)
        return E4M3[self.scales] if self.kind == "nvfp4" else self.scales.astype(np.float32)

    def dequantize(self: "Quantized", dtype: DTypeLike = np.float64) -> np.ndarray:
        """The weights [*lanes, rows, columns], with columns in the order of the vector.

        Without a global scale, float64 is exact, and so is float32 for E2M1 and for other codes with 16-bit scales.
        Other dtypes are rounded from float32.
        """
        real = np.dtype(np.float64 if np.dtype(dtype) == np.float64 else np.float32)
        values: np.ndarray
        if self.format.code == "int":
            values = self.each().astype(real)
            if self.zero_points is not None:
                values -= self._spread(self.zero_points.astype(real))
            elif self.format.zero:
                values -= self.format.zero
        else:
            values = _VALUES[self.format.code].astype(real)[self.each()]
        scales: np.ndarray = self.scale_values().astype(real)
        if self.global_scale is not None:
            scales /= self.global_scale.astype(real)
        values *= self._spread(scales)
        if self.order is not None:
            in_order = np.empty_like(values)
            in_order[..., self.order] = values
            values = in_order
        return values.astype(dtype, copy=False)

    def _spread(self: "Quantized", grid: np.ndarray) -> np.ndarray:
        """An array shaped like the scales, repeated to one value per weight."""
        rows, columns = self.group
        grid = np.repeat(grid, rows, -2)[..., : self.shape[-2], :]
        return np.repeat(grid, columns, -1)[..., : self.columns]

    # ---- the same weights, cut or in another order

    def _with_grids(self: "Quantized", change: Callable[[np.ndarray], np.ndarray]) -> "Quantized":
        """The record with changed scales and zero points."""
        zeros = None if self.zero_points is None else change(self.zero_points)
        return replace(self, scales=change(self.scales), zero_points=zeros)

    def regrouped(self: "Quantized", rows: int, columns: int) -> "Quantized":
        """The record with smaller groups, whose sizes divide the present sizes or span whole rows or columns."""

        def finer(grid: np.ndarray) -> np.ndarray:
            for axis, (old, new, size) in enumerate(
                zip(self.group, (rows, columns), self.shape[-2:], strict=True), grid.ndim - 2
            ):
                if new != old:
                    places = np.arange(-(-size // new)) * new // old
                    grid = np.take(grid, places, axis)
            return grid

        return replace(self._with_grids(finer), group=(rows, columns))

    def split_rows(self: "Quantized", lanes: int) -> "Quantized":
        """The record with its rows cut into lanes: [..., rows, columns] -> [lanes, ..., rows / lanes, columns]."""
        rows = self.shape[-2] // lanes
        found = self._dividing(0, rows)
        arrays = {name: array for name, array in found.arrays.items() if name not in WHOLE}
        return found.with_arrays(
            {name: np.ascontiguousarray(split_axis(array, -2, lanes)) for name, array in arrays.items()}
        )

    def split_columns(self: "Quantized", lanes: int) -> "Quantized":
        """The record with its columns cut into lanes: [..., rows, columns] -> [lanes, ..., rows, columns / lanes].
        Raises ValueError for several lanes if the record has an order.
        """
        if self.order is not None and lanes > 1:
            raise ValueError(f"its columns are sorted by group and cannot be cut into {lanes} lanes")
        columns = self.columns // lanes
        found = self._dividing(1, columns)

        def split(array: np.ndarray) -> np.ndarray:
            return np.ascontiguousarray(split_axis(array, -1, lanes))

        return replace(found._with_grids(split), codes=self._packed(split(found.each())), columns=columns)

    def join_columns(self: "Quantized") -> "Quantized":
        """The inverse of `split_columns`: [lanes, rows, columns] -> [rows, lanes * columns]."""
        lanes, _, columns = self.shape
        found = self.regrouped(self.group[0], columns) if self.group[1] > columns else self
        if columns % found.group[1]:
            found = found.regrouped(found.group[0], math.gcd(columns, found.group[1]))

        def join(array: np.ndarray) -> np.ndarray:
            return array.swapaxes(0, 1).reshape(array.shape[1], -1)

        return replace(found._with_grids(join), codes=self._packed(join(found.each())), columns=lanes * columns)

    def cut(self: "Quantized", parts: int, first: int, count: int, transposed: bool) -> "Quantized":
        """`count` rows, from row `first` on, of each of `parts` equal parts of the rows: [..., rows, columns] ->
        [..., parts, count, columns], or [..., parts, columns, count] if transposed.
        """
        each = self.shape[-2] // parts
        found = self._in_order(self.order) if self.order is not None and transposed else self
        found = found._dividing(0, each) if parts > 1 else found
        group = min(found.group[0], each)
        if first % group:
            group = math.gcd(first, group)
        if group != found.group[0]:
            found = found.regrouped(group, found.group[1])

        def take(array: np.ndarray, of_each: int, start: int, stop: int) -> np.ndarray:
            some = array.reshape(*array.shape[:-2], parts, of_each, array.shape[-1])[..., start:stop, :]
            return np.ascontiguousarray(some.swapaxes(-1, -2) if transposed else some)

        groups = -(-each // group), first // group, -(-(first + count) // group)
        return replace(
            found._with_grids(lambda grid: take(grid, *groups)),
            codes=self._packed(take(found.each(), each, first, first + count)),
            group=found.group[::-1] if transposed else found.group,
            columns=count if transposed else self.columns,
        )

    def _in_order(self: "Quantized", order: np.ndarray) -> "Quantized":
        """The record with its columns in the order of the vector, one scale per column. order: the record's."""
        places, found = np.argsort(order), self.regrouped(self.group[0], 1)

        def sort(array: np.ndarray) -> np.ndarray:
            return array[..., places]

        return replace(found._with_grids(sort), codes=self._packed(sort(found.each())), order=None)

    def _dividing(self: "Quantized", axis: int, share: int) -> "Quantized":
        """The record with groups that do not cross multiples of `share` rows (axis 0) or columns (axis 1)."""
        size, group = self.shape[axis - 2], self.group[axis]
        if share == size or share % group == 0:
            return self
        fitting = share if group >= size else math.gcd(share, group)
        return self.regrouped(*((fitting, self.group[1]) if axis == 0 else (self.group[0], fitting)))

    def take_rows(self: "Quantized", rows: np.ndarray) -> "Quantized":
        """The record with the given rows in the given order. rows: row numbers, int [n]."""
        found = self
        if self.group[0] > 1 and (
            len(rows) != self.shape[-2] or (rows // self.group[0] != np.arange(len(rows)) // self.group[0]).any()
        ):
            found = self.regrouped(1, self.group[1])

        def take(grid: np.ndarray) -> np.ndarray:
            return grid if found.group[0] > 1 else grid[..., rows, :]

        return replace(found._with_grids(take), codes=found.codes[..., rows, :])


def e8m0_values(codes: np.ndarray) -> np.ndarray:
    """2^(b - 127) in float32 for codes b, uint8; NaN for b = 255. b is the exponent field of the float32, except for
    b = 0, whose value is subnormal.
    """
    bits = codes.astype(np.uint32) << 23
    bits[codes == 0], bits[codes == NAN_E8M0] = 1 << 22, 0x7FC00000
    return bits.view(np.float32)


def split_axis(array: np.ndarray, axis: int, lanes: int) -> np.ndarray:
    """Cuts an axis into equal shares: [..., n, ...] -> [lanes, ..., n / lanes, ...]. axis: negative, from the end."""
    axis += array.ndim
    return np.moveaxis(array.reshape(*array.shape[:axis], lanes, -1, *array.shape[axis + 1 :]), axis, 0)


def stack(records: Sequence[Quantized]) -> Quantized:
    """Stacks n records [rows, columns] into one record [n, rows, columns]. Raises ValueError if they differ in format,
    or have a global scale or an order.
    """
    first = records[0]
    for record in records:
        if (record.kind, record.group, record.scales.dtype) != (first.kind, first.group, first.scales.dtype):
            raise ValueError(f"{first.name} and {record.name} cannot be stacked")
        if any(name in record.arrays for name in WHOLE):
            raise ValueError(f"{' or '.join(name for name in WHOLE if name in record.arrays)} cannot be stacked")
    usual = first.codes.dtype.type(first.format.zero)
    if any(record.zero_points is not None for record in records):
        records = [
            replace(record, zero_points=np.full(record.scales.shape, usual)) if record.zero_points is None else record
            for record in records
        ]
    return first.with_arrays(
        {name: np.stack([record.arrays[name] for record in records]) for name in records[0].arrays}
    )


def narrow_scales(scales: np.ndarray) -> np.ndarray:
    """The scales in bfloat16 if that is exact for all of them, otherwise in float32."""
    narrow = scales.astype(ml_dtypes.bfloat16)
    return narrow if (narrow.astype(np.float32) == scales.astype(np.float32)).all() else scales.astype(np.float32)


def _first(found: np.ndarray) -> tuple[int, ...] | None:
    """The index of the first True, or None."""
    return tuple(map(int, np.unravel_index(found.argmax(), found.shape))) if found.any() else None
