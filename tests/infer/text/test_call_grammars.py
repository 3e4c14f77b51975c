"""Grammars of calls: every answer drawn under them is read as calls whose arguments fit their schemas."""

import json
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from laneformer.errors import InputError
from laneformer.infer.text.call_grammars import call_grammar
from laneformer.infer.text.channels import Channels, Harmony, Part
from laneformer.infer.text.grammar import Grammar
from laneformer.infer.text.tokenizer import Detokenizer, Tokenizer
from laneformer.infer.text.tool_calls import FORMATS, HARMONY, HarmonyReader, TextReader, ToolRequest
from tests.support.checkpoints import byte_tokenizer
from tests.support.serving.schemas import schemas

jsonschema = pytest.importorskip("jsonschema")
pytest.importorskip("llguidance")
from laneformer.infer.engine.constraint import Grammars, as_flags  # noqa: E402

BY_NAME = {each.name: each for each in FORMATS}
STOP = "<|stop|>"
MARKS = ("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|constrain|>")
PROMPT = "<|start|>user<|message|>Hi<|end|><|start|>assistant"


class Model:
    """Draws random answers that a grammar allows."""

    def __init__(self, folder, tool_format, special):
        """special: whether the marks of the format are special tokens; otherwise they are plain text."""
        marks = [STOP, *(MARKS if tool_format is HARMONY else tool_format.spelled if special else ())]
        made = byte_tokenizer(*marks, words=["name", '": ', '{"', "\n\n", "</param"])
        made.save(str(folder / "tokenizer.json"))
        self.format, self.made, self.ids = tool_format, made, made.token_to_id
        self.special = lambda text: made.token_to_id(text) if text in marks else None
        self.tokenizer, self.size = Tokenizer(folder / "tokenizer.json"), made.get_vocab_size()
        self.grammars = Grammars(self.tokenizer, self.size)
        self.marks = [*map(self.ids, marks)]

    def grammar(self, request, **options):
        return call_grammar(self.format, request, self.special, **options)

    def draw(self, grammar, seed, limit=240):
        """The tokens of an answer, and whether it ended before the limit."""
        place = self.grammars.constraint(grammar, (self.ids(STOP),))
        chance, tokens = random.Random(seed), []
        likely = [*self.marks, *self.made.encode('"}]<{,:').ids, self.ids("name")]
        while len(tokens) < limit:
            if (words := place.mask()) is None:
                return tokens, True
            allowed = as_flags(words, self.size)
            wanted = [token for token in likely if allowed[token]]
            if len(tokens) > limit // 3 and allowed[self.ids(STOP)]:
                return tokens, True
            picked = wanted if wanted and chance.random() < 0.4 else allowed.nonzero()[0].tolist()
            token = int(chance.choice(picked))
            if token == self.ids(STOP):
                return tokens, True
            place.accept(token)
            tokens.append(token)
        return tokens, False

    def read(self, tokens, request):
        """The content and the calls of an answer."""
        if self.format is HARMONY:
            prompt = self.made.encode(PROMPT).ids
            channels, reader = (Channels(Harmony.find(self.made), self.made, prompt, calls=True) for _ in range(2))
            reader = HarmonyReader(reader, request)
        else:
            channels, reader = None, TextReader(self.format, request)
        text, calls, words = "", [], Detokenizer(self.tokenizer, (), self.format.spelled)
        for token in tokens:
            part = Part.CONTENT if channels is None else channels.add(token)
            read = reader.add(token, "" if part is Part.MARK else words.add(token), part)
            text += read.text * (read.part is Part.CONTENT)
            calls += read.calls
            if reader.finished:
                break
        last = reader.end("")
        return text + last.text, [*calls, *last.calls]


@pytest.fixture(scope="module", params=[(each.name, special) for each in FORMATS for special in (True, False)
                                        if special or each is not HARMONY], ids=str)  # fmt: skip
def model(request, tmp_path_factory):
    name, special = request.param
    return Model(tmp_path_factory.mktemp("tokenizers"), BY_NAME[name], special)


def function(name, schema):
    return {"type": "function", "function": {"name": name, "description": "", "parameters": schema}}


def arguments():
    properties = st.dictionaries(st.sampled_from(["a", "name", "ü", "b-c"]), schemas(), max_size=3)
    return st.tuples(properties, st.integers(0, 3)).map(
        lambda made: {
            "type": "object",
            "properties": made[0],
            "required": [*made[0]][: made[1]],
            "additionalProperties": False,
        }
    )


def usable(model, request, **options):
    """The grammar of a request. None if the tags of the format cannot express one of the schemas; the error is then
    checked to be one line.
    """
    try:
        return model.grammar(request, **options)
    except InputError as error:
        assert model.format.tagged and "\n" not in str(error)
        return None


def check(calls, request):
    for call in calls:
        jsonschema.validate(json.loads(call.arguments), request.schemas[call.name])


