"""Tokenize text into memory-mapped shards: local files and folders, or a Hugging Face dataset.

    python -m scripts.tokenize --out data/mine ~/projects --glob '*.py' --exclude test
    python -m scripts.tokenize --out data/web --dataset HuggingFaceFW/fineweb --config sample-10BT --streaming --tokenizer tokenizer.json

The result depends on the text and the settings alone: files come in sorted order, and a document's hash decides whether it is held out for
validation (so copies of one document never sit on both sides).
"""

import fnmatch
import glob
import hashlib
import itertools
import os
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import tokenizers
import tyro
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from tqdm import tqdm

from laneformer.errors import ConfigError, InputError, LaneformerError
from train.shards import MANIFEST, Manifest, StoreWriter, TokenStore

END_OF_TEXT = "<|endoftext|>"
# Words with the space or the sign before them, single digits, runs of signs, line ends, indentation: the cl100k pattern, which Llama 3 and
# Qwen use too, with digits one by one so that a small vocabulary is not spent on numbers.
PIECES = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")
SKIPPED = "skipped (not UTF-8 text, or empty)"
ALPHABET = 256 + 1  # every byte, and the end of text
BATCH_CHARS = 1 << 22  # per call of the tokenizer, which spreads the documents of a call over the cores
PIECE_CHARS = 1 << 20  # longer documents are encoded in pieces: in parallel, and with a bound on memory
SAMPLE_CHARS = 1 << 14  # what the sample for the BPE is made of
HIDDEN = (".*", "__pycache__")


@dataclass(frozen=True, kw_only=True)
class Options:
    """Tokenize text files or a Hugging Face dataset into a folder of memory-mapped shards for `python -m train`."""

    sources: tyro.conf.Positional[tuple[Path, ...]] = ()
    """Files, or folders that are searched through (hidden names and __pycache__ are left out)."""
    out: Path
    """Folder to write."""
    glob: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """Take only files with such a name, e.g. '*.py'; may be repeated. Without it: every file. What is not UTF-8 is skipped and counted."""
    exclude: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """Leave out files and folders with such a name, e.g. test or '*_pb2.py'; may be repeated."""
    document_separator: str = ""
    """Text between the documents of a file, such as '<|endoftext|>'. Without it a file is one document."""
    dataset: str = ""
    """A dataset for the Hugging Face `datasets` library instead of SOURCES: a hub name, or json, parquet, text with --data-files."""
    config: str = ""
    """Configuration (subset) of the dataset."""
    data_files: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """Files of the dataset, paths or patterns; may be repeated."""
    split: str = "train"
    """Split of the dataset."""
    column: str = "text"
    """Column of the dataset that holds the text."""
    streaming: bool = False
    """Read the dataset as it downloads, without a copy on disk. --validation-fraction then needs a dataset of many documents."""
    tokenizer: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """A tokenizer.json to use. Without it a byte-level BPE is trained on the text."""
    train_bpe: int = 4096
    """Vocabulary of the trained BPE."""
    bpe_sample_bytes: int = 20_000_000
    """Train the BPE on about this many bytes of the text, chosen by hash (of a streamed dataset the first ones)."""
    end_token: str = END_OF_TEXT
    """Token after every document."""
    begin_token: str = ""
    """Token before every document, for a tokenizer whose models expect one. Without it: none."""
    validation_fraction: float = 0.01
    """Share of the documents that is held out as the split `validation`; 0 for none."""
    shard_tokens: int = 1 << 27
    """Tokens per shard file."""
    overwrite: bool = False
    """Replace what --out holds."""

    def check(self) -> None:
        """ConfigError on what cannot work. Not at construction: the command line prints its own kind of message for that."""
        files, dataset = ("sources", "glob", "exclude", "document_separator"), ("config", "data_files", "split", "column", "streaming")
        if bool(self.sources) == bool(self.dataset):
            raise ConfigError("give either files and folders to tokenize, or --dataset NAME")
        self._refuse(dataset if self.sources else files, "--dataset" if self.sources else "files and folders")
        if self.tokenizer:
            self._refuse(("train_bpe", "bpe_sample_bytes"), "a BPE trained here, not --tokenizer")
        elif self.end_token != END_OF_TEXT or self.begin_token:
            raise ConfigError(f"--end-token and --begin-token belong to --tokenizer: a trained BPE has {END_OF_TEXT} alone")
        if self.train_bpe < ALPHABET:
            raise ConfigError(f"--train-bpe {self.train_bpe}: a byte-level vocabulary has at least {ALPHABET} tokens")
        if self.bpe_sample_bytes < 1 or self.shard_tokens < 1:
            raise ConfigError("--bpe-sample-bytes and --shard-tokens: give at least 1")
        if not 0 <= self.validation_fraction < 1:
            raise ConfigError(f"--validation-fraction {self.validation_fraction}: give a share of the documents, at least 0 and below 1")

    def _refuse(self, names: Sequence[str], owner: str) -> None:
        for option in fields(self):
            if option.name in names and getattr(self, option.name) != option.default:
                raise ConfigError(f"--{option.name.replace('_', '-')} goes with {owner}: leave it out")


