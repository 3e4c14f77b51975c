"""Sources of documents: local files, or a Hugging Face dataset whose rows are texts or conversations (train/tokenizing/
tables.py has rows of local files).

A source consists of units: files (or parts of files), or rows. `documents(start)` iterates over them from unit `start`
on, in the same order every time, with None for a unit without text; so a position in any source is one number.
"""

import fnmatch
import glob
import hashlib
import itertools
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from laneformer.errors import InputError, one_line
from laneformer.train.tokenizing.conversations import Conversation
from laneformer.train.tokenizing.formats import decoded
from laneformer.train.tokenizing.rows import BadRows, RowReader

HIDDEN = (".*", "__pycache__")
ROWS = 256  # rows of a dataset read at once
ROW_WITHOUT = "rows without text, or without an answer"


@dataclass(frozen=True)
class Document:
    content: str | Conversation
    unit: int
    """Number of the unit in the source."""
    key: bytes
    """Digest of the content, 32 bytes."""
    size: int
    """Bytes of the content, as UTF-8 or JSON."""
    where: str = ""
    """File and row of the unit, for messages."""

    @property
    def text(self) -> str:
        """The content of a document of text. Raises TypeError for a conversation."""
        if not isinstance(self.content, str):
            raise TypeError(f"document {self.unit} is a conversation, not text")
        return self.content

    @property
    def conversation(self) -> Conversation:
        """The content of a document of a conversation. Raises TypeError for text."""
        if isinstance(self.content, str):
            raise TypeError(f"document {self.unit} is text, not a conversation")
        return self.content

    @classmethod
    def of(cls, unit: int, content: str | Conversation | None, where: str = "") -> "Document | None":
        """The document with this content; None without text. Raises InputError for text that is not Unicode."""
        if not content or (isinstance(content, str) and content.isspace()):
            return None
        try:
            if isinstance(content, str):
                data = content.encode()
            else:
                data = json.dumps(asdict(content), sort_keys=True).encode()
                if b"\\ud" in data:
                    json.dumps(asdict(content), ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            raise InputError(f"text is not Unicode ({one_line(error)})") from None
        return cls(content, unit, digest(data), len(data), where)


def digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=32).digest()


def place(key: bytes) -> float:
    """A number in [0, 1) from a document's digest: below the held-out share, the document is for validation."""
    return int.from_bytes(key[:8], "big") / 2.0**64


def named(name: str, patterns: Sequence[str]) -> bool:
    """Whether the name matches one of the patterns."""
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def once(files: Iterable[Path]) -> list[Path]:
    """The files in their order, each once, whatever names or links lead to it."""
    found: dict[tuple[int, int], Path] = {}
    for file in files:
        status = file.stat()
        found.setdefault((status.st_dev, status.st_ino), file)
    return list(found.values())


class Files:
    """Local files in sorted order. Each is a document, or several with `separator` between them."""

    without = "without text"
    """Description of units that have no document."""

    def __init__(
        self, roots: Sequence[Path], names: Sequence[str] = (), exclude: Sequence[str] = (), separator: str = ""
    ):
        self.name, self.separator, self.bad = ", ".join(map(str, roots)), separator, BadRows()
        self.paths = once(itertools.chain.from_iterable(self._find(root, names or ("*",), exclude) for root in roots))
        if not self.paths:
            raise InputError(f"no files in {self.name} match --glob and --exclude; change these options")
        self.origin = {"paths": list(map(str, roots)), "glob": list(names), "exclude": list(exclude)}

    @staticmethod
    def _find(root: Path, names: Sequence[str], exclude: Sequence[str]) -> Iterator[Path]:
        def complain(error: OSError):
            raise InputError(
                f"cannot read folder {error.filename}: {error.strerror}; change its permissions or --exclude it"
            )

        if root.is_file():
            yield root.resolve()
            return
        if not root.is_dir():
            raise InputError(f"{root} does not exist; give files or folders of text")
        for folder, folders, found in os.walk(root, onerror=complain):
            folders[:] = sorted(name for name in folders if not named(name, (*HIDDEN, *exclude)))
            for name in sorted(found):
                if named(name, names) and not named(name, (*HIDDEN, *exclude)):
                    path = Path(folder, name)
                    if path.is_file():  # not a broken link, a socket or a pipe
                        yield path.resolve()

    def documents(self, start: int = 0) -> Iterator[Document | None]:
        texts: Iterator[str | None]
        if self.separator:  # the number of documents in a file is unknown before it is read
            texts = itertools.islice((text for path in self.paths for text in self._parts(path)), start, None)
        else:
            texts = map(self._read, self.paths[start:])
        return map(Document.of, itertools.count(start), texts)

    def _parts(self, path: Path) -> Iterator[str | None]:
        text = self._read(path)
        return iter([None]) if text is None else filter(None, text.split(self.separator))

    def _read(self, path: Path) -> str | None:
        try:
            text = decoded(path.read_bytes())  # bytes: text mode would change line ends
        except UnicodeDecodeError:
            text = "\0"
        except OSError as error:
            raise InputError(f"cannot read {path}: {error.strerror}; change its permissions or --exclude it") from None
        if "\0" in text:  # also valid UTF-8, but binary
            table = path.suffix in (".parquet", ".gz", ".zst", ".bz2", ".xz")
            self.bad.add(path, str(path), "not text" + table * ", see --dataset files")
            return None
        return text


