"""Errors a user can cause, and what every command line shares.

The text of an error names the input and the remedy; command lines print it in one line, without a traceback.
"""

import errno
import functools
import io
import itertools
import logging
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, redirect_stderr
from pathlib import Path
from typing import Any, TypeVar

from laneformer.interrupts import INTERRUPTED, LINE, interrupt_again, raise_at_interrupt

T = TypeVar("T")


class LaneformerError(Exception):
    """Base of every error that is about the user's input, not about a bug."""


class ConfigError(LaneformerError, ValueError):
    """An invalid configuration value."""


class CheckpointError(LaneformerError, ValueError):
    """A checkpoint folder or file that is missing, damaged, or does not fit its config."""


class InputError(LaneformerError, ValueError):
    """Token ids, prompts or data that do not fit the model."""


def one_line(error: Exception) -> str:
    """The text of an error as one line of at most 300 characters.

    TensorStore's texts start with the operation and end with the cause, followed by its settings.
    """
    text = (
        " ".join(re.split(r" \[(?:tensorstore_spec|source locations|os_error_code)", str(error))[0].split())
        or type(error).__name__
    )
    return _shortened(text, 300)


def _shortened(text: str, most: int) -> str:
    """A text of at most that many characters, the longer part of them from its end."""
    return text if len(text) <= most else f"{text[: most // 3]} ... {text[10 + most // 3 - most :]}"


@contextmanager
def writing(path: Path, otherwise: str = "fix that and run the same command again to resume") -> Iterator[None]:
    """Turns an OSError into a LaneformerError that names the file. otherwise: the remedy unless the disk is full."""
    try:
        yield
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        remedy = "make room and run the same command again to resume" if full else otherwise
        raise LaneformerError(f"cannot write {path}: {error.strerror or error}; {remedy}") from error


@functools.cache  # installs the hook once
def say_errors_once() -> None:
    """Silences the tracebacks that Orbax, asyncio and TensorStore print in addition to raising an error. Sends a Ctrl-C
    again that arrived where Python ignores exceptions, as in JAX's callback of the garbage collector.
    """
    for library in ("absl", "asyncio"):
        logging.getLogger(library).setLevel(logging.CRITICAL)
    before = sys.unraisablehook

    def hook(unraisable):
        if unraisable.exc_type is KeyboardInterrupt:
            interrupt_again()
            return
        # A TensorStore thread may end after Orbax has stopped waiting for it.
        if str(unraisable.exc_value) != "Event loop is closed":
            before(unraisable)

    sys.unraisablehook = hook


def run_command(
    act: Callable[..., int | str | Path | None],
    options: type | None = None,
    program: str = "",
    arguments: Sequence[str] | None = None,
    description: str | None = None,
    *,
    markers: Sequence[Any] = (),
    interrupted: str = LINE,
) -> int:
    """Runs a command and returns its exit status; prints the text or path that `act` returns.

    options: dataclass that tyro reads from `arguments` (default: sys.argv) and hands to `act`; without one `act` takes
    no argument. markers: of tyro.conf. interrupted: line printed after Ctrl-C.

    Status: the number that `act` returns, else 0; 2 after a user's mistake, printed in one line; 130 after Ctrl-C; 141
    when the reader of the output has gone, as with `| head`.
    """
    say_errors_once()
    raise_at_interrupt()
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed, as with `>&-`
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115  until the process ends
    try:
        if options is None:
            result = act()
        else:
            result = act(read_options(options, program, arguments, description=description, config=tuple(markers)))
        if isinstance(result, int):
            return result
        if result is not None:
            print(result, flush=True)
        return 0
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except (LaneformerError, OSError) as error:
        print(f"error: {_shortened(' '.join(str(error).splitlines()), 2000)}", file=sys.stderr)
        return 2
    except MemoryError as error:
        print(f"error: out of memory ({one_line(error)}); use a smaller model or a larger machine", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(interrupted, file=sys.stderr)
        return INTERRUPTED


def read_options(kind: Callable[..., T], program: str, arguments: Sequence[str] | None = None, **settings: Any) -> T:
    """The dataclass `kind` from the arguments (default: sys.argv). settings: of tyro.cli. Raises ConfigError; prints
    help and exits if it is asked for.
    """
    import tyro  # the core raises its errors without a command line

    arguments = sys.argv[1:] if arguments is None else list(arguments)
    message = io.StringIO()
    width = nullcontext() if {"-h", "--help"} & {*arguments} else _unwrapped()
    try:
        with redirect_stderr(message), width:
            return tyro.cli(kind, prog=program, args=arguments, **settings)
    except SystemExit as stop:
        if not stop.code:
            raise  # help
        raise ConfigError(f"{_unboxed(message.getvalue())}; {program} --help lists all options") from None


@contextmanager
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


# Words of tyro and of Python in its messages -> ours.
_REWORDED = (
    (r": no type matching (?:\{None\}\|)?(\S+) could be instantiated from \[(.*?)\]\..*", r" = \2 is not \1"),
    (r": invalid literal for int\(\) with base 10: (.*)", r" = \1 is not a whole number"),
    (r": could not convert string to float: (.*)", r" = \1 is not a number"),
    (r" is not INT$", " is not a whole number"),
    (r" is not FLOAT$", " is not a number"),
    (r"^Missing value for argument '(\S+)'\. Expected (\d+) values?", r"\1 needs a value"),
)


def _unboxed(text: str) -> str:
    """The message in a box that tyro draws, in one line, with the options that it suggests."""
    lines = [line.strip("│|+╭╮ ") for line in re.sub(r"\x1b\[[0-9;]*m", "", text).splitlines()]
    parts = [part.strip() for part in re.split(r"[─-]{8,}", " ".join(lines)) if part.strip()]
    message = parts[1] if len(parts) > 1 else " ".join(parts)
    message = re.sub(r"^Error parsing (\w+: )?|\s+(?=\s)|\.$", "", message)
    if message.startswith("Missing from"):
        required = [line for line in lines if re.match(r"--\S+ [A-Z]|[A-Z_.]+$", line)]
        unknown = next((part for part in parts if part.startswith("Unrecognized options:")), "")
        message = f"{' '.join(unknown.split())}{'; ' if unknown else ''}give {' and '.join(required)}"
    for theirs, ours in _REWORDED:
        message = re.sub(theirs, ours, message)
    offers = itertools.dropwhile(lambda line: not line.startswith(("Perhaps you meant", "Arguments similar to")), lines)
    names = dict.fromkeys(line.split()[0] for line in offers if re.match(r"--\w", line))
    return f"{message}; perhaps you meant {' or '.join(names)}" if names else message
