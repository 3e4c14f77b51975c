"""Text to token ids and back, with the tokenizer.json beside a checkpoint, and text from a stream of tokens."""

import codecs
import json
from collections.abc import Iterable, Iterator
from pathlib import Path

import tokenizers

from laneformer.checkpoint import checkpoint_files
from laneformer.errors import CheckpointError, InputError
from laneformer.files import read_file

FILE = "tokenizer.json"
# Decoders whose text for a token depends only on whether it is the first token; others cannot be streamed.
STREAMABLE = {"ByteLevel", "ByteFallback", "Fuse", "Metaspace", "Replace", "Sequence", "Strip", "WordPiece"}
RAW_BYTES = {f"<0x{byte:02X}>": bytes([byte]) for byte in range(256)}  # pieces of a vocabulary with byte fallback


def _byte_level_alphabet() -> dict[str, int]:
    """Character -> byte in byte-level vocabularies (GPT-2): printable Latin-1 characters represent themselves, those
    from U+0100 on the other bytes.
    """
    printable = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    rest = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(rest)}


BYTE_LEVEL = _byte_level_alphabet()


class Tokenizer:
    """A Hugging Face tokenizer.json. The name of a special token inside a text is encoded as plain text."""

    def __init__(self, file: str | Path, bos_token_id: int | None = None):
        """bos_token_id: begin-of-text token from the model's config, which `encode` puts before every text; None for no
        such token. Raises CheckpointError for an unusable file.
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
        """The tokenizer of a checkpoint (an HF folder, a training run or one of its steps); None if the checkpoint has
        no tokenizer.json.
        """
        file = checkpoint_files(checkpoint) / FILE
        return cls(file, bos_token_id) if file.exists() else None

    def encode(self, text: str) -> list[int]:
        """The begin-of-text token, if the model has one, and the token ids of a text. Raises InputError for a text that
        is not valid Unicode.
        """
        try:
            text.encode()
        except UnicodeEncodeError:  # lone surrogates: Python decodes command lines that are not UTF-8 to them
            raise InputError("the text is not valid Unicode: write it in UTF-8") from None
        ids = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids if self.bos_token_id is None else [self.bos_token_id, *ids]

    def decode(self, tokens: Iterable[int]) -> str:
        """The text of token ids, without special tokens."""
        return self._tokenizer.decode([int(token) for token in tokens])

    def special_id(self, name: str) -> int | None:
        """The id of a special token; None if no special token has this name."""
        token = self._tokenizer.token_to_id(name)
        return token if token in self._special else None

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
