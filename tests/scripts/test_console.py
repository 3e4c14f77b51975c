"""The console command: its list of commands, its errors, and the same results as `python -m`."""

import re
import shlex
import signal
import subprocess
import sys
import tomllib

import pytest

import laneformer.infer.__main__
from laneformer.commands import __main__ as console
from tests.support.paths import ROOT

NAMES = tuple(console.commands())


def output_of(main, arguments, capsys) -> tuple[int, str, str]:
    """Exit status, standard output and standard error."""
    try:
        status = main(arguments)
    except SystemExit as stop:
        status = stop.code or 0
    return status, *capsys.readouterr()


def test_project_installs_the_command():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project["scripts"] == {"laneformer": "laneformer.commands.__main__:console"}


@pytest.mark.parametrize("name", NAMES)
def test_help_names_the_command_instead_of_the_module(name, capsys):
    command = console.commands()[name]
    module = __import__(command.module, fromlist=["main"])
    theirs = output_of(module.main, [*command.first, "--help"], capsys)
    ours = output_of(console.main, [name, "--help"], capsys)
    assert theirs[0] == ours[0] == 0
    assert f"laneformer {name}" in ours[1] and re.search(rf"{re.escape(command.program)}(?![\w.])", theirs[1])
    program = rf"({re.escape(command.program)}(?![\w.])|laneformer {name})"
    assert re.sub(program, "PROGRAM", theirs[1]) == re.sub(program, "PROGRAM", ours[1])
    assert not re.search(rf"usage: {re.escape(command.program)}", ours[1])


def test_usage_without_arguments_names_the_command(capsys):
    status, text, _ = output_of(console.main, ["ablate"], capsys)
    assert status == 2 and text.startswith("usage: laneformer ablate RECIPE") and "python -m" not in text


def test_closed_output_is_no_error():
    command = f"{shlex.quote(sys.executable)} -m scripts --help | true; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], check=False, cwd=ROOT, capture_output=True, timeout=60)
    assert done.returncode in (0, 141) and not done.stderr


def test_help_of_a_recipe_names_the_command(capsys):
    status, text, _ = output_of(console.main, ["train", "tiny", "--help"], capsys)
    assert status == 0 and text.startswith("usage: laneformer train tiny [-h] [OPTIONS]\n")


def test_every_command_is_listed_without_jax():
    code = "import sys\nfrom laneformer.commands import __main__\n"
    code += "assert __main__.main(['--help']) == 0 and 'jax' not in sys.modules"
    done = subprocess.run(
        [sys.executable, "-c", code], check=True, cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    listed = re.findall(r"^  ([\w-]+)  +\S", done.stdout, re.MULTILINE)
    assert listed == list(NAMES) and {*laneformer.infer.__main__.COMMANDS} < {*listed}


def test_no_command_prints_the_usage_and_fails(capsys):
    assert output_of(console.main, [], capsys) == (2, console.usage() + "\n", "")


@pytest.mark.parametrize(
    ("name", "remedy"),
    [("trian", "did you mean train?"), ("plo", "did you mean plot?"), ("??", "laneformer --help lists all")],
)
def test_unknown_command_is_one_line(name, remedy, capsys):
    assert console.main([name]) == 2
    out, err = capsys.readouterr()
    assert (out, err) == ("", f"error: unknown command {name!r}; {remedy}\n")


@pytest.mark.parametrize(
    ("line", "status"),
    [
        ("draw-layout 'dtp(1)' --out missing/x.svg", 2),
        ("generate --checkpoint missing --prompt x", 2),
        ("train nothing", 2),
        ("roofline --checkpoint tiny", 0),
        ("ablate tiny --list", 0),
    ],
)
def test_status_and_output_are_those_of_the_module(line, status, capsys):
    name, *rest = shlex.split(line)
    command = console.commands()[name]
    module = __import__(command.module, fromlist=["main"])
    theirs = output_of(module.main, [*command.first, *rest], capsys)
    assert output_of(console.main, [name, *rest], capsys) == theirs and theirs[0] == status


def test_recipes_of_the_current_folder_are_found(tmp_path, monkeypatch, capsys):
    """The current folder is not in sys.path when an installed script starts."""
    (tmp_path / "mine_alone.py").write_text("from laneformer.recipes.tiny import tiny as small\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(ROOT), *filter(None, sys.path)])
    status, text, err = output_of(console.main, ["train", "mine_alone:small", "--help"], capsys)
    del sys.modules["mine_alone"]
    assert status == 0 and text.startswith("usage: laneformer train mine_alone:small"), err


def test_ctrl_c_during_imports_is_one_line():
    code = (
        "import builtins, os, signal, sys\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "from laneformer.commands.__main__ import main\n"
        "load = builtins.__import__\n"
        "def stop(name, *rest):\n"
        "    if name == 'jax':\n"
        "        os.kill(os.getpid(), signal.SIGINT)\n"
        "    return load(name, *rest)\n"
        "builtins.__import__ = stop\n"
        "sys.exit(main(['ablate', 'tiny']))"
    )
    done = subprocess.run([sys.executable, "-c", code], check=False, cwd=ROOT, capture_output=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (128 + signal.SIGINT, b"", b"error: interrupted\n")
