"""Errors in one line, and the exit status and output of command lines."""

import errno
import logging
import os
import subprocess
import sys
from dataclasses import dataclass, make_dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest

from laneformer.errors import ConfigError, LaneformerError, LogFormat, as_run, one_line, printable, run_command, writing
from tests.support.paths import ROOT


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (Exception("bare\nwith more"), "bare with more"),
        (ValueError(), "ValueError"),
        (ValueError("NOT_FOUND: cause [tensorstore_spec='{\"a\": 1}']"), "NOT_FOUND: cause"),
    ],
)
def test_error_in_one_line_keeps_its_cause(error, text):
    assert one_line(error) == text


HOSTILE = "\x1b]0;title\x07\x1b[2J\x9b31m\u202etxt.exe\r\udc80"


def test_text_for_a_terminal_has_no_control_characters(capsys):
    def fail():
        raise ConfigError(f"tensor {HOSTILE} is missing")

    assert run_command(fail) == 2
    assert run_command(lambda: f"folder {HOSTILE}\nnext line") == 0
    record = logging.LogRecord("infer", logging.WARNING, "", 0, "field %s has no effect", (HOSTILE,), None)
    out, err = capsys.readouterr()
    for text in (out, err, LogFormat().format(record), one_line(ValueError(HOSTILE))):
        assert r"\x1b]0;title\x07" in text and r"\u202e" in text
        assert all(c.isprintable() or c == "\n" for c in text)
    assert out.count("\n") == 2 and err.count("\n") == 1


def test_printable_text_is_unchanged():
    text = "αβ → 漢字 🙂\n\tif x: return"
    assert printable(text) == text


def test_long_error_keeps_its_beginning_and_its_cause():
    text = one_line(ValueError("Reading " + 1000 * "long " + "cause [source locations=x]"))
    assert text.startswith("Reading long") and text.endswith("long cause") and len(text) < 300


@pytest.mark.parametrize(
    ("number", "remedy"),
    [
        (errno.ENOSPC, "make room and run the same command again to resume"),
        (errno.EDQUOT, "make room and run the same command again to resume"),
        (errno.EROFS, "give another --out"),
        (errno.EACCES, "give another --out"),
    ],
)
def test_failed_write_names_file_and_remedy(number, remedy):
    with pytest.raises(LaneformerError) as raised, writing(Path("some/file"), "give another --out"):
        raise OSError(number, os.strerror(number))
    assert str(raised.value) == f"cannot write some/file: {os.strerror(number)}; {remedy}"


@dataclass
class Options:
    number: int = 3
    other: int | None = None


def test_run_command_prints_the_result_of_the_options(capsys):
    assert run_command(lambda options: f"got {options.number}", Options, "program", ["--number", "5"]) == 0
    assert capsys.readouterr() == ("got 5\n", "")


@pytest.mark.parametrize(
    ("result", "status", "out"), [(None, 0, ""), (0, 0, ""), (7, 7, ""), ("text", 0, "text\n"), (Path("a"), 0, "a\n")]
)
def test_run_command_returns_a_number_and_prints_other_results(capsys, result, status, out):
    assert run_command(lambda: result) == status
    assert capsys.readouterr() == (out, "")


LESS = "use a smaller model or a larger machine"


def raises(error):
    def act():
        raise error

    return act


@pytest.mark.parametrize(
    ("error", "status", "err"),
    [
        (ConfigError("steps must be at least 1"), 2, "error: steps must be at least 1\n"),
        (FileNotFoundError(errno.ENOENT, "No such file", "x"), 2, "error: [Errno 2] No such file: 'x'\n"),
        (ConfigError("a name\nof\rthree lines"), 2, "error: a name of three lines\n"),
        (ConfigError("a" + "b" * 9000 + "c"), 2, f"error: a{'b' * 665} ... {'b' * 1323}c\n"),
        (MemoryError("Unable to allocate 9 TiB"), 2, f"error: out of memory (Unable to allocate 9 TiB); {LESS}\n"),
        (KeyboardInterrupt(), 130, "stopped\n"),
    ],
)
def test_run_command_prints_an_error_in_one_line(capsys, error, status, err):
    assert run_command(raises(error), interrupted="stopped") == status
    assert capsys.readouterr() == ("", err)


def test_run_command_passes_bugs_and_exits_on():
    with pytest.raises(ZeroDivisionError):
        run_command(raises(ZeroDivisionError()))
    with pytest.raises(SystemExit) as stopped:
        run_command(print, Options, "program", ["--help"])
    assert stopped.value.code == 0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--number", "x"], ("error: --number = 'x' is not",)),
        (["--number", "x" * 300], ("--number = 'xxx",)),
        (["--numer", "3"], ("Unrecognized options: --numer, 3", "perhaps you meant --number")),
        (["3"], ("Unrecognized options: 3",)),
        (["--number"], ("--number needs a value",)),
        (["--other", "x"], ("error: --other = 'x' is not a whole number;",)),
    ],
)
def test_option_mistakes_are_one_line(capsys, arguments, words):
    assert run_command(print, Options, "program", arguments) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("error: ") and err.endswith("; program --help lists all options\n")
    assert err.count("\n") == 1 and all(word in err for word in words)


@pytest.mark.parametrize(
    ("arguments", "message"), [([], "give --source PATH;"), (["--sorce", "x"], "Unrecognized options: --sorce x; give")]
)
def test_missing_options_are_named(capsys, arguments, message):
    kind = make_dataclass("Required", [("source", Path)])
    assert run_command(print, kind, "program", arguments) == 2
    assert capsys.readouterr().err.startswith(f"error: {message}")


@pytest.mark.parametrize("closed", [">&-", "2>&-", ">&- 2>&-"])
def test_run_command_succeeds_with_closed_output(closed):
    code = "import sys, laneformer.errors as e; sys.exit(e.run_command(lambda: sys.stdout.isatty() or print('text')))"
    done = subprocess.run(
        ["bash", "-c", f'"$0" -c "$1" {closed}', sys.executable, code], cwd=ROOT, capture_output=True, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, b"text\n" if closed == "2>&-" else b"", b"")


def test_run_command_without_a_reader_exits_with_141():
    """The pipe is closed before the command prints."""
    code = "import sys, laneformer.errors as e; sys.stdin.read(); sys.exit(e.run_command(lambda: 'text' * 99999))"
    process = subprocess.Popen(
        [sys.executable, "-c", code], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    process.stdout.close()
    process.stdin.close()
    with process.stderr as err:
        assert err.read() == b""
    assert process.wait(60) == 141


def test_errors_are_light_to_import():
    code = "import sys, laneformer.errors; assert not {'tyro', 'jax', 'numpy'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=60)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("resume with: python -m train stdlib --steps 9", "resume with: laneformer train stdlib --steps 9"),
        ("python -m infer bench --help lists all options", "laneformer bench --help lists all options"),
        ("python -m train.ablate tiny; python -m train.bench", "laneformer ablate tiny; laneformer train-bench"),
        ("write it with python -m scripts.convert_dense A B", "write it with laneformer convert-dense A B"),
        ("run python -m pip install tyro", "run python -m pip install tyro"),
    ],
)
def test_commands_have_the_name_by_which_they_run(text, expected, monkeypatch):
    assert as_run(text) == text  # in a clone
    monkeypatch.setattr(sys, "argv", ["/usr/bin/laneformer", "train"])
    assert as_run(text) == expected
    module = "laneformer.train.__main__"  # python -m laneformer.train
    monkeypatch.setattr(sys, "argv", ["/site-packages/laneformer/train/__main__.py"])
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", SimpleNamespace(name=module))
    assert as_run(text) == expected
