"""Encodes documents to token ids, a group at a time, and trains a BPE if no tokenizer is given."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple, TypeVar

import numpy as np
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from infer.text.chat_template import TURN_END, TURN_START, ChatTemplate
from laneformer.errors import InputError
from train.tokenizing import fim
from train.tokenizing.documents import Document, place

END_OF_TEXT = "<|endoftext|>"
# A vocabulary cannot grow after pretraining, so a BPE trained here has the tokens for fill-in-the-middle and chat.
SPECIAL_TOKENS = (END_OF_TEXT, *fim.TOKENS, TURN_START, TURN_END)
# Words with the space or sign before them, single digits, runs of signs, line ends, indentation: the cl100k
# pattern, which Llama 3 and Qwen use too, with digits one by one so that a small vocabulary is not spent on numbers.
PIECES = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
ALPHABET = 256 + len(SPECIAL_TOKENS)  # every byte, and the special tokens
GROUP_BYTES = 1 << 22  # bytes per call of the tokenizer, which encodes the documents of a call in parallel
PIECE_CHARS = 1 << 20  # characters; longer documents are encoded in pieces, in parallel and with bounded memory

T = TypeVar("T")
END = object()


class Encoded(NamedTuple):
    document: Document
    ids: np.ndarray
    """uint32[n]"""
    bytes: int
    """Size of the text that the ids encode."""
    loss: np.ndarray | None
    """bool[n]: whether predicting each token counts; None: all count."""


def train_bpe(texts: Iterable[str], vocab: int) -> Tokenizer:
    """A byte-level BPE of `vocab` tokens that round-trips every string; the first tokens are SPECIAL_TOKENS."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECES), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=list(SPECIAL_TOKENS),
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def load_tokenizer(data: bytes, name: str) -> Tokenizer:
    """The tokenizer in a tokenizer.json, without truncation or padding; reads names of special tokens as text."""
    try:
        tokenizer = Tokenizer.from_buffer(data)
    except Exception as error:  # the library raises bare Exception
        raise InputError(f"{name} is not a tokenizer.json ({error}); give another file") from None
    tokenizer.no_truncation()
    tokenizer.no_padding()
    tokenizer.encode_special_tokens = True
    return tokenizer


def token_id(tokenizer: Tokenizer, token: str, option: str, name: str) -> int:
    found = tokenizer.token_to_id(token)
    if found is None:
        special = [added.content for added in tokenizer.get_added_tokens_decoder().values() if added.special]
        raise InputError(
            f"{name} has no token {token!r}; give {option}; special tokens are {', '.join(special[:20]) or 'none'}"
        )
    return found


def pieces(text: str, size: int) -> Iterator[str]:
    """Pieces of `text` of at most `size` characters, cut after line ends if possible."""
    start = 0
    while start < len(text):
        cut = text.rfind("\n", start, start + size) + 1 if len(text) - start > size else len(text)
        cut = cut if cut > start else start + size
        yield text[start:cut]
        start = cut


def grouped(items: Iterable[T], size: Callable[[T], int]) -> Iterator[list[T]]:
    """Groups of items of about GROUP_BYTES each."""
    group, total = [], 0
    for item in items:
        group.append(item)
        total += size(item)
        if total >= GROUP_BYTES:
            yield group
            group, total = [], 0
    if group:
        yield group


def ahead(items: Iterator[T]) -> Iterator[T]:
    """The same items, each computed in a background thread while the previous one is in use."""
    with ThreadPoolExecutor(1) as thread:
        following = thread.submit(next, items, END)
        while (item := following.result()) is not END:
            following = thread.submit(next, items, END)
            yield item


class TextEncoder:
    """Encodes texts to token ids. middle: rearranges training texts, those with a `place` of at least `share`."""

    def __init__(self, tokenizer: Tokenizer, middle: fim.FillInTheMiddle | None = None, share: float = 0.0):
        self.tokenizer, self.middle, self.share = tokenizer, middle, share

    def __call__(self, documents: Sequence[Document]) -> list[Encoded]:
        parts = [self._parts(document) for document in documents]
        ids = (
            np.array(encoding.ids, np.uint32)
            for texts in grouped((part for each in parts for part in each if isinstance(part, str)), len)
            for encoding in self.tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        )
        return [
            Encoded(
                document,
                np.concatenate([next(ids) if isinstance(part, str) else np.array([part], np.uint32) for part in each]),
                document.size,
                None,
            )
            for document, each in zip(documents, parts, strict=True)
        ]

    def _parts(self, document: Document) -> list[int | str]:
        rearranged = self.middle and place(document.key) >= self.share
        whole = self.middle.parts(document.content, document.key) if rearranged else [document.content]
        return [piece for part in whole for piece in ([part] if isinstance(part, int) else pieces(part, PIECE_CHARS))]


class ChatEncoder:
    """Encodes conversations by a template, with the loss on the assistant's answers; skips those without an answer."""

    def __init__(self, template: ChatTemplate, eos_id: int, bos_id: int | None):
        self.template, self.eos_id, self.bos_id = template, eos_id, bos_id

    def __call__(self, documents: Sequence[Document]) -> list[Encoded]:
        rendered = []
        for document in documents:
            try:
                rendered.append(self.template.render_with_answers(document.content.messages, document.content.tools))
            except InputError as error:
                raise InputError(f"row {document.unit}: {error}") from None
        found = []
        for document, text, (ids, loss) in zip(
            documents, rendered, self.template.encode_rendered(rendered), strict=True
        ):
            if not loss.any():
                continue
            # StoreWriter adds the marks around a document, and counts the end mark if the token before it counts.
            first = int(ids[0] == self.bos_id)
            last = len(ids) - int(ids[-1] == self.eos_id and loss[-2:].all())
            found.append(Encoded(document, ids[first:last], len(text.text.encode()), loss[first:last]))
        return found
