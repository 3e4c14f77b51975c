"""How few tokens a text may have, known from its bytes alone, so that a text that is far too long for a context is
refused before it is encoded.
"""

import json

import tokenizers

# Largest number of bytes that become one byte, by the type of a normalizer; 4 for the forms of Unicode, because the
# letters of mathematics (4 bytes) become those of ASCII, and three Korean letters (9 bytes) one syllable (3).
SHRINKS = {"NFC": 4, "NFD": 4, "NFKC": 4, "NFKD": 4, "Prepend": 1}


def most_bytes(tokenizer: tokenizers.Tokenizer) -> int | None:
    """The most bytes of a text that one token represents; None if there is no limit, for example because the tokenizer
    drops spaces or has one token for any unknown word.
    """
    parts = json.loads(tokenizer.to_str())
    model, shrink = parts["model"], 1
    if model.get("type") != "BPE" or any(token["lstrip"] or token["rstrip"] for token in parts["added_tokens"]):
        return None
    before = [*_parts(parts["pre_tokenizer"], "pretokenizers")]
    if any(part["type"] not in ("ByteLevel", "Digits", "Split", "Metaspace") for part in before) or any(
        part["type"] == "Split" and part["behavior"] == "Removed" for part in before
    ):
        return None
    if not (any(part["type"] == "ByteLevel" for part in before) or model.get("byte_fallback")):
        return None
    for part in _parts(parts["normalizer"], "normalizers"):
        if part["type"] == "Replace":
            text, made = part["pattern"].get("String"), part["content"]
            if text is None or len(made.encode()) < len(text.encode()):
                return None
        elif part["type"] not in SHRINKS:
            return None
        shrink *= SHRINKS.get(part["type"], 1)
    return shrink * max((len(token.encode()) for token in tokenizer.get_vocab()), default=1)


def _parts(part: dict | None, several: str):
    """The parts of a normalizer or pre-tokenizer. several: name of the list in a sequence of them."""
    if part is not None and part["type"] == "Sequence":
        for each in part[several]:
            yield from _parts(each, several)
    elif part is not None:
        yield part
