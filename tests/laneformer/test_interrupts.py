"""Ctrl-C at moments at which libraries would swallow it, and during training."""

import hashlib
import os
import signal
import subprocess
import sys
import threading
from types import SimpleNamespace

import pytest

from laneformer.interrupts import STOPPED, STOPPING, importing, stop_signals
from tests.support.paths import ROOT

# A background job would ignore SIGINT.
DEFAULT = "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
COMMANDS = ("train", "train.ablate", "infer", "scripts", "scripts.convert", "scripts.tokenize", "scripts.plot")


def run(code):
    """Exit status, stdout and stderr of a Python program."""
    command = [sys.executable, "-c", DEFAULT + code]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize("swallow", ["except BaseException: pass", "except BaseException: raise ImportError('no')"])
def test_interrupt_that_an_import_swallows_ends_the_process(tmp_path, swallow):
    (tmp_path / "library.py").write_text(
        f"import signal\ntry:\n    signal.raise_signal(signal.SIGINT)\n{swallow}\nprint('goes on')\n"
    )
    code = (
        f"from laneformer.interrupts import importing\nsys.path.append({str(tmp_path)!r})\n"
        "with importing('stopped'):\n    import library\nprint('goes on')"
    )
    assert run(code) == (130, "", "stopped\n")


@pytest.mark.parametrize("callback", ["gc.callbacks.append(callback); gc.collect()", "Deleted()"])
def test_interrupt_in_a_callback_is_sent_again(callback):
    """Python ignores exceptions in callbacks: a training run that was interrupted in JAX's callback did not stop."""
    code = (
        "import gc, time\n"
        "from laneformer.errors import run_command\n"
        "class Deleted:\n"
        "    def __del__(self): callback()\n"
        "def callback(*_):\n"
        "    gc.callbacks.clear()\n"
        "    signal.raise_signal(signal.SIGINT)\n"
        "def act():\n"
        f"    {callback}\n"
        "    time.sleep(30)\n"
        "sys.exit(run_command(act, interrupted='stopped'))"
    )
    assert run(code) == (130, "", "stopped\n")


@pytest.mark.parametrize("module", COMMANDS)
def test_interrupt_while_a_command_starts_is_one_line(module):
    """The interrupt arrives during the first slow import, which swallows it."""
    code = (
        "import builtins, runpy\n"
        "load = builtins.__import__\n"
        "def stop(name, *rest, **more):\n"
        "    if name in ('numpy', 'jax', 'tyro', 'matplotlib'):\n"
        "        try: signal.raise_signal(signal.SIGINT)\n"
        "        except BaseException: print('swallowed')\n"
        "    return load(name, *rest, **more)\n"
        "builtins.__import__ = stop\n"
        "sys.argv = ['-m']\n"
        f"import {module.partition('.')[0]}\n"
        "sys.argv = ['x', 'generate']\n"
        f"runpy.run_module({module!r}, run_name='__main__')"
    )
    status, out, err = run(code)
    assert (status, out, err.count("\n")) == (130, "", 1) and "Traceback" not in err


def test_other_handlers_are_kept():
    def mine(*_):
        pass

    before = signal.signal(signal.SIGINT, mine)
    try:
        with importing():
            assert signal.getsignal(signal.SIGINT) is mine
    finally:
        signal.signal(signal.SIGINT, before)
    with importing():
        assert signal.getsignal(signal.SIGINT) is not before
    assert signal.getsignal(signal.SIGINT) is before


def test_ctrl_c_prints_a_line_and_sigterm_does_not(capsys):
    for number, answer in ((signal.SIGINT, STOPPING + "\n"), (signal.SIGTERM, "")):
        with stop_signals() as received:
            signal.raise_signal(number)
            assert received == [number]
        assert capsys.readouterr().err == answer
    with pytest.raises(KeyboardInterrupt), stop_signals():
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler and signal.set_wakeup_fd(-1) == -1


def test_ctrl_c_prints_a_line_while_a_library_is_running(monkeypatch):
    """As while XLA compiles, Python's own handler has not run yet."""
    answered = []
    with stop_signals() as received:
        monkeypatch.setattr(
            "sys.stderr",
            SimpleNamespace(write=lambda text: answered.append((text, list(received))), flush=lambda: None),
        )
        sender = threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT))
        sender.start()
        hashlib.pbkdf2_hmac("sha256", b"", b"", 1_000_000)
        sender.join()
    assert answered[0] == (STOPPING, []) and received == [signal.SIGINT]


def test_second_ctrl_c_ends_a_process_inside_a_library():
    code = (
        "import hashlib, os, threading\n"
        "from laneformer import interrupts\n"
        "interrupts.PATIENCE = 0.1\n"
        "for n in (1, 2): threading.Timer(0.2 * n, os.kill, (os.getpid(), signal.SIGINT)).start()\n"
        "with interrupts.stop_signals():\n"
        "    hashlib.pbkdf2_hmac('sha256', b'', b'', 1_000_000_000)\n"
    )
    assert run(code) == (130, "", f"{STOPPING}\n{STOPPED}\n")


@pytest.mark.parametrize("status, out", [(0, "kept\ntorn down\n"), (2, "kept\ntorn down\n"), (130, "kept\n")])
def test_interrupted_program_ends_without_teardown(status, out):
    """In teardown, XLA would crash while it computes, or delay the end until it is done."""
    code = (
        "import atexit\nfrom laneformer.interrupts import end\n"
        f"atexit.register(print, 'torn down')\nprint('kept')\nend({status})"
    )
    assert run(code) == (status, out, "")
