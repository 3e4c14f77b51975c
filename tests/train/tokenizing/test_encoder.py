"""Encoding: text round-trips through a trained BPE, pieces make up the text, and work done ahead keeps its order."""

import itertools
import threading
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from train.tokenizing import encoder, fim
from train.tokenizing.documents import Document


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
