"""Grammars of arguments that are written between tags: <parameter=NAME>, value and </parameter>, each on its own line.

A value of type string is plain text, any other value is JSON. The schema decides between them by the rules of
`infer.text.values.typed`, so that a value has the type that its schema requires when it is read.
"""

import json
import re
from collections.abc import Mapping
from typing import Any

from laneformer.errors import InputError
from laneformer.infer.text.grammar import WHITE_SPACE
from laneformer.infer.text.tool_calls import FUNCTION_END, PARAMETER, PARAMETER_END, TAG_NAME
from laneformer.infer.text.values import kinds_of, resolved, typed

NOTES = {"title", "description", "default", "examples", "$comment", "$schema", "$id", "deprecated", "readOnly",
         "writeOnly", "$defs", "definitions", "x-guidance"}  # fmt: skip
OF_OBJECT = NOTES | {"type", "properties", "required", "additionalProperties"}
OF_TEXT = NOTES | {"type", "minLength", "maxLength", "pattern"}
END = f"\n{PARAMETER_END}\n"


class TagRules:
    """The grammar rules for the arguments of one function, including its closing tag."""

    def __init__(self, rule: str, schema: Mapping[str, Any], loose: bool):
        """rule: name of the first rule. schema: schema of the arguments. loose: whether the arguments may be any
        object. Raises InputError for a schema that the rules cannot express.
        """
        self.rules: list[str] = []
        self._name, self._schema = rule, schema
        free = f"{rule.upper()}_TEXT"
        self.rules.append(f"{free}: ANY & ~(ANY {json.dumps(PARAMETER_END)} ANY)")
        self._free = free
        if loose:
            name, value = f"{rule.upper()}_NAME", f"{rule.upper()}_VALUE"
            self.rules.append(f"{name}: /[^<>\\n]{{1,64}}/")
            self.rules.append(f"{value}: {free} {json.dumps(END)}")
            self.rules.append(f'{rule}: ({json.dumps(PARAMETER)} {name} ">\\n" {value})* {json.dumps(FUNCTION_END)}')
            return
        _only(schema, OF_OBJECT)
        properties, required = schema.get("properties", {}), schema.get("required", [])
        if (
            not isinstance(properties, Mapping)
            or not isinstance(required, list)
            or schema.get("type", "object") != "object"
        ):
            raise InputError("it must be an object with properties")
        if missing := [each for each in required if each not in properties]:
            raise InputError(f"{missing[0]} is required but not among the properties")
        parts = [self._parameter(n, name, name in required) for n, name in enumerate(properties)]
        self.rules.append(f"{rule}: {' '.join([*parts, json.dumps(FUNCTION_END)])}")

    def _parameter(self, n: int, name: str, required: bool) -> str:
        if not TAG_NAME.fullmatch(f"{name}>"):
            raise InputError(f"property {json.dumps(name)} cannot be the name of a tag")
        rule = f"{self._name}_{n}"
        value = self._value(rule, resolved(self._schema["properties"][name], self._schema))
        self.rules.append(f"{rule}: {json.dumps(f'{PARAMETER}{name}>' + chr(10), ensure_ascii=False)} {value}")
        return rule if required else f"{rule}?"

    def _value(self, rule: str, schema: Any) -> str:
        """The rule for the value of a parameter and its closing tag. Raises InputError for a schema that it cannot
        express.
        """
        schema = schema if isinstance(schema, Mapping) else {}
        given = (
            schema["enum"] if isinstance(schema.get("enum"), list) else [schema["const"]] if "const" in schema else None
        )
        if given is not None:
            texts = [each if isinstance(each, str) else json.dumps(each, ensure_ascii=False) for each in given]
            for text, value in zip(texts, given, strict=True):
                if typed(text, schema) != value or PARAMETER_END in text:
                    raise InputError(f"value {json.dumps(value)} reads the same as a value of another type")
            return f"({' | '.join(json.dumps(text + END, ensure_ascii=False) for text in texts)})"
        kinds = kinds_of(schema, self._schema)
        if "string" not in kinds and kinds:
            root = {key: self._schema[key] for key in ("$defs", "definitions") if key in self._schema}
            if '"#"' in json.dumps(schema):
                raise InputError("a property refers to the whole schema")
            whole = {"x-guidance": {"whitespace_pattern": WHITE_SPACE}, **root, **schema}
            return f"%json {json.dumps(whole)} {json.dumps(END)}"
        if len(kinds) > 1:  # a text that parses as another allowed type becomes that type
            for each in (schema, *schema.get("anyOf", ()), *schema.get("oneOf", ())):
                _only(resolved(each, self._schema), NOTES | {"type", "anyOf", "oneOf"})
            if "oneOf" in schema:
                raise InputError("oneOf with strings is not supported")
        else:
            _only(schema, OF_TEXT)
        self.rules.append(f"{rule.upper()}_VALUE: ({' & '.join([self._free, *_limits(schema)])}) {json.dumps(END)}")
        return f"{rule.upper()}_VALUE"


def _only(schema: Any, words: set[str]) -> None:
    """Raises InputError if a schema has keywords other than `words`."""
    for word in schema if isinstance(schema, Mapping) else ():
        if word not in words:
            raise InputError(f"{json.dumps(word)} is not supported where arguments are written as tags")


def _limits(schema: Mapping[str, Any]) -> list[str]:
    """Regular expressions, each of which must match the whole text."""
    made, least, most = [], schema.get("minLength", 0), schema.get("maxLength", "")
    if not isinstance(least, int) or not (most == "" or isinstance(most, int)):
        raise InputError("minLength and maxLength must be whole numbers")
    if least or most != "":
        made.append(f"/(?s:.{{{least},{most}}})/")
    if (pattern := schema.get("pattern")) is not None:
        start, stop = pattern.startswith("^"), bool(re.search(r"(?<!\\)(\\\\)*\$$", pattern))
        if "|" in pattern and (start or stop):
            raise InputError(f"pattern {json.dumps(pattern)} is not supported where arguments are written as tags")
        inner = re.sub(
            r"\\.|/", lambda found: "\\/" if found[0] == "/" else found[0], pattern[start : len(pattern) - stop]
        )
        made.append(f"/{'' if start else '(?s:.*)'}({inner}){'' if stop else '(?s:.*)'}/")
    return made