def digest(text: str) -> bytes:
    return hashlib.blake2b(text.encode(), digest_size=32).digest()


def place(key: bytes) -> float:
    """A document's place in [0, 1), from its digest: below the held-out share it belongs to validation."""
    return int.from_bytes(key[:8], "big") / 2.0**64


class Files:
    """The documents of local files, in sorted order."""

    def __init__(self, options: Options):
        self.separator = options.document_separator
        self.paths = list(dict.fromkeys(itertools.chain.from_iterable(self._find(root, options) for root in options.sources)))
        self.skipped = 0
        if not self.paths:
            raise InputError(f"no files in {', '.join(map(str, options.sources))} that --glob and --exclude leave: check these")

    @staticmethod
    def _find(root: Path, options: Options) -> Iterator[Path]:
        def named(name: str, patterns: Sequence[str]) -> bool:
            return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)

        def complain(error: OSError):
            raise InputError(f"cannot read folder {error.filename}: {error.strerror}")

        if root.is_file():
            yield root.resolve()
            return
        if not root.is_dir():
            raise InputError(f"{root} does not exist: give files or folders of text")
        for folder, folders, names in os.walk(root, onerror=complain):
            folders[:] = sorted(name for name in folders if not named(name, (*HIDDEN, *options.exclude)))
            for name in sorted(names):
                if named(name, options.glob or ("*",)) and not named(name, (*HIDDEN, *options.exclude)):
                    path = Path(folder, name)
                    if path.is_file():  # not a broken link, a socket or a pipe
                        yield path.resolve()

    def documents(self) -> Iterator[str]:
        self.skipped = 0
        for path in self.paths:
            try:
                text = path.read_bytes().decode("utf-8")  # bytes: text mode would change line ends
            except UnicodeDecodeError:
                text = "\0"
            except OSError as error:
                raise InputError(f"cannot read {path}: {error.strerror}") from None
            if "\0" in text:  # decodes, but no text has it
                self.skipped += 1
                continue
            yield from filter(None, text.split(self.separator) if self.separator else (text,))


