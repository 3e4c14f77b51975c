"""Token shards: the folder that tokenizing writes and training reads, memory-mapped and checksummed.

    manifest.json       format version, token dtype, vocabulary, tokenizer hash, source, and the shards of every split
    tokenizer.json      the tokenizer that made the ids, byte for byte
    train-00000.bin     ids end to end, little-endian; each document is [bos] ids eos, and lies whole in one shard
    validation-00000.bin

`StoreWriter` collects everything in `.partial/` and moves it into place at the end, the manifest last: a folder with a manifest is
a finished one, and a run that dies leaves what was there before. `TokenStore` reads. Each shard carries a CRC-32 per 256 KiB block, checked
when a block is first read: a flipped bit is found before it is trained on, and opening a store of any size costs no reading.
"""

import contextlib
import functools
import hashlib
import json
import os
import re
import shutil
import zlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, Self

import numpy as np

from laneformer.errors import ConfigError, InputError

FORMAT = "laneformer-tokens"
VERSION = 1
BLOCK_BYTES = 1 << 18  # one checksum per block: 0.2 ms to check, 32 bytes of manifest per MiB of tokens
OPEN_SHARDS = 256  # every mapping holds a file descriptor, and 1024 is a usual limit
SHARD_NAME = re.compile(r"[a-z0-9_]+-\d{5}\.bin")
DTYPES = {"uint16": np.dtype("<u2"), "uint32": np.dtype("<u4")}
MANIFEST, TOKENIZER, PARTIAL = "manifest.json", "tokenizer.json", ".partial"
REMEDY = "copy the folder again, or tokenize again with --overwrite"


@dataclass(frozen=True)
class Shard:
    """One file of whole documents: `tokens` counts the bos/eos marks, `bytes` the UTF-8 text alone; `crc32` is 8 hex digits per block."""

    file: str
    tokens: int
    bytes: int
    documents: int
    crc32: str