class Dataset:
    """A split of a Hugging Face dataset, in its order. A row is a document: a text or, with `chat`, a conversation."""

    without = ROW_WITHOUT

    def __init__(
        self,
        name: str,
        config: str,
        split: str,
        data_files: Sequence[str],
        columns: Sequence[str],
        *,
        streaming: bool,
        chat: bool,
        bad: BadRows,
    ):
        """Raises InputError if the dataset cannot be opened or lacks the columns. bad: receives rows that cannot be
        read.
        """
        try:
            import datasets
        except ImportError:
            raise InputError(
                "--dataset needs the datasets library; install it with pip install 'laneformer[data]'"
            ) from None
        self.name, self.split, self.streaming = name, split, streaming
        local = {pattern: sorted(glob.glob(pattern, recursive=True)) for pattern in data_files}
        self.files = [file for found in local.values() for file in found]
        files = [file for pattern, found in local.items() for file in found or [pattern]]
        try:
            builder = datasets.load_dataset_builder(name, config or None, data_files=files or None)
            if streaming:
                self.rows = builder.as_streaming_dataset(split)
            else:
                builder.download_and_prepare()
                self.rows = builder.as_dataset(split)
            # For local files, `identity` covers names, sizes and times instead.
            self.revision = None if local and all(local.values()) else f"{builder.hash} {builder.config_id}"
            found = self.rows.column_names or list(next(iter(self.rows), {}))
        except Exception as error:  # loaders and the network raise many types
            raise self._failure(error) from error
        if not found:
            raise InputError(f"dataset {name} (split {split}) has no rows; check --split, --config and --data-files")
        self.reader, self.bad = RowReader(columns, chat), bad
        try:
            self.columns = self.reader.columns(found)
        except InputError as error:
            raise InputError(f"dataset {name} has {error}") from None
        self.origin = {
            "dataset": name,
            "config": config,
            "split": split,
            "columns": self.columns,
            "data_files": list(data_files),
            "revision": self.revision,
        }

    def documents(self, start: int = 0) -> Iterator[Document | None]:
        unit = start
        try:
            if not self.streaming and start == len(self.rows):  # skip() would raise
                return
            for batch in self.rows.select_columns(self.columns).skip(start).iter(batch_size=ROWS):
                for values in zip(*(batch[column] for column in self.columns), strict=True):
                    where = f"dataset {self.name} (split {self.split}), row {unit}"
                    try:
                        document = Document.of(
                            unit, self.reader.content(dict(zip(self.columns, values, strict=True))), where
                        )
                    except InputError as error:
                        self.bad.add(unit, where, str(error))
                        document = None
                    yield document
                    unit += 1
        except InputError:
            raise
        except Exception as error:
            raise self._failure(error) from error

    def identity(self) -> str:
        """Digest that identifies the text without reading it: revision, or name, size and mtime of local files."""
        local = [(Path(file).name, os.stat(file).st_size, os.stat(file).st_mtime_ns) for file in self.files]
        return digest(repr((self.name, self.split, self.columns, local, self.revision)).encode()).hex()

    def _failure(self, error: Exception) -> InputError:
        root: BaseException = error
        while root.__cause__ is not None:  # the reason is the innermost cause
            root = root.__cause__
        reason = " ".join(str(root).split())
        if isinstance(root, StopIteration) or "BatchSize must be" in reason or "corresponds to no data" in reason:
            reason = "it or one of its files has no rows; leave that file out"
        return InputError(f"cannot read dataset {self.name} (split {self.split}): {reason}")


@dataclass(frozen=True)
class Survey:
    """Result of one pass over the documents: their fingerprint, the number of documents and units, their bytes, and the
    two lowest values of `place`.
    """

    fingerprint: str
    documents: int
    units: int
    bytes: int
    lowest: tuple[float, ...]

    @classmethod
    def of(cls, documents: Iterable[Document | None]) -> "Survey":
        whole, count, units, size = hashlib.blake2b(digest_size=32), 0, 0, 0
        lowest: set[float] = set()
        for document in documents:
            units += 1
            if document:
                whole.update(document.key)
                count, size = count + 1, size + document.size
                lowest = set(sorted(lowest | {place(document.key)})[:2])
        return cls(whole.hexdigest(), count, units, size, tuple(sorted(lowest)))

    def held_out_share(self, fraction: float) -> float:
        """The bound on `place` for validation: `fraction`, or a little more if it would select no document.

        Raises InputError if there are fewer than two different documents.
        """
        if fraction == 0:
            return 0.0
        if len(self.lowest) < 2:
            raise InputError(
                f"cannot split {self.documents} {'equal documents' if self.documents > 1 else 'document'}; give "
                "--validation-fraction 0, more documents, or --document-separator"
            )
        first, second = self.lowest
        return max(fraction, (first + second) / 2) if first >= fraction else fraction
