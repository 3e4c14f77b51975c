"""Text to token ids and back, with the tokenizer beside a checkpoint, and text from a stream of tokens."""

import codecs
import json
import logging
from collections.abc import Iterable, Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import models, processors

from laneformer.errors import CheckpointError, InputError
from laneformer.files import read_file
from laneformer.infer.text.tokenizer_files import (
    BYTE_LEVEL,
    find_vocabulary,
    read_settings,
    read_tokenizer,
    special_names,
    unread,
)

log = logging.getLogger("laneformer")

# Decoders whose text for a token depends only on whether it is the first token; others cannot be streamed.
STREAMABLE = {"ByteLevel", "ByteFallback", "Fuse", "Metaspace", "Replace", "Sequence", "Strip", "WordPiece"}
RAW_BYTES = {f"<0x{byte:02X}>": bytes([byte]) for byte in range(256)}  # pieces of a vocabulary with byte fallback


class Tokenizer:
    """The tokenizer of a folder. The name of a special token inside a text is encoded as plain text."""

    def __init__(self, file: str | Path, begin: int | None = None):
        """file: a vocabulary that `read_tokenizer` reads; the settings are read beside it. begin: token before every
        text if the tokenizer does not decide it, see `tokens_before`. Raises CheckpointError for unusable files.
        """
        file = Path(file)
        self._tokenizer = read_tokenizer(file)
        self._tokenizer.encode_special_tokens = True
        self._decoders = set(_types(json.loads(self._tokenizer.to_str())["decoder"]))
        if unknown := self._decoders - STREAMABLE:
            raise CheckpointError(
                f"{file}: decoder {', '.join(unknown)} cannot be streamed; remove the file and give prompts as ids"
            )
        found = tokens_before(self._tokenizer, read_settings(file.parent))
        self.before: tuple[int, ...] = (() if begin is None else (begin,)) if found is None else found
        """Tokens before every text."""
        added = self._tokenizer.get_added_tokens_decoder()
        self.special_names = {token: what.content.encode() for token, what in added.items() if what.special}
        """Id -> name, in UTF-8, of the special tokens, which have no text."""
        self._continued: dict[int, bytes] = {}

    @property
    def library(self) -> tokenizers.Tokenizer:
        """The tokenizer as the library `tokenizers` has it."""
        return self._tokenizer

    @classmethod
    def find(cls, checkpoint: str | Path, begin: int | None = None) -> "Tokenizer | None":
        """The tokenizer of a checkpoint (an HF folder, a training run or one of its steps); None if the checkpoint has
        no vocabulary.

        begin: the bos_token_id of the model's config. It counts only in a training run, whose recipe chose it, and only
        if the tokenizer does not decide.
        """
        from laneformer.checkpoint import checkpoint_files, is_run  # here, because it imports JAX

        folder = checkpoint_files(checkpoint)
        file = find_vocabulary(folder)
        if file is None and (problem := unread(folder)):
            log.warning("%s", problem)
        return None if file is None else cls(file, begin if is_run(checkpoint) else None)

    def encode(self, text: str) -> list[int]:
        """The tokens that the tokenizer puts before every text, and the token ids of a text. Raises InputError for a
        text that is not valid Unicode.
        """
        return [*self.before, *self._ids(self._tokenizer, text)]

    def encode_continuation(self, text: str) -> list[int]:
        """Token ids of a text that follows other text. Raises InputError as `encode` does."""
        return self._ids(self._unprefixed, text)

    @cached_property
    def _unprefixed(self) -> tokenizers.Tokenizer:
        return unprefixed(self._tokenizer)

    @staticmethod
    def _ids(tokenizer: tokenizers.Tokenizer, text: str) -> list[int]:
        try:
            text.encode()
        except UnicodeEncodeError:  # lone surrogates: Python decodes command lines that are not UTF-8 to them
            raise InputError("the text is not valid Unicode: write it in UTF-8") from None
        return tokenizer.encode(text, add_special_tokens=False).ids

    def decode(self, tokens: Iterable[int]) -> str:
        """The text of token ids, without special tokens."""
        return self._tokenizer.decode([int(token) for token in tokens])

    def special_id(self, name: str) -> int | None:
        """The id of a special token; None if no special token has this name."""
        token = self._tokenizer.token_to_id(name)
        return token if token in self.special_names else None

    def token_bytes(self, token: int, *, first: bool = False) -> bytes:
        """The UTF-8 bytes of one token of a text; b"" for special and unknown tokens.

        first: whether the token starts the text. Sentencepiece-style decoders omit a space there.
        """
        if first:
            return self._bytes(token, first=True)
        if token not in self._continued:
            self._continued[token] = self._bytes(token, first=False)
        return self._continued[token]

    def _bytes(self, token: int, first: bool) -> bytes:
        piece = self._tokenizer.id_to_token(token)
        if piece is None or token in self.special_names:
            return b""
        if "ByteLevel" in self._decoders:
            plain = all(character in BYTE_LEVEL for character in piece)
            return bytes(BYTE_LEVEL[character] for character in piece) if plain else piece.encode()
        if "ByteFallback" in self._decoders and piece in RAW_BYTES:
            return RAW_BYTES[piece]
        alone = self._tokenizer.decode([token])
        return (alone if first else self._tokenizer.decode([token, token])[len(alone) :]).encode()


