"""Constraints on an answer's text: a JSON schema, a regular expression, a grammar, or one of several texts."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Self

# White space allowed between the tokens of JSON. It is limited because a model could write white space without end.
WHITE_SPACE = r"(\n[ ]{0,40}|[ ]{1,4})?"


@dataclass(frozen=True)
class Grammar:
    """The set of texts that an answer may be. An engine checks it when it compiles it."""

    kind: Literal["json_schema", "regex", "grammar", "choice", "lark"]
    text: str
    """The schema or the list of texts as JSON, the expression, or the grammar in llama.cpp's GBNF or Lark's form."""
    name: str = "constraint"
    """Name of the parameter that contains the grammar, for messages."""
    whole: bool = False
    """Whether the grammar describes the whole answer, including reasoning and marks, instead of the content alone."""
    form: "Grammar | None" = None
    """The grammar that the rules of this one, of kind lark, refer to as `@form`."""

    @classmethod
    def json_schema(cls, schema: dict[str, Any] | bool, name: str = "constraint") -> Self:
        """JSON that matches a schema (JSON Schema 2020-12). The properties of objects are in the schema's order."""
        return cls("json_schema", json.dumps(schema), name)

    @classmethod
    def json_object(cls, name: str = "constraint") -> Self:
        """Any JSON object."""
        return cls.json_schema({"type": "object"}, name)

    @classmethod
    def regex(cls, expression: str, name: str = "constraint") -> Self:
        """Texts that match a whole regular expression, in the syntax of the Rust library `regex`."""
        return cls("regex", expression, name)

    @classmethod
    def choice(cls, texts: Sequence[str], name: str = "constraint") -> Self:
        """One of these texts."""
        return cls("choice", json.dumps(list(texts)), name)

    @classmethod
    def of_rules(cls, rules: str, name: str = "constraint") -> Self:
        """Texts of a context-free grammar in llama.cpp's GBNF, or in llguidance's variant of Lark."""
        return cls("grammar", rules, name)
