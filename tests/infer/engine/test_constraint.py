"""Answers that follow a grammar: they fit it on every backend, alone or beside others, and nothing hangs or leaks."""

import json
import sys
import threading
import time

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers

from laneformer import custom_calls
from laneformer.errors import ConfigError, InputError
from laneformer.infer import Engine, Grammar, Sampling
from laneformer.infer.engine import constraint
from laneformer.infer.engine.constraint import Constraint, Grammars, as_flags
from laneformer.infer.engine.xla import XlaBackend
from laneformer.infer.text.channels import Channels, Harmony
from laneformer.infer.text.tokenizer import Tokenizer
from tests.support.checkpoints import HARMONY, byte_tokenizer, save_checkpoint
from tests.support.serving.schemas import schemas

jsonschema = pytest.importorskip("jsonschema")
pytest.importorskip("llguidance")
pytestmark = pytest.mark.skipif(custom_calls.unavailable() is not None, reason=str(custom_calls.unavailable()))
EOS, PROMPT = "<|im_end|>", "def add(a, b):"
DRAW = Sampling(temperature=1.0, seed=4, top_p=0.9)
PERSON = Grammar.json_schema({
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 6}, "age": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
})  # fmt: skip
ENDLESS = Grammar.regex("[a-z ]+")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    words = ("true", '": ', '{"', '"}', "name")
    return save_checkpoint(tmp_path_factory.mktemp("checkpoints") / "small", EOS, words=words, lanes=2)


@pytest.fixture(scope="module")
def engine(folder):
    made = Engine.load(folder, "cpu", parallel=3, speculation=5)
    made.session.speculate(5, [1.0] * 16)  # fixed prices with which calls share passes
    return made


@pytest.fixture(scope="module")
def reference(folder):
    return Engine.load(folder, "xla")


def ask(engine, grammar, sampling=DRAW, tokens=150, **more):
    return engine.generate(PROMPT, max_new_tokens=tokens, sampling=sampling, constraint=grammar, **more)


@settings(max_examples=40, deadline=None)
@given(
    schema=schemas(),
    seed=st.integers(0, 2**64 - 1),
    temperature=st.sampled_from([0.0, 0.5, 1.0, 3.0]),
    top_p=st.sampled_from([1.0, 0.9, 0.3]),
)
def test_answers_that_end_fit_their_schema(engine, schema, seed, temperature, top_p):
    sampling = Sampling(temperature=temperature, seed=seed, top_p=top_p)
    result = ask(engine, Grammar.json_schema(schema), sampling, 400).result
    assert (result.finish_reason == "length") == (len(result.tokens) == 400)
    if result.finish_reason == "stop":
        jsonschema.validate(json.loads(result.text), schema)


@pytest.mark.parametrize("sampling", [Sampling(), DRAW, Sampling(1.0, seed=2, frequency_penalty=1.0, top_k=9)], ids=str)
def test_backends_draw_the_same(engine, reference, sampling):
    grammars = {
        PERSON: lambda text: jsonschema.validate(json.loads(text), json.loads(PERSON.text)),
        Grammar.regex("[a-c]{3,9}x"): lambda text: text[-1] == "x",
        Grammar.choice(["yes", "no", "maybe"]): ["yes", "no", "maybe"].index,
        Grammar.of_rules('root ::= "a" ("b" | "c") "d"'): ["abd", "acd"].index,
    }
    for grammar, check in grammars.items():
        ours, theirs = (ask(each, grammar, sampling, stop_tokens=()).result for each in (engine, reference))
        assert (ours.tokens, ours.finish_reason, ours.stop_reason) == (theirs.tokens, "stop", None)
        check(ours.text)
    assert ours.drafting.drafted == 0


