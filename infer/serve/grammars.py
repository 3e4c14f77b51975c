"""Reads the form of the answer from a request, in the fields of OpenAI, vLLM, SGLang and llama.cpp."""

from collections.abc import Callable
from typing import Any

from laneformer.infer.serve.body import ApiError, printable, shown, wrong
from laneformer.infer.text.grammar import Grammar
from laneformer.infer.text.values import read_object

FORMATS = ("text", "json_object", "json_schema")
SCHEMA_FIELDS = ("name", "description", "schema", "strict")  # a schema is always enforced, also if it is not strict
MOST_CHOICES = 1024
ITEMS_FORM = "text.format"  # name here of the field at this path in the Responses API


def read_grammar(left: dict[str, Any]) -> Grammar | None:
    """Removes the fields that describe the answer's form, and returns its grammar; None without any. Raises ApiError
    with the name of the field.
    """
    found = {name: read(left.pop(name), name) for name, read in FIELDS.items() if name in left}
    given = {name: grammar for name, grammar in found.items() if grammar is not None}
    if len(given) > 1:
        raise ApiError(400, f"{' and '.join(given)} describe the answer's form: give only one", param=[*given][-1])
    return next(iter(given.values()), None)


def _format(value: Any, name: str) -> Grammar | None:
    kind = value.get("type") if isinstance(value, dict) else None
    if kind not in FORMATS:
        raise wrong(name, value, ", ".join(f'{{"type": "{each}"}}' for each in FORMATS))
    if kind == "text":
        return None
    if kind == "json_object":  # llama.cpp's clients may add a schema
        _only(value, ("type", "schema"), name)
        return _schema(value["schema"], name) if value.get("schema") else Grammar.json_object(name)
    _only(value, ("type", "json_schema"), name)
    described = value.get("json_schema")
    if not isinstance(described, dict):
        raise wrong(f"{name}.json_schema", described, 'an object {"name": ..., "schema": {...}, "strict": true}')
    _only(described, SCHEMA_FIELDS, f"{name}.json_schema")
    if not isinstance(described.get("strict"), bool | None):
        raise wrong(f"{name}.json_schema.strict", described["strict"], "true or false")
    return _schema(described.get("schema"), name, ".json_schema.schema")


def _schema(value: Any, name: str, path: str = "") -> Grammar:
    schema = read_object(value) if isinstance(value, str) else value
    if not isinstance(schema, dict):
        raise wrong(name + path, value, "a JSON schema, an object")
    return Grammar.json_schema(schema, name)


def _text(make: Callable[[str, str], Grammar]) -> Callable[[Any, str], Grammar | None]:
    """A function that reads a field with a string, from which `make` makes the grammar."""

    def read(value: Any, name: str) -> Grammar | None:
        if not isinstance(value, str):
            raise wrong(name, value, "a string")
        return make(value, name) if value else None

    return read


def _choice(value: Any, name: str) -> Grammar:
    texts = isinstance(value, list) and all(isinstance(each, str) and each for each in value)
    if not texts or not 1 <= len(value) <= MOST_CHOICES:
        raise wrong(name, value, f"a list of 1 to {MOST_CHOICES} strings")
    return Grammar.choice(value, name)


def _structured(value: Any, name: str) -> Grammar | None:
    if not isinstance(value, dict):
        raise wrong(name, value, 'an object, as in {"json": {...}}')
    _only(value, ("json", "regex", "choice", "grammar", "json_object"), name)
    given = {key: each for key, each in value.items() if each is not None and each is not False}
    if len(given) != 1:
        raise wrong(name, value, "one of json, regex, choice, grammar and json_object")
    [(key, each)] = given.items()
    return Grammar.json_object(name) if key == "json_object" else FIELDS[f"guided_{key}"](each, name)


def _only(fields: dict[str, Any], known: tuple[str, ...], path: str) -> None:
    """Raises ApiError for a field that is not known."""
    for key, value in fields.items():
        if key not in known and value is not None:
            full = f"{path}.{printable(key)}"
            raise ApiError(
                400, f"{full} = {shown(value)} is not supported: leave it out", param=full, code="unsupported_parameter"
            )


FIELDS: dict[str, Callable[[Any, str], Grammar | None]] = {
    "response_format": _format,  # OpenAI
    ITEMS_FORM: _format,
    "guided_json": _schema,  # vLLM, before structured_outputs
    "guided_regex": _text(Grammar.regex),
    "guided_choice": _choice,
    "guided_grammar": _text(Grammar.of_rules),
    "structured_outputs": _structured,
    "json_schema": _schema,  # llama.cpp, SGLang
    "grammar": _text(Grammar.of_rules),  # llama.cpp
    "ebnf": _text(Grammar.of_rules),  # SGLang
    "regex": _text(Grammar.regex),
}