@settings(max_examples=5, deadline=None)
@given(
    one=arguments(),
    other=arguments(),
    how=st.sampled_from(["required", "named", "auto"]),
    parallel=st.booleans(),
    opened=st.booleans(),
    seed=st.integers(0, 2**32),
)
def test_drawn_calls_fit_their_schemas(model, one, other, how, parallel, opened, seed):
    tools = (function("f", one), function("get_weather", other))
    name = "f" if how == "named" else None
    request = ToolRequest(tools, how != "auto", name, parallel and name is None, frozenset(("f", "get_weather")),
                          opened and model.format is not HARMONY)  # fmt: skip
    if (grammar := usable(model, request)) is None:
        return
    tokens, ended = model.draw(grammar, seed)
    text, calls = model.read(tokens, request)
    check(calls, request)
    if not ended:
        return
    assert how == "auto" or (calls and (model.format is HARMONY or not text.strip())), text
    assert name is None or {call.name for call in calls} == {name}
    assert request.parallel or len(calls) <= 1
    if model.format is not HARMONY:
        assert not any(mark in text for mark in model.format.openings), "no call may remain in the text"


FREE = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"], "additionalProperties": False}


def test_text_is_free_up_to_the_mark_of_a_call(model):
    request = ToolRequest((function("f", FREE),), strict=frozenset("f"))
    place = model.grammars.constraint(model.grammar(request), (model.ids(STOP),))

    def add(text):
        for token in model.made.encode(text).ids:
            assert as_flags(place.mask(), model.size)[token], (text, model.made.decode([token]))
            place.accept(token)

    def allowed(token):
        return as_flags(place.mask(), model.size)[model.ids(token)]

    final = "<|channel|>final<|message|>" if model.format is HARMONY else ""
    add(final + "Any text: ü < [TOOL } \n")
    assert allowed(STOP)
    if model.format is HARMONY:
        return
    for mark in model.format.openings:
        special = model.special(mark)
        for token in [special] if special is not None else [model.made.encode(c).ids[0] for c in mark]:
            assert as_flags(place.mask(), model.size)[token]
            place.accept(token)
        assert not allowed(STOP) and as_flags(place.mask(), model.size).sum() < 20
        break


def test_answer_is_a_call_or_follows_the_form(model):
    person = Grammar.json_schema(FREE, "response_format")
    for form in (
        Grammar.choice(["yes", "no"]),
        Grammar.regex("x{2,3}"),
        Grammar.of_rules('root ::= "a" | "b"'),
        person,
    ):
        seen = set()
        for seed in range(12):
            request = ToolRequest((function("f", FREE),), parallel=False)
            tokens, ended = model.draw(model.grammar(request, form=form), seed)
            text, calls = model.read(tokens, request)
            if not ended:
                continue
            check(calls, request)
            seen.add(bool(calls))
            if not calls:
                assert (
                    text in ("yes", "no", "xx", "xxx", "a", "b") or jsonschema.validate(json.loads(text), FREE) is None
                )
        assert seen


def test_loose_functions_take_any_object(model):
    request = ToolRequest((function("f", {"not": "a schema"}),), required=True, opened=False)
    for seed in range(6):
        tokens, ended = model.draw(model.grammar(request, loose={"f"}), seed)
        _, calls = model.read(tokens, request)
        assert not ended or (calls and all(isinstance(json.loads(call.arguments), dict) for call in calls))


@pytest.mark.parametrize("schema", [{"type": "string"}, {"type": ["null"]}])
def test_schemas_without_objects_are_refused(model, schema):
    with pytest.raises(InputError):
        model.grammar(ToolRequest((function("f", schema),), required=True))


@pytest.mark.parametrize("schema", [
    {"pattern": 5}, {"minLength": "1"}, {"format": "date"}, {"type": ["string", "integer"], "minimum": 3}, {"allOf": 5},
    {"enum": ["5", 5]}, {"pattern": "^a|b$"}, {"anyOf": 5, "pattern": [1]}, {"type": "array", "items": {"$ref": "#"}},
])  # fmt: skip
def test_tags_refuse_schemas_that_they_cannot_express(schema):
    request = ToolRequest((function("f", {"type": "object", "properties": {"a": schema}}),), required=True)
    with pytest.raises(InputError):
        call_grammar(BY_NAME["qwen3-coder"], request, lambda text: None)
    for odd in ({"required": [[1]]}, {"required": 5}, {"properties": 5}, {"properties": {"a>": {}}}):
        with pytest.raises(InputError):
            call_grammar(BY_NAME["qwen3-coder"], ToolRequest((function("f", odd),), required=True), lambda text: None)


def test_tags_support_patterns_and_cyclic_schemas(tmp_path):
    made = Model(tmp_path, BY_NAME["qwen3-coder"], True)
    circle = {"anyOf": [{"$ref": "#/$defs/c"}] * 9 + [{"type": "string"}, {"type": "null"}]}
    schema = {"type": "object", "properties": {"p": {"type": "string", "pattern": r"^\/[a-c]/x{2}$"},
              "q": {"type": "string", "pattern": "b", "maxLength": 3}, "c": {"$ref": "#/$defs/c"}},
              "required": ["p", "q"], "$defs": {"c": circle}}  # fmt: skip
    request = ToolRequest((function("f", schema),), required=True, parallel=False)
    for seed in range(5):
        tokens, ended = made.draw(made.grammar(request), seed)
        _, calls = made.read(tokens, request)
        assert ended is False or calls
        check(calls, request)
