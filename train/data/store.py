"""Token folders: shards that tokenizing writes and training reads, memory-mapped and checksummed.

    manifest.json        format version, token dtype, vocabulary, tokenizer hash, source, and the shards of every split
    tokenizer.json       the tokenizer that made the ids, byte for byte
    train-00000.bin      ids end to end, little-endian; each document is [bos] ids eos, whole in one shard
    train-00000.ends     the document index: int64 position in the shard after the last token of each document
    train-00000.loss     one byte per token, 1 where predicting it counts; only if the writer got loss masks
    validation-00000.bin ...

`StoreWriter` collects everything in `.partial/` and moves it into place at the end, the manifest last: a folder with a
manifest is finished. An interrupted run leaves the folder unchanged and keeps its own work up to the last checkpoint,
from which the same run resumes. `TokenStore` reads a finished folder. Every file has a CRC-32 per 256 KiB block,
checked when a block is first read: a flipped bit is found before training uses it, and opening a store of any size
reads no tokens.
"""

import contextlib
import fcntl
import functools
import hashlib
import itertools
import json
import os
import re
import shutil
import zlib
from collections.abc import Collection, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, Self

import numpy as np

from laneformer.errors import ConfigError, InputError

FORMAT = "laneformer-tokens"
VERSION = 2
BLOCK_BYTES = 1 << 18  # one checksum per block: 0.2 ms to check, 32 bytes of manifest per MiB of tokens
OPEN_FILES = 256  # every mapping holds a file descriptor, and a process often may have only 1024
SHARD_NAME = re.compile(r"[a-z0-9_]+-\d{5}")
SHARD_FILE = re.compile(SHARD_NAME.pattern + r"\.(bin|ends|loss)")
DTYPES: dict[str, np.dtype] = {"uint16": np.dtype("<u2"), "uint32": np.dtype("<u4")}
ENDS, LOSS = np.dtype("<i8"), np.dtype("u1")
MANIFEST, TOKENIZER, PARTIAL, PROGRESS = "manifest.json", "tokenizer.json", ".partial", "progress.json"
REMEDY = "copy the folder again, or tokenize again with --overwrite"


class File(NamedTuple):
    """One file of a shard: `length` values of `dtype`; `crc32` is 8 hex digits per block of BLOCK_BYTES."""

    name: str
    dtype: np.dtype
    length: int
    crc32: str

    @property
    def bytes(self) -> int:
        return self.length * self.dtype.itemsize


@dataclass(frozen=True)
class Shard:
    """Whole documents: `tokens` includes the bos/eos marks, `bytes` is the UTF-8 text alone; checksums are of the
    shard's files.
    """

    name: str
    tokens: int
    bytes: int
    documents: int
    tokens_crc32: str
    ends_crc32: str
    loss_crc32: str | None

    def ids(self, dtype: np.dtype) -> File:
        return File(f"{self.name}.bin", dtype, self.tokens, self.tokens_crc32)

    @property
    def ends(self) -> File:
        return File(f"{self.name}.ends", ENDS, self.documents, self.ends_crc32)

    @property
    def loss(self) -> File:
        """Raises ValueError if the shard is not `masked`."""
        if self.loss_crc32 is None:
            raise ValueError(f"shard {self.name} has no loss mask; ask `masked` first")
        return File(f"{self.name}.loss", LOSS, self.tokens, self.loss_crc32)

    @property
    def masked(self) -> bool:
        return self.loss_crc32 is not None

    def files(self, dtype: np.dtype) -> tuple[File, ...]:
        return self.ids(dtype), self.ends, *((self.loss,) if self.masked else ())


