"""Encoding: text round-trips through a trained BPE, pieces make up the text, and work done ahead keeps its order."""

import collections
import itertools
import json
import random
import threading
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers

from laneformer.train.tokenizing import encoder, fim
from laneformer.train.tokenizing.documents import Document


@pytest.fixture(scope="module")
def trained():
    bpe = encoder.train_bpe([Path(encoder.__file__).read_text(encoding="utf-8")], 600)
    return encoder.load_tokenizer(bpe.to_str().encode(), "trained")


@settings(deadline=None, max_examples=100)
@given(st.text() | st.text(alphabet=" \t\r\n\u00a0\u2028ab1'<|>endoftext"))
def test_any_text_round_trips(trained, text):
    ids = trained.encode(text, add_special_tokens=False).ids
    assert trained.decode(ids, skip_special_tokens=True) == text
    assert min(ids, default=6) >= 6


def test_special_tokens_have_the_first_ids_and_digits_are_single(trained):
    assert [trained.id_to_token(i) for i in range(6)] == [
        "<|endoftext|>",
        "<|fim_prefix|>",
        "<|fim_middle|>",
        "<|fim_suffix|>",
        "<|im_start|>",
        "<|im_end|>",
    ]
    assert trained.get_vocab_size() == 600
    assert trained.encode("12345").tokens == list("12345")


def merges_of(words, ids, count):
    """The merges of a BPE by its definition (Sennrich et al., arXiv 1508.07909): each joins the most frequent pair,
    the one of the lowest ids among equals.
    """
    words, found = [[*word] for word in words], []
    for _ in range(count):
        pairs = collections.Counter(pair for word in words for pair in itertools.pairwise(word))
        a, b = min(pairs, key=lambda pair: (-pairs[pair], ids[pair[0]], ids[pair[1]]))
        ids[a + b] = len(ids)
        found.append((a, b))
        for word in words:
            at = 0
            while at < len(word) - 1:
                if (word[at], word[at + 1]) == (a, b):
                    word[at : at + 2] = [a + b]
                at += 1
    return found


@pytest.mark.parametrize("length", [5, 1000])
def test_trained_merges_are_those_of_words_cut_to_a_length(monkeypatch, length):
    """With 1,000, no word is cut. The cut has no effect on encoding."""
    monkeypatch.setattr(encoder, "WORD_CHARS", length)
    random = np.random.default_rng(0)
    words = ["".join(random.choice([*"abc"], n, p=[0.5, 0.3, 0.2])) for n in (300, 7, 7, 4, 64)]
    tokenizer = encoder.train_bpe(["\n".join(words)], encoder.ALPHABET + 20)
    ids = tokenizer.get_vocab()
    known = {token: ids[token] for token in (*encoder.SPECIAL_TOKENS, *encoder.pre_tokenizers.ByteLevel.alphabet())}
    cut = [word[at : at + length] for word in words for at in range(0, len(word), length)]
    expected = merges_of(cut, known, 20)
    assert [tuple(pair) for pair in json.loads(tokenizer.to_str())["model"]["merges"]] == expected
    assert "".join(tokenizer.encode(words[0]).tokens) == words[0]
    assert len(tokenizer.pre_tokenizer.pre_tokenize_str(words[0])) == 1


@given(st.text(alphabet="ab\n", max_size=200))
def test_pieces_make_up_the_text(text):
    parts = list(encoder.pieces(text, 16))
    assert "".join(parts) == text
    assert all(0 < len(part) <= 16 for part in parts)
    assert all(part.endswith("\n") or len(part) == 16 for part in parts[:-1])


@given(st.lists(st.integers(0, 50)))
def test_groups_keep_order_and_size(sizes):
    bound = 60
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(encoder, "GROUP_BYTES", bound)
        groups = list(encoder.grouped(sizes, lambda size: size))
    assert list(itertools.chain.from_iterable(groups)) == sizes
    assert all(sum(group) >= bound for group in groups[:-1]) and all(sum(group[:-1]) < bound for group in groups)


def test_texts_of_a_group_keep_their_ids_apart(trained, monkeypatch):
    monkeypatch.setattr(encoder, "GROUP_BYTES", 40)
    monkeypatch.setattr(encoder, "PIECE_CHARS", 16)
    made = [Document.of(i, "".join(f"line {j}\n" for j in range(i))) for i in range(1, 12)]
    middle = fim.FillInTheMiddle(0.5, 0.5, 1, 2, 3)
    for text in (encoder.TextEncoder(trained), encoder.TextEncoder(trained, middle, share=1.0)):  # all held out
        for document, ids, size, loss in text(made):
            assert trained.decode(ids.tolist()) == document.content and size == len(document.content) and loss is None
    changed = [
        document.content
        for document, ids, *_ in encoder.TextEncoder(trained, middle)(made)
        if {1, 2, 3} <= set(ids.tolist())
    ]
    assert 1 < len(changed) < len(made)


