"""Reads and writes safetensors files: headers are checked before any weight is read, tensors are read one at a time.

The format is 8 bytes with the header's length, a JSON header with dtype, shape and byte range of each tensor, and the
bytes of the tensors.
"""

import contextlib
import json
import math
import mmap
import os
import stat
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any, Literal, NamedTuple

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from laneformer.errors import CheckpointError, one_line
from laneformer.files import parse_json, read_file
from laneformer.hf.rope import interleave
from laneformer.quantized import WHOLE, Quantized, split_axis

DTYPES = {"F32": np.dtype(np.float32), "F16": np.dtype(np.float16), "BF16": np.dtype(ml_dtypes.bfloat16)}
PACKED = {  # dtypes of the tensors of quantized weights; 8-bit floats are read as their bits
    **DTYPES,
    **{"I64": np.dtype(np.int64), "I32": np.dtype(np.int32), "I8": np.dtype(np.int8), "U8": np.dtype(np.uint8)},
    **{"F8_E4M3": np.dtype(np.uint8), "F8_E8M0": np.dtype(np.uint8)},
}
INTEGERS = ("I32", "I64")
QUANTIZED = "quantized"
"""Used instead of a dtype for weights that consist of several tensors; see laneformer/hf/packed/packings.py."""
INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
OTHER_FILES = ("consolidated", "adapter")
"""Beginnings of the names of files that are no part of a model: copies in Mistral's form, and adapters."""
_LONGEST_HEADER = 100_000_000  # bytes; safetensors' own limit
_PIECE = 2**20  # values that are compared at once
_WRITTEN = 2**23  # bytes that are written at once, so that Linux caches a file in large pages and maps it in these
ALIGNMENT = 64
"""Bytes of a cache line. Tensors that kernels map begin at multiples of it."""
_IGNORED = ("rotary_emb.inv_freq",)  # buffers of old Llama files, which the config already determines


Cut = Literal["rows", "columns", "whole"]
"""The axis that is cut into the lanes' shares. whole: the first lane has the whole tensor, the others have zeros, for
weights whose results are summed over the lanes.
"""


