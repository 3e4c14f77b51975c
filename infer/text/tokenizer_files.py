"""Reads the tokenizer of a folder: its vocabulary from tokenizer.json or tiktoken.model, and its settings from
tokenizer_config.json and special_tokens_map.json.
"""

import base64
import binascii
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers

from laneformer.errors import CheckpointError, one_line
from laneformer.files import parse_json, read_file

TOKENIZER, TIKTOKEN, CONFIG, SPECIAL = (
    "tokenizer.json",
    "tiktoken.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
)
OTHERS = ("tokenizer.model", "tekken.json", "vocab.json", "vocab.txt")
"""Vocabularies that are not read here, of which transformers can make a tokenizer.json."""
RESERVED = 256  # special tokens behind a tiktoken vocabulary, named or not
# How Moonshot's tokenization_kimi.py cuts a text before it merges bytes. Its tokenizer.json does not exist.
KIMI_PIECES = "|".join(
    (
        r"[\p{Han}]+",
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+"
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*"
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )
)


def _byte_level_alphabet() -> dict[str, int]:
    """Character -> byte in byte-level vocabularies (GPT-2): printable Latin-1 characters represent themselves, those
    from U+0100 on the other bytes.
    """
    printable = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    rest = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(rest)}


BYTE_LEVEL = _byte_level_alphabet()


def find_vocabulary(folder: Path) -> Path | None:
    """The file with the vocabulary of a folder; None if there is none that can be read."""
    return next((file for name in (TOKENIZER, TIKTOKEN) if (file := folder / name).exists()), None)


def unread(folder: Path) -> str | None:
    """A line about a vocabulary in the folder that cannot be read, with the remedy; None if there is none."""
    other = next((name for name in OTHERS if (folder / name).exists()), None)
    if other is None:
        return None
    return f"{folder} has {other} but no {TOKENIZER}: write it with transformers' AutoTokenizer and save_pretrained"


def read_tokenizer(file: Path) -> tokenizers.Tokenizer:
    """The tokenizer with the vocabulary in `file`, a tokenizer.json or tiktoken.model, without truncation and padding.
    Raises CheckpointError for an unusable file.
    """
    try:
        content = read_file(file)
        found = _from_ranks(file, content) if file.suffix == ".model" else tokenizers.Tokenizer.from_buffer(content)
    except (CheckpointError, KeyboardInterrupt):
        raise
    except BaseException as error:  # the library raises bare Exception, and a panic in Rust is none of Exception
        raise CheckpointError(f"{file} is not a readable {file.name} ({one_line(error)}): copy it again") from None
    found.no_truncation()
    found.no_padding()
    return found


def read_settings(folder: Path) -> dict[str, Any]:
    """The values of tokenizer_config.json, with the special tokens of special_tokens_map.json. As in transformers, the
    latter decide unless the former describes all added tokens. Raises CheckpointError for damaged files.
    """
    config, special = (_values(folder / name) for name in (CONFIG, SPECIAL))
    return special | config if "added_tokens_decoder" in config else config | special


def special_names(settings: Mapping[str, Any]) -> dict[str, str]:
    """Role -> name of special tokens, as in {"bos_token": "<s>"}, from the values of `read_settings`."""
    named = {role: token for role, token in settings.items() if role.endswith("_token")}
    texts = {role: token["content"] if isinstance(token, dict) else token for role, token in named.items()}
    return {role: text for role, text in texts.items() if isinstance(text, str)}


def _values(file: Path) -> dict[str, Any]:
    try:
        values = parse_json(read_file(file))
        if not isinstance(values, dict):
            raise ValueError(f"it is a JSON {type(values).__name__}, not an object")
        special_names(values)
        return values
    except FileNotFoundError:
        return {}
    except CheckpointError:
        raise
    except (OSError, ValueError, KeyError) as error:
        raise CheckpointError(f"cannot read {file} ({type(error).__name__}: {error}): copy it again") from None


def _from_ranks(file: Path, content: bytes) -> tokenizers.Tokenizer:
    """The tokenizer of a tiktoken.model, whose lines are a token in base64 and its rank, which is also its id.

    tiktoken merges the two neighbours whose union has the lowest rank. The library merges by a list of pairs, so every
    pair of tokens that forms a token becomes an entry, in the order of the ranks.
    """
    try:
        lines = (line.split() for line in content.splitlines() if line)
        ranks = {base64.b64decode(token, validate=True): int(rank) for token, rank in lines}
    except (ValueError, binascii.Error) as error:
        raise CheckpointError(f"{file} is not a tiktoken vocabulary ({one_line(error)}): copy it again") from None
    if sorted(ranks.values()) != list(range(len(ranks))) or not all(bytes([byte]) in ranks for byte in range(256)):
        raise CheckpointError(f"{file} lacks bytes or ranks of its vocabulary: copy it again")
    names = {byte: character for character, byte in BYTE_LEVEL.items()}
    spell = {token: "".join(names[byte] for byte in token) for token in ranks}
    merges = []
    for token in sorted(ranks, key=ranks.__getitem__):
        pairs = [(token[:n], token[n:]) for n in range(1, len(token))]
        pairs = [pair for pair in pairs if pair[0] in ranks and pair[1] in ranks]
        merges += [(spell[a], spell[b]) for a, b in sorted(pairs, key=lambda pair: (ranks[pair[0]], ranks[pair[1]]))]
    vocabulary = {spell[token]: rank for token, rank in ranks.items()}
    found = tokenizers.Tokenizer(models.BPE(vocabulary, merges, fuse_unk=False, ignore_merges=True))
    split = pre_tokenizers.Split(Regex(KIMI_PIECES), "isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    found.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    found.decoder = decoders.ByteLevel()
    found.add_tokens(_added(file, len(ranks)))
    return found


def _added(file: Path, first: int) -> list[AddedToken]:
    """The tokens behind a tiktoken vocabulary, in the order of their ids: those that `added_tokens_decoder` in
    tokenizer_config.json names, and reserved ones between and behind them. first: id of the first.
    """
    given = _values(file.parent / CONFIG).get("added_tokens_decoder", {})
    try:
        named = {int(token): values for token, values in given.items()}
        if any(not first <= token < first + RESERVED for token in named):
            raise ValueError(f"ids must be from {first} to {first + RESERVED - 1}")
        return [
            AddedToken(
                values["content"] if (values := named.get(token)) else f"<|reserved_token_{token}|>",
                special=values["special"] if values else True,
                normalized=False,
            )
            for token in range(first, first + RESERVED)
        ]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        where = f"added_tokens_decoder in {file.parent / CONFIG}"
        raise CheckpointError(f"cannot read {where} ({type(error).__name__}: {error}): copy it again") from None
