"""Tokenizers of both families: streamed text equals decoding all ids at once."""

import json

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, trainers

from laneformer.errors import CheckpointError, InputError
from laneformer.infer.text.tokenizer import BYTE_LEVEL, Detokenizer, Tokenizer

SAMPLE = [
    "def add(a, b):\n    return a + b\n",
    "naïve café, 你好 你好, 🙂🙂 the the there",
    "▁ and � are characters too",
]
TEXT = st.text(st.one_of(st.characters(exclude_categories=["Cs"]), st.sampled_from(" \n▁�é你🙂abth")), max_size=30)


def byte_level():
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=["<|end|>"],
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(SAMPLE, trainer)
    tokenizer.add_tokens([AddedToken("<tool call>", normalized=False)])
    return tokenizer


def sentencepiece_style():
    """A tokenizer as in Llama 2: spaces are ▁, one is put before a text, unknown characters fall back to bytes."""
    pieces = [
        "<unk>",
        "<s>",
        "</s>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        "▁",
        *"abdefhnrt",
        "th",
        "the",
        "▁th",
        "▁the",
        "▁a",
    ]
    merges = [("t", "h"), ("th", "e"), ("▁", "th"), ("▁th", "e"), ("▁", "a")]
    model = models.BPE(
        {piece: n for n, piece in enumerate(pieces)}, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True
    )
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(["<s>", "</s>"])
    return tokenizer


def metaspace():
    tokenizer = tokenizers.Tokenizer(
        models.Unigram([("<unk>", 0.0), *((piece, -2.0) for piece in ["▁", "▁the", *"abcdehtn你🙂"])], 0)
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    return tokenizer


@pytest.fixture(scope="module")
def wrapped(tmp_path_factory):
    folder, made = tmp_path_factory.mktemp("tokenizers"), {}
    for make in (byte_level, sentencepiece_style, metaspace):
        make().save(str(folder / make.__name__))
        made[make.__name__] = Tokenizer(folder / make.__name__)
    return made


def stream(tokenizer, tokens, prompt=()):
    detokenizer = Detokenizer(tokenizer, prompt)
    return [detokenizer.add(token) for token in tokens], detokenizer.flush()


@given(TEXT)
@settings(deadline=None, max_examples=150)
def test_byte_level_text_round_trips(wrapped, text):
    tokens = wrapped["byte_level"].encode(text)
    pieces, rest = stream(wrapped["byte_level"], tokens)
    assert ("".join(pieces), rest) == (text, "")
    for n, piece in enumerate(pieces):  # no replacement character while a character is incomplete
        assert piece.count("�") <= text[len("".join(pieces[:n])) :].count("�")


@given(TEXT, TEXT)
@settings(deadline=None, max_examples=150)
def test_sentencepiece_text_round_trips(wrapped, first, second):
    tokenizer = wrapped["sentencepiece_style"]
    expected = (" " * bool(first) + first).replace("▁", " ")  # this kind of vocabulary decodes ▁ as a space
    tokens = tokenizer.encode(first)
    assert "".join(stream(tokenizer, tokens)[0]) == expected[1:] == tokenizer.decode(tokens)
    if first:  # a continuation keeps its leading space, also after a special token
        end = tokenizer._tokenizer.token_to_id("</s>")
        pieces, _ = stream(tokenizer, [*tokenizer.encode(second), end], tokens)
        assert "".join(pieces) == (" " * bool(second) + second).replace("▁", " ")


@given(st.text("abcdehtn 你🙂", min_size=1, max_size=20))
@settings(deadline=None)
def test_metaspace_text_matches_decode(wrapped, text):
    tokens = wrapped["metaspace"].encode(text)
    assert "".join(stream(wrapped["metaspace"], tokens)[0]) == wrapped["metaspace"].decode(tokens)


@given(st.lists(st.integers(0, 330), max_size=30))
@settings(deadline=None, max_examples=150)
def test_random_byte_level_tokens_match_decode(wrapped, tokens):
    pieces, rest = stream(wrapped["byte_level"], tokens)
    assert "".join(pieces) + rest == wrapped["byte_level"].decode(tokens)


@pytest.mark.parametrize("kind", ["byte_level", "sentencepiece_style"])
def test_broken_character_does_not_hide_the_next(wrapped, kind):
    inner = wrapped[kind]._tokenizer
    if kind == "byte_level":
        from_byte = {byte: inner.token_to_id(character) for character, byte in BYTE_LEVEL.items()}
    else:
        from_byte = {byte: inner.token_to_id(f"<0x{byte:02X}>") for byte in range(256)}
    tokens = [from_byte[byte] for byte in b"\xff\xff" + "€".encode() + b"\xe2a\xf0\x9f"]
    assert stream(wrapped[kind], tokens, tokens) == (["�", "�", "", "", "€", "", "�a", "", ""], "�")


def test_special_tokens_have_no_text(wrapped):
    tokenizer = wrapped["byte_level"]
    end = tokenizer._tokenizer.token_to_id("<|end|>")
    tokens = tokenizer.encode("<|end|>")
    assert end not in tokens and tokenizer.decode([*tokens, end]) == "<|end|>"
    assert stream(tokenizer, [end, 10**6]) == (["", ""], "")  # 10**6 stands for a padding row of the embedding table


def test_text_that_is_not_unicode_is_refused(wrapped):
    for encode in (wrapped["byte_level"].encode, wrapped["byte_level"].encode_continuation):
        with pytest.raises(InputError, match="Unicode"):
            encode("\udc80")


def test_truncation_and_padding_are_ignored(tmp_path):
    tokenizer = byte_level()
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=64)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    text = "there is more than four tokens"
    found = Tokenizer.find(tmp_path)
    assert found.decode(found.encode(text)) == text and len(found.encode("a")) == 1


def test_bad_files_are_refused(tmp_path):
    assert Tokenizer.find(tmp_path) is None
    file = tmp_path / "tokenizer.json"
    file.write_text("{}")
    with pytest.raises(CheckpointError, match="not a readable tokenizer"):
        Tokenizer.find(tmp_path)
    byte_level().save(str(file))
    contents = json.loads(file.read_text())
    contents["decoder"] = {"type": "CTC", "pad_token": "_", "word_delimiter_token": "|", "cleanup": True}
    file.write_text(json.dumps(contents))
    with pytest.raises(CheckpointError, match="CTC cannot be streamed"):
        Tokenizer.find(tmp_path)
