"""JSON in tool calls, and values written as plain text, whose types follow from their schemas.

The web process imports this file, so it may use the standard library only.
"""

import json
import sys
from collections.abc import Mapping
from typing import Any

MOST_DIGITS = 4000  # digits of a whole number; Python's own limit is 4,300
KINDS: dict[str, type | tuple[type, ...]] = {
    "string": str, "boolean": bool, "integer": int, "number": (int, float), "array": list, "object": dict,
    "null": type(None)}  # fmt: skip
KIND_OF = {str: "string", bool: "boolean", int: "integer", float: "number", list: "array", dict: "object",
           type(None): "null"}  # fmt: skip
MOST_REFERENCES = 16  # length of a chain of references between schemas
PYTHON_WORDS = {"True": "true", "False": "false", "None": "null"}


def json_text(value: Any) -> str:
    """JSON without escapes for non-ASCII characters, unless the value contains lone surrogates."""
    text = json.dumps(value, ensure_ascii=False)
    try:
        text.encode()
    except UnicodeEncodeError:
        return json.dumps(value)
    return text


def read_object(text: str) -> dict[str, Any] | None:
    """The JSON object that a text contains; None if the text is not a JSON object."""
    try:
        value = _loads(text)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _loads(text: str) -> Any:
    """The value of a JSON text. Raises ValueError for NaN and infinities. Numbers beyond the range of a double become
    the largest double.
    """
    return json.loads(text, parse_constant=_no_number, parse_float=_double, parse_int=_integer)


def _no_number(text: str) -> None:
    raise ValueError(text)


def _double(text: str) -> float:
    return min(max(float(text), -sys.float_info.max), sys.float_info.max)


def _integer(text: str) -> int:
    return int(text) if len(text) <= MOST_DIGITS else int(_double(text))


def typed(text: str, schema: Any, root: Mapping[str, Any] | None = None) -> Any:
    """A value that was written as text, converted to a type that its schema allows; the text itself if it does not fit.
    root: the whole schema that `schema` is part of.
    """
    kinds = kinds_of(schema, root or {})
    if not kinds or kinds == {"string"}:
        return text
    plain = text.strip()
    try:
        value = _loads(PYTHON_WORDS.get(plain, plain))
    except (ValueError, RecursionError):
        return text
    fits = any(
        isinstance(value, KINDS[kind]) and (kind == "boolean") == isinstance(value, bool)
        for kind in kinds - {"string"}
        if kind in KINDS
    )
    return value if fits else text


def resolved(schema: Any, root: Mapping[str, Any]) -> Any:
    """The schema that a "$ref" points to inside the whole schema `root`; the schema itself if it has no "$ref"."""
    for _ in range(MOST_REFERENCES):
        path = schema.get("$ref") if isinstance(schema, Mapping) else None
        if not isinstance(path, str) or not path.startswith("#/"):
            break
        found: Any = root
        for key in path[2:].split("/"):
            found = found.get(key.replace("~1", "/").replace("~0", "~")) if isinstance(found, Mapping) else None
        schema = found
    return schema


def kinds_of(schema: Any, root: Mapping[str, Any], seen: set[int] | None = None) -> set[str]:
    """The names of the types that a schema allows, from "type" or from the values that it lists. root: the whole schema
    that it is part of. seen: ids of schemas to skip, because they have been visited.
    """
    schema, seen = resolved(schema, root), set() if seen is None else seen
    if not isinstance(schema, Mapping) or id(schema) in seen:
        return set()
    seen.add(id(schema))
    kind = schema.get("type")
    kinds = {each for each in (kind if isinstance(kind, list) else [kind]) if isinstance(each, str)}
    for word in ("anyOf", "oneOf"):
        several = schema.get(word)
        kinds = kinds.union(*(kinds_of(each, root, seen) for each in (several if isinstance(several, list) else [])))
    listed = schema["enum"] if isinstance(schema.get("enum"), list) else [schema["const"]] if "const" in schema else []
    return kinds or {KIND_OF[type(value)] for value in listed}
