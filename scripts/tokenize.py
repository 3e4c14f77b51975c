r"""Tokenizes files, folders or a Hugging Face dataset of texts or conversations into memory-mapped shards.

    python -m scripts.tokenize --out data/mine ~/projects --glob '*.py' --exclude test --fim-rate 0.5
    python -m scripts.tokenize --out data/web --dataset HuggingFaceFW/fineweb --config sample-10BT --streaming \
        --tokenizer tokenizer.json
    python -m scripts.tokenize --out data/chat --dataset json --data-files 'chats/*.jsonl' --chat \
        --tokenizer data/web/tokenizer.json

The result depends only on the text and the settings: documents are in a fixed order, and a document's hash decides
whether it is held out for validation, so that copies of a document are in the same split. If an interrupted command is
run again, it resumes and writes the same result.
"""

import datetime
import hashlib
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any

import tokenizers
import tyro

from laneformer.errors import ConfigError, InputError, run_command, writing
from laneformer.infer.text.chat_template import ChatTemplate
from laneformer.infer.text.tokenizer import tokens_before
from laneformer.infer.text.tokenizer_files import CONFIG, read_settings, special_names
from laneformer.train.data.store import TokenStore
from laneformer.train.tokenizing import fim
from laneformer.train.tokenizing.documents import Dataset, Files, Survey
from laneformer.train.tokenizing.encoder import (
    ALPHABET,
    END_OF_TEXT,
    SPECIAL_TOKENS,
    ChatEncoder,
    TextEncoder,
    load_tokenizer,
    token_id,
    train_bpe,
)
from laneformer.train.tokenizing.formats import KINDS
from laneformer.train.tokenizing.rows import BadRows
from laneformer.train.tokenizing.tables import Tables
from laneformer.train.tokenizing.writer import Job, Source, is_finished, no_text, sample, write