def test_answers_do_not_depend_on_other_requests(engine):
    asked = [PERSON, Grammar.json_object(), None, ENDLESS] * 2
    alone = [ask(engine, grammar, stop_tokens=()).result.tokens for grammar in asked]
    found = [None] * len(asked)

    def run(numbers):
        for n in numbers:
            found[n] = ask(engine, asked[n], stop_tokens=()).result.tokens

    threads = [threading.Thread(target=run, args=(range(n, len(asked), 3),)) for n in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == alone


def test_slow_mask_delays_only_its_answer(engine, monkeypatch):
    expected = [ask(engine, grammar, tokens=count).result.tokens for grammar, count in ((ENDLESS, 12), (None, 400))]
    mask = Constraint.mask
    monkeypatch.setattr(Constraint, "mask", lambda self: time.sleep(0.1) or mask(self))
    slow = ask(engine, ENDLESS, tokens=12)
    with ask(engine, None, tokens=400) as free:
        assert free.result.tokens == expected[1]
    assert engine.session.slots[0].wait(0, 0) < 12, "the slow answer ended first"
    assert slow.result.tokens == expected[0]


def test_end_of_the_grammar_ends_the_answer(engine, reference, folder):
    eos = Tokenizer.find(folder).special_id(EOS)
    for each in (engine, reference):
        result = ask(each, Grammar.regex("a{4}b*"), Sampling(), stop_tokens=(eos,)).result
        assert result.text.startswith("aaaa") and {*result.text[4:]} <= {"b"}
        assert (result.finish_reason, result.stop_reason) in (("stop", eos), ("length", None))
        ends = set()
        for seed in range(8):
            result = ask(each, Grammar.regex("a{2}b?"), Sampling(9.0, seed=seed), stop_tokens=(eos,)).result
            assert result.text in ("aa", "aab") and result.finish_reason == "stop"
            ends.add((result.text, result.stop_reason))
        assert ends == {("aa", eos), ("aab", None)}
        assert ask(each, PERSON, tokens=3).result.finish_reason == "length"
        cut = ask(each, PERSON, stop_strings=('": ', "name")).result
        assert cut.text == '{"' and (cut.finish_reason, cut.stop_reason) == ("stop", "name")


def test_call_that_waits_for_a_mask_is_cancelled_at_once(engine, monkeypatch):
    waits, mask = threading.Event(), Constraint.mask
    monkeypatch.setattr(Constraint, "mask", lambda self: mask(self) if not self._begun or waits.wait(20) else None)
    generation = ask(engine, ENDLESS)
    next(generation)
    threading.Timer(0.2, lambda: (generation.cancel(), waits.set())).start()
    began = time.perf_counter()
    assert generation.result.finish_reason == "cancelled" and time.perf_counter() - began < 10


@pytest.mark.parametrize("begun", [False, True])
def test_mask_error_ends_only_its_answer(engine, monkeypatch, begun):
    def broken(self):
        if self._begun == begun:
            raise InputError("too complex")
        return mask(self)

    mask = Constraint.mask
    with monkeypatch.context() as patch:
        patch.setattr(Constraint, "mask", broken)
        generation = ask(engine, ENDLESS)
        with pytest.raises(InputError, match="too complex"):
            list(generation)
    assert len(ask(engine, ENDLESS, tokens=9, stop_tokens=()).result.tokens) == 9


def nested(depth):
    schema = {}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    return schema


HOSTILE = {
    "deep": Grammar.json_schema(nested(400)),
    "reference to itself": Grammar.json_schema({"$ref": "#"}),
    "circle": Grammar.json_schema({
        "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a",
    }),
    "elsewhere": Grammar.json_schema({"$ref": "http://localhost:1/schema.json"}),
    "product": Grammar.json_schema({
        "allOf": [{"anyOf": [{"properties": {f"{n}{k}": {}}} for k in range(6)]} for n in range(12)],
    }),
    "not a schema": Grammar.json_schema({"type": "strin"}),
    "unknown keyword": Grammar.json_schema({"not": {"type": "string"}}),
    "nothing": Grammar.json_schema({"properties": {"a": {"enum": []}}, "required": ["a"], "type": "object"}),
    "empty": Grammar.regex(""),
    "parentheses": Grammar.regex("(" * 5000 + "a" + ")" * 5000),
    "look-ahead": Grammar.regex("(?=a)b"),
    "unknown rule": Grammar.of_rules("root ::= other"),
    "no rules": Grammar.of_rules("}{"),
    "rule of itself": Grammar.of_rules("root ::= root"),
    # The compilation of a slow grammar goes on for seconds after the error, and blocks that of others.
    "wide": Grammar.json_schema({"properties": {f"p{n}": {"type": "string"} for n in range(3000)}}),
    "long": Grammar.regex("a" * 300_000),
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_grammars_end_in_one_line_in_time(engine, name, monkeypatch):
    engine.check_constraint(PERSON)  # reads the vocabulary, before the time is measured
    monkeypatch.setattr(constraint, "SECONDS", 0.2)
    began = time.perf_counter()
    with pytest.raises(InputError, match=r"\Aconstraint (has|cannot)") as caught:
        engine.generate(PROMPT, constraint=HOSTILE[name])
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 400
    assert time.perf_counter() - began < constraint.SECONDS + 0.5


def test_slow_compilation_is_refused(engine, monkeypatch):
    grammars, waits = Grammars(engine.tokenizer, engine.config.vocab_size), threading.Event()
    monkeypatch.setattr(constraint, "SECONDS", 0.05)
    monkeypatch.setattr(Grammars, "_compile", lambda self, grammar: waits.wait(20))
    for _ in range(2):
        with pytest.raises(InputError, match=r"cannot be compiled within 0.05 s"):
            grammars.compile(PERSON)
    waits.set()


def test_only_content_follows_the_grammar(tmp_path):
    """The reasoning of an answer in harmony is free."""
    made = byte_tokenizer(*HARMONY)
    made.save(str(tmp_path / "tokenizer.json"))
    tokenizer, ids, vocab = Tokenizer(tmp_path / "tokenizer.json"), made.token_to_id, made.get_vocab_size()
    start, channel, message, end, returned, call = map(ids, HARMONY)
    channels = Channels(Harmony.find(made), made, [start, *tokenizer.encode("assistant")])
    place = Grammars(tokenizer, vocab).constraint(Grammar.json_object(), (returned, call), channels)
    brace = tokenizer.encode("{}")

    def allowed():
        return {n for n, flag in enumerate(as_flags(place.mask(), vocab)) if flag}

    assert allowed() == {brace[0], channel, start}
    for token in (channel, *tokenizer.encode("analysis"), message, *tokenizer.encode("}{"), end, start):
        place.accept(token)
        assert allowed() == {*range(vocab)} - {returned, call}
    for token in (*tokenizer.encode("assistant"), channel, *tokenizer.encode("final"), message):
        place.accept(token)
    assert allowed() >= {brace[0]} and tokenizer.encode("a")[0] not in allowed()
    for token in brace:
        place.accept(token)
    assert place.mask() is None and place.complete


def test_unusable_constraints_name_the_reason(engine, reference, monkeypatch):
    with pytest.raises(InputError, match=r"constraint = 'json': give laneformer\.Grammar"):
        engine.generate(PROMPT, constraint="json")
    with monkeypatch.context() as patch:
        patch.setattr(XlaBackend, "masks", False)
        with pytest.raises(InputError, match="cannot be used on backend xla: use backend cpu or xla"):
            reference.generate(PROMPT, constraint=PERSON)
    monkeypatch.setattr(engine, "tokenizer", None)
    with pytest.raises(InputError, match="the model has no tokenizer"):
        engine.generate([1], constraint=PERSON)
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(ConfigError, match=r"pip install 'laneformer\[grammar\]'"):
        Grammars(reference.tokenizer, 10)


def metaspace() -> tokenizers.Tokenizer:
    """A tokenizer that puts a space before a text."""
    pieces = [("<unk>", 0.0), *((piece, -2.0) for piece in ["▁", "▁na", "na", *'nam"e:{'])]
    made = tokenizers.Tokenizer(models.Unigram(pieces, 0))
    made.pre_tokenizer, made.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    return made


@pytest.mark.parametrize(("made", "forced"), [
    (byte_tokenizer(words=["name"]), ["name", '"']), (metaspace(), ["na", "m", "e", '"'])], ids=["bytes", "metaspace"],
)  # fmt: skip
def test_forced_texts_are_cut_as_inside_a_text(made, forced, tmp_path):
    made.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer(tmp_path / "tokenizer.json")
    vocabulary = constraint._Vocabulary(tokenizer, made.get_vocab_size())
    assert [vocabulary._texts[token].decode() for token in vocabulary(b'name"')] == forced
    for text in (b"na me", b"n\xc3", b" name", b"{:"):
        cut = [vocabulary._texts[token] for token in vocabulary(text)]
        assert text.startswith(b"".join(cut)) and all(cut)
    place = Grammars(tokenizer, made.get_vocab_size()).constraint(Grammar.regex('name"?'))
    text = ""
    while (words := place.mask()) is not None:
        token = int(as_flags(words, made.get_vocab_size()).nonzero()[0][0])
        place.accept(token)
        text += vocabulary._texts[token].decode()
    assert text in ("name", 'name"')
