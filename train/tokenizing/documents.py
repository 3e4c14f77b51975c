"""Where documents come from: local files, or a Hugging Face dataset whose rows are texts or conversations.

A source consists of units: files (or parts of files), or rows. `documents(start)` goes over them from unit number
`start` on, in the same order every time, with None for a unit without text: so a position in any source is one number.
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
from typing import Any

from laneformer.errors import InputError
from train.tokenizing.conversations import Conversation, Shape

HIDDEN = (".*", "__pycache__")
ROWS = 256  # of a dataset, read at once
REPOSITORY = (
    "repo",
    "repo_name",
    "commit_id",
    "blob_id",
)  # columns of code sets that say where a file lies instead of what is in it


@dataclass(frozen=True)
class Document:
    content: str | Conversation
    unit: int
    """Its number in the source."""
    key: bytes
    """Digest of the content, 32 bytes: equal documents have equal ones."""
    size: int
    """Bytes of the content, as UTF-8 or JSON."""

    @classmethod
    def of(cls, unit: int, content: str | Conversation | None) -> "Document | None":
        if not content:
            return None
        data = content.encode() if isinstance(content, str) else json.dumps(asdict(content), sort_keys=True).encode()
        return cls(content, unit, digest(data), len(data))


def digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=32).digest()


def place(key: bytes) -> float:
    """A document's place in [0, 1), from its digest: below the held-out share it belongs to validation."""
    return int.from_bytes(key[:8], "big") / 2.0**64


class Files:
    """Local files in sorted order. Each is a document, or holds several with `separator` between them."""

    without = "not UTF-8 text, or empty"
    """What units are that give no document."""

    def __init__(
        self, roots: Sequence[Path], names: Sequence[str] = (), exclude: Sequence[str] = (), separator: str = ""
    ):
        self.name, self.separator = ", ".join(map(str, roots)), separator
        self.paths = list(
            dict.fromkeys(itertools.chain.from_iterable(self._find(root, names or ("*",), exclude) for root in roots))
        )
        if not self.paths:
            raise InputError(f"no files in {self.name} that --glob and --exclude leave: check these")
        self.origin = {"paths": list(map(str, roots)), "glob": list(names), "exclude": list(exclude)}

    @staticmethod
    def _find(root: Path, names: Sequence[str], exclude: Sequence[str]) -> Iterator[Path]:
        def named(name: str, patterns: Sequence[str]) -> bool:
            return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)

        def complain(error: OSError):
            raise InputError(f"cannot read folder {error.filename}: {error.strerror}")

        if root.is_file():
            yield root.resolve()
            return
        if not root.is_dir():
            raise InputError(f"{root} does not exist: give files or folders of text")
        for folder, folders, found in os.walk(root, onerror=complain):
            folders[:] = sorted(name for name in folders if not named(name, (*HIDDEN, *exclude)))
            for name in sorted(found):
                if named(name, names) and not named(name, (*HIDDEN, *exclude)):
                    path = Path(folder, name)
                    if path.is_file():  # not a broken link, a socket or a pipe
                        yield path.resolve()

    def documents(self, start: int = 0) -> Iterator[Document | None]:
        if self.separator:  # how many are in a file shows only in reading it
            texts = itertools.islice((text for path in self.paths for text in self._parts(path)), start, None)
        else:
            texts = map(self._read, self.paths[start:])
        return map(Document.of, itertools.count(start), texts)

    def _parts(self, path: Path) -> Iterator[str | None]:
        text = self._read(path)
        return iter([None]) if text is None else filter(None, text.split(self.separator))

    @staticmethod
    def _read(path: Path) -> str | None:
        try:
            text = path.read_bytes().decode("utf-8")  # bytes: text mode would change line ends
        except UnicodeDecodeError:
            return None
        except OSError as error:
            raise InputError(f"cannot read {path}: {error.strerror}") from None
        return None if "\0" in text else text  # decodes, but no text has it


