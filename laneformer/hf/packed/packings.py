"""Published packings of quantized weights: the tensors of a module become one record of laneformer/quantized.

A packing is a function in PACKINGS. It takes the tensors that it needs from a `Module`, which checks the dtypes and
shapes in their headers. It returns the weight's shape, and a function that reads the record later.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from laneformer.errors import CheckpointError, one_line
from laneformer.files import parse_json
from laneformer.formats import FORMATS
from laneformer.hf.packed.quantization import Scheme, Schemes
from laneformer.hf.safetensors import DTYPES, QUANTIZED, Source, Tensor
from laneformer.quantized import Quantized, e8m0_values

REMEDY = "add --weights bfloat16 to round its weights to 16 bits"
FLOATS, BF16 = tuple(DTYPES), DTYPES["BF16"]
E4M3, E8M0 = "F8_E4M3", "F8_E8M0"
AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)  # nibble of a word that contains output 0, 1, ..., 7
ACTIVATIONS = frozenset(  # suffixes of tensors for activations, keys and values, which are not quantized here
    f"{what}{kind}"
    for what in ("input", "output", "activation", "act", "q", "k", "v", "kv", "kv_cache", "prob", "qkv")
    for kind in ("_scale", "_zero_point", "_global_scale", "_scale_inv", "_scale_2", "_g_idx")
) | {"input_amax", "output_amax", "k_bmm_amax", "v_bmm_amax"}

Shape = tuple[int, ...]
Found = tuple[Shape, Callable[[], Quantized]]


@dataclass(frozen=True)
class QuantizedTensor(Tensor):
    """A packed weight, as if it were one tensor of its file."""

    name: str
    make: Callable[[], Quantized]
    """Reads the record."""

    def record(self) -> Quantized:
        """Reads and checks the record. Raises CheckpointError, naming file and tensor, for invalid values."""
        found = self.make()
        if problem := found.problem():
            raise CheckpointError(f"{self.file}: tensor {self.name} is damaged: {problem}; copy it again")
        return found


class Module:
    """The tensors of a module, which are removed one by one from the folder's tensors."""

    def __init__(
        self, name: str, tensors: dict[str, Tensor], folder: Path, texts: Mapping[str, object], joint: str = "."
    ):
        """texts: the metadata of the module's file. joint: separator of the module's name and a tensor's suffix."""
        self.name, self.folder, self.texts, self._tensors, self._joint = name, folder, texts, tensors, joint

    def find(self, suffix: str, dtypes: Iterable[str], *shapes: Shape) -> Tensor | None:
        """Removes and returns the tensor with this suffix, or None if there is none. Raises CheckpointError unless it
        has one of the dtypes and, if any are given, one of the shapes.
        """
        tensor = self._tensors.pop(f"{self.name}{self._joint}{suffix}", None)
        if tensor is None:
            return None
        for what, found, wanted in (("dtype", tensor.dtype, dtypes), ("shape", tensor.shape, shapes)):
            if wanted and found not in wanted:
                given, *needed = (str(list(each) if what == "shape" else each) for each in (found, *wanted))
                needs = " or ".join(dict.fromkeys(needed))
                name = f"{self.name}{self._joint}{suffix}"
                raise self.error(f"tensor {name} has {what} {given}, but this packing needs {needs}")
        return tensor

    def take(self, suffix: str, dtypes: Iterable[str], *shapes: Shape) -> Tensor:
        """Like `find`, for a required tensor. Raises CheckpointError if it is missing."""
        tensor = self.find(suffix, dtypes, *shapes)
        if tensor is None:
            raise self.error(f"tensor {self.name}{self._joint}{suffix} is missing")
        return tensor

    def error(
        self, what: str, remedy: str = "use the config.json and safetensors files of one model"
    ) -> CheckpointError:
        return CheckpointError(f"{self.folder}: {what}; {remedy}")


# ---- packings


