"""What an answer's text must be: a JSON schema, a regular expression, a grammar, or one of several texts."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Self

# Between the tokens of JSON: a model could write white space without end.
WHITE_SPACE = r"(\n[ ]{0,40}|[ ]{1,4})?"


@dataclass(frozen=True)
class Grammar:
    """A description of all texts that an answer may be. It is checked when an engine compiles it."""

    kind: Literal["json_schema", "regex", "grammar", "choice", "lark"]
    text: str
    """The schema or the list of texts as JSON; the expression; the grammar, in llama.cpp's GBNF or in Lark's form."""
    name: str = "constraint"
    """Of the parameter that has it, for messages."""
    whole: bool = False
    """Whether it describes reasoning and marks too, not the content alone."""
    form: "Grammar | None" = None
    """The grammar that the rules of this one, of kind lark, refer to as `@form`."""

    @classmethod
    def json_schema(cls, schema: dict[str, Any] | bool, name: str = "constraint") -> Self:
        """JSON that fits a schema (JSON Schema 2020-12), with the properties of objects in the schema's order."""
        return cls("json_schema", json.dumps(schema), name)

    @classmethod
    def json_object(cls, name: str = "constraint") -> Self:
        """Any JSON object."""
        return cls.json_schema({"type": "object"}, name)

    @classmethod
    def regex(cls, expression: str, name: str = "constraint") -> Self:
        """Texts that match a regular expression from end to end, in the syntax of the Rust library `regex`."""
        return cls("regex", expression, name)

    @classmethod
    def choice(cls, texts: Sequence[str], name: str = "constraint") -> Self:
        """One of these texts."""
        return cls("choice", json.dumps(list(texts)), name)

    @classmethod
    def of_rules(cls, rules: str, name: str = "constraint") -> Self:
        """Texts of a context-free grammar in llama.cpp's GBNF, or in Lark's form as llguidance reads it."""
        return cls("grammar", rules, name)
