"""Rows of local files in JSON, CSV, Parquet or plain text, also compressed; rows that cannot be read are reported.

Each reader yields (place, row): the line or the number of a row, and its values by column, or `Unreadable`.
"""

import bz2
import codecs
import csv
import gzip
import io
import json
import lzma
import sys
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from laneformer.errors import InputError, one_line
from laneformer.train.tokenizing.rows import RowReader

ROWS = 256  # rows of a Parquet file read at once
PARQUET = b"PAR1"
NEEDS_PYARROW = "needs the pyarrow library; install it with pip install 'laneformer[data]'"
csv.field_size_limit(sys.maxsize)  # a document is one field; the default is 128 KiB


class Unreadable(NamedTuple):
    """Stands for a row or the rest of a file that cannot be read."""

    reason: str


Row = dict[str, Any] | Unreadable
Rows = Iterator[tuple[str, Row]]
Opened = io.BufferedReader | gzip.GzipFile | bz2.BZ2File | lzma.LZMAFile


def read_rows(file: Path, kind: str, reader: RowReader) -> Rows:
    """The rows of a file. A file that is damaged or lacks the reader's columns ends with an Unreadable.

    kind: a key of READERS, or "files": by the file's name. Raises InputError if the system cannot read the file, or a
    library is missing.
    """
    try:
        yield from READERS[_kind_of(file) if kind == "files" else kind](file, reader)
    except InputError:
        raise
    except (OSError, EOFError, ValueError, zlib.error, lzma.LZMAError) as error:  # pyarrow raises the first and third
        if isinstance(error, OSError) and error.errno:
            raise InputError(f"cannot read {file}: {error.strerror}; change its permissions, or leave it out") from None
        yield "", Unreadable(one_line(error))


def decoded(data: bytes) -> str:
    """Text without its byte-order mark: UTF-8, or UTF-16 if the mark says so. Raises UnicodeDecodeError."""
    return data.decode("utf-16" if data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)) else "utf-8-sig")


def _kind_of(file: Path) -> str:
    with _opened(file) as stream:
        if stream.peek(4)[:4] == PARQUET:
            return "parquet"
    names = [suffix for suffix in file.suffixes if suffix.lower() not in (".gz", ".zst", ".bz2", ".xz")]
    suffix = names[-1].lower() if names else ""
    return {".json": "json", ".jsonl": "json", ".ndjson": "json", ".csv": "csv", ".tsv": "csv"}.get(suffix, "document")


def _opened(file: Path) -> Opened:
    """The content of a file, decompressed if it begins like a compressed one."""
    with open(file, "rb") as stream:
        start = stream.read(6)
    if start.startswith(b"\x1f\x8b"):
        return gzip.open(file)
    if start.startswith(b"BZh"):
        return bz2.open(file)
    if start.startswith(b"\xfd7zXZ\0"):
        return lzma.open(file)
    if start.startswith(b"\x28\xb5\x2f\xfd"):
        try:
            import pyarrow
        except ImportError:
            raise InputError(f"{file} is compressed with zstd, which {NEEDS_PYARROW}") from None
        return io.BufferedReader(pyarrow.input_stream(str(file), compression="zstd"))
    return open(file, "rb")


def _utf8(file: Path) -> Opened | io.BytesIO:
    """The text of a file as UTF-8 without a byte-order mark."""
    stream = _opened(file)
    start = stream.peek(3)
    if start.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        with stream:
            return io.BytesIO(decoded(stream.read()).encode("utf-8", "surrogatepass"))
    if start.startswith(codecs.BOM_UTF8):
        stream.read(len(codecs.BOM_UTF8))
    return stream


def _json(file: Path, reader: RowReader) -> Rows:
    """An object per line, or objects in a list or one after another over several lines."""
    with _utf8(file) as stream:
        lines = enumerate(stream, 1)
        number, first = next(((number, line) for number, line in lines if line.strip()), (0, b""))
        if first.strip() == b"{" or first.lstrip().startswith(b"["):
            text = (first + stream.read()).decode("utf-8", "surrogateescape")
            for place, value in _values(text):
                yield f"row {place}", _object(value)
            return
        if first:
            yield f"line {number}", _object(_loaded(first))
        for number, line in lines:
            if not line.isspace():
                yield f"line {number}", _object(_loaded(line))


