"""Writes documents as a token folder; an interrupted and resumed run writes the same bytes."""

import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers
from tqdm import tqdm

from laneformer.errors import InputError
from laneformer.infer.text.chat_template import CONFIG, TEMPLATE
from laneformer.train.data.store import MANIFEST, PARTIAL, PROGRESS, Manifest, StoreWriter, TokenStore
from laneformer.train.tokenizing.documents import Dataset, Document, Files, Survey, digest, place
from laneformer.train.tokenizing.encoder import Encoded, ahead, grouped, pieces
from laneformer.train.tokenizing.tables import Tables

Source = Files | Dataset | Tables
SAMPLE_CHARS = 1 << 14  # characters in a piece of the sample that a BPE is trained on
CHECKPOINT_TOKENS, CHECKPOINT_SECONDS = 1 << 26, 30.0  # a resumed run repeats at most the smaller of these


@dataclass(frozen=True, kw_only=True)
class Job:
    """Documents of a source, and the token folder to write them to."""

    out: Path
    source: Source
    survey: Survey | None
    """Result of a first pass over the documents; None for a streamed dataset."""
    validation_fraction: float
    """Share of the documents to hold out, as the user gave it."""
    held_out: float
    """Bound on `place` below which a document is held out: validation_fraction or a little more, 0 for none."""
    encoder: Callable[[Sequence[Document]], list[Encoded]]
    tokenizer_file: bytes
    """Content of tokenizer.json."""
    vocab_size: int
    eos_id: int
    bos_id: int | None
    beside: dict[str, bytes]
    """Name -> content of further files of the tokenizer."""
    shard_tokens: int
    settings: dict[str, Any]
    """Everything that the result depends on, for the manifest."""


def write(job: Job) -> int:
    """Writes the folder and returns the number of units without text; resumes a stopped run with the same settings.

    Raises InputError for a source without text, or a split without documents.
    """
    splits = ("train", "validation") if job.held_out else ("train",)
    with StoreWriter(
        job.out,
        tokenizer=job.tokenizer_file,
        vocab_size=job.vocab_size,
        eos_id=job.eos_id,
        bos_id=job.bos_id,
        shard_tokens=job.shard_tokens,
        settings=job.settings,
    ) as writer:
        done = _write_documents(job, writer)
        skipped = done - sum(map(writer.documents, splits))
        if skipped == done:
            raise no_text(job.source, skipped)
        for split in splits:
            if not writer.documents(split):
                raise InputError(
                    f"split {split} has no document at --validation-fraction {job.validation_fraction}; "
                    f"give a {'larger' if split == 'validation' else 'smaller'} one, or 0, or more documents"
                )
        for file in (TEMPLATE, CONFIG):  # before the manifest, which marks the folder as finished
            (job.out / file).unlink(missing_ok=True)
            if file in job.beside:
                (job.out / file).write_bytes(job.beside[file])
        writer.finish(
            {
                "settings": job.settings,
                "from": job.source.origin,
                "skipped": skipped,
                "tokenizers_version": tokenizers.__version__,
            }
        )
    return skipped


def _write_documents(job: Job, writer: StoreWriter) -> int:
    """Encodes and writes the documents that are not written yet; returns the number of units read in all runs."""
    source, survey = job.source, job.survey
    done, tokens, saved = writer.done, 0, time.monotonic()
    if done:
        kind = "files or documents" if isinstance(source, Files) else "rows"
        print(f"resuming after {done:,} {kind}", file=sys.stderr)
    # Reading, encoding and writing overlap, each one group behind the previous stage.
    groups = ahead(grouped(source.documents(done), lambda document: document.size if document else 0))
    results = ahead((len(group), job.encoder(list(filter(None, group)))) for group in groups)
    total, before = (survey.bytes, survey.bytes * done // survey.units) if survey else (None, 0)
    with tqdm(total=total, initial=before, unit="B", unit_scale=True, desc="tokenizing", disable=None) as bar:
        for units, encoded in results:
            for document, ids, size, loss in encoded:
                writer.add("validation" if place(document.key) < job.held_out else "train", ids, size, loss)
                tokens += len(ids)
                bar.update(document.size)
            done += units
            if tokens >= CHECKPOINT_TOKENS or time.monotonic() - saved >= CHECKPOINT_SECONDS:
                writer.checkpoint(done)
                tokens, saved = 0, time.monotonic()
    return done


def is_finished(out: Path, settings: dict[str, Any]) -> bool:
    """Whether a folder already holds, undamaged, what these settings would write.

    Raises InputError if it holds something else, or unfinished work with other settings, which writing would discard.
    """
    if (out / MANIFEST).exists():
        if changed := changes(Manifest.read(out).source.get("settings", {}), settings):
            raise InputError(
                f"{out} holds tokens with other settings ({changed}); choose another --out, or replace them with"
                " --overwrite"
            )
        TokenStore.open(out).verify()
        return True
    progress = out / PARTIAL / PROGRESS
    if progress.exists():
        before = json.loads(json.loads(progress.read_text(encoding="utf-8"))["identity"])[0]
        if changed := changes(before, settings):
            raise InputError(
                f"{out} holds unfinished work with other settings ({changed}); give those settings to resume it, or"
                " discard it with --overwrite"
            )
    return False


def changes(before: dict[str, Any], now: dict[str, Any]) -> str:
    """The settings that differ, in words; "" if none does."""
    changed = [name for name in dict.fromkeys([*now, *before]) if before.get(name) != now.get(name)]
    return ", ".join(
        "the text" if name == "text" else f"{name} (was {before.get(name)}, now {now.get(name)})" for name in changed
    )


def sample(source: Source, survey: Survey | None, held_out: float, size: int) -> Iterator[str]:
    """About `size` bytes of training text for a BPE: chosen by hash, or the first ones if the total is unknown."""
    rate = size / survey.bytes if survey else 1.0
    taken = 0
    for document in filter(None, source.documents()):
        if place(document.key) < held_out:
            continue
        # If only a part is taken, in pieces: one document may be larger than the sample.
        whole = rate >= 1 and survey
        for piece in [document.text] if whole else pieces(document.text, SAMPLE_CHARS):
            data = piece.encode()
            if place(digest(data)[8:]) < rate:  # other bytes of the digest than the choice of held-out documents
                taken += len(data)
                yield piece
            if not survey and taken >= size:
                return


def no_text(source: Source, skipped: int) -> InputError:
    """The error for a source that has no text at all."""
    return InputError(
        f"no text in {source.name}, {skipped} skipped ({source.without}{source.bad.summary}); choose other sources"
    )
