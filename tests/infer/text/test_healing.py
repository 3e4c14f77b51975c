"""The tokens at the end of a prompt that a continuation may replace."""

from pathlib import Path

import pytest
import tokenizers
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers, trainers

from laneformer.infer.text.healing import Spelling
from laneformer.infer.text.tokenizer import Tokenizer

CODE = 'def f(x):\n    """Text."""\n    return x + 1\n\n\nclass A:\n        y = 20\n'
WORDS = st.text(st.sampled_from("ab \n(\"'):\té1"), max_size=12)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A BPE of this project's code that keeps line ends and indentation together, as SmolLM2's does."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=700, special_tokens=["<end>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    tokenizer.train_from_iterator([Path(__file__).read_text(encoding="utf-8"), CODE] * 3, trainer)
    file = tmp_path_factory.mktemp("tokenizers") / "tokenizer.json"
    tokenizer.save(str(file))
    made = Tokenizer(file)
    return made, Spelling(made, tokenizer.get_vocab_size())


@settings(max_examples=30)
@given(WORDS, WORDS)
@example("def f(x):\n", "    return x")
@example("a  ", " b")
@example('"', '"')
def test_continuation_keeps_the_stable_tokens(trained, prompt, more):
    tokenizer, spelling = trained
    ids = tokenizer.encode(prompt)
    count, text = spelling.unstable(ids)
    kept = ids[: len(ids) - count]
    assert b"".join(map(spelling.text, kept)) + text == prompt.encode()
    text.decode()
    if count < len(ids) - 1:  # otherwise the first token had to stay
        assert tokenizer.encode(prompt + more)[: len(kept)] == kept


@settings(max_examples=15)
@given(st.sampled_from(["def f(x):\n", "x = 1\n    ", "class A", '"""Te', "é", "a é"]), st.data())
def test_every_allowed_token_leads_to_the_text(trained, text, data):
    _, spelling = trained
    rest, known = text.encode(), {}
    while rest:
        allowed = spelling.allowed(rest, known)
        texts = [spelling.text(token) for token in allowed]
        assert len(set(allowed)) == len(allowed)
        possible = {t for t in range(700) if (b := spelling.text(t)) and (b.startswith(rest) or rest.startswith(b))}
        assert set(allowed) == possible  # every byte is a token, so whatever fits can be completed
        rest = rest[len(data.draw(st.sampled_from(texts))) :]


def test_tokens_that_lead_nowhere_are_not_allowed(tmp_path):
    """Without a token for "c", "b" must not begin "bcd"."""
    tokenizer = tokenizers.Tokenizer(models.WordLevel({"b": 0, "bc": 1, "d": 2, "bcde": 3, "cx": 4}, unk_token="b"))
    tokenizer.decoder = decoders.Fuse()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    spelling = Spelling(Tokenizer(tmp_path / "tokenizer.json"), 5)
    assert sorted(spelling.allowed(b"bcd", {})) == [1, 3]
    assert spelling.allowed(b"bcz", {}) == []


def test_special_tokens_and_the_first_token_stay(trained):
    tokenizer, spelling = trained
    end = tokenizer.special_id("<end>")
    assert spelling.unstable([end]) == (0, b"") and spelling.unstable([]) == (0, b"")
    ids = tokenizer.encode("def")
    assert spelling.unstable([*ids, end]) == (0, b"")
    assert spelling.unstable(tokenizer.encode("a")) == (0, b"")
    line_end = tokenizer.encode("\n")
    assert spelling.unstable([*ids, end, *line_end]) == (1, b"\n")
