"""Options of a command line as a dataclass, read by tyro, with its messages in one line."""

import contextlib
import io
import itertools
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

from laneformer.errors import ConfigError

T = TypeVar("T")


def read_options(kind: Callable[..., T], program: str, arguments: Sequence[str] | None = None, **settings: Any) -> T:
    """The dataclass `kind` from the arguments (default: sys.argv). settings: of tyro.cli. Raises ConfigError; prints
    help and exits if it is asked for.
    """
    import tyro  # the core raises its errors without a command line

    arguments = sys.argv[1:] if arguments is None else list(arguments)
    message = io.StringIO()
    width = contextlib.nullcontext() if {"-h", "--help"} & {*arguments} else _unwrapped()
    try:
        with contextlib.redirect_stderr(message), width:
            return tyro.cli(kind, prog=program, args=arguments, **settings)
    except SystemExit as stop:
        if not stop.code:
            raise  # help
        raise ConfigError(f"{_unboxed(message.getvalue())}; {program} --help lists all options") from None


@contextlib.contextmanager
def _unwrapped() -> Iterator[None]:
    """Lets tyro write a message in one line; it would wrap a long one anywhere, also inside a value."""
    before = os.environ.get("COLUMNS")
    os.environ["COLUMNS"] = "10000"
    try:
        yield
    finally:
        del os.environ["COLUMNS"]
        if before is not None:
            os.environ["COLUMNS"] = before


def _unboxed(text: str) -> str:
    """The message in a box that tyro draws, in one line, with the options that it suggests."""
    lines = [line.strip("│|+╭╮ ") for line in re.sub(r"\x1b\[[0-9;]*m", "", text).splitlines()]
    parts = [part.strip() for part in re.split(r"[─-]{8,}", " ".join(lines)) if part.strip()]
    message = parts[1] if len(parts) > 1 else " ".join(parts)
    message = re.sub(r"^Error parsing (\w+: )?|\s+(?=\s)|\.$", "", message)
    offers = itertools.dropwhile(lambda line: not line.startswith(("Perhaps you meant", "Arguments similar to")), lines)
    names = dict.fromkeys(line.split()[0] for line in offers if re.match(r"--\w", line))
    return f"{message}; perhaps you meant {' or '.join(names)}" if names else message
