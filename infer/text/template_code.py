"""The program of a chat template: Jinja in a sandbox, with the filters, functions and blocks of Hugging Face.

The sandbox keeps a template from everything but its variables. It does not limit time or memory: a template may loop
without end or make a text of any size. The server therefore runs templates in processes of their own
(infer/serve/processes/encoders.py).
"""

import functools
import json
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

from laneformer.errors import InputError

CODE = "<template>"  # Jinja's name for a template in tracebacks
MARKS = "generation_marks"  # template variable that passes the marks to {% generation %} blocks


class Marks(NamedTuple):
    """Characters that mark places in a conversation while it is rendered."""

    cut: str
    """Marks places where text must be split so that it does not become a special token."""
    start: str
    """Marks the start of text that the assistant wrote."""
    stop: str
    """Marks the end of text that the assistant wrote."""


class Code(Protocol):
    """The program of a chat template."""

    names: frozenset[str]
    """Names that the template reads."""

    def run(self, variables: Mapping[str, Any]) -> str:
        """The text that the template makes. Raises InputError with the line of the template."""


class Elsewhere:
    """The `Code` of a template that another process runs."""

    def __init__(self, names: frozenset[str]):
        self.names = names

    def run(self, variables: Mapping[str, Any]) -> str:
        """Raises InputError."""
        raise InputError("the chat template runs in another process: encode conversations there")


class TemplateCode:
    """A compiled template."""

    def __init__(self, source: str, name: str):
        """name: name of the template in messages. Raises InputError for a text that is not Jinja."""
        environment, self._name = _environment(), name
        try:
            self._template = environment.from_string(source)
            self.names = frozenset(_names(environment.parse(source)))
        except MemoryError:  # Jinja computes constants, as in 'x' * 10 ** 12
            raise
        except Exception as error:  # TemplateSyntaxError, and others for files that are not templates
            line = getattr(error, "lineno", None)
            raise InputError(
                f"{name}{'' if line is None else f', line {line}'} is not a chat template: {error}"
            ) from None

    def run(self, variables: Mapping[str, Any]) -> str:
        """The text that the template makes. Raises InputError with the line of the template."""
        try:
            return self._template.render(variables)
        except MemoryError:
            raise
        except Exception as error:  # an expression in a template can raise any exception
            lines, frame = [], error.__traceback__
            while frame is not None:
                if frame.tb_frame.f_code.co_filename == CODE:
                    lines.append(frame.tb_lineno)
                frame = frame.tb_next
            raise InputError(f"{self._name}{f', line {lines[-1]}' if lines else ''}: {error}") from None


@functools.cache
def _environment() -> Any:
    """The sandbox that templates run in, with the filters, functions and blocks of Hugging Face."""
    try:
        from jinja2 import nodes
        from jinja2.exceptions import TemplateError
        from jinja2.ext import Extension
        from jinja2.sandbox import ImmutableSandboxedEnvironment
    except ImportError:
        raise InputError("chat templates need the jinja2 library: pip install 'laneformer[chat]'") from None

    class Generation(Extension):
        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser):
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.CallBlock(self.call_method("enclose", [nodes.Name(MARKS, "load")]), [], [], body).set_lineno(
                line
            )

        def enclose(self, marks: Marks, caller: Callable[[], str]) -> str:
            return marks.start + caller() + marks.stop

    def refuse(message: str) -> None:
        raise TemplateError(message)

    def to_json(value: Any, ensure_ascii: bool = False, indent=None, separators=None, sort_keys: bool = False) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = to_json  # Jinja's own filter escapes <, > and & for HTML
    environment.globals["raise_exception"] = refuse
    return environment


def _names(tree: Any) -> set[str]:
    """The variables and functions that a parsed template uses but does not define."""
    from jinja2.meta import find_undeclared_variables

    return find_undeclared_variables(tree)