@dataclass(frozen=True)
class Manifest:
    """What manifest.json says. `source` describes what was tokenized and how; the writer does not look into it."""

    dtype: str
    vocab_size: int
    tokenizer_sha256: str
    eos_id: int
    bos_id: int | None
    splits: dict[str, tuple[Shard, ...]] = field(default_factory=dict)
    source: dict[str, Any] = field(default_factory=dict)

    def to_json(self) -> str:
        return json.dumps({"format": FORMAT, "version": VERSION, **asdict(self)}, indent=1, ensure_ascii=False) + "\n"

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read `path`/manifest.json; InputError when it is missing, damaged or of another format version."""
        file = Path(path) / MANIFEST
        try:
            values = json.loads(file.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise InputError(f"{path} has no {MANIFEST}: not a token folder, or its tokenizing did not finish; "
                             "make it with python -m scripts.tokenize") from None
        except ValueError as error:
            raise InputError(f"{file} is damaged ({error}): {REMEDY}") from None
        if not isinstance(values, dict) or values.pop("format", None) != FORMAT:
            raise InputError(f"{file} is not a {FORMAT} manifest: give a folder that python -m scripts.tokenize wrote")
        if (version := values.pop("version", None)) != VERSION:
            raise InputError(f"{file} has format version {version}, this program reads {VERSION}: tokenize again with --overwrite")
        try:
            splits = {split: tuple(Shard(**shard) for shard in shards) for split, shards in values.pop("splits").items()}
            manifest = cls(**values, splits=splits)
            for shard in (shard for shards in splits.values() for shard in shards):
                blocks = -(-shard.tokens * DTYPES[manifest.dtype].itemsize // BLOCK_BYTES)
                if len(bytes.fromhex(shard.crc32)) != 4 * blocks:
                    raise ValueError(f"crc32 of {shard.file} does not have {blocks} blocks")
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise InputError(f"{file} is damaged ({type(error).__name__}: {error}): {REMEDY}") from None
        return manifest


def block_checksums(data: np.ndarray) -> np.ndarray:
    """CRC-32 of each BLOCK_BYTES piece of `data[n]` (uint8; the last piece may be shorter) -> uint32[ceil(n / BLOCK_BYTES)]."""
    return np.array([zlib.crc32(data[i : i + BLOCK_BYTES]) for i in range(0, len(data), BLOCK_BYTES)], np.uint32)


class TokenStore:
    """A finished token folder, read through memory maps. Safe to read from several threads."""

    def __init__(self, path: Path, manifest: Manifest):
        self.path, self.manifest = path, manifest
        self.dtype = DTYPES[manifest.dtype]
        self._ends = {split: np.cumsum([shard.tokens for shard in shards]) for split, shards in manifest.splits.items()}
        self._unchecked: dict[str, np.ndarray] = {}  # file -> bool[blocks]; outlives an evicted mapping
        self._map = functools.lru_cache(OPEN_SHARDS)(self._map)

    @classmethod
    def open(cls, path: str | Path) -> Self:
        """Open `path`: reads the manifest, the tokenizer's hash and the size of every shard, no tokens.

        Raises InputError for a missing or truncated shard, a tokenizer.json that is not the one the ids were made with, and the
        manifest's own faults.
        """
        path = Path(path)
        store = cls(path, Manifest.read(path))
        try:
            digest = hashlib.sha256((path / TOKENIZER).read_bytes()).hexdigest()
        except FileNotFoundError:
            raise InputError(f"{path / TOKENIZER} is missing: {REMEDY}") from None
        if digest != store.manifest.tokenizer_sha256:
            raise InputError(f"{path / TOKENIZER} is not the tokenizer that made these tokens (sha256 {digest[:12]}, "
                             f"the manifest says {store.manifest.tokenizer_sha256[:12]}): {REMEDY}")
        for shard in (shard for shards in store.manifest.splits.values() for shard in shards):
            store._check_size(shard)
        return store

    @property
    def splits(self) -> tuple[str, ...]:
        return tuple(self.manifest.splits)

    def tokens(self, split: str) -> int:
        """Tokens in `split`, end-of-text marks included."""
        return sum(shard.tokens for shard in self._shards(split))

    def text_bytes(self, split: str) -> int:
        """UTF-8 bytes of the text of `split`: bits per byte = loss in nats / ln 2 * tokens / text_bytes."""
        return sum(shard.bytes for shard in self._shards(split))

    def documents(self, split: str) -> int:
        return sum(shard.documents for shard in self._shards(split))

    def read(self, split: str, start: int, length: int) -> np.ndarray:
        """Tokens [start, start + length) of `split`, over shard borders -> int32[length]. InputError on a damaged block."""
        shards, ends = self._shards(split), self._ends[split]
        if start < 0 or length < 0 or start + length > self.tokens(split):
            raise IndexError(f"tokens [{start}, {start + length}) of split {split!r}, which has {self.tokens(split)}")
        out = np.empty(length, np.int32)
        done, index = 0, int(np.searchsorted(ends, start, side="right"))
        while done < length:
            shard = shards[index]
            local = start + done - (int(ends[index]) - shard.tokens)
            count = min(length - done, shard.tokens - local)
            out[done : done + count] = self._checked(shard, local, local + count)
            done, index = done + count, index + 1
        return out

    def verify(self) -> None:
        """Read every shard and check all its blocks; InputError names the first damaged one."""
        for shard in (shard for shards in self.manifest.splits.values() for shard in shards):
            self._checked(shard, 0, shard.tokens)

    def digest(self, split: str) -> str:
        """SHA-256 over the sizes and checksums of the shards of `split`: equal for equal tokens in equal shards."""
        return hashlib.sha256(repr([(shard.tokens, shard.crc32) for shard in self._shards(split)]).encode()).hexdigest()

    def require_tokenizer(self, sha256: str) -> None:
        """InputError unless the tokens were made by the tokenizer.json with this hash, e.g. the one a checkpoint was trained with."""
        if sha256 != self.manifest.tokenizer_sha256:
            raise InputError(f"{self.path} was tokenized with another tokenizer (sha256 {self.manifest.tokenizer_sha256[:12]}, wanted "
                             f"{sha256[:12]}): tokenize it again with --tokenizer and the tokenizer.json you train with")

    def _shards(self, split: str) -> tuple[Shard, ...]:
        try:
            return self.manifest.splits[split]
        except KeyError:
            raise InputError(f"{self.path} has no split {split!r}, only {', '.join(self.splits) or 'none'}"
                             + (": tokenize with --validation-fraction above 0" if split == "validation" else "")) from None

    def _check_size(self, shard: Shard) -> None:
        file, want = self.path / shard.file, shard.tokens * self.dtype.itemsize
        try:
            size = file.stat().st_size
        except FileNotFoundError:
            raise InputError(f"{file} is missing: {REMEDY}") from None
        if size != want:
            raise InputError(f"{file} is {'truncated' if size < want else 'too long'}: {size} bytes, the manifest says {want}; {REMEDY}")

    def _map(self, shard: Shard) -> tuple[np.ndarray, np.ndarray]:
        """The tokens of a shard and the checksums of its blocks."""
        self._check_size(shard)  # again: reading a mapping of a file that shrank since `open` would kill the process
        return np.memmap(self.path / shard.file, self.dtype, mode="r"), np.frombuffer(bytes.fromhex(shard.crc32), ">u4")

    def _checked(self, shard: Shard, start: int, stop: int) -> np.ndarray:
        """Tokens [start, stop) of one shard as a view, after checking those of its blocks that no read has touched."""
        data, expected = self._map(shard)
        raw = data.view(np.uint8)
        unchecked = self._unchecked.setdefault(shard.file, np.ones(len(expected), bool))
        first, last = start * self.dtype.itemsize // BLOCK_BYTES, -(-stop * self.dtype.itemsize // BLOCK_BYTES)
        for block in first + np.flatnonzero(unchecked[first:last]):
            piece = raw[block * BLOCK_BYTES : (block + 1) * BLOCK_BYTES]
            if zlib.crc32(piece) != expected[block]:
                raise InputError(f"{self.path / shard.file} is corrupted near byte {block * BLOCK_BYTES}: {REMEDY}")
            unchecked[block] = False
        return data[start:stop]


class StoreWriter:
    """Writes a token folder. Use as a context manager; without `finish` nothing of `path` changes.

        with StoreWriter(path, tokenizer=json_bytes, vocab_size=4096, eos_id=0) as writer:
            writer.add("train", ids, text_bytes)      # per document
            writer.finish(source)
    """

    def __init__(self, path: str | Path, *, tokenizer: bytes, vocab_size: int, eos_id: int, bos_id: int | None = None,
                 shard_tokens: int = 1 << 27):
        if shard_tokens < 1:
            raise ConfigError(f"shard_tokens is {shard_tokens}: give at least 1")
        if not 0 < vocab_size <= 1 << 31:
            raise ConfigError(f"vocab_size is {vocab_size}: token ids must fit into int32")
        self.path, self.partial, self.shard_tokens = Path(path), Path(path) / PARTIAL, shard_tokens
        self.manifest = Manifest(dtype="uint16" if vocab_size <= 1 << 16 else "uint32", vocab_size=vocab_size,
                                 tokenizer_sha256=hashlib.sha256(tokenizer).hexdigest(), eos_id=eos_id, bos_id=bos_id)
        self._open: dict[str, _ShardFile] = {}
        self._shards: dict[str, list[Shard]] = {}
        self.begin = [] if bos_id is None else [bos_id]
        for token in [*self.begin, eos_id]:
            if not 0 <= token < vocab_size:
                raise ConfigError(f"end or begin token {token} is outside the vocabulary of {vocab_size}")
        shutil.rmtree(self.partial, ignore_errors=True)  # of a run that was killed
        self.partial.mkdir(parents=True)
        (self.partial / TOKENIZER).write_bytes(tokenizer)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_) -> None:
        for shard in self._open.values():
            with contextlib.suppress(OSError):  # the disk may be full, which is why we are here
                shard.file.close()
        shutil.rmtree(self.partial, ignore_errors=True)

    def add(self, split: str, ids: Sequence[int] | np.ndarray, text_bytes: int) -> None:
        """Append one document of `ids[n]`, which stand for `text_bytes` bytes of UTF-8; the marks around it are added here."""
        ids = np.asarray(ids)
        if ids.size and not (ids.min() >= 0 and ids.max() < self.manifest.vocab_size):
            raise InputError(f"token id {ids.min() if ids.min() < 0 else ids.max()} is outside the vocabulary of "
                             f"{self.manifest.vocab_size}")
        if split not in self._open:
            name = f"{split}-{len(self._shards.setdefault(split, [])):05d}.bin"
            if not SHARD_NAME.fullmatch(name):
                raise ConfigError(f"split name {split!r}: use lower-case letters, digits and _")
            self._open[split] = _ShardFile(self.partial / name)
        shard, begin = self._open[split], self.begin
        document = np.empty(len(begin) + len(ids) + 1, DTYPES[self.manifest.dtype])
        document[: len(begin)], document[len(begin) : -1], document[-1] = begin, ids, self.manifest.eos_id
        shard.append(document, text_bytes)
        if shard.tokens >= self.shard_tokens:
            self._shards[split].append(self._open.pop(split).close())

    def documents(self, split: str) -> int:
        """Documents added to `split` so far."""
        shards = [*self._shards.get(split, ()), *([self._open[split]] if split in self._open else [])]
        return sum(shard.documents for shard in shards)

    def finish(self, source: dict[str, Any]) -> Manifest:
        """Close the shards and move everything into `path`, replacing a store that was there."""
        for split in sorted(self._open):
            self._shards[split].append(self._open.pop(split).close())
        splits = {split: tuple(self._shards[split]) for split in sorted(self._shards)}
        manifest = Manifest(**{**vars(self.manifest), "splits": splits, "source": source})
        (self.partial / MANIFEST).write_text(manifest.to_json(), encoding="utf-8")
        for name in (TOKENIZER, MANIFEST):
            with open(self.partial / name, "rb") as file:
                os.fsync(file.fileno())
        # From here to the last rename the folder has no manifest, so a crash in between reads as "did not finish".
        (self.path / MANIFEST).unlink(missing_ok=True)
        for old in self.path.glob("*.bin"):
            if SHARD_NAME.fullmatch(old.name):
                old.unlink()
        for name in [*(shard.file for shards in splits.values() for shard in shards), TOKENIZER, MANIFEST]:
            os.replace(self.partial / name, self.path / name)
        folder = os.open(self.path, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
        return manifest


class _ShardFile:
    """A shard being written."""

    def __init__(self, path: Path):
        self.path, self.tokens, self.bytes, self.documents = path, 0, 0, 0
        self.file: BinaryIO = open(path, "wb")  # noqa: SIM115 (close() does)

    def append(self, ids: np.ndarray, text_bytes: int) -> None:
        self.file.write(ids.tobytes())
        self.tokens, self.bytes, self.documents = self.tokens + len(ids), self.bytes + text_bytes, self.documents + 1

    def close(self) -> Shard:
        with self.file:
            self.file.flush()
            os.fsync(self.file.fileno())
        checksums = block_checksums(np.memmap(self.path, np.uint8, mode="r"))
        return Shard(self.path.name, self.tokens, self.bytes, self.documents, checksums.astype(">u4").tobytes().hex())
