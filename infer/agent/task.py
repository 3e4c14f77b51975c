"""An agent's task: a folder with a description, files to start from and tests, and the program that runs these
tests.
"""

import base64
import hashlib
import re
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from laneformer.errors import InputError

TEXTS = ("task.md", "README.md")
TEST = "test*.py"  # the pattern of `python -m unittest`
COMMAND = re.compile(r"^Test command: `([^`\n]+)`[ \t]*$", re.MULTILINE)
MOST_BYTES = 4 << 20  # bytes of all files, because they are copied to the sandbox before every run
MOST_OUTPUT = 4000  # characters of the tests' output that are kept and sent to the model
FAILURE = "TestsFailed"

# Writes the files to the current folder, which is in the sandbox. The modules that run the tests are imported first,
# because a file may have the name of one of them.
_SETUP = """
import base64, io, os, subprocess, sys, unittest
for name, content in {files!r}.items():
    os.makedirs(os.path.dirname(name) or ".", exist_ok=True)
    with open(name, "wb") as file:
        file.write(base64.b64decode(content))
sys.modules.pop("solution")  # the name of this program, and possibly of a file
sys.path.insert(0, os.getcwd())

class {failure}(Exception):
    pass

def fail(text):
    most = {most}
    raise {failure}(text if len(text) <= most else text[: most // 3] + "\\n...\\n" + text[-(2 * most // 3 - 5) :])
"""
# The tests run in the same process, so that they pass only if they run to their end. A skipped test does not pass.
_UNITTEST = """
out = io.StringIO()
result = unittest.TextTestRunner(out, buffer=True).run(unittest.defaultTestLoader.discover("."))
if not result.wasSuccessful() or result.skipped or not result.testsRun:
    fail(out.getvalue())
"""
_COMMAND = """
command = {command!r}
command[0] = sys.executable if command[0] in ("python", "python3") else command[0]
done = subprocess.run(command, env=dict(os.environ, PYTHONPATH=os.pathsep.join(sys.path)), stdin=subprocess.DEVNULL,
                      stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
if done.returncode:
    fail(done.stdout.decode(errors="replace") + "\\nexit status %d" % done.returncode)
"""


@dataclass(frozen=True)
class Task:
    """The content of a task folder."""

    name: str
    text: str
    """Description of the task."""
    files: Mapping[str, bytes]
    """Name relative to the folder -> content, for all files except the description."""
    tests: tuple[str, ...]
    """Names of the files that the model must not change."""
    command: tuple[str, ...] | None
    """Command that runs the tests; None for Python's unittest."""

    @property
    def editable(self) -> tuple[str, ...]:
        """Names of the existing files that the model may change."""
        return tuple(name for name in self.files if name not in self.tests)

    @property
    def sha256(self) -> str:
        """SHA-256 of the description, the names and the contents, hexadecimal."""
        digest = hashlib.sha256(self.text.encode())
        for name, content in self.files.items():
            digest.update(b"\0" + name.encode() + b"\0" + hashlib.sha256(content).digest())
        return digest.hexdigest()


def load_task(folder: Path) -> Task:
    """Reads a task folder. Raises InputError for a folder that is not a complete task."""
    if not folder.is_dir():
        raise InputError(
            f"{folder} is not a folder: give a folder with {TEXTS[0]}, files to start from and tests ({TEST})"
        )
    found = sorted(
        path
        for path in folder.rglob("*")
        if _belongs(path.relative_to(folder)) and (path.is_symlink() or not path.is_dir())
    )
    for path in found:
        if path.is_symlink() or not path.is_file():
            raise InputError(f"{path} is not a regular file: replace it by a copy")
    if (total := sum(path.stat().st_size for path in found)) > MOST_BYTES:
        raise InputError(f"{folder} has {total:,} bytes: reduce it to {MOST_BYTES:,}")
    files = {path.relative_to(folder).as_posix(): path.read_bytes() for path in found}
    name = next((name for name in TEXTS if name in files), None)
    if name is None:
        raise InputError(f"{folder} has no description of the task: add {TEXTS[0]}")
    try:
        text = files.pop(name).decode()
    except UnicodeDecodeError:
        raise InputError(f"{folder / name} is not UTF-8 text: convert it") from None
    command = stated[1] if (stated := COMMAND.search(text)) else ""
    try:
        words = tuple(shlex.split(command))
    except ValueError as error:
        raise InputError(
            f"{folder / name}: cannot parse the test command `{command}` ({error}): correct its quoting"
        ) from None
    tests = tuple(name for name in files if PurePosixPath(name).match(TEST) or name in words)
    if not tests:
        raise InputError(
            f"{folder} has no tests: add some ({TEST}, run with unittest), or name the file that runs them in"
            f" {name}, with a line such as: Test command: `python check.py`"
        )
    return Task(folder.resolve().name, text.strip(), files, tests, words or None)


def _belongs(path: Path) -> bool:
    """Whether a file is part of the task: hidden files and __pycache__ are not."""
    return not any(part.startswith(".") or part == "__pycache__" for part in path.parts)


def test_program(files: Mapping[str, bytes], command: Iterable[str] | None) -> str:
    """A program that writes the files and tests them. If the tests fail, it raises an exception with their output."""
    packed = {name: base64.b64encode(content).decode() for name, content in files.items()}
    setup = _SETUP.format(files=packed, failure=FAILURE, most=MOST_OUTPUT)
    return setup + (_UNITTEST if command is None else _COMMAND.format(command=list(command)))