class Dataset:
    """The documents of a Hugging Face dataset, in its order. Rows without text are skipped and counted."""

    def __init__(self, options: Options):
        try:
            import datasets
        except ImportError:
            raise InputError("--dataset needs the datasets library: pip install 'laneformer[data]'") from None
        self.options, self.skipped = options, 0
        local = [sorted(glob.glob(pattern, recursive=True)) for pattern in options.data_files]
        data_files = [file for pattern, found in zip(options.data_files, local, strict=True) for file in found or [pattern]]
        try:
            builder = datasets.load_dataset_builder(options.dataset, options.config or None, data_files=data_files or None)
            if options.streaming:
                self.rows = builder.as_streaming_dataset(options.split)
            else:
                builder.download_and_prepare()
                self.rows = builder.as_dataset(options.split)
            self.revision = f"{builder.hash} {builder.config_id}"
            columns = self.rows.column_names or list(next(iter(self.rows), {}))
        except Exception as error:  # loaders of all kinds, and the network
            raise self._failure(error) from error
        if options.column not in columns:
            raise InputError(f"dataset {options.dataset} has no column {options.column!r}: give --column, one of {', '.join(columns)}")

    def documents(self) -> Iterator[str]:
        self.skipped = 0
        try:
            for batch in self.rows.select_columns([self.options.column]).iter(batch_size=256):
                for text in batch[self.options.column]:
                    if text is not None and not isinstance(text, str):
                        raise TypeError(f"column {self.options.column!r} holds {type(text).__name__}, not text: give another --column")
                    if text:
                        yield text
                    else:
                        self.skipped += 1
        except Exception as error:
            raise self._failure(error) from error

    def _failure(self, error: Exception) -> InputError:
        root = error
        while root.__cause__ is not None:  # "An error occurred while generating the dataset" has the reason inside
            root = root.__cause__
        return InputError(f"cannot read dataset {self.options.dataset} (split {self.options.split}): {' '.join(str(root).split())}")


@dataclass(frozen=True)
class Survey:
    """What one pass over the documents tells: their fingerprint and count, the UTF-8 bytes, and the `place` of the two lowest contents."""

    fingerprint: str
    documents: int
    bytes: int
    lowest: tuple[float, ...]


def survey(documents: Iterable[str]) -> Survey:
    whole, count, size, lowest = hashlib.blake2b(digest_size=32), 0, 0, set()
    for text in documents:
        key = digest(text)
        whole.update(key)
        count, size = count + 1, size + len(text.encode())
        lowest = set(sorted(lowest | {place(key)})[:2])
    return Survey(whole.hexdigest(), count, size, tuple(sorted(lowest)))


def held_out_share(fraction: float, found: Survey) -> float:
    """The bound on `place` for validation: `fraction`, or a little more where so few documents would leave it empty."""
    if fraction == 0:
        return 0.0
    if len(found.lowest) < 2:
        raise InputError(f"{found.documents} document{'s, all alike,' * (found.documents > 1)} cannot be divided: give "
                         "--validation-fraction 0, more documents, or --document-separator")
    first, second = found.lowest
    return max(fraction, (first + second) / 2) if first >= fraction else fraction


def train_bpe(documents: Iterable[str], vocab: int) -> Tokenizer:
    """A byte-level BPE of `vocab` tokens in which every string round-trips; token 0 is END_OF_TEXT."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(PIECES), "isolated"),
                                                       pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=vocab, special_tokens=[END_OF_TEXT], show_progress=False,
                                  initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    tokenizer.train_from_iterator(documents, trainer)
    return tokenizer


def load_tokenizer(data: bytes, name: str) -> Tokenizer:
    """The tokenizer in a tokenizer.json, set to take text as it stands: whole, unpadded, a special token's spelling as plain text."""
    try:
        tokenizer = Tokenizer.from_buffer(data)
    except Exception as error:  # the library raises bare Exception
        raise InputError(f"{name} is not a tokenizer.json: {error}") from None
    tokenizer.no_truncation()
    tokenizer.no_padding()
    tokenizer.encode_special_tokens = True
    return tokenizer


def token_id(tokenizer: Tokenizer, token: str, option: str, name: str) -> int:
    found = tokenizer.token_to_id(token)
    if found is None:
        special = [added.content for added in tokenizer.get_added_tokens_decoder().values() if added.special]
        raise InputError(f"{name} has no token {token!r}: give {option}, perhaps one of {', '.join(special[:20]) or '(it names none)'}")
    return found


def pieces(text: str, size: int) -> Iterator[str]:
    """`text` in pieces of at most `size` characters, cut after line ends where there are any."""
    start = 0
    while start < len(text):
        cut = text.rfind("\n", start, start + size) + 1 if len(text) - start > size else len(text)
        cut = cut if cut > start else start + size
        yield text[start:cut]
        start = cut


