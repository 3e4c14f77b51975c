"""The errors a user can cause. Their text names the input and the remedy; command lines print it without a
traceback.
"""

import errno
import functools
import logging
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class LaneformerError(Exception):
    """Base of every error that is about the user's input, not about a bug."""


class ConfigError(LaneformerError, ValueError):
    """A configuration value that cannot work."""


class CheckpointError(LaneformerError, ValueError):
    """A checkpoint folder or file that is missing, damaged or does not fit its config."""


class InputError(LaneformerError, ValueError):
    """Token ids, prompts or data that the model cannot take."""


def one_line(error: Exception) -> str:
    """One line of an error. TensorStore's are long, begin with what it did, end with the cause, and then give its
    settings.
    """
    text = (
        " ".join(re.split(r" \[(?:tensorstore_spec|source locations|os_error_code)", str(error))[0].split())
        or type(error).__name__
    )
    return text if len(text) <= 300 else f"{text[:100]} ... {text[-190:]}"


@contextmanager
def writing(path: Path, otherwise: str = "once it can be written, the same command goes on") -> Iterator[None]:
    """Makes an OSError in it a LaneformerError that names the file. otherwise: the remedy where it is not room that is
    missing.
    """
    try:
        yield
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        remedy = "make room, then the same command goes on" if full else otherwise
        raise LaneformerError(f"cannot write {path}: {error.strerror or error}; {remedy}") from error


@functools.cache  # a hook is put in place once
def say_errors_once() -> None:
    """Silences what Orbax, asyncio and TensorStore print, with tracebacks, of a failed read or save beside raising it
    to us.
    """
    for library in ("absl", "asyncio"):
        logging.getLogger(library).setLevel(logging.CRITICAL)
    before = sys.unraisablehook

    def hook(unraisable):
        if (
            str(unraisable.exc_value) != "Event loop is closed"
        ):  # a TensorStore thread that ends after Orbax has stopped waiting for it
            before(unraisable)

    sys.unraisablehook = hook