class Detokenizer:
    """Turns a stream of tokens into text. A character whose bytes are spread over several tokens is held back until it
    is complete.

    The joined pieces equal `tokenizer.decode` of all tokens. Bytes become U+FFFD as soon as they are certain to be
    invalid UTF-8.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Iterable[int] = (), spelled: Iterable[str] = ()):
        """prompt: the tokens before the stream; only whether they have text matters. spelled: names of special tokens
        that appear in the text by their names.
        """
        self._tokenizer = tokenizer
        self._spelled = {tokenizer.special_id(name): name.encode() for name in spelled}
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._first = not any(tokenizer.token_bytes(int(token)) for token in prompt)

    def add(self, token: int) -> str:
        """Adds a token, and returns the text that became printable with it."""
        raw = self._spelled.get(int(token)) or self._tokenizer.token_bytes(int(token), first=self._first)
        self._first = self._first and not self._tokenizer.token_bytes(int(token))
        return self._utf8.decode(raw)

    def flush(self) -> str:
        """Returns the text that is held back; call it at the end of the text. U+FFFD for an incomplete character, or
        "".
        """
        return self._utf8.decode(b"", final=True)


def _types(decoder: dict | None) -> Iterator[str]:
    """The type names in the decoder of a tokenizer.json."""
    if decoder:
        yield decoder["type"]
        for part in decoder.get("decoders", ()):
            yield from _types(part)


def tokens_before(tokenizer: tokenizers.Tokenizer, settings: dict[str, Any]) -> tuple[int, ...] | None:
    """The tokens that a tokenizer puts before every text: those of its post-processor or, if that adds none, the begin
    token if `add_bos_token` in tokenizer_config.json says so. None if neither decides. Tokens that it puts after a text
    are left out, because a model continues its prompt.

    settings: from `read_settings`.
    """
    if tokenizer.post_processor is not None:
        one = tokenizers.Tokenizer(models.WordLevel({"text": 0}, "text")).encode("text")
        made = tokenizer.post_processor.process(one, None, True)
        if any(sequence is None for sequence in made.sequence_ids):
            return tuple(made.ids[: made.sequence_ids.index(0)])
    wanted = settings.get("add_bos_token")
    if not isinstance(wanted, bool):
        return None
    begin = tokenizer.token_to_id(special_names(settings).get("bos_token", "")) if wanted else None
    return () if begin is None else (begin,)


def with_tokens_before(file: Path, before: tuple[int, ...]) -> None:
    """Adds a post-processor to a tokenizer.json, so that other programs put these tokens before every text, too. The
    tokenizer must not decide it, see `tokens_before`.
    """
    tokenizer = tokenizers.Tokenizer.from_buffer(read_file(file))
    names = [tokenizer.id_to_token(token) for token in before]
    template = processors.TemplateProcessing(
        single=[*names, "$A"], pair=[*names, "$A", "$B:1"], special_tokens=[*zip(names, before, strict=True)]
    )
    kept = tokenizer.post_processor
    tokenizer.post_processor = template if kept is None else processors.Sequence([kept, template])
    tokenizer.save(str(file))


def unprefixed(tokenizer: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    """The tokenizer for text that follows other text: without the space that some tokenizers put before every text."""
    values = json.loads(tokenizer.to_str())
    changed = {name: _without_space(values[name]) for name in ("normalizer", "pre_tokenizer")}
    if all(changed[name] == values[name] for name in changed):
        return tokenizer
    values |= changed
    found = tokenizers.Tokenizer.from_str(json.dumps(values))
    found.encode_special_tokens = tokenizer.encode_special_tokens
    return found


def _without_space(part: dict[str, Any] | None) -> dict[str, Any] | None:
    """A normalizer or pre-tokenizer of a tokenizer.json, without what puts a space before a text."""
    if part is None or part["type"] == "Prepend":
        return None
    changes: dict[str, dict[str, Any]] = {
        "Metaspace": {"prepend_scheme": "never"},
        "ByteLevel": {"add_prefix_space": False},
    }
    changed = part | changes.get(part["type"], {})
    for name in ("normalizers", "pretokenizers"):
        if name in part:
            parts = [found for each in part[name] if (found := _without_space(each)) is not None]
            changed[name] = parts
    return changed