def batches(documents: Iterable[str]) -> Iterator[list[str]]:
    """Documents in groups of about BATCH_CHARS."""
    group, size = [], 0
    for text in documents:
        group.append(text)
        size += len(text)
        if size >= BATCH_CHARS:
            yield group
            group, size = [], 0
    if group:
        yield group


def encode(tokenizer: Tokenizer, documents: Iterable[str]) -> Iterator[tuple[str, np.ndarray]]:
    """Each document with its ids, uint32[n]; the documents of a group are encoded in parallel."""
    for texts in batches(documents):
        parts = [list(pieces(text, PIECE_CHARS)) for text in texts]
        ids = []  # per piece
        for group in batches(itertools.chain.from_iterable(parts)):
            ids += [np.array(encoding.ids, np.uint32) for encoding in tokenizer.encode_batch_fast(group, add_special_tokens=False)]
        of_piece = iter(ids)
        for text, part in zip(texts, parts, strict=True):
            yield text, np.concatenate(list(itertools.islice(of_piece, len(part))))


def settings(options: Options, source: Files | Dataset, found: Survey | None, tokenizer_file: bytes) -> dict[str, Any]:
    """What the result depends on, for the manifest: a later run with the same is finished before it starts."""
    if found:
        text = found.fingerprint
    else:  # of a stream only its name and revision are known beforehand, and the content of local files
        whole = hashlib.blake2b(repr((options.dataset, options.config, options.split, options.column)).encode(), digest_size=32)
        local = sorted(file for pattern in options.data_files for file in glob.glob(pattern, recursive=True))
        for file in local:
            with open(file, "rb") as data:
                whole.update(hashlib.file_digest(data, "blake2b").digest())
        if not local:
            whole.update(source.revision.encode())
        text = whole.hexdigest()
    if options.tokenizer:
        ids = {"tokenizer": hashlib.sha256(tokenizer_file).hexdigest(), "end_token": options.end_token, "begin_token": options.begin_token}
    else:
        ids = {"train_bpe": options.train_bpe, "bpe_sample_bytes": options.bpe_sample_bytes}
    return {"text": text, **ids, "validation_fraction": options.validation_fraction, "shard_tokens": options.shard_tokens}


def finished(options: Options, wanted: dict[str, Any]) -> bool:
    """Whether --out already holds, undamaged, what these settings would write. InputError when it holds something else."""
    if options.overwrite or not (options.out / MANIFEST).exists():
        return False
    have = Manifest.read(options.out).source.get("settings", {})
    changed = [name for name in dict.fromkeys([*wanted, *have]) if have.get(name) != wanted.get(name)]
    if changed:
        named = ", ".join("the text" if name == "text" else f"{name} (was {have.get(name)}, now {wanted.get(name)})" for name in changed)
        raise InputError(f"{options.out} holds other tokens ({named} differ): give another --out, or --overwrite to replace them")
    TokenStore.open(options.out).verify()
    return True


def tokenize(options: Options) -> str:
    """Do what the options say; returns the line to print."""
    began = time.perf_counter()
    if options.out.exists() and not options.out.is_dir():
        raise InputError(f"--out {options.out} is a file: give a folder")
    source = Files(options) if options.sources else Dataset(options)
    found = None if options.streaming else survey(source.documents())
    if found and not found.documents:
        raise InputError(f"no text in {options.dataset or ', '.join(map(str, options.sources))}, {source.skipped} {SKIPPED}: give others")
    tokenizer_file = b""
    if options.tokenizer:
        try:
            tokenizer_file = options.tokenizer.read_bytes()
        except OSError as error:
            raise InputError(f"cannot read --tokenizer {options.tokenizer}: {error.strerror}; give a tokenizer.json") from None
    wanted = settings(options, source, found, tokenizer_file)
    if finished(options, wanted):
        return f"{options.out}: already tokenized with these settings, nothing to do ({_counts(TokenStore.open(options.out))})"

    share = held_out_share(options.validation_fraction, found) if found else options.validation_fraction
    if options.tokenizer:
        name = str(options.tokenizer)
    else:
        print(f"training a BPE of {options.train_bpe} tokens", file=sys.stderr)
        name = "the trained BPE"
        tokenizer_file = train_bpe(_sample(source, found, share, options.bpe_sample_bytes), options.train_bpe).to_str(pretty=True).encode()
    try:
        write(options, source, share, load_tokenizer(tokenizer_file, name), tokenizer_file, name, found and found.bytes, wanted)
    except OSError as error:  # those of reading are InputErrors already
        raise InputError(f"cannot write {options.out}: {error.strerror}; make room or give another --out, "
                         "then the same command starts again") from error
    skipped = f", {source.skipped} {SKIPPED}" if source.skipped else ""
    return f"{options.out}: {_counts(TokenStore.open(options.out))}{skipped}, {time.perf_counter() - began:.1f} s"


