"""Text to token ids and back, with the tokenizer.json beside a checkpoint; and streaming text token by token."""

import codecs
import json
from collections.abc import Iterable, Iterator
from pathlib import Path

import tokenizers

from laneformer.checkpoint import checkpoint_files
from laneformer.errors import CheckpointError, InputError
from laneformer.files import read_file

FILE = "tokenizer.json"
# Decoders whose text for a token depends only on whether there are tokens before it; others cannot be streamed.
STREAMABLE = {"ByteLevel", "ByteFallback", "Fuse", "Metaspace", "Replace", "Sequence", "Strip", "WordPiece"}
RAW_BYTES = {f"<0x{byte:02X}>": bytes([byte]) for byte in range(256)}  # pieces of a vocabulary with byte fallback


def _byte_level_alphabet() -> dict[str, int]:
    """Character -> byte of byte-level vocabularies (GPT-2): printable Latin-1 is itself, the rest U+0100 and up."""
    printable = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    rest = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(rest)}


BYTE_LEVEL = _byte_level_alphabet()


class Tokenizer:
    """A Hugging Face tokenizer.json. The spelling of a special token in a text is encoded as plain text."""

    def __init__(self, file: str | Path, bos_token_id: int | None = None):
        """bos_token_id: from the model's config; if set, put before every text. Raises CheckpointError for an unusable
        file.
        """
        try:
            self._tokenizer = tokenizers.Tokenizer.from_buffer(read_file(Path(file)))
        except CheckpointError:
            raise
        except Exception as error:  # the library raises bare Exception
            raise CheckpointError(f"{file} is not a readable tokenizer.json ({error}): copy it again") from None
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._tokenizer.encode_special_tokens = True
        self.bos_token_id = bos_token_id
        self._decoders = set(_types(json.loads(self._tokenizer.to_str())["decoder"]))
        if unknown := self._decoders - STREAMABLE:
            raise CheckpointError(
                f"{file}: decoder {', '.join(unknown)} cannot be streamed; remove the file and give prompts as ids"
            )
        added = self._tokenizer.get_added_tokens_decoder()
        self._special = {token for token, what in added.items() if what.special}
        self._continued: dict[int, bytes] = {}

    @classmethod
    def find(cls, checkpoint: str | Path, bos_token_id: int | None = None) -> "Tokenizer | None":
        """The tokenizer of a checkpoint: an HF folder, a training run or one step of it. None if it has none."""
        file = checkpoint_files(checkpoint) / FILE
        return cls(file, bos_token_id) if file.exists() else None

    def encode(self, text: str) -> list[int]:
        """Token ids of a text, after the begin-of-text token if the model has one."""
        try:
            text.encode()
        except UnicodeEncodeError:  # lone surrogates, to which Python decodes command lines that are not UTF-8
            raise InputError("the text is not valid Unicode: write it in UTF-8") from None
        ids = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids if self.bos_token_id is None else [self.bos_token_id, *ids]

    def decode(self, tokens: Iterable[int]) -> str:
        """The text of token ids, without special tokens."""
        return self._tokenizer.decode([int(token) for token in tokens])

    def special_id(self, name: str) -> int | None:
        """The id of a special token; None if there is none of that name."""
        token = self._tokenizer.token_to_id(name)
        return token if token in self._special else None

    def token_bytes(self, token: int, *, first: bool = False) -> bytes:
        """The UTF-8 bytes of one token of a text; b"" for special and unknown tokens.

        first: the token starts the text, where sentencepiece-style decoders omit a space.
        """
        if first:
            return self._bytes(token, first=True)
        if token not in self._continued:
            self._continued[token] = self._bytes(token, first=False)
        return self._continued[token]

    def _bytes(self, token: int, first: bool) -> bytes:
        piece = self._tokenizer.id_to_token(token)
        if piece is None or token in self._special:
            return b""
        if "ByteLevel" in self._decoders:
            plain = all(character in BYTE_LEVEL for character in piece)
            return bytes(BYTE_LEVEL[character] for character in piece) if plain else piece.encode()
        if "ByteFallback" in self._decoders and piece in RAW_BYTES:
            return RAW_BYTES[piece]
        alone = self._tokenizer.decode([token])
        return (alone if first else self._tokenizer.decode([token, token])[len(alone) :]).encode()


class Detokenizer:
    """Text of a stream of tokens. A character whose bytes are spread over tokens is held back until it is complete.

    The joined pieces are `tokenizer.decode` of all tokens; invalid UTF-8 becomes U+FFFD as soon as that is certain.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Iterable[int] = (), spelled: Iterable[str] = ()):
        """prompt: the tokens before the stream; it only matters whether they have text. spelled: special tokens that
        have a text, their names.
        """
        self._tokenizer = tokenizer
        self._spelled = {tokenizer.special_id(name): name.encode() for name in spelled}
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._first = not any(tokenizer.token_bytes(int(token)) for token in prompt)

    def add(self, token: int) -> str:
        """The text that became printable with this token."""
        raw = self._spelled.get(int(token)) or self._tokenizer.token_bytes(int(token), first=self._first)
        self._first = self._first and not self._tokenizer.token_bytes(int(token))
        return self._utf8.decode(raw)

    def flush(self) -> str:
        """The text that is held back, at the end of the text: U+FFFD for an incomplete character, or ""."""
        return self._utf8.decode(b"", final=True)


def _types(decoder: dict | None) -> Iterator[str]:
    """The type names in the decoder of a tokenizer.json."""
    if decoder:
        yield decoder["type"]
        for part in decoder.get("decoders", ()):
            yield from _types(part)