@dataclass(frozen=True)
class Source:
    """The tensor in a file that contains a weight, and how it becomes the weight."""

    name: str
    """Name of the tensor in its file."""
    shape: tuple[int, ...]
    """Shape of the tensor: [..., rows, columns] for a matrix, [..., rows] for a vector."""
    head_dim: int | None = None
    """Channels of a head, if the tensor's rotary pairs are half-split; None: there are no such pairs."""
    cut: Cut | None = None
    """The axis that is cut; None: the tensor is already lane-first, or shared."""
    lanes: int = 1
    copies: int = 1
    """Consecutive lanes that have the same share."""
    experts: int | None = None
    """Number of experts, if each has its own tensor, whose name contains the expert's number in place of *; None: there
    is one tensor.
    """
    vector: bool = False
    """Whether the last axis is that of the rows."""
    taken: tuple[int, ...] | None = None
    """Rows of the tensor that the weight contains, in the weight's order, before the cut; None: all rows, in order."""
    stored_shape: tuple[int, ...] | None = None
    """Shape of the tensor in its file, if `shape` omits axes of size 1."""
    every: tuple[int, int] | None = None
    """First row that the weight contains, and the step to the next row; None: all rows."""
    integers: bool = False
    """Whether the tensor contains integers."""
    transposed: bool = False
    """Whether the columns of an array precede its rows; those of a quantized tensor never do."""

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the tensors in the files, one per expert if each expert has its own."""
        if self.experts is None:
            return (self.name,)
        return tuple(self.name.replace("*", str(number)) for number in range(self.experts))

    def shape_as(self, dtype: str) -> tuple[int, ...]:
        """The expected shape of the tensor in its file. dtype: a key of DTYPES, or QUANTIZED."""
        if self.stored_shape:
            return self.stored_shape
        transposed = self.transposed and dtype != QUANTIZED
        return (*self.shape[:-2], self.shape[-1], self.shape[-2]) if transposed else self.shape

    def convert(self, w: np.ndarray) -> np.ndarray:
        """The weight from its tensor: lane-first, with the channels of rotary pairs next to each other."""
        w = w.reshape(self.shape) if self.stored_shape else w
        w = w.swapaxes(-1, -2) if self.transposed else w
        w = np.take(w, self.taken, -1 if self.vector else -2) if self.taken else w
        w = interleave(w, self.head_dim) if self.head_dim else w
        if self.every:
            first, step = self.every
            w = w[..., first::step] if self.vector else w[..., first::step, :]
        if self.cut == "whole":
            return np.concatenate([w[None], np.zeros((self.lanes - 1, *w.shape), w.dtype)])
        if self.cut:
            w = split_axis(w, -2 if self.cut == "rows" and not self.vector else -1, self.lanes // self.copies)
        return np.repeat(w, self.copies, 0) if self.copies > 1 else w

    def convert_record(self, record: Quantized) -> Quantized:
        """Like `convert`, for a quantized matrix. Raises ValueError if its columns cannot be cut."""
        if self.head_dim:
            record = record.take_rows(interleave(np.arange(record.shape[-2]), self.head_dim))
        if self.taken:
            record = record.take_rows(np.array(self.taken))
        if self.every:
            record = record.take_rows(np.arange(record.shape[-2])[self.every[0] :: self.every[1]])
        if self.cut == "rows":
            record = record.split_rows(self.lanes // self.copies)
        elif self.cut == "columns":
            record = record.split_columns(self.lanes // self.copies)
        if self.copies == 1:
            return record
        arrays = {name: array for name, array in record.arrays.items() if name not in WHOLE}
        return record.with_arrays({name: np.repeat(array, self.copies, 0) for name, array in arrays.items()})


@dataclass(frozen=True)
class Tensor:
    """A tensor as the header of its file describes it."""

    file: Path
    dtype: str
    """Dtype as the header names it, or QUANTIZED. Weights have a key of DTYPES or INTEGERS, or QUANTIZED."""
    shape: tuple[int, ...]
    start: int
    """Offset of the first byte from the start of the file."""
    size: int
    """Size in bytes."""

    def read(self, memory: np.ndarray) -> np.ndarray:
        """Reads the tensor into memory uint8 [size]; returns it in a dtype of PACKED."""
        return self._typed(self.read_bytes(memory))

    def values(self) -> np.ndarray:
        """Reads the tensor into new memory; returns it in a dtype of PACKED."""
        return self._typed(self.read_bytes(np.empty(self.size, np.uint8)))

    def _typed(self, memory: np.ndarray) -> np.ndarray:
        values: np.ndarray = memory.view(PACKED[self.dtype])
        return values.reshape(self.shape)

    def record(self) -> Quantized:
        """Reads the record, if the dtype is QUANTIZED. Raises TypeError for other tensors."""
        raise TypeError(f"a tensor of dtype {self.dtype} in {self.file} is not packed")

    def read_bytes(self, memory: np.ndarray) -> np.ndarray:
        """Reads the tensor's bytes into memory uint8 [size] without mapping the file, because mapped pages that were
        read count as memory in use. Raises CheckpointError if the file cannot be read or is truncated.
        """
        try:
            with self.file.open("rb") as file:
                file.seek(self.start)
                found = file.readinto(memory.data)
        except OSError as error:
            raise _damaged(self.file, error) from None
        if found != self.size:
            raise _truncated(self.file, self.start + found, self.start + self.size)
        return memory

    def within(self, pages: np.ndarray) -> np.ndarray:
        """The tensor's bytes in its mapped file, uint8 [size]. Raises CheckpointError if the file is too short now."""
        if len(pages) < self.start + self.size:
            raise _truncated(self.file, len(pages), self.start + self.size)
        return pages[self.start : self.start + self.size]

    def same_values(self, other: "Tensor") -> bool:
        """Whether two tensors have equal values, possibly in different dtypes; neither is held in memory. False if one
        of them is packed.
        """
        if self.shape != other.shape or not {self.dtype, other.dtype} <= set(DTYPES):
            return False
        with self.file.open("rb") as first, other.file.open("rb") as second:
            first.seek(self.start)
            second.seek(other.start)
            for n in range(0, count := math.prod(self.shape), _PIECE):
                files = ((first, self), (second, other))
                pieces = [np.fromfile(file, DTYPES[each.dtype], min(_PIECE, count - n)) for file, each in files]
                same_bits = self.dtype == other.dtype and pieces[0].tobytes() == pieces[1].tobytes()  # NaN too
                if not same_bits and not np.array_equal(pieces[0].astype(np.float32), pieces[1].astype(np.float32)):
                    return False
        return True