def _scales(
    module: Module, suffixes: Iterable[str], dtypes: Iterable[str], shape: Shape, scheme: Scheme
) -> tuple[Tensor, Shape, tuple[int, int]]:
    """The tensor with the scales of a weight of this shape, the scales' shape in a record, and the rows and columns
    that share a scale. Raises CheckpointError.
    """
    *lead, rows, columns = shape
    if scheme.block:
        groups = [scheme.block]
    elif scheme.group:
        groups = [(1, scheme.group)]
    else:
        groups = [(1, columns), (rows, columns)]
    grids: dict[Shape, tuple[int, int]] = {
        (*lead, -(-rows // group[0]), -(-columns // group[1])): group for group in groups
    }
    spellings: dict[Shape, Shape] = {grid: grid for grid in grids}
    if not lead and not (scheme.block or scheme.group):
        spellings |= {(): (1, 1), (1,): (1, 1), (rows,): (rows, 1)}
    for suffix in suffixes:
        if tensor := module.find(suffix, dtypes, *spellings):
            grid = spellings[tensor.shape]
            return tensor, grid, grids[grid]
    raise module.error(f"tensor {module.name}.{'/'.join(suffixes)} is missing")


def float8(module: Module, scheme: Scheme) -> Found:
    """E4M3 with scales per block, row or tensor: fp8, fbgemm_fp8, compressed-tensors' float-quantized, and DeepSeek
    V4's FP8. Its scales are E8M0, which a record stores exactly in bfloat16.
    """
    codes = module.take("weight", (E4M3,))
    suffixes = ("weight_scale_inv", "weight_scale", "scale")
    scales, grid, group = _scales(module, suffixes, (*FLOATS, E8M0), codes.shape, scheme)
    zeros = module.find("weight_zero_point", (E4M3, "I8", "U8"))

    def make() -> Quantized:
        if zeros is not None and zeros.values().any():
            raise module.error(f"tensor {module.name}.weight_zero_point: fp8 has no zero points", "copy it again")
        values = scales.values().reshape(grid)
        values = e8m0_values(values).astype(BF16) if scales.dtype == E8M0 else values
        return Quantized("fp8", codes.values(), values, group, codes.shape[-1])

    return codes.shape, make


def integers(module: Module, scheme: Scheme) -> Found:
    """compressed-tensors' int-quantized: int8, one code per byte."""
    codes = module.take("weight", ("I8",))
    scales, grid, group = _scales(module, ("weight_scale",), FLOATS, codes.shape, scheme)
    zeros = module.find("weight_zero_point", ("I8",), scales.shape, grid)

    def make() -> Quantized:
        points = None if zeros is None else zeros.values().reshape(grid)
        record = Quantized("int8", codes.values(), scales.values().reshape(grid), group, codes.shape[-1], points)
        return _without_usual_zeros(record)

    return codes.shape, make


def words(module: Module, scheme: Scheme) -> Found:
    """compressed-tensors' pack-quantized: integers of 4 or 8 bits, plus half their range, packed in 32-bit words."""
    bits, kind = scheme.bits, _integer_kind(module, scheme)
    size = module.take("weight_shape", ("I64", "I32"))
    packed = module.take("weight_packed", ("I32",))
    *lead, rows, _ = packed.shape
    shape = tuple(map(int, size.values().reshape(-1)))
    columns = shape[-1] if shape else 0
    if shape != (*lead, rows, columns) or packed.shape[-1] != -(-columns * bits // 32):
        raise module.error(
            f"tensor {module.name}.weight_packed has shape {list(packed.shape)}, which does not fit {list(shape)}"
        )
    scales, grid, group = _scales(module, ("weight_scale",), FLOATS, shape, scheme)
    packed_zeros = (*lead, -(-rows * bits // 32), grid[-1])
    zeros = module.find("weight_zero_point", ("I32", "I8"), packed_zeros, grid)
    index = module.find("weight_g_idx", ("I32",), (columns,))

    def make() -> Quantized:
        points = None
        if zeros is not None and zeros.dtype != "I32":  # one in a byte, as signed as the codes that they belong to
            points = zeros.values().reshape(grid)
            points = points if kind == "int8" else (points + np.int8(FORMATS[kind].zero)).view(np.uint8)
        elif zeros is not None:
            across = np.ascontiguousarray(zeros.values().swapaxes(-1, -2)).view(np.uint8)
            points = _codes(FORMATS[kind].unpack(across, rows), kind)[..., :rows].swapaxes(-1, -2)
            points = np.ascontiguousarray(points)
        record = _record(kind, packed.values(), columns, scales.values().reshape(grid), group, points)
        return in_groups(record, None if index is None else index.values(), module)

    return shape, make


def float4(module: Module, scheme: Scheme) -> Found:
    """compressed-tensors' mxfp4-pack-quantized and nvfp4-pack-quantized: E2M1, with the even column in the low half of
    a byte.
    """
    kind, size = ("nvfp4", 16) if scheme.packing.startswith("nvfp4") else ("mxfp4", 32)
    packed = module.take("weight_packed", ("U8",))
    shape = (*packed.shape[:-1], 2 * packed.shape[-1])
    dtypes = (E4M3,) if kind == "nvfp4" else ("U8", E8M0)
    scales, grid, group = _scales(module, ("weight_scale",), dtypes, shape, replace(scheme, group=scheme.group or size))
    whole = module.take("weight_global_scale", ("F32",), (1,), ()) if kind == "nvfp4" else None

    def make() -> Quantized:
        one = None if whole is None else whole.values().reshape(())
        return Quantized(kind, packed.values(), scales.values().reshape(grid), group, shape[-1], None, one)

    return shape, make


def modelopt4(module: Module, scheme: Scheme) -> Found:
    """ModelOpt's NVFP4: like nvfp4-pack-quantized, with a factor `weight_scale_2` instead of a divisor."""
    packed = module.take("weight", ("U8",))
    shape = (*packed.shape[:-1], 2 * packed.shape[-1])
    scales, grid, group = _scales(module, ("weight_scale",), (E4M3,), shape, replace(scheme, group=scheme.group or 16))
    factor = module.take("weight_scale_2", ("F32",), (1,), ())

    def make() -> Quantized:
        divisor = np.float32(1) / factor.values().reshape(())
        return Quantized("nvfp4", packed.values(), scales.values().reshape(grid), group, shape[-1], None, divisor)

    return shape, make


def bytes4(module: Module, scheme: Scheme) -> Found:
    """The FP4 experts of DeepSeek V4: E2M1, with the even column in the low half of a byte, and an E8M0 scale per 32
    columns.
    """
    packed = module.take("weight", ("I8", "U8"))
    shape = (*packed.shape[:-1], 2 * packed.shape[-1])
    scales, _, group = _scales(module, ("scale",), (E8M0, "U8"), shape, replace(scheme, group=32))
    return shape, lambda: Quantized("mxfp4", packed.values().view(np.uint8), scales.values(), group, shape[-1])


def blocks(module: Module, scheme: Scheme) -> Found:
    """gpt-oss's mxfp4: E2M1 in blocks of 32 columns, U8 [..., rows, blocks, 16], with the even column in the low half
    of a byte.
    """
    packed = module.take("blocks", ("U8",))
    if len(packed.shape) < 3 or packed.shape[-1] != 16:
        raise module.error(f"tensor {module.name}_blocks has shape {list(packed.shape)}, not [..., rows, blocks, 16]")
    scales = module.take("scales", ("U8", E8M0), packed.shape[:-1])
    shape = (*packed.shape[:-2], 32 * packed.shape[-2])

    def make() -> Quantized:
        codes = packed.values().reshape(*shape[:-1], shape[-1] // 2)
        return Quantized("mxfp4", codes, scales.values(), (1, 32), shape[-1])

    return shape, make


def gptq(module: Module, scheme: Scheme) -> Found:
    """GPTQ's qweight, packed along the columns. Its first version stores zero points minus 1. The zero points of a
    symmetric model show its version, which the config often names wrongly.
    """
    bits, kind = scheme.bits, _integer_kind(module, scheme)
    packed = module.take("qweight", ("I32",))
    columns, rows = packed.shape[0] * 32 // bits, packed.shape[1]
    group = scheme.group or columns
    grid = (-(-columns // group), rows)
    zeros = module.take("qzeros", ("I32",), (grid[0], -(-rows * bits // 32)))
    scales = module.take("scales", FLOATS, grid)
    index = module.find("g_idx", ("I32",), (columns,))

    def make() -> Quantized:
        codes = np.ascontiguousarray(packed.values().T)
        points = zeros.values().view(np.uint8)
        points = FORMATS[kind].unpack(points, rows)[:, :rows]
        middle = 2 ** (bits - 1)
        less_one = scheme.zeros_less_one
        if not scheme.zero_points and np.isin(points, (middle - 1, middle)).all():
            less_one = points != middle  # symmetric: every zero point is the middle, whatever version the config names
        points = points + np.uint8(1) * less_one
        points = np.ascontiguousarray(_codes(points & (2**bits - 1), kind).T)
        across = np.ascontiguousarray(scales.values().T)
        record = _record(kind, codes, columns, across, (1, group), points)
        return in_groups(record, None if index is None else index.values(), module)

    return (rows, columns), make


def awq(module: Module, scheme: Scheme) -> Found:
    """AWQ's gemm version, packed along the rows in the order AWQ_PLACES."""
    packed = module.take("qweight", ("I32",))
    columns, rows = packed.shape[0], 8 * packed.shape[1]
    group = scheme.group or columns
    grid = (-(-columns // group), rows)
    zeros = module.take("qzeros", ("I32",), (grid[0], rows // 8))
    scales = module.take("scales", FLOATS, grid)

    def each(tensor: Tensor) -> np.ndarray:
        found = FORMATS["int4"].unpack(tensor.values().view(np.uint8), rows).reshape(-1, rows // 8, 8)
        return np.ascontiguousarray(found[..., AWQ_PLACES].reshape(-1, rows).T)

    def make() -> Quantized:
        across = np.ascontiguousarray(scales.values().T)
        return _without_usual_zeros(
            Quantized("int4", FORMATS["int4"].pack(each(packed)), across, (1, group), columns, each(zeros))
        )

    return (rows, columns), make


def torchao(module: Module, scheme: Scheme) -> Found:
    """torchao's Float8Tensor. The file's metadata names the class of each weight."""
    try:
        kind = str(parse_json(str(module.texts[f"{module.name}.weight"]))["_type"])
    except (KeyError, TypeError, ValueError) as error:
        raise module.error(f"metadata of {module.name}.weight lacks its class ({one_line(error)})") from None
    if kind != "Float8Tensor":
        raise module.error(
            f"tensor {module.name}.weight is torchao's {kind}, which cannot be read",
            "use a copy in Float8Tensor or 16 bits",
        )
    codes = module.take("_weight_qdata", (E4M3,))
    scales, grid, group = _scales(module, ("_weight_scale",), FLOATS, codes.shape, scheme)
    shape = codes.shape
    return shape, lambda: Quantized("fp8", codes.values(), scales.values().reshape(grid), group, shape[-1])


PACKINGS: dict[str, Callable[[Module, Scheme], Found]] = {
    "fp8": float8,
    "float-quantized": float8,
    "int-quantized": integers,
    "pack-quantized": words,
    "mxfp4-pack-quantized": float4,
    "nvfp4-pack-quantized": float4,
    "modelopt NVFP4": modelopt4,
    "mxfp4": blocks,
    "fp4": bytes4,
    "gptq": gptq,
    "awq": awq,
    "torchao": torchao,
}


# ---- functions that the packings of integers share


def _integer_kind(module: Module, scheme: Scheme) -> str:
    if scheme.bits not in (4, 8):
        raise module.error(
            f"tensor {module.name}.weight is in {scheme.packing} of {scheme.bits} bits, which cannot be read",
            "use a copy of the model in 4, 8 or 16 bits",
        )
    return f"int{scheme.bits}"


def _codes(codes: np.ndarray, kind: str) -> np.ndarray:
    """The codes of a record from unsigned codes, uint8."""
    return (codes ^ np.uint8(0x80)).view(np.int8) if kind == "int8" else codes


def _record(
    kind: str, packed: np.ndarray, columns: int, scales: np.ndarray, group: tuple[int, int], points: np.ndarray | None
) -> Quantized:
    """A record of integers. packed: int32 [*lanes, rows, words], the lowest bits of a word first. points: its zero
    points.
    """
    codes = np.ascontiguousarray(packed.view(np.uint8)[..., : columns if kind == "int8" else -(-columns // 2)])
    if kind == "int4" and columns % 2:
        codes[..., -1] &= 15
    return _without_usual_zeros(Quantized(kind, _codes(codes, kind), scales, group, columns, points))


def _without_usual_zeros(record: Quantized) -> Quantized:
    found = record.zero_points
    return replace(record, zero_points=None) if found is not None and (found == record.format.zero).all() else record


def in_groups(record: Quantized, index: np.ndarray | None, module: Module) -> Quantized:
    """The record with its columns sorted by group. index: group of each column, int32 [columns], or None if they are
    sorted already.
    """
    places = np.arange(record.columns) // record.group[1]
    if index is None or (index == places).all() or (index < 0).all():  # -1: an unused index was written
        return record
    if index.min() < 0 or index.max() >= record.scales.shape[-1]:
        raise module.error(
            f"tensor {module.name}.weight has groups from {index.min()} to {index.max()}", "copy it again"
        )
    order = np.argsort(index, kind="stable").astype(np.int32)
    if (index[order] != places).any():  # groups of unequal size: a scale per column is exact, but too large to be kept
        grids = {name: grid[..., index] for name, grid in record.arrays.items() if name in ("scales", "zero_points")}
        return replace(record.with_arrays(grids), group=(1, 1))
    codes = record.each()[..., order]
    return replace(record, codes=record.format.pack(codes), order=order)


# ---- a folder


def with_records(
    folder: Path,
    schemes: Schemes,
    sources: Mapping[str, Source],
    tensors: Mapping[str, Tensor],
    metadata: Mapping[Path, Mapping[str, object]],
) -> dict[str, Tensor]:
    """The tensors of a folder, with one QuantizedTensor in place of the tensors of each packed weight. Raises
    CheckpointError, naming tensor and format, for tensors that do not fit their packing.
    """
    found, names = dict(tensors), {name for source in sources.values() for name in source.names}
    files = {name.rpartition(joint)[0]: tensor.file for name, tensor in tensors.items() for joint in "._"}
    for name in sorted(names):
        module, _, kind = name.rpartition(".")
        # The weight of all experts is a parameter of their module, with NAME_blocks instead of NAME.weight_packed.
        module, joint = (module, ".") if kind == "weight" else (name, "_")
        scheme = schemes.of(module)
        if scheme is None or module not in files:
            continue  # not packed; check_tensors reports missing weights
        if name in found and found[name].dtype in DTYPES:
            continue
        own = Module(module, found, folder, metadata.get(files[module], {}), joint)
        if scheme.packing not in PACKINGS:
            raise own.error(
                f"tensor {name} is in {scheme.packing}, which cannot be read",
                f"use a copy of the model in 16 bits or in one of {', '.join(PACKINGS)}",
            )
        shape, make = PACKINGS[scheme.packing](own, scheme)
        found[name] = QuantizedTensor(files[module], QUANTIZED, shape, 0, 0, name, make)
        bias = f"{module}.bias"
        if bias in found and bias not in names and not found[bias].values().any():
            del found[bias]  # GPTQ's tools write a bias of zeros for every module
    return {name: tensor for name, tensor in found.items() if name.rpartition(".")[2] not in ACTIVATIONS}