@dataclass(frozen=True, kw_only=True)
class Options:
    """Tokenize text files or a Hugging Face dataset into a folder of memory-mapped shards for `python -m train`.

    Run the same command again to resume after Ctrl-C, a kill or a full disk.
    """

    sources: tyro.conf.Positional[tuple[Path, ...]] = ()
    """Files, or folders to search (without hidden names and __pycache__)."""
    out: Path
    """Folder to write."""
    glob: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """Pattern of file names to include, such as '*.py'; may be repeated (default: all). Files that are not UTF-8 are
    skipped and counted.
    """
    exclude: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """Pattern of names of files and folders to exclude, such as test or '*_pb2.py'; may be repeated."""
    document_separator: str = ""
    """Text between the documents of a file, such as '<|endoftext|>' (default: a file is one document)."""
    dataset: str = ""
    """Rows to read instead of SOURCES: a dataset of the Hugging Face hub, or the format of --data-files: json, csv,
    parquet, text (a document per line), or files (by each file's name; other text files are a document each).
    """
    config: str = ""
    """Configuration (subset) of the dataset."""
    data_files: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """Files of the dataset: paths, folders or patterns; may be repeated. A file that is named twice is read once. Files
    may be compressed (.gz, .zst, .bz2, .xz).
    """
    max_bad_rows: int = 1000
    """With --dataset: most rows or files that are skipped because they cannot be read; the first ones are named."""
    split: str = "train"
    """Split of the dataset."""
    column: str = ""
    """Column of the text or, with --chat, of the messages (default: text; with --chat the first of messages,
    conversations, and pairs such as prompt and response in the dataset).
    """
    streaming: bool = False
    """Read the dataset while it downloads, without a copy on disk or a first pass: for large datasets.
    --validation-fraction then needs many documents.
    """
    tokenizer: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """tokenizer.json to use (default: train a byte-level BPE on the text)."""
    train_bpe: int = 4096
    """Vocabulary size of the trained BPE, in tokens."""
    bpe_sample_bytes: int = 20_000_000
    """Approximate bytes of text to train the BPE on, chosen by hash (the first ones of a streamed dataset)."""
    end_token: str = END_OF_TEXT
    """Token after every document."""
    begin_token: str | None = None
    """Token before every document; '' for none (default: the tokens that the tokenizer puts before every text; with
    --chat none, because the template writes them).
    """
    fim_rate: float = 0.0
    """Share of the training documents to rearrange for fill-in-the-middle (arXiv 2207.14255), cut at random
    characters.
    """
    fim_spm_rate: float = 0.5
    """Share of rearranged documents in the order suffix, prefix, middle; the others: prefix, suffix, middle."""
    fim_tokens: tuple[str, str, str] = fim.TOKENS
    """Tokens before the prefix, the middle and the suffix."""
    chat: bool = False
    """Read rows as conversations, write them by the tokenizer's chat template, and count the loss only on answers."""
    chat_template: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """Jinja chat template (default: the one next to the tokenizer, or ChatML for a BPE trained by this command)."""
    chat_date: str = ""
    """Date to write where the template writes today's date, such as 2025-01-31."""
    prompt_column: str = ""
    """With --chat: column of the prompts, texts or messages, to the answers in --answer-column."""
    answer_column: str = ""
    """With --chat: column of the assistant's answers."""
    validation_fraction: float = 0.01
    """Share of the documents to hold out as split `validation`; 0: none."""
    shard_tokens: int = 1 << 27
    """Tokens per shard file."""
    overwrite: bool = False
    """Replace the content of --out, and discard unfinished work with other settings there."""

    def check(self) -> None:
        """Raises ConfigError for invalid options. At construction, tyro would print the error in a box."""
        files, dataset = (
            ("glob", "exclude", "document_separator"),
            ("config", "data_files", "split", "column", "streaming", "chat", "max_bad_rows"),
        )
        if bool(self.sources) == bool(self.dataset):
            raise ConfigError("give either files and folders to tokenize, or --dataset NAME")
        self._refuse(dataset if self.sources else files, "--dataset" if self.sources else "files and folders")
        if self.local:
            self._refuse(("config", "split"), "datasets of the hub")
        if self.dataset == "files" and not self.local:
            raise ConfigError("--dataset files needs --data-files, with local files, folders or patterns")
        if self.max_bad_rows < 0:
            raise ConfigError(f"--max-bad-rows must be at least 0, got {self.max_bad_rows}")
        if self.tokenizer:
            self._refuse(("train_bpe", "bpe_sample_bytes"), "a BPE trained here, not --tokenizer")
        elif self.end_token != END_OF_TEXT or self.begin_token or self.fim_tokens != fim.TOKENS:
            raise ConfigError(
                "--end-token, --begin-token and --fim-tokens need --tokenizer; a trained BPE has "
                + ", ".join(SPECIAL_TOKENS)
            )
        if self.chat:
            if not self.tokenizer:
                raise ConfigError(
                    "--chat needs the tokenizer of the model to train; name it with --tokenizer data/web/tokenizer.json"
                )
            self._refuse(("fim_rate",), "plain text, not --chat")
            if bool(self.prompt_column) != bool(self.answer_column) or (self.prompt_column and self.column):
                raise ConfigError("give --column for a column of messages, or both --prompt-column and --answer-column")
            try:
                self._today()
            except ValueError:
                raise ConfigError(
                    f"--chat-date must be year, month and day, such as 2025-01-31, got {self.chat_date}"
                ) from None
        else:
            self._refuse(("chat_template", "chat_date", "prompt_column", "answer_column"), "--chat")
        if self.train_bpe < ALPHABET:
            raise ConfigError(
                f"--train-bpe must be at least {ALPHABET}, every byte and special token, got {self.train_bpe}"
            )
        for name in ("bpe_sample_bytes", "shard_tokens"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{_flag(name)} must be at least 1, got {getattr(self, name)}")
        for name in ("fim_rate", "fim_spm_rate"):
            if not 0 <= getattr(self, name) <= 1:
                raise ConfigError(f"{_flag(name)} must be a share between 0 and 1, got {getattr(self, name)}")
        if not self.fim_rate:
            self._refuse(("fim_spm_rate", "fim_tokens"), "--fim-rate")
        if not 0 <= self.validation_fraction < 1:
            raise ConfigError(f"--validation-fraction must be at least 0 and below 1, got {self.validation_fraction}")

    @property
    def columns(self) -> tuple[str, ...]:
        """Columns of the dataset chosen by the options."""
        pair = (self.prompt_column, self.answer_column) if self.prompt_column else ()
        return pair or ((self.column,) if self.column else () if self.chat else ("text",))

    def _today(self) -> datetime.datetime:
        return datetime.datetime.fromisoformat(self.chat_date) if self.chat_date else datetime.datetime.min

    def _refuse(self, names: Sequence[str], owner: str) -> None:
        for option in fields(self):
            if option.name in names and getattr(self, option.name) != option.default:
                raise ConfigError(f"{_flag(option.name)} applies to {owner} only; leave it out")

    @property
    def local(self) -> bool:
        """Whether the rows are those of local files."""
        return self.dataset in KINDS and bool(self.data_files) and not any("://" in file for file in self.data_files)

    def source(self) -> Source:
        if self.sources:
            return Files(self.sources, self.glob, self.exclude, self.document_separator)
        bad = BadRows(self.max_bad_rows)
        if self.local:
            return Tables(self.dataset, self.data_files, self.columns, chat=self.chat, bad=bad)
        return Dataset(
            self.dataset,
            self.config,
            self.split,
            self.data_files,
            self.columns,
            streaming=self.streaming,
            chat=self.chat,
            bad=bad,
        )

    @property
    def tokenizer_folder(self) -> Path:
        """Folder of --tokenizer. Raises ConfigError without this option."""
        if self.tokenizer is None:
            raise ConfigError("no tokenizer is given; name it with --tokenizer data/web/tokenizer.json")
        return self.tokenizer.parent

    def template(self, tokenizer: tokenizers.Tokenizer | None) -> ChatTemplate | None:
        """The chat template to use, if any. Raises InputError if it needs a date and none is given, or the reverse."""
        if not self.chat:
            return None
        template = ChatTemplate.load(self.tokenizer_folder, self.chat_template, tokenizer=tokenizer, now=self._today)
        if template.says_date != bool(self.chat_date):
            raise InputError(
                f"{template.name} writes the date; give --chat-date, the day to write in all conversations"
                if template.says_date
                else f"{template.name} does not write the date; leave out --chat-date"
            )
        return template


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def settings(
    options: Options, text: str, tokenizer_file: bytes, begin: str, template: ChatTemplate | None
) -> dict[str, Any]:
    """Everything that the result depends on, for the manifest. A folder with equal settings is not written again.

    text: what identifies the documents.
    """
    ids: dict[str, Any]
    if options.tokenizer:
        ids = {
            "tokenizer": hashlib.sha256(tokenizer_file).hexdigest(),
            "end_token": options.end_token,
            "begin_token": begin,
        }
    else:
        ids = {"train_bpe": options.train_bpe, "bpe_sample_bytes": options.bpe_sample_bytes}
    if options.fim_rate:
        ids["fim"] = {"rate": options.fim_rate, "spm_rate": options.fim_spm_rate, "tokens": list(options.fim_tokens)}
    if template:
        ids["chat"] = {
            "template": template.sha256,
            "answers": "generation blocks" if template.says_answers else "prefixes",
            "tokens": template.tokens,
            "date": options.chat_date,
        }
    return {
        "text": text,
        **ids,
        "validation_fraction": options.validation_fraction,
        "shard_tokens": options.shard_tokens,
    }


def tokenize(options: Options) -> str:
    """Writes the folder that the options describe, and returns a line that sums it up. Raises LaneformerError."""
    start = time.perf_counter()
    if options.out.exists() and not options.out.is_dir():
        raise InputError(f"--out {options.out} is a file; give a folder")
    source, tokenizer_file, tokenizer = options.source(), b"", None
    if options.tokenizer:
        try:
            tokenizer_file = options.tokenizer.read_bytes()
        except OSError as error:
            raise InputError(
                f"cannot read --tokenizer {options.tokenizer}: {error.strerror}; give a tokenizer.json"
            ) from None
        tokenizer = load_tokenizer(tokenizer_file, str(options.tokenizer))
    template = options.template(tokenizer)
    survey: Survey | None = None
    if isinstance(source, Files) or not options.streaming:
        survey = Survey.of(source.documents())
        text = survey.fingerprint
        if not survey.documents:
            raise no_text(source, survey.units)
    else:
        text = source.identity()
    decided = _tokens_before(options, tokenizer)
    before = decided or ()
    begin = " ".join(filter(None, map(tokenizer.id_to_token, before))) if tokenizer else ""
    wanted = settings(options, text, tokenizer_file, begin, template)
    if not options.overwrite and is_finished(options.out, wanted):
        counts = _counts(TokenStore.open(options.out))
        return f"{options.out}: already tokenized with these settings, nothing to do ({counts})"

    fraction = options.validation_fraction
    held_out = survey.held_out_share(fraction) if survey else fraction
    if not tokenizer:
        print(f"training a BPE of {options.train_bpe} tokens", file=sys.stderr)
        trained = train_bpe(sample(source, survey, held_out, options.bpe_sample_bytes), options.train_bpe)
        tokenizer_file = trained.to_str(pretty=True).encode()
        tokenizer = load_tokenizer(tokenizer_file, "the trained BPE")
    eos_id, middle = _marks(options, tokenizer)
    bos_id = before[0] if before else None
    job = Job(
        out=options.out,
        source=source,
        survey=survey,
        validation_fraction=fraction,
        held_out=held_out,
        encoder=ChatEncoder(template, eos_id, bos_id, source.bad)
        if template
        else TextEncoder(tokenizer, middle, held_out, before[1:]),
        tokenizer_file=tokenizer_file,
        vocab_size=max(tokenizer.get_vocab(with_added_tokens=True).values()) + 1,
        eos_id=eos_id,
        bos_id=bos_id,
        beside=template.files() if template else _settings_file(options, decided),
        shard_tokens=options.shard_tokens,
        settings=wanted,
    )
    with writing(options.out, "choose another --out"):  # errors of reading are InputErrors already
        skipped = write(job)
    noted = f", {skipped} skipped ({source.without}{source.bad.summary})" if skipped else ""
    return f"{options.out}: {_counts(TokenStore.open(options.out))}{noted}, {time.perf_counter() - start:.1f} s"


def _tokens_before(options: Options, tokenizer: tokenizers.Tokenizer | None) -> tuple[int, ...] | None:
    """The tokens before every document; None if neither the options nor the tokenizer decide. Raises InputError."""
    if options.begin_token == "":
        return ()
    if tokenizer is None:
        return None
    if options.begin_token:
        return (token_id(tokenizer, options.begin_token, "--begin-token", str(options.tokenizer)),)
    if options.chat:
        return None
    return tokens_before(tokenizer, read_settings(options.tokenizer_folder))


def _settings_file(options: Options, before: tuple[int, ...] | None) -> dict[str, bytes]:
    """The tokenizer_config.json of text, so that prompts begin like its documents: name -> content; {} if nothing
    decides what is before them.
    """
    if before is None:
        return {}
    names = special_names(read_settings(options.tokenizer_folder))
    names |= {"bos_token": options.begin_token} if options.begin_token else {}
    values = {"tokenizer_class": "PreTrainedTokenizerFast", **names, "add_bos_token": bool(before)}
    return {CONFIG: (json.dumps(values, indent=1) + "\n").encode()}


def _marks(options: Options, tokenizer: tokenizers.Tokenizer) -> tuple[int, fim.FillInTheMiddle | None]:
    """Id of the end token, and the rearrangement for filling in the middle. Raises InputError."""
    name = str(options.tokenizer or "the trained BPE")
    eos_id = token_id(tokenizer, options.end_token, "--end-token", name)
    if not options.fim_rate:
        return eos_id, None
    marks = [token_id(tokenizer, token, "--fim-tokens", name) for token in options.fim_tokens]
    return eos_id, fim.FillInTheMiddle(options.fim_rate, options.fim_spm_rate, *marks)


def _counts(store: TokenStore) -> str:
    documents, tokens, size = (
        sum(map(count, store.splits)) for count in (store.documents, store.tokens, store.text_bytes)
    )
    held = f", {store.tokens('validation'):,} of them for validation" if "validation" in store.splits else ""
    return (
        f"{documents:,} documents, {tokens:,} tokens{held}, {size / tokens:.2f} bytes/token, "
        f"vocabulary {store.manifest.vocab_size:,}"
    )


def run(options: Options) -> str:
    """Checks the options, writes the folder and returns a line that sums it up."""
    options.check()
    return tokenize(options)


def main(args: Sequence[str] | None = None) -> int:
    """Returns the exit status: 0, 2 for a user's mistake, or 130 after Ctrl-C."""
    return run_command(
        run,
        Options,
        "python -m scripts.tokenize",
        args,
        markers=(tyro.conf.FlagCreatePairsOff,),
        interrupted="error: interrupted; run the same command again to resume",
    )


if __name__ == "__main__":
    sys.exit(main())