@dataclass(frozen=True)
class Stack(Tensor):
    """The tensors of all experts, of equal dtype and shape, as if they were one tensor [experts, ...]."""

    parts: tuple[Tensor, ...]
    """One tensor per expert."""

    @classmethod
    def of(cls, parts: Sequence[Tensor]) -> "Stack":
        first = parts[0]
        return cls(first.file, first.dtype, (len(parts), *first.shape), 0, sum(part.size for part in parts), (*parts,))

    def read_bytes(self, memory: np.ndarray) -> np.ndarray:
        for n, part in enumerate(self.parts):
            part.read_bytes(memory[n * part.size : (n + 1) * part.size])
        return memory


def with_stacks(folder: Path, sources: Mapping[str, Source], tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of a folder, with a Stack in place of the tensors of the experts. Raises CheckpointError if these
    differ in dtype or shape.
    """
    found = dict(tensors)
    for source in sources.values():
        if source.experts is None or not all(name in found for name in source.names):
            continue  # check_tensors reports missing tensors
        parts = [found.pop(name) for name in source.names]
        for name, part in zip(source.names, parts, strict=True):
            if (part.dtype, part.shape) != (parts[0].dtype, parts[0].shape):
                raise CheckpointError(
                    f"{folder}: tensor {name} is {part.dtype} {list(part.shape)}, but {source.names[0]} is"
                    f" {parts[0].dtype} {list(parts[0].shape)}: use the files of one model"
                )
        found[source.name] = Stack.of(parts)
    return found


class MappedFile:
    """A file as mapped pages. Pages are read when first used, and shared with other processes that map them.

    The file must not change while it is mapped: what overwrites it changes the pages, and what truncates it ends the
    process that reads them. A file that is replaced, by renaming another one to its name, stays mapped as it was.
    """

    pages: np.ndarray
    """The bytes of the file, uint8 [size]."""

    def __init__(self, file: Path):
        """Raises CheckpointError.

        The file is mapped in one piece, because large pages require addresses that fit the offsets in the file.
        """
        self.file = file
        try:
            self._descriptor = os.open(file, os.O_RDONLY)
            weakref.finalize(self, os.close, self._descriptor)
            self._state = self._now()
            pages = mmap.mmap(self._descriptor, 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:  # ValueError: it is empty
            raise _damaged(file, error) from None
        if hasattr(mmap, "MADV_HUGEPAGE"):
            with contextlib.suppress(OSError):  # a kernel without huge pages
                pages.madvise(mmap.MADV_HUGEPAGE)
        self.pages = np.frombuffer(pages, np.uint8)

    def _now(self) -> tuple[int, int]:
        found = os.fstat(self._descriptor)
        return found.st_size, found.st_mtime_ns

    def check(self) -> None:
        """Raises CheckpointError if the size or the time of the file has changed since it was mapped."""
        if self._now() != self._state:
            raise CheckpointError(
                f"{self.file.name} was changed while it was in use: load the model again; to replace a file in use,"
                " rename another one to its name"
            )


class Header(NamedTuple):
    """The content of a file's header."""

    tensors: dict[str, Tensor]
    """Tensors by name."""
    metadata: dict[str, object]
    """Metadata of the file, usually texts by name."""


def find_tensors(
    folder: Path, ignored: tuple[str, ...] = ()
) -> tuple[dict[str, Tensor], dict[Path, dict[str, object]]]:
    """The tensors of a model's files by name, and the metadata of each file. ignored: prefixes of the names of tensors
    whose file may be missing. Raises CheckpointError for missing or damaged files, and for duplicate tensors.
    """
    index = folder / INDEX
    names = _model_files(folder, ignored)
    if not names:
        raise CheckpointError(f"{folder} has no .safetensors files: copy them next to its config.json")
    tensors: dict[str, Tensor] = {}
    metadata: dict[Path, dict[str, object]] = {}
    for name in names:
        try:
            found, metadata[folder / name] = read_header(folder / name)
        except FileNotFoundError:
            named = f"but {INDEX} names it" if index.exists() else "its symbolic link is broken"
            raise CheckpointError(f"{folder / name} does not exist, {named}: copy it again") from None
        except (SafetensorError, OSError) as error:
            raise _damaged(folder / name, error) from None
        for tensor in found:
            if tensor in tensors:
                files = f"{tensors[tensor].file.name} and {name}"
                raise CheckpointError(
                    f"{folder}: tensor {tensor} appears in more than one file, {files}; remove the duplicate"
                )
        tensors |= found
    return tensors, metadata


def _model_files(folder: Path, ignored: tuple[str, ...]) -> list[str]:
    """Names of the files of the model: model.safetensors alone unless the index lists it, as in transformers, otherwise
    those that the index lists. Without either, all but copies in another form and adapters.
    """
    index, listed = folder / INDEX, []
    if index.exists():
        listed = _indexed_files(index, ignored)
    if SINGLE not in listed and (folder / SINGLE).exists():
        return [SINGLE]
    if index.exists():
        return listed
    names = sorted(file.name for file in folder.glob("*.safetensors"))
    return [name for name in names if not name.startswith(OTHER_FILES)] or names


def _indexed_files(index: Path, ignored: tuple[str, ...]) -> list[str]:
    """Names of the files that an index lists, without missing ones of ignored tensors. Raises CheckpointError if a name
    leads out of the folder.
    """
    try:
        entries = parse_json(read_file(index))["weight_map"].items()
        names = sorted({str(name) for _, name in entries})
        needed = {str(name) for tensor, name in entries if not tensor.startswith(ignored)}
    except CheckpointError:
        raise
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        what = f"{type(error).__name__}: {one_line(error)}"
        raise CheckpointError(f"{index} is damaged ({what}): copy the folder again") from None
    for name in names:
        for path in (PurePosixPath(name), PureWindowsPath(name)):
            if path.anchor or ".." in path.parts or not path.parts or not name.isprintable():
                raise CheckpointError(
                    f"{index} names {name!r}, which is not a file inside the folder: correct the index"
                )
    return [name for name in names if name in needed or (index.parent / name).exists()]


def read_header(file: Path) -> Header:
    """Reads and checks the header of a file. Raises CheckpointError for a truncated file, and CheckpointError,
    SafetensorError or OSError for other damage.
    """
    found = file.stat()
    if not stat.S_ISREG(found.st_mode):
        raise CheckpointError(f"{file} is not a regular file: copy it again")
    size = found.st_size
    with file.open("rb") as opened:
        length = int.from_bytes(opened.read(8), "little")
        begin = 8 + length
        if size < 8 or (size < begin and length <= _LONGEST_HEADER):
            raise _truncated(file, size, max(begin, 9))
        text = opened.read(min(length, _LONGEST_HEADER))
    header, metadata = _parse_header(file, text)
    ranges = [entry["data_offsets"] for entry in header.values()] if header else []
    if ranges and size < (wanted := begin + max(end for _, end in ranges)):
        raise _truncated(file, size, wanted)
    with safe_open(file, framework="numpy"):
        pass  # checks that dtypes, shapes and offsets fit each other and the size of the file
    tensors = {
        name: Tensor(file, entry["dtype"], tuple(entry["shape"]), begin + start, end - start)
        for (name, entry), (start, end) in zip(header.items(), ranges, strict=True)
    }
    return Header(tensors, metadata)


def _parse_header(file: Path, text: bytes) -> tuple[dict[str, dict[str, Any]], dict[str, object]]:
    """The entries of a header by tensor name, and its metadata."""

    def unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
        made: dict[str, object] = {}
        for name, value in pairs:
            if name in made:
                raise CheckpointError(f"{file}: {name} appears twice in the header; write the file again")
            made[name] = value
        return made

    try:
        header = parse_json(text, object_pairs_hook=unique)
        if not isinstance(header, dict) or not all(isinstance(entry, dict) for entry in header.values()):
            raise ValueError("its header is not an object of objects")
        metadata = header.pop("__metadata__", {})
        for entry in header.values():
            start, end = entry["data_offsets"]
            if not (isinstance(start, int) and isinstance(end, int)):
                raise ValueError(f"data_offsets = {entry['data_offsets']}")
    except CheckpointError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise _damaged(file, error) from None
    return header, metadata


def check_tensors(folder: Path, sources: Mapping[str, Source], tensors: Mapping[str, Tensor]) -> None:
    """Raises CheckpointError unless the files contain exactly the weights that the config requires, with the right
    shapes and dtypes.
    """
    found = set(tensors)
    wanted = {name for source in sources.values() for name in ([source.name] if source.name in found else source.names)}
    missing, extra = sorted(wanted - found), sorted(n for n in found - wanted if not n.endswith(_IGNORED))
    for kind, names in (("lacks", missing), ("has unknown", extra)):
        if names:
            shown = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
            raise CheckpointError(
                f"{folder} {kind} tensor(s) {shown}: use the config.json and safetensors files of one model"
            )
    for source in sources.values():
        tensor = tensors[source.name]
        if tensor.shape != (shape := source.shape_as(tensor.dtype)):
            raise CheckpointError(
                f"{folder}: tensor {source.name} has shape {list(tensor.shape)}, but config.json gives"
                f" {list(shape)}: use the files of one model"
            )
        known = INTEGERS if source.integers else tuple(DTYPES)
        if tensor.dtype not in (*known, QUANTIZED):
            raise CheckpointError(
                f"{folder}: tensor {source.name} has dtype {tensor.dtype}; convert it to one of {', '.join(known)}"
            )


def write_tensors(file: Path, tensors: Mapping[str, np.ndarray]) -> None:
    """Writes a file; an existing one is replaced once its successor is complete. Raises OSError or SafetensorError."""
    part = file.with_name(f"{file.name}.part")
    save_file(dict(tensors), part, metadata={"format": "pt"})
    os.replace(part, file)


class Output(NamedTuple):
    """A tensor to be written."""

    dtype: str
    """Dtype as a header names it."""
    shape: tuple[int, ...]
    size: int
    """Size in bytes."""
    pieces: Callable[[], Iterable[np.ndarray]]
    """Returns the tensor's values, piece by piece."""


def write_outputs(file: Path, tensors: Mapping[str, Output], metadata: Mapping[str, str]) -> None:
    """Like `write_tensors`, with one piece in memory at a time. Every tensor begins at a multiple of its dtype's size,
    and at a multiple of ALIGNMENT if its own size is one. Raises OSError.
    """
    tensors = dict(sorted(tensors.items(), key=lambda entry: -math.gcd(entry[1].size, ALIGNMENT)))
    header: dict[str, dict[str, Any]] = {"__metadata__": {"format": "pt", **metadata}}
    end = 0
    for name, tensor in tensors.items():
        header[name] = {"dtype": tensor.dtype, "shape": [*tensor.shape], "data_offsets": [end, end + tensor.size]}
        end += tensor.size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % ALIGNMENT)
    part = file.with_name(f"{file.name}.part")
    pieces = chain.from_iterable(tensor.pieces() for tensor in tensors.values())
    first = np.frombuffer(len(text).to_bytes(8, "little") + text, np.uint8)
    with part.open("wb") as opened:
        for joined in _joined(chain([first], pieces)):
            opened.write(joined.data)
    os.replace(part, file)


def _joined(pieces: Iterable[np.ndarray]) -> Iterator[np.ndarray]:
    """The bytes of the arrays, end to end, in parts of _WRITTEN bytes that share one memory."""
    memory, filled = np.empty(_WRITTEN, np.uint8), 0
    for piece in pieces:
        rest = np.ascontiguousarray(piece).reshape(-1).view(np.uint8)
        while len(rest):
            part = rest[: _WRITTEN - filled]
            memory[filled : filled + len(part)] = part
            filled, rest = filled + len(part), rest[len(part) :]
            if filled == _WRITTEN:
                yield memory
                filled = 0
    yield memory[:filled]


def _truncated(file: Path, size: int, wanted: int) -> CheckpointError:
    return CheckpointError(f"{file} is truncated: {size:,} of at least {wanted:,} bytes; copy it again")


def _damaged(file: Path, error: Exception) -> CheckpointError:
    return CheckpointError(f"{file} is damaged ({error}): copy it again")