def prefixing():
    """Tokenizers that put a space before a text, by name, each trained on this project's code."""
    lines = Path(encoder.__file__).read_text(encoding="utf-8")
    prepend = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    spaces = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    always = pre_tokenizers.Metaspace(prepend_scheme="always", split=True)
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=True)
    parts = {"llama2": (prepend, None), "mistral": (None, spaces), "t5": (None, always), "roberta": (None, byte_level)}
    for name, (normalizer, pre_tokenizer) in parts.items():
        made = Tokenizer(models.BPE(unk_token="<unk>"))
        made.normalizer, made.pre_tokenizer = normalizer, pre_tokenizer
        # Without pre-tokenizer, pairs are learned only within lines, as sentencepiece does.
        source = lines.splitlines() if pre_tokenizer in (None, spaces) else [lines]
        alphabet = [*pre_tokenizers.ByteLevel.alphabet(), "\n", "▁", *map(chr, range(33, 127))]
        trainer = trainers.BpeTrainer(
            vocab_size=500, special_tokens=["<unk>"], initial_alphabet=alphabet, show_progress=False
        )
        made.train_from_iterator(source, trainer)
        yield pytest.param(made, id=name)


GPT2 = Tokenizer(
    models.BPE({piece: n for n, piece in enumerate([*pre_tokenizers.ByteLevel.alphabet(), "ĊĊ"])}, [("Ċ", "Ċ")])
)
GPT2.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)


@pytest.mark.parametrize("made", [*prefixing(), pytest.param(GPT2, id="gpt2")])
@given(st.integers(0, 2**32), st.sampled_from(["", " ", "\n\n", "é "]))
@settings(deadline=None, max_examples=25)
def test_documents_in_pieces_have_the_tokens_of_the_whole(made, seed, start):
    words, source = random.Random(seed), Path(encoder.__file__).read_text(encoding="utf-8").split(" ")
    text = start + "".join(words.choice([" ", "\n", "\n\n", "  "]) + words.choice(source) for _ in range(300))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(encoder, "PIECE_CHARS", 120)
        encode = encoder.TextEncoder(made)
        assert len([*encode._pieces(fim.Text(text, begins=True))]) > 2
        [found] = encode([Document.of(0, text)])
    assert found.ids.tolist() == made.encode(text, add_special_tokens=False).ids


@pytest.mark.parametrize("made", [*prefixing()])
def test_parts_in_the_middle_have_no_space_before_them(made):
    text = Path(encoder.__file__).read_text(encoding="utf-8")[:3000]
    middle, count = fim.FillInTheMiddle(1.0, 0.5, 10_001, 10_002, 10_003), 0
    for n in range(20):
        document = Document.of(n, text[n * 100 :])
        _, *rest = middle.parts(document.content, document.key)
        [found] = encoder.TextEncoder(made, middle)([document])
        for part in rest:
            if isinstance(part, fim.Text) and not part.begins and part.text:
                # A text behind a character that merges with nothing has the tokens of a continuation.
                after = made.encode(f"\x00{part.text}", add_special_tokens=False)
                expected = [token for token, (_, end) in zip(after.ids, after.offsets, strict=True) if end > 1]
                assert "".join(map(str, expected)) in "".join(map(str, found.ids.tolist()))
                count += 1
    assert count > 30


def test_a_text_without_a_place_to_cut_stays_whole(monkeypatch):
    made = Tokenizer(models.BPE({"a": 0, "aa": 1, "aaaa": 2}, [("a", "a"), ("aa", "aa")]))
    monkeypatch.setattr(encoder, "PIECE_CHARS", 10)
    [found] = encoder.TextEncoder(made, before=[7, 8])([Document.of(0, "a" * 103)])
    assert found.ids.tolist() == [7, 8] + [2] * 25 + [1, 0]


def test_ahead_keeps_order_and_runs_in_parallel():
    threads, started = set(), [threading.Event() for _ in range(6)]

    def items():
        for i in range(5):
            threads.add(threading.current_thread())
            started[i].set()
            yield i
        started[5].set()

    for i, item in enumerate(encoder.ahead(items())):
        assert item == i
        assert started[i + 1].wait(timeout=10), "the next item is produced while this one is in use"
        assert i + 2 >= len(started) or not started[i + 2].is_set(), "only one item is produced ahead"
    assert i == 4 and threading.current_thread() not in threads


def test_ahead_raises_an_error_at_its_item():
    def items():
        yield 1
        raise ValueError("no more")

    reader = encoder.ahead(items())
    assert next(reader) == 1
    with pytest.raises(ValueError, match="no more"):
        next(reader)
