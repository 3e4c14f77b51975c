"""Encodes documents to token ids, a group at a time, and trains a BPE if no tokenizer is given."""

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple, TypeVar

import numpy as np
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from laneformer.errors import InputError
from laneformer.infer.text.chat_template import TURN_END, TURN_START, ChatTemplate
from laneformer.infer.text.tokenizer import unprefixed
from laneformer.train.tokenizing import fim
from laneformer.train.tokenizing.documents import Document, place
from laneformer.train.tokenizing.rows import BadRows

END_OF_TEXT = "<|endoftext|>"
# A vocabulary cannot grow after pretraining, so a BPE trained here has the tokens for fill-in-the-middle and chat.
SPECIAL_TOKENS = (END_OF_TEXT, *fim.TOKENS, TURN_START, TURN_END)
# Words with the space or sign before them, single digits, runs of signs, line ends, indentation: the cl100k
# pattern, which Llama 3 and Qwen use too, with digits one by one so that a small vocabulary is not spent on numbers.
PIECES = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
ALPHABET = 256 + len(SPECIAL_TOKENS)  # every byte, and the special tokens
WORD_CHARS = 256  # characters of a word, at most, in training
GROUP_BYTES = 1 << 22  # bytes per call of the tokenizer, which encodes the documents of a call in parallel
PIECE_CHARS = 1 << 20  # characters; longer documents are encoded in pieces, in parallel and with bounded memory
NEAR_CHARS = 256  # characters on each side of a place that decide whether a text may be cut there
MOST_TRIES = 64  # places that are tried, after line ends, before spaces and anywhere, before a piece becomes longer

T = TypeVar("T")


class End:
    """Stands for the end of an iterator."""


class Encoded(NamedTuple):
    document: Document
    ids: np.ndarray
    """uint32[n]"""
    bytes: int
    """Size of the text that the ids encode."""
    loss: np.ndarray | None
    """bool[n]: whether predicting each token counts; None: all count."""


def train_bpe(texts: Iterable[str], vocab: int) -> Tokenizer:
    """A byte-level BPE of `vocab` tokens that round-trips every string; the first tokens are SPECIAL_TOKENS.

    Words of more than WORD_CHARS characters are cut for training: every merge reads a word that contains its pair to
    the end, so one word of n characters would take n steps per merge.
    """
    tokenizer = Tokenizer(models.BPE())
    words = pre_tokenizers.Split(Regex(PIECES), "isolated")
    cut = pre_tokenizers.Split(Regex(rf"[\s\S]{{1,{WORD_CHARS}}}"), "isolated")
    encoded = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([words, cut, encoded])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=list(SPECIAL_TOKENS),
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([words, encoded])
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
        end = End()
        following = thread.submit(next, items, end)
        while not isinstance(item := following.result(), End):
            following = thread.submit(next, items, end)
            yield item


class TextEncoder:
    """Encodes texts to token ids. A document in pieces has the ids that it has as a whole."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        middle: fim.FillInTheMiddle | None = None,
        share: float = 0.0,
        before: Sequence[int] = (),
    ):
        """middle: rearranges training texts, those with a `place` of at least `share`. before: tokens before every
        text.
        """
        self.middle, self.share, self.before = middle, share, list(before)
        self._tokenizers = {True: tokenizer, False: unprefixed(tokenizer)}  # by whether a text begins a document

    def __call__(self, documents: Sequence[Document]) -> list[Encoded]:
        parts = [self._parts(document) for document in documents]
        texts = (part for each in parts for part in each if not isinstance(part, int))
        ids = (each for group in grouped(texts, lambda part: len(part.text)) for each in self._encode(group))
        return [
            Encoded(
                document,
                np.concatenate([np.array([part] if isinstance(part, int) else next(ids), np.uint32) for part in each]),
                document.size,
                None,
            )
            for document, each in zip(documents, parts, strict=True)
        ]

    def _encode(self, parts: Sequence[fim.Text]) -> list[list[int]]:
        found: dict[int, list[int]] = {}
        for begins, tokenizer in self._tokenizers.items():
            places = [n for n, part in enumerate(parts) if part.begins is begins]
            encodings = tokenizer.encode_batch_fast([parts[n].text for n in places], add_special_tokens=False)
            found |= {n: encoding.ids for n, encoding in zip(places, encodings, strict=True)}
        return [found[n] for n in range(len(parts))]

    def _parts(self, document: Document) -> list[int | fim.Text]:
        whole: list[int | fim.Text] = [fim.Text(document.text, begins=True)]
        if self.middle and place(document.key) >= self.share:
            whole = self.middle.parts(document.text, document.key)
        return self.before + [
            piece for part in whole for piece in ([part] if isinstance(part, int) else self._pieces(part))
        ]

    def _pieces(self, part: fim.Text) -> Iterator[fim.Text]:
        """Pieces of about PIECE_CHARS, with the same ids as the whole text. A piece is longer if the text has no place
        where it can be cut.
        """
        start, stop = 0, PIECE_CHARS
        while stop < len(part.text):
            if (cut := self._cut(part.text, start, stop)) is None:
                stop += PIECE_CHARS
                continue
            yield fim.Text(part.text[start:cut], part.begins and not start)
            start, stop = cut, cut + PIECE_CHARS
        yield fim.Text(part.text[start:], part.begins and not start)

    def _cut(self, text: str, start: int, stop: int) -> int | None:
        """The last place up to `stop` where no token crosses and neither side changes the other's tokens; None if there
        is none among the places that are tried.
        """
        first = max(start + 1, stop - PIECE_CHARS // 2)
        kinds = (
            lambda place: text[place - 1] == "\n" and not text[place].isspace(),
            lambda place: text[place].isspace() and not text[place - 1].isspace(),
            lambda place: True,
        )
        for fits in kinds:
            places = filter(fits, range(stop, first - 1, -1))
            for cut in itertools.islice(places, MOST_TRIES):
                if self._independent(text[max(start, cut - NEAR_CHARS) : cut], text[cut : cut + NEAR_CHARS]):
                    return cut
        return None

    def _independent(self, before: str, after: str) -> bool:
        whole, *sides = (
            self._tokenizers[False].encode(text, add_special_tokens=False).ids
            for text in (before + after, before, after)
        )
        return whole == sides[0] + sides[1]


class ChatEncoder:
    """Encodes conversations by a template, with the loss on the assistant's answers.

    Skips those without an answer, and those that the template refuses, which `bad` receives.
    """

    def __init__(self, template: ChatTemplate, eos_id: int, bos_id: int | None, bad: BadRows):
        self.template, self.eos_id, self.bos_id, self.bad = template, eos_id, bos_id, bad

    def __call__(self, documents: Sequence[Document]) -> list[Encoded]:
        rendered = []
        for document in documents:
            try:
                said = document.conversation
                text = self.template.render_with_answers(said.messages, said.tools)
                rendered.append((document, text))
            except InputError as error:
                self.bad.add(document.unit, document.where, str(error))
        found = []
        encoded = self.template.encode_rendered([text for _, text in rendered])
        for (document, text), (ids, loss) in zip(rendered, encoded, strict=True):
            if not loss.any():
                continue
            # StoreWriter adds the marks around a document, and counts the end mark if the token before it counts.
            first = int(ids[0] == self.bos_id)
            last = len(ids) - int(ids[-1] == self.eos_id and loss[-2:].all())
            found.append(Encoded(document, ids[first:last], len(text.text.encode()), loss[first:last]))
        return found