def write(options: Options, source: Files | Dataset, share: float, tokenizer: Tokenizer, tokenizer_file: bytes, name: str,
          total: int | None, wanted: dict[str, Any]) -> None:
    """Encode the documents into --out; `total` is their size in bytes for the progress bar."""
    eos_id = token_id(tokenizer, options.end_token, "--end-token", name)
    bos_id = token_id(tokenizer, options.begin_token, "--begin-token", name) if options.begin_token else None
    vocab_size = max(tokenizer.get_vocab(with_added_tokens=True).values()) + 1
    lowest = 1.0
    with (StoreWriter(options.out, tokenizer=tokenizer_file, vocab_size=vocab_size, eos_id=eos_id, bos_id=bos_id,
                      shard_tokens=options.shard_tokens) as writer,
          tqdm(total=total, unit="B", unit_scale=True, desc="tokenizing", disable=None) as bar):
        for text, ids in encode(tokenizer, source.documents()):
            where, size = place(digest(text)), len(text.encode())
            lowest = min(lowest, where)
            writer.add("validation" if where < share else "train", ids, size)
            bar.update(size)
        for split in ("train", "validation") if share else ("train",):
            if not writer.documents(split):
                remedy = f"above {lowest:.3g}" if split == "validation" else "below it"
                raise InputError(f"no document fell to split {split} at --validation-fraction {options.validation_fraction}: "
                                 f"give one {remedy}, or 0, or more documents")
        writer.finish({"settings": wanted, "from": _origin(options, source), "tokenizers_version": tokenizers.__version__})


def _sample(source: Files | Dataset, found: Survey | None, share: float, size: int) -> Iterator[str]:
    """Text to train the BPE on, nothing of it held out: about `size` bytes, chosen by hash where the total is known."""
    rate = size / found.bytes if found else 1.0
    taken = 0
    for text in source.documents():
        if place(digest(text)) < share:
            continue
        for piece in [text] if rate >= 1 and found else pieces(text, SAMPLE_CHARS):  # a document may be larger than the sample
            if place(digest(piece)[8:]) < rate:  # other bytes than the held-out share looks at
                taken += len(piece.encode())
                yield piece
            if not found and taken >= size:
                return


def _origin(options: Options, source: Files | Dataset) -> dict[str, Any]:
    if isinstance(source, Files):
        return {"paths": [str(path) for path in options.sources], "glob": options.glob, "exclude": options.exclude}
    return {"dataset": options.dataset, "config": options.config, "split": options.split, "column": options.column,
            "data_files": options.data_files, "revision": source.revision}


def _counts(store: TokenStore) -> str:
    documents, tokens, size = (sum(map(count, store.splits)) for count in (store.documents, store.tokens, store.text_bytes))
    held = f", {store.tokens('validation'):,} of them for validation" if "validation" in store.splits else ""
    return (f"{documents:,} documents, {tokens:,} tokens{held}, {size / tokens:.2f} bytes/token, "
            f"vocabulary {store.manifest.vocab_size:,}")


def main(args: Sequence[str] | None = None) -> int:
    try:
        options = tyro.cli(Options, args=args, prog="python -m scripts.tokenize", config=(tyro.conf.FlagCreatePairsOff,))
        options.check()
        print(tokenize(options))
    except (LaneformerError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("error: interrupted; nothing was changed, the same command starts again", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
