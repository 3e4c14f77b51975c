"""Bounds of the bytes of a token, checked by encoding."""

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import models, normalizers, pre_tokenizers

from laneformer.infer.text.token_bounds import most_bytes
from tests.support.checkpoints import byte_tokenizer


def bpe(normalizer=None, before=None, **model):
    ids = {f"<0x{byte:02X}>": byte for byte in range(256)} | {"\u2581": 256, "aa": 257, "a": 258}
    made = tokenizers.Tokenizer(models.BPE(ids, [("a", "a")], byte_fallback=True, **model))
    made.normalizer = normalizer
    if before is not None:
        made.pre_tokenizer = before
    return made


BOUNDED = [
    byte_tokenizer("<|im_start|>"),
    bpe(),
    bpe(normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])),
    bpe(normalizers.NFKC()),
    bpe(normalizers.NFC()),
]


BOUNDS = [most_bytes(tokenizer) for tokenizer in BOUNDED]


@given(st.text(), st.integers(0, len(BOUNDED) - 1))
def test_text_has_at_least_the_tokens_of_its_bytes(text, case):
    tokenizer = BOUNDED[case]
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    assert len(ids) * BOUNDS[case] >= len(text.encode())


def test_letters_of_mathematics_are_bounded():
    text = "\U0001d41a" * 100  # becomes "a", two of which are one token
    assert len(bpe(normalizers.NFKC()).encode(text).ids) * most_bytes(bpe(normalizers.NFKC())) >= len(text.encode())


@pytest.mark.parametrize(
    "tokenizer",
    [
        tokenizers.Tokenizer(models.WordPiece({"[UNK]": 0}, unk_token="[UNK]")),
        tokenizers.Tokenizer(models.BPE({"<unk>": 0}, [], unk_token="<unk>", fuse_unk=True)),
        bpe(normalizers.Replace("aa", "a")),
        bpe(normalizers.Strip()),
        bpe(before=pre_tokenizers.Whitespace()),
        bpe(before=pre_tokenizers.Split("a", "removed")),
    ],
)
def test_tokenizers_that_drop_text_have_no_bound(tokenizer):
    assert most_bytes(tokenizer) is None
