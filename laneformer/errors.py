"""Errors that a user can cause, and functions that all command lines share.

The text of an error names the input and the remedy. Command lines print it in one line, without a traceback.
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
    """Base class of errors that the user's input causes, as opposed to bugs."""


class ConfigError(LaneformerError, ValueError):
    """An invalid configuration value."""


class CheckpointError(LaneformerError, ValueError):
    """A checkpoint folder or file that is missing, damaged, or does not fit its config."""


class InputError(LaneformerError, ValueError):
    """Token ids, prompts or data that do not fit the model."""


def printable(text: str) -> str:
    """The text with its unprintable characters, except line ends and tabs, as Python writes them (\\x1b).

    Names in files that others made may contain control sequences of terminals, or characters that reverse a line.
    """
    return "".join(c if c.isprintable() or c in "\n\t" else ascii(c)[1:-1] for c in text)


def as_run(text: str) -> str:
    """The text with the names of commands as the user runs them. `python -m infer bench` needs a clone of the
    repository, so a process that was started otherwise, as `laneformer bench`, reports that name.
    """
    main = sys.modules["__main__"]
    module = main.__spec__.name if main.__spec__ else ""
    if Path(sys.argv[0]).name != "laneformer" and not module.startswith("laneformer."):
        return text
    return _MODULE.sub(lambda found: f"laneformer {_COMMANDS.get(found[1], found[2].replace('_', '-'))}", text)


_MODULE = re.compile(r"python -m ((?:infer |train\.|scripts\.|(?=train\b))(\w+))(?![\w.])")
_COMMANDS = {"train.bench": "train-bench"}


class LogFormat(logging.Formatter):
    """Formats log messages as their printable text."""

    def format(self, record: logging.LogRecord) -> str:
        return printable(as_run(super().format(record)))


def one_line(error: BaseException) -> str:
    """The text of an error as one line of at most 300 characters, without the settings that TensorStore appends.

    TensorStore's texts start with the operation and end with the cause, followed by its settings.
    """
    text = (
        " ".join(re.split(r" \[(?:tensorstore_spec|source locations|os_error_code)", str(error))[0].split())
        or type(error).__name__
    )
    return _shortened(printable(text), 300)


def _shortened(text: str, most: int) -> str:
    """The text, shortened in its middle to at most `most` characters, most of which are from its end."""
    return text if len(text) <= most else f"{text[: most // 3]} ... {text[10 + most // 3 - most :]}"


@contextmanager
def writing(path: Path, otherwise: str = "fix that and run the same command again to resume") -> Iterator[None]:
    """Turns an OSError into a LaneformerError that names the file. otherwise: remedy if the disk is not full."""
    try:
        yield
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        remedy = "make room and run the same command again to resume" if full else otherwise
        raise LaneformerError(f"cannot write {path}: {error.strerror or error}; {remedy}") from error


@functools.cache  # installs the hook once
def say_errors_once() -> None:
    """Silences the tracebacks that Orbax, asyncio and TensorStore print in addition to raising an error.

    It also repeats a Ctrl-C that arrived where Python ignores exceptions, such as JAX's garbage-collection callback.
    """
    for library in ("absl", "asyncio"):
        logging.getLogger(library).setLevel(logging.CRITICAL)
    before = sys.unraisablehook

    def hook(unraisable: "sys.UnraisableHookArgs") -> None:
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

    options: dataclass that tyro reads from `arguments` (default: sys.argv) and passes to `act`; without it, `act` takes
    no argument. markers: tyro.conf markers for the dataclass. interrupted: line printed after Ctrl-C.

    Exit status: the number that `act` returns, otherwise 0; 2 after a user's mistake, printed in one line; 130 after
    Ctrl-C; 141 if the reader of the output has closed it, as `| head` does.
    """
    say_errors_once()
    if logging.lastResort is not None:  # Python's handler of warnings that no other handler takes
        logging.lastResort.setFormatter(LogFormat())
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
            print(printable(str(result)), flush=True)
        return 0
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except (LaneformerError, OSError) as error:
        print(f"error: {_shortened(printable(as_run(' '.join(str(error).splitlines()))), 2000)}", file=sys.stderr)
        return 2
    except MemoryError as error:
        print(f"error: out of memory ({one_line(error)}); use a smaller model or a larger machine", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(as_run(interrupted), file=sys.stderr)
        return INTERRUPTED


def read_options(kind: Callable[..., T], program: str, arguments: Sequence[str] | None = None, **settings: Any) -> T:
    """An instance of the dataclass `kind`, read from the arguments (default: sys.argv). settings: arguments of
    tyro.cli. Raises ConfigError for wrong arguments. With --help, prints the help and exits.
    """
    import tyro  # here, so that modules can raise these errors without tyro

    arguments = sys.argv[1:] if arguments is None else list(arguments)
    message = io.StringIO()
    width = nullcontext() if {"-h", "--help"} & {*arguments} else _unwrapped()
    try:
        with redirect_stderr(message), width:
            options: T = tyro.cli(kind, prog=program, args=arguments, **settings)
        return options
    except SystemExit as stop:
        if not stop.code:
            raise  # help
        raise ConfigError(f"{_unboxed(message.getvalue())}; {program} --help lists all options") from None


@contextmanager
def _unwrapped() -> Iterator[None]:
    """Makes tyro write each message in one line. Otherwise it wraps long messages, even inside a value."""
    before = os.environ.get("COLUMNS")
    os.environ["COLUMNS"] = "10000"
    try:
        yield
    finally:
        del os.environ["COLUMNS"]
        if before is not None:
            os.environ["COLUMNS"] = before


# Pattern in tyro's messages, some of which quote Python -> our words
_REWORDED = (
    (r": no type matching (?:\{None\}\|)?(\S+) could be instantiated from \[(.*?)\]\..*", r" = \2 is not \1"),
    (r": invalid literal for int\(\) with base 10: (.*)", r" = \1 is not a whole number"),
    (r": could not convert string to float: (.*)", r" = \1 is not a number"),
    (r" is not INT$", " is not a whole number"),
    (r" is not FLOAT$", " is not a number"),
    (r"^Missing value for argument '(\S+)'\. Expected (\d+) values?", r"\1 needs a value"),
)


def _unboxed(text: str) -> str:
    """The message from the box that tyro draws, in one line, with the options that tyro suggests."""
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