def _loaded(line: bytes) -> Any:
    try:
        return json.loads(line)
    except UnicodeDecodeError as error:
        return Unreadable(f"not UTF-8: {one_line(error)}")
    except (ValueError, RecursionError) as error:
        return Unreadable(f"not JSON: {one_line(error)}")


def _values(text: str) -> Iterator[tuple[int, Any]]:
    """(number, value) of the JSON values in a text, and in a list that it begins with; the first error is the last."""
    decoder, at, number = json.JSONDecoder(), 0, 0
    while True:
        while at < len(text) and text[at] in " \t\r\n,[]":  # between the objects of a list
            at += 1
        if at == len(text):
            return
        try:
            value, at = decoder.raw_decode(text, at)
        except (ValueError, RecursionError) as error:
            yield number, Unreadable(f"not JSON: {one_line(error)}")
            return
        yield number, value
        number += 1


def _object(value: Any) -> Row:
    if isinstance(value, dict | Unreadable):
        return value
    return Unreadable(f"a JSON {type(value).__name__}, not an object with columns")


def _csv(file: Path, reader: RowReader) -> Rows:
    """A header and rows, with the separator that is most frequent in the header."""
    with io.TextIOWrapper(_utf8(file), "utf-8", errors="surrogateescape", newline="") as text:
        start = text.readline()
        mark = "\t" if ".tsv" in file.suffixes else max(",;\t|", key=start.count)
        header = [name.strip() for name in next(csv.reader([start], delimiter=mark), [])]
        if not header:
            return
        _chosen(reader, header)
        rows = csv.reader(text, delimiter=mark)
        while True:
            line = rows.line_num + 2
            try:
                values = next(rows)
            except StopIteration:
                return
            except csv.Error as error:
                yield f"line {line}", Unreadable(f"not CSV: {error}")
                continue
            if len(values) > len(header):
                yield f"line {line}", Unreadable(f"{len(values)} fields, but the header has {len(header)}")
            elif values:
                yield f"line {line}", dict(zip(header, values + [None] * (len(header) - len(values)), strict=True))


def _parquet(file: Path, reader: RowReader) -> Rows:
    try:
        from pyarrow.parquet import ParquetFile
    except ImportError:
        raise InputError(f"{file} is a Parquet file, which {NEEDS_PYARROW}") from None
    with ParquetFile(file) as table:
        names, number = _chosen(reader, table.schema_arrow.names), 0
        for batch in table.iter_batches(ROWS, columns=names):
            for values in zip(*(_cells(batch.column(name)) for name in names), strict=True):
                bad = next((value for value in values if isinstance(value, Unreadable)), None)
                yield f"row {number}", bad or dict(zip(names, values, strict=True))
                number += 1


def _cells(column: Any) -> list[Any]:
    """The values of an Arrow array; one that is not UTF-8 is Unreadable."""
    try:
        return column.to_pylist()
    except UnicodeDecodeError:
        return [_cell(value) for value in column]


def _cell(value: Any) -> Any:
    try:
        return value.as_py()
    except UnicodeDecodeError as error:
        return Unreadable(f"not UTF-8: {one_line(error)}")


def _lines(file: Path, reader: RowReader) -> Rows:
    """Every line is a row of the column `text`."""
    _chosen(reader, ["text"])
    with _utf8(file) as stream:
        for number, line in enumerate(stream, 1):
            try:
                yield f"line {number}", {"text": line.decode().rstrip("\r\n")}
            except UnicodeDecodeError as error:
                yield f"line {number}", Unreadable(f"not UTF-8: {one_line(error)}")


def _document(file: Path, reader: RowReader) -> Rows:
    """The whole file is the only row, under the column that is read."""
    [column] = _chosen(reader, reader.chosen or ["text"])
    with _opened(file) as stream:
        yield "", {column: decoded(stream.read())}


def _chosen(reader: RowReader, found: Sequence[str]) -> list[str]:
    """The columns to read. Raises ValueError, which ends the file, if it lacks them."""
    try:
        return reader.columns(found)
    except InputError as error:
        raise ValueError(str(error)) from None


READERS = {"json": _json, "csv": _csv, "parquet": _parquet, "text": _lines, "document": _document}
KINDS = ("files", "json", "csv", "parquet", "text")