@dataclass(frozen=True)
class Manifest:
    """Content of manifest.json. `source` describes what was tokenized and how; the writer does not interpret it."""

    dtype: str
    vocab_size: int
    tokenizer_sha256: str
    eos_id: int
    bos_id: int | None
    splits: dict[str, tuple[Shard, ...]] = field(default_factory=dict)
    source: dict[str, Any] = field(default_factory=dict)

    def to_json(self) -> str:
        return json.dumps({"format": FORMAT, "version": VERSION, **asdict(self)}, indent=1, ensure_ascii=False) + "\n"

    def files(self) -> Iterator[File]:
        """Every file of every shard."""
        for shard in itertools.chain.from_iterable(self.splits.values()):
            yield from shard.files(DTYPES[self.dtype])

    @classmethod
    def read(cls, path: Path) -> Self:
        """Reads `path`/manifest.json. Raises InputError if it is missing, damaged or of another format version."""
        file = Path(path) / MANIFEST
        try:
            values = json.loads(file.read_text(encoding="utf-8"))
        except (FileNotFoundError, NotADirectoryError):
            raise InputError(
                f"{path} has no {MANIFEST}: it is not a token folder, or tokenizing did not finish; "
                "create it with python -m scripts.tokenize"
            ) from None
        except OSError as error:
            raise InputError(f"cannot read {file}: {error.strerror}") from None
        except ValueError as error:
            raise InputError(f"{file} is damaged ({error}); {REMEDY}") from None
        if not isinstance(values, dict) or values.pop("format", None) != FORMAT:
            raise InputError(f"{file} is not a {FORMAT} manifest; give a folder written by python -m scripts.tokenize")
        if (version := values.pop("version", None)) != VERSION:
            raise InputError(
                f"{file} has format version {version}, but this program reads {VERSION}; tokenize again with"
                " --overwrite"
            )
        try:
            splits = {
                split: tuple(Shard(**shard) for shard in shards) for split, shards in values.pop("splits").items()
            }
            manifest = cls(**values, splits=splits)
            for shards in splits.values():
                if len({shard.masked for shard in shards}) != 1:
                    raise ValueError("a split has no shards, or a loss mask for only some of them")
            for part in manifest.files():
                blocks = -(-part.bytes // BLOCK_BYTES)
                if not SHARD_FILE.fullmatch(part.name) or len(bytes.fromhex(part.crc32)) != 4 * blocks:
                    raise ValueError(f"crc32 of {part.name} does not have {blocks} blocks")
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise InputError(f"{file} is damaged ({type(error).__name__}: {error}); {REMEDY}") from None
        return manifest


def block_checksums(data: np.ndarray) -> np.ndarray:
    """CRC-32 of each BLOCK_BYTES piece of uint8 `data[n]` -> uint32[ceil(n / BLOCK_BYTES)]; the last may be shorter."""
    return np.array([zlib.crc32(data[i : i + BLOCK_BYTES].data) for i in range(0, len(data), BLOCK_BYTES)], np.uint32)


class TokenStore:
    """A finished token folder, read through memory maps. Thread-safe."""

    def __init__(self, path: Path, manifest: Manifest):
        self.path, self.manifest = path, manifest
        self.dtype = DTYPES[manifest.dtype]
        self._ends = {split: np.cumsum([shard.tokens for shard in shards]) for split, shards in manifest.splits.items()}
        self._unchecked: dict[str, np.ndarray] = {}  # file -> bool[blocks]; outlives an evicted mapping
        self._mapped = functools.lru_cache(OPEN_FILES)(self._map)

    @classmethod
    def open(cls, path: str | Path) -> Self:
        """Opens `path`: reads the manifest, the tokenizer's hash and the size of every file, but no tokens.

        Raises InputError for a missing or truncated file, a tokenizer.json that did not make the ids, or a bad
        manifest.
        """
        path = Path(path)
        store = cls(path, Manifest.read(path))
        try:
            digest = hashlib.sha256((path / TOKENIZER).read_bytes()).hexdigest()
        except FileNotFoundError:
            raise InputError(f"{path / TOKENIZER} is missing; {REMEDY}") from None
        if digest != store.manifest.tokenizer_sha256:
            raise InputError(
                f"{path / TOKENIZER} is not the tokenizer that made these tokens (sha256 {digest[:12]}, expected "
                f"{store.manifest.tokenizer_sha256[:12]}); {REMEDY}"
            )
        for part in store.manifest.files():
            store._check_size(part)
        return store

    @property
    def splits(self) -> tuple[str, ...]:
        return tuple(self.manifest.splits)

    def tokens(self, split: str) -> int:
        """Tokens in `split`, end-of-text marks included."""
        self._shards(split)
        return int(self._ends[split][-1])

    def text_bytes(self, split: str) -> int:
        """UTF-8 bytes of the text of `split`: without a loss mask, bits per byte = loss in nats / ln 2 * tokens /
        text_bytes.
        """
        return sum(shard.bytes for shard in self._shards(split))

    def documents(self, split: str) -> int:
        return sum(shard.documents for shard in self._shards(split))

    def read(self, split: str, start: int, length: int) -> np.ndarray:
        """Tokens [start, start + length) of `split` -> int32[length]. Raises InputError for a damaged block."""
        out = np.empty(length, np.int32)
        for shard, local, count, done in self._spans(split, start, start + length):
            out[done : done + count] = self._checked(shard.ids(self.dtype), local, local + count)
        return out

    def has_loss_mask(self, split: str) -> bool:
        """Whether the documents of `split` have loss masks."""
        return self._shards(split)[0].masked

    def read_loss(self, split: str, start: int, length: int) -> np.ndarray:
        """Loss mask of tokens [start, start + length) of `split`, true if predicting a token counts -> bool[length]."""
        out = np.empty(length, bool)
        for shard, local, count, done in self._spans(split, start, start + length):
            out[done : done + count] = self._checked(shard.loss, local, local + count)
        return out

    def document_ends(self, split: str, start: int = 0, stop: int | None = None) -> np.ndarray:
        """Ascending positions in (start, stop] of `split` after the last token of a document -> int64[documents]."""
        stop = self.tokens(split) if stop is None else stop
        found = [np.empty(0, np.int64)]
        for shard, local, count, done in self._spans(split, start, stop):
            ends = self._checked(shard.ends, 0, shard.documents)
            first, last = np.searchsorted(ends, [local, local + count], side="right")
            found.append(ends[first:last] + (start + done - local))
        return np.concatenate(found)

    def verify(self) -> None:
        """Reads every file and checks all its blocks. Raises InputError, which names the first damaged block."""
        for part in self.manifest.files():
            self._checked(part, 0, part.length)

    def digest(self, split: str) -> str:
        """SHA-256 of the sizes and checksums of the shards of `split`: equal for equal documents and masks in equal
        shards.
        """
        return hashlib.sha256(repr(self._shards(split)).encode()).hexdigest()

    def require_tokenizer(self, sha256: str, whose: str) -> None:
        """Raises InputError unless the tokenizer.json with this hash made the tokens. whose: its folder or run."""
        if sha256 != self.manifest.tokenizer_sha256:
            raise InputError(
                f"{self.path} was tokenized with another tokenizer (sha256 {self.manifest.tokenizer_sha256[:12]}) than "
                f"{whose} ({sha256[:12]}); tokenize one again with --tokenizer and the tokenizer.json of the other"
            )

    def _shards(self, split: str) -> tuple[Shard, ...]:
        try:
            return self.manifest.splits[split]
        except KeyError:
            raise InputError(
                f"{self.path} has no split {split!r}, only {', '.join(self.splits) or 'none'}"
                + ("; tokenize with --validation-fraction above 0" if split == "validation" else "")
            ) from None

    def _spans(self, split: str, start: int, stop: int) -> Iterator[tuple[Shard, int, int, int]]:
        """The shards that hold tokens [start, stop): shard, first position in it, count, and count before it."""
        shards, ends = self._shards(split), self._ends[split]
        if not 0 <= start <= stop <= ends[-1]:
            raise IndexError(f"tokens [{start}, {stop}) are outside split {split!r} of {ends[-1]} tokens")
        done, index = 0, int(np.searchsorted(ends, start, side="right"))
        while start + done < stop:
            shard = shards[index]
            local = start + done - (int(ends[index]) - shard.tokens)
            count = min(stop - start - done, shard.tokens - local)
            yield shard, local, count, done
            done, index = done + count, index + 1

    def _check_size(self, part: File) -> None:
        path = self.path / part.name
        try:
            size = path.stat().st_size
        except FileNotFoundError:
            raise InputError(f"{path} is missing; {REMEDY}") from None
        if size != part.bytes:
            raise InputError(
                f"{path} is {'truncated' if size < part.bytes else 'too long'}: {size} bytes, expected {part.bytes};"
                f" {REMEDY}"
            )

    def _map(self, part: File) -> tuple[np.ndarray, np.ndarray]:
        """Values of a file, and the checksums of its blocks."""
        self._check_size(part)  # again: reading a mapping of a file that shrank since `open` would kill the process
        return np.memmap(self.path / part.name, part.dtype, mode="r"), np.frombuffer(bytes.fromhex(part.crc32), ">u4")

    def _checked(self, part: File, start: int, stop: int) -> np.ndarray:
        """Values [start, stop) of one file as a view, after checking the blocks that are read for the first time."""
        data, expected = self._mapped(part)
        unchecked = self._unchecked.setdefault(part.name, np.ones(len(expected), bool))
        first, last = start * part.dtype.itemsize // BLOCK_BYTES, -(-stop * part.dtype.itemsize // BLOCK_BYTES)
        for block in first + np.flatnonzero(unchecked[first:last]):
            piece = data.view(np.uint8)[block * BLOCK_BYTES : (block + 1) * BLOCK_BYTES]
            if zlib.crc32(piece.data) != expected[block]:
                raise InputError(f"{self.path / part.name} is corrupted near byte {block * BLOCK_BYTES}; {REMEDY}")
            unchecked[block] = False
        return data[start:stop]


class StoreWriter:
    """Writes a token folder. Use as a context manager; without `finish` nothing in `path` changes but `.partial/`.

        settings = {"text": fingerprint}
        with StoreWriter(path, tokenizer=json_bytes, vocab_size=4096, eos_id=0, settings=settings) as writer:
            for number, document in enumerate(documents[writer.done :], start=writer.done):
                writer.add("train", ids, text_bytes)
                writer.checkpoint(number + 1)  # from time to time
            writer.finish(source)

    `settings` (JSON values) is everything that the result depends on besides the other arguments. After an interrupted
    run with the same settings, `done` is the number of its last checkpoint, and the work resumes there: the result is
    the same, byte for byte. Unfinished work with other settings is discarded; without `settings`, any unfinished work
    is. Raises ConfigError while another process writes to `path`.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        tokenizer: bytes,
        vocab_size: int,
        eos_id: int,
        bos_id: int | None = None,
        shard_tokens: int = 1 << 27,
        settings: dict[str, Any] | None = None,
    ):
        if shard_tokens < 1:
            raise ConfigError(f"shard_tokens must be at least 1, got {shard_tokens}")
        if not 0 < vocab_size <= 1 << 31:
            raise ConfigError(f"vocab_size must be between 1 and 2**31, so that ids fit into int32, got {vocab_size}")
        self.begin = [] if bos_id is None else [bos_id]
        for token in [*self.begin, eos_id]:
            if not 0 <= token < vocab_size:
                raise ConfigError(
                    f"end or begin token {token} is outside the vocabulary of {vocab_size}; choose one inside"
                )
        self.path, self.partial, self.shard_tokens = Path(path), Path(path) / PARTIAL, shard_tokens
        self.manifest = Manifest(
            dtype="uint16" if vocab_size <= 1 << 16 else "uint32",
            vocab_size=vocab_size,
            tokenizer_sha256=hashlib.sha256(tokenizer).hexdigest(),
            eos_id=eos_id,
            bos_id=bos_id,
        )
        self._identity = json.dumps([settings, shard_tokens, self.manifest.to_json()], sort_keys=True)
        self.dtype = DTYPES[self.manifest.dtype]
        self.done = 0
        self._open: dict[str, _ShardFiles] = {}
        self._shards: dict[str, list[Shard]] = {}
        self._masked: dict[str, bool] = {}
        self.partial.mkdir(parents=True, exist_ok=True)
        self._folder = os.open(self.partial, os.O_RDONLY)
        try:
            fcntl.flock(self._folder, fcntl.LOCK_EX | fcntl.LOCK_NB)  # released when the process ends, even by a kill
        except BlockingIOError:
            os.close(self._folder)
            raise ConfigError(
                f"another process is writing to {self.path}; wait for it, or choose another folder"
            ) from None
        except OSError:
            pass  # some network file systems have no locks
        if settings is None or not self._resume():
            self._clear()
        (self.partial / TOKENIZER).write_bytes(tokenizer)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_) -> None:
        for shard in self._open.values():
            shard.abandon()
        if not (self.partial / PROGRESS).exists():  # no checkpoint to resume from
            shutil.rmtree(self.partial, ignore_errors=True)
        os.close(self._folder)

    def add(
        self,
        split: str,
        ids: Sequence[int] | np.ndarray,
        text_bytes: int,
        loss: Sequence[bool] | np.ndarray | None = None,
    ) -> None:
        """Appends one document of `ids[n]`, which encode `text_bytes` bytes of UTF-8, and adds the marks around it.

        `loss[n]` is true for every token whose prediction counts. The end mark counts if the last token does, the begin
        mark never. Without `loss` every token counts. A split has masks for all of its documents or for none.
        """
        ids = np.asarray(ids)
        if ids.size and not (ids.min() >= 0 and ids.max() < self.manifest.vocab_size):
            raise InputError(
                f"token id {ids.min() if ids.min() < 0 else ids.max()} is outside the vocabulary of"
                f" {self.manifest.vocab_size}; use the tokenizer of this folder"
            )
        masked, begin = loss is not None, self.begin
        if loss is not None and len(loss) != len(ids):
            raise InputError(
                f"loss mask of {len(loss)} values for a document of {len(ids)} tokens; give one value per token"
            )
        if self._masked.get(split, masked) != masked:
            raise InputError(
                f"split {split!r} of {self.path} has documents with and without a loss mask; give one for all or none"
            )
        if split not in self._open:
            name = f"{split}-{len(self._shards.get(split, ())):05d}"
            if not SHARD_NAME.fullmatch(name):
                raise ConfigError(f"bad split name {split!r}; use lower-case letters, digits and _")
            self._masked[split] = masked
            self._open[split] = _ShardFiles(
                self.partial, Shard(name, 0, 0, 0, "", "", "" if masked else None), self.dtype
            )
        document = np.empty(len(begin) + len(ids) + 1, self.dtype)
        document[: len(begin)], document[len(begin) : -1], document[-1] = begin, ids, self.manifest.eos_id
        mask = None
        if loss is not None:
            mask = np.zeros(len(document), LOSS)
            mask[len(begin) : -1] = np.asarray(loss, bool)
            mask[-1] = len(ids) and mask[-2]
        shard = self._open[split]
        shard.append(document, text_bytes, mask)
        if shard.tokens >= self.shard_tokens:
            self._close(split)

    def documents(self, split: str) -> int:
        """Documents added to `split` so far, including those of the run it resumes."""
        return sum(shard.documents for shard in self._started(split))

    def checkpoint(self, done: int) -> None:
        """Makes all added documents durable; a run that resumes here starts with `done` source documents."""
        for shard in self._open.values():
            shard.sync()
        os.fsync(self._folder)
        state = {
            "identity": self._identity,
            "done": done,
            "closed": {split: len(shards) for split, shards in self._shards.items()},
            "open": {split: asdict(files.shard()) for split, files in self._open.items()},
        }
        _write_durably(self.partial / PROGRESS, json.dumps(state))
        os.fsync(self._folder)
        self.done = done

    def finish(self, source: dict[str, Any]) -> Manifest:
        """Closes the shards and moves everything into `path`, replacing a store there."""
        for split in sorted(self._open):
            self._close(split)
        splits = {split: tuple(self._shards[split]) for split in sorted(self._shards)}
        manifest = replace(self.manifest, splits=splits, source=source)
        with open(self.partial / TOKENIZER, "rb") as file:
            os.fsync(file.fileno())
        _write_durably(self.partial / MANIFEST, manifest.to_json())
        # From here to the last rename the folder has no manifest, so after a crash it counts as unfinished.
        (self.path / MANIFEST).unlink(missing_ok=True)
        names = [part.name for part in manifest.files()]
        for old in set(self.path.iterdir()) - {self.path / name for name in names}:
            if SHARD_FILE.fullmatch(old.name):
                old.unlink()
        for name in [*names, TOKENIZER, MANIFEST]:
            os.replace(self.partial / name, self.path / name)
        folder = os.open(self.path, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
        shutil.rmtree(self.partial)
        return manifest

    def _started(self, split: str) -> list[Shard]:
        """The shards of `split` so far; the last may still be open."""
        return [*self._shards.get(split, ()), *([self._open[split].shard()] if split in self._open else ())]

    def _close(self, split: str) -> None:
        shard = self._open.pop(split).close()
        _write_durably(self.partial / f"{shard.name}.json", json.dumps(asdict(shard)))
        self._shards.setdefault(split, []).append(shard)

    def _resume(self) -> bool:
        """Resumes from the last checkpoint in `.partial/`; False if it is incomplete or has other settings."""
        try:
            state = json.loads((self.partial / PROGRESS).read_text(encoding="utf-8"))
            if state["identity"] != self._identity:
                return False
            if (self.partial / MANIFEST).exists():  # stopped while moving the files into place
                for part in Manifest.read(self.partial).files():
                    if not (self.partial / part.name).exists():
                        os.replace(self.path / part.name, self.partial / part.name)
            records = {
                split: [self.partial / f"{split}-{i:05d}.json" for i in range(closed)]
                for split, closed in state["closed"].items()
            }
            closed = {
                split: [Shard(**json.loads(path.read_text())) for path in paths] for split, paths in records.items()
            }
            started = {split: Shard(**values) for split, values in state["open"].items()}
            files = [
                part
                for shard in (*itertools.chain(*closed.values()), *started.values())
                for part in shard.files(self.dtype)
            ]
            if any((self.partial / part.name).stat().st_size < part.bytes for part in files):
                return False
        except (FileNotFoundError, ValueError, KeyError):
            return False
        self._clear(
            {PROGRESS, *(path.name for path in itertools.chain(*records.values())), *(part.name for part in files)}
        )
        self._open = {split: _ShardFiles(self.partial, shard, self.dtype) for split, shard in started.items()}
        self._shards, self.done = closed, state["done"]
        self._masked = {split: self._started(split)[0].masked for split in {**closed, **started}}
        return True

    def _clear(self, keep: Collection[str] = ()) -> None:
        """Deletes all files in `.partial/` except those in `keep`."""
        for file in self.partial.iterdir():
            if file.name not in keep:
                file.unlink()


class _ShardFiles:
    """A shard being written. start: its state at the last checkpoint or at its creation, without checksums."""

    def __init__(self, folder: Path, start: Shard, dtype: np.dtype):
        self.start, self.tokens, self.bytes, self.documents = start, start.tokens, start.bytes, start.documents
        parts = start.files(dtype)
        self.paths = [folder / part.name for part in parts]
        self.files: list[BinaryIO] = [open(path, "ab") for path in self.paths]  # noqa: SIM115 (close() does)
        for file, part in zip(self.files, parts, strict=True):
            file.truncate(part.bytes)  # drops everything after the checkpoint

    def append(self, ids: np.ndarray, text_bytes: int, mask: np.ndarray | None) -> None:
        values = (ids, np.array(self.tokens + len(ids), ENDS), *(() if mask is None else (mask,)))
        self.tokens += len(ids)
        self.bytes += int(text_bytes)
        self.documents += 1
        for file, part in zip(self.files, values, strict=True):
            file.write(part.tobytes())

    def shard(self, *checksums: str) -> Shard:
        return replace(
            self.start,
            tokens=self.tokens,
            bytes=self.bytes,
            documents=self.documents,
            **dict(zip(("tokens_crc32", "ends_crc32", "loss_crc32"), checksums, strict=False)),
        )

    def sync(self) -> None:
        for file in self.files:
            file.flush()
            os.fsync(file.fileno())

    def close(self) -> Shard:
        self.sync()
        self.abandon()
        return self.shard(
            *(block_checksums(np.memmap(path, np.uint8, mode="r")).astype(">u4").tobytes().hex() for path in self.paths)
        )

    def abandon(self) -> None:
        for file in self.files:
            with contextlib.suppress(OSError):  # the disk may be full
                file.close()


def _write_durably(path: Path, text: str) -> None:
    """Replaces the file `path` as a whole: after a crash it holds the old text or the new one."""
    new = path.with_name(path.name + ".new")
    with open(new, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(new, path)