class Dataset:
    """A split of a Hugging Face dataset, in its order. A row is a document: the text in `columns`, or with `chat` a
    conversation.
    """

    without = "rows without text, or without an answer"

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
    ):
        try:
            import datasets
        except ImportError:
            raise InputError("--dataset needs the datasets library: pip install 'laneformer[data]'") from None
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
            # Local files are known by themselves, see `identity`.
            self.revision = None if local and all(local.values()) else f"{builder.hash} {builder.config_id}"
            found = self.rows.column_names or list(next(iter(self.rows), {}))
        except Exception as error:  # loaders of all kinds, and the network
            raise self._failure(error) from error
        if not found:
            raise InputError(f"dataset {name} (split {split}) has no rows: check --split, --config and --data-files")
        self.shape = None
        try:
            if chat:
                self.shape = Shape.find(found, columns)
        except InputError as error:
            raise InputError(f"dataset {name} has {error}") from None
        self.columns = [*self.shape.columns, *self.shape.beside] if self.shape else list(columns)
        if missing := set(self.columns) - set(found):
            lists = [
                column for column in REPOSITORY if column in found and not {"content", "code", "text"} & set(found)
            ]
            advice = (
                f"it says by {', '.join(lists)} where files lie, not what is in them; fetch the files and tokenize"
                " their folder, or "
                if lists
                else ""
            )
            raise InputError(
                f"dataset {name} has no column {missing.pop()!r}: {advice}give --column, one of {', '.join(found)}"
            )
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
            if not self.streaming and start == len(self.rows):  # which skip refuses
                return
            for batch in self.rows.select_columns(self.columns).skip(start).iter(batch_size=ROWS):
                for values in zip(*(batch[column] for column in self.columns), strict=True):
                    yield Document.of(unit, self._content(dict(zip(self.columns, values, strict=True))))
                    unit += 1
        except InputError as error:
            raise InputError(f"dataset {self.name} (split {self.split}), row {unit}: {error}") from None
        except Exception as error:
            raise self._failure(error) from error

    def _content(self, row: dict[str, Any]) -> str | Conversation | None:
        if self.shape:
            return self.shape.read(row)
        [(column, text)] = row.items()
        if text is not None and not isinstance(text, str):
            raise InputError(f"column {column!r} holds {type(text).__name__}, not text: give another --column")
        return text

    def identity(self) -> str:
        """Digest of what is known of the text without reading it: the revision, or the name, size and time of change of
        local files.
        """
        local = [(Path(file).name, os.stat(file).st_size, os.stat(file).st_mtime_ns) for file in self.files]
        return digest(repr((self.name, self.split, self.columns, local, self.revision)).encode()).hex()

    def _failure(self, error: Exception) -> InputError:
        root = error
        while root.__cause__ is not None:  # "An error occurred while generating the dataset" has the reason inside
            root = root.__cause__
        reason = " ".join(str(root).split())
        if isinstance(root, StopIteration) or "BatchSize must be" in reason or "corresponds to no data" in reason:
            reason = "there are no rows in it, or in one of its files: leave that out"
        return InputError(f"cannot read dataset {self.name} (split {self.split}): {reason}")


@dataclass(frozen=True)
class Survey:
    """What one pass over the documents tells: their fingerprint, their number and that of all units, the bytes, and the
    `place` of the two lowest contents.
    """

    fingerprint: str
    documents: int
    units: int
    bytes: int
    lowest: tuple[float, ...]

    @classmethod
    def of(cls, documents: Iterable[Document | None]) -> "Survey":
        whole, count, units, size, lowest = hashlib.blake2b(digest_size=32), 0, 0, 0, set()
        for document in documents:
            units += 1
            if document:
                whole.update(document.key)
                count, size = count + 1, size + document.size
                lowest = set(sorted(lowest | {place(document.key)})[:2])
        return cls(whole.hexdigest(), count, units, size, tuple(sorted(lowest)))

    def held_out_share(self, fraction: float) -> float:
        """The bound on `place` for validation: `fraction`, or a little more where so few documents would leave it
        empty.
        """
        if fraction == 0:
            return 0.0
        if len(self.lowest) < 2:
            raise InputError(
                f"{self.documents} document{'s, all alike,' * (self.documents > 1)} cannot be divided: give "
                "--validation-fraction 0, more documents, or --document-separator"
            )
        first, second = self.lowest
        return max(fraction, (first + second) / 2) if first >= fraction else fraction
