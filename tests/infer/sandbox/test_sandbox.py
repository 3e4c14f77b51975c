"""The sandbox, and attacks on it. Every attack is executed."""

import contextlib
import os
import shutil
import socket
import subprocess
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import pytest

from laneformer.errors import ConfigError
from laneformer.infer.sandbox import levels, sandbox
from laneformer.infer.sandbox.sandbox import HarnessError, Limits, Sandbox
from tests.support.sandboxes import LIMITS, attack, open_sandbox, usual_level, verdict

SHORT = Limits(cpu_seconds=1, wall_seconds=1)
MARK = "laneformer-left-behind"


@pytest.fixture(scope="module", params=["bwrap", "unshare", "rlimits"])
def box(request):
    """A sandbox of each available level."""
    with open_sandbox(request.param) as made:
        yield made


@pytest.fixture(scope="module")
def usual_box():
    """A sandbox of level auto, or rlimits if none works, for tests that do not depend on the level."""
    with Sandbox(usual_level()) as made:
        yield made


@pytest.fixture
def shut(box):
    """A sandbox of each level that isolates programs."""
    if box.level.network:
        pytest.skip("this level has resource limits only")
    return box


def processes():
    """The command lines of the machine's processes."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            with contextlib.suppress(OSError):
                yield (entry / "cmdline").read_bytes()


def wait_until_gone(mark):
    for _ in range(50):
        if not any(mark.encode() in line for line in processes()):
            return
        time.sleep(0.1)
    raise AssertionError("a process outlived its sandbox")


# ---- verdicts


def test_verdicts_of_right_and_wrong_programs(box):
    add = "def add(a, b):\n    return a + b\n"
    outcome = box.run(add, "assert add(1, 2) == 3", LIMITS)
    assert (outcome.verdict, outcome.error) == ("passed", "") and 0 <= outcome.cpu_seconds < 5
    assert verdict(box, add, "assert add(1, 2) == 4, 'no'") == ("failed", "AssertionError: no")
    assert verdict(box, "def add(a, b)\n", "assert True")[0] == "syntax"
    assert verdict(box, "x = 1\0", "")[0] == "syntax"
    assert verdict(box, "x = '\ud800'", "")[0] == "syntax"  # a lone surrogate, which JSON can contain
    assert verdict(box, "x = " + "(" * 5000, "")[0] == "syntax"
    assert verdict(box, "raise KeyError('k')") == ("failed", "KeyError: 'k'")
    assert verdict(box, "def f():\n    return f()\n", "f()")[0] == "failed"
    assert verdict(box, "raise ValueError('\\ud800')") == ("failed", "ValueError: \ud800")
    assert verdict(box, "def f(): raise ValueError('\\ud800')", "f()") == ("failed", "ValueError: \ud800")
    assert verdict(box, "", "assert undefined == 3")[0] == "failed"


def test_programs_run_in_a_normal_environment(box):
    attack(box, "import numpy, typing, math, collections\nassert numpy.allclose(numpy.arange(3), [0, 1, 2])")
    attack(
        box,
        "from dataclasses import dataclass\n@dataclass\nclass A:\n    x: 'int' = 1\n"
        "import pickle\nassert pickle.loads(pickle.dumps(A())).x == 1",
    )
    attack(
        box,
        "open('note', 'w').write('x')\nassert open('note').read() == 'x'\nimport os\nassert os.listdir('.') =="
        " ['note']",
    )
    attack(box, "import os\nassert os.listdir('.') == []")  # nothing remains of the previous run
    attack(box, "assert __name__ != '__main__'")  # code under `if __name__ == "__main__"` does not run
    attack(box, "import multiprocessing as m\nl = m.get_context('fork').Lock()\nwith l:\n    pass")
    attack(box, f"assert hash('a') == {hash_of_a()}")  # sets have the same order in every run


def hash_of_a():
    python = levels.interpreter()
    done = subprocess.run(
        [python, "-c", "print(hash('a'))"], env={"PYTHONHASHSEED": "0"}, capture_output=True, text=True, check=True
    )
    return int(done.stdout)


@pytest.mark.parametrize(
    "solution",
    [
        "import os; os._exit(0)",
        "import sys; sys.exit(0)",
        "exit(0)",
        "raise SystemExit",
        "raise KeyboardInterrupt",
        "def f(): raise SystemExit(0)",
        "def f():\n    import os\n    os._exit(0)",
        "import os, signal; os.kill(os.getpid(), signal.SIGTERM)",
        "import os\nif os.fork():\n    os._exit(0)",  # the child passes, but the program has ended
        "import atexit, sys\natexit.register(print, 'passed')\nsys.exit(0)",
        "import threading, os, time\nthreading.Thread(target=lambda: os._exit(0)).start()\ntime.sleep(1)",
        # write a report of success to every open file
        (
            'import os\nfor fd in range(64):\n    try: os.write(fd, b\'{"verdict": "passed", "error": "", "cpu":'
            " 0}\\n')\n    except OSError: pass\nos._exit(0)"
        ),
        "print('passed'); print('{\"verdict\": \"passed\"}', flush=True); import os; os._exit(0)",
        "import os; os.closerange(0, 64)",  # without a report, a program has not passed
    ],
)
def test_early_end_fails(usual_box, solution):
    outcome = usual_box.run(solution, "f()\nassert False", LIMITS)
    assert outcome.verdict in ("failed", "killed"), outcome


@pytest.mark.parametrize(
    "spoil",
    [
        "abs = lambda x: 0",
        "def all(x): return True",
        "import builtins\nbuiltins.abs = lambda x: 0\nbuiltins.all = lambda x: True",
        "def check(f): pass",
        "__builtins__ = {'abs': lambda x: 0}",
    ],
)
def test_tests_use_original_builtins(usual_box, spoil):
    test = "def check(f):\n    assert all([abs(f() - 3) < 1])\ncheck(f)"
    assert usual_box.run(f"def f(): return 3\n{spoil}", test, LIMITS, entry_point="f").verdict == "passed"
    assert usual_box.run(f"def f(): return 4\n{spoil}", test, LIMITS, entry_point="f").verdict == "failed"


@pytest.mark.parametrize(
    "solution",
    [
        (
            "from collections import *\nP = namedtuple('P', 'x y')\ndef f(n=2): return [P(1, 2), (1, 2), Counter(),"
            " deque(), {1}.union()][0]"
        ),
        "def f(n=2): return (1, 2) if n == 0 else f(n - 1)",
        "import numpy\ndef f(): return tuple(numpy.arange(1, 3))",
        "def sorted(): return (1, 2)\nf = sorted",
    ],
)
def test_results_of_usual_types_pass(usual_box, solution):
    assert usual_box.run(solution, "assert f() == (1, 2)", LIMITS, entry_point="f").verdict == "passed"
    assert usual_box.run(solution, "assert f() == (1, 3)", LIMITS, entry_point="f").verdict == "failed"


def test_forked_child_cannot_report(box):
    fork = "import os\npid = os.fork()\nif pid:\n    os.waitpid(pid, 0)\n    os._exit(0)"
    assert verdict(box, fork, "assert True")[0] == "failed"


def test_hostile_exception_text_fails(usual_box):
    code = "class E(Exception):\n    def __str__(self):\n        {}\nraise E"
    assert verdict(usual_box, code.format("raise SystemExit"))[0] == "failed"
    assert verdict(usual_box, code.format("import os; os._exit(0)"))[0] == "failed"
    assert len(verdict(usual_box, code.format("return 'x' * 10**7"))[1]) <= 500


def test_replaced_functions_do_not_change_the_verdict(usual_box):
    spoil = "import os, json, builtins, time\nos.write = os.pread = os._exit = json.dumps = time.process_time = None\n"
    assert verdict(usual_box, spoil, "assert True") == ("passed", "")
    assert verdict(usual_box, spoil + "builtins.print = None", "assert False")[0] == "failed"


# ---- limits


@pytest.mark.parametrize("box", ["bwrap", "unshare", pytest.param("rlimits", marks=pytest.mark.slow)], indirect=True)
def test_time_limits_end_programs(box):
    for spin in ("while True: pass", "import signal\nsignal.signal(signal.SIGXCPU, signal.SIG_IGN)\nwhile True: pass"):
        assert verdict(box, spin, limits=Limits(cpu_seconds=1, wall_seconds=60)) == (
            "timeout",
            "more than 1 s of CPU time",
        )
    began = time.monotonic()
    assert verdict(box, "import time; time.sleep(600)", limits=SHORT) == ("timeout", "no end after 1 s")
    assert time.monotonic() - began < 15


def test_memory_limit_is_reported(box):
    assert verdict(box, "x = bytearray(6 << 30)") == ("memory", "MemoryError: ")
    attack(box, "try: x = bytearray(6 << 30)\nexcept MemoryError: pass")
    if os.geteuid() or box.level.name != "rlimits":  # root may
        attack(
            box,
            "import resource\ntry: resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY,) * 2)\n"
            "except (ValueError, OSError): pass\nelse: raise SystemExit",
        )
    assert verdict(box, "import ctypes; ctypes.string_at(0)") == ("killed", "SIGSEGV")


def test_output_is_discarded(box):
    began = time.monotonic()
    attack(
        box, "import sys\nfor _ in range(100):\n    sys.stdout.write('x' * 2**20)\n    sys.stderr.write('x' * 2**20)"
    )
    assert time.monotonic() - began < 15
    assert verdict(box, "assert input() == ''")[0] == "failed"  # input is empty, too
    # Write to all open files, and so also into the report.
    flood = "import os\nfor _ in range(100):\n    for fd in range(3, 64):\n        try: os.write(fd, b'x' * 2**20)\n"
    flood += "        except OSError: pass"
    assert verdict(box, flood)[0] == "failed"


def test_file_limits_hold(box):
    big = "try: open('big', 'wb').write(b'x' * (32 << 20))\nexcept OSError: pass\n"
    attack(box, big + "import os\nassert os.path.getsize('big') <= 16 << 20")
    attack(
        box,
        "files = []\ntry:\n    for n in range(100): files.append(open(f'{n}', 'w'))\nexcept OSError: pass\nassert"
        " len(files) < 64",
    )


def test_full_disk_fails(shut):
    fill = (
        "n = 0\ntry:\n    for n in range(100): open(f'{n}', 'wb').write(b'x' * (8 << 20))\nexcept OSError: pass\nassert"
        " 4 < n < 9, n"
    )
    attack(shut, fill)


FORKS = """
import os, time
children = 0
try:
    while children < 1000:
        if os.fork() == 0:
            time.sleep(60)
            os._exit(0)
        children += 1
except OSError:
    pass
assert 5 < children < 64, children
"""


def test_fork_bomb_is_stopped(box):
    if box.level.name == "rlimits":
        pytest.skip("here the limit counts all processes of the user, and none of root's")
    attack(box, FORKS)
    bomb = "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass"
    assert box.run(bomb, "", Limits(cpu_seconds=1, wall_seconds=0.4)).verdict == "timeout"
    attack(box, "import os\nif os.fork() == 0: os._exit(0)\nos.wait()")  # the next run is not affected


def test_no_process_or_file_remains(shut):
    daemon = "import subprocess, sys\n"
    daemon += (
        f"subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)', '{MARK}'], start_new_session=True)"
    )
    attack(shut, daemon)
    assert verdict(shut, daemon + "\nraise ValueError")[0] == "failed"
    assert verdict(shut, daemon + "\nimport time; time.sleep(60)", limits=SHORT)[0] == "timeout"
    wait_until_gone(MARK)


# ---- unreachable resources


def test_network_is_unreachable(shut):
    reach = "import socket\ntry: socket.create_connection({}, 3)\nexcept OSError: pass\nelse: raise SystemExit"
    with socket.create_server(("127.0.0.1", 0)) as here:
        attack(shut, reach.format(here.getsockname()))
    attack(shut, reach.format(("192.0.2.1", 80)))
    attack(
        shut, "assert {line.split(':')[0].strip() for line in open('/proc/net/dev').readlines()[2:]} <= {'lo', 'sit0'}"
    )
    with socket.socket(socket.AF_UNIX) as here:  # an abstract name, which is in the network namespace
        here.bind("\0" + MARK)
        here.listen()
        name = "\\0" + MARK
        attack(
            shut,
            f"import socket\ntry: socket.socket(socket.AF_UNIX).connect('{name}')\nexcept OSError: pass\nelse: raise"
            " SystemExit",
        )


def test_home_and_environment_are_hidden(shut, monkeypatch):
    monkeypatch.setenv("SECRET_TOKEN", "hidden")
    attack(shut, "import os\nassert 'SECRET_TOKEN' not in os.environ")
    attack(
        shut,
        "import glob\nfor file in glob.glob('/proc/[0-9]*/environ'):\n    try: text = open(file, 'rb').read()\n"
        "    except OSError: continue\n    assert b'SECRET' not in text",
    )
    python = levels.interpreter()
    for home in {Path("/root"), Path("/home"), Path(os.path.expanduser("~"))}:  # a Python in it is visible
        names = [python.relative_to(home).parts[0]] if python.is_relative_to(home) else []
        attack(shut, f"import os\nassert not os.path.exists({str(home)!r}) or os.listdir({str(home)!r}) == {names}")


def test_other_processes_are_hidden(shut):
    attack(shut, "import os\nassert len([p for p in os.listdir('/proc') if p.isdigit()]) < 4")
    attack(
        shut,
        f"import os, signal\nfor pid in ({os.getpid()}, {os.getppid()}):\n    try: os.kill(pid, signal.SIGKILL)\n"
        "    except OSError: pass\n    else: raise SystemExit",
    )
    shut.run("import os, signal; os.kill(-1, signal.SIGKILL)", "", LIMITS)
    shut.run("import os, signal; os.kill(os.getppid(), signal.SIGKILL)", "", LIMITS)
    attack(shut, "pass")


def test_capabilities_are_dropped(shut):
    if os.geteuid() == 0:
        attack(
            shut,
            "import os\nassert os.getuid() and os.geteuid() and os.getgid() and set(os.getgroups()) <= {os.getgid()}",
        )
        attack(shut, "import os\ntry: os.setuid(0)\nexcept OSError: pass\nelse: raise SystemExit")
    caps = (
        "{k: int(v, 16) for k, v in (line.split(':') for line in open('/proc/self/status') if line.startswith('Cap'))}"
    )
    attack(shut, f"caps = {caps}\nassert len(caps) == 5 and not any(caps.values()), caps")
    attack(shut, "assert 'NoNewPrivs:\\t1' in open('/proc/self/status').read()")
    attack(
        shut, "import ctypes\nlibc = ctypes.CDLL(None)\nassert libc.mount(b'none', b'/tmp', b'tmpfs', 0, None) == -1"
    )
    attack(
        shut,
        "import os\ntry: os.mknod('disk', 0o60660, os.makedev(8, 0))\nexcept OSError: pass\nelse: raise SystemExit",
    )


def test_other_files_are_hidden(shut, tmp_path):
    secret = tmp_path / "secret"
    secret.write_text("hidden")
    secret.chmod(0o644)
    hidden = (secret, tmp_path, Path(__file__), "/etc/passwd", "/etc/shadow", "/var", "/run", "/sys", "/boot")
    attack(
        shut,
        f"import os\nfor path in {[*map(str, hidden)]}: assert not os.path.exists(path), path\n"
        "assert os.listdir('/tmp') == []",
    )


def test_only_the_scratch_folder_is_writable(shut):
    python = str(levels.interpreter())
    paths = [
        "/x",
        "/usr/x",
        "/usr/bin/env",
        "/dev/x",
        "/proc/x",
        "/etc/x",
        "/site/x",
        python,
        os.path.dirname(python) + "/x",
    ]
    attack(
        shut,
        f"for path in {paths}:\n    try: open(path, 'ab')\n    except OSError: pass\n    else: raise ValueError(path)",
    )
    fill = (
        "n = 0\ntry:\n    for n in range(100): open(f'/dev/shm/{n}', 'wb').write(b'x' * (4 << 20))\nexcept OSError:"
        " pass\n"
    )
    attack(shut, fill + "assert n < 5, n")


def test_namespaces_are_refused_inside(shut):
    new_user = 0x10000000
    attack(shut, f"import ctypes\nassert ctypes.CDLL(None, use_errno=True).unshare({new_user}) == -1")


# ---- the sandbox itself


def test_concurrent_runs_beside_jax_threads(box):
    """Programs start from threads of a process that runs JAX. Forking such a process would be a warning, which pytest
    turns into an error.
    """
    busy = jax.jit(lambda x: x @ x)
    with ThreadPoolExecutor(4) as pool:
        jobs = [pool.submit(box.run, f"x = {n}", f"assert x % 2 == 0, {n}", LIMITS) for n in range(8)]
        busy(jax.numpy.ones((500, 500))).block_until_ready()
        assert [job.result().verdict for job in jobs] == ["passed", "failed"] * 4


def test_close_kills_programs_and_removes_the_folder():
    made = Sandbox("rlimits")
    stage, ended = made._stage, []

    def wait():
        ended.append(
            made.run(f"import time; x = '{MARK}'; time.sleep(600)", "", Limits(cpu_seconds=5, wall_seconds=500))
        )

    thread = threading.Thread(target=wait)
    thread.start()
    while not made._running:
        time.sleep(0.01)
    time.sleep(0.3)
    made.close()
    thread.join(20)
    assert not thread.is_alive() and ended[0].verdict == "killed" and not stage.exists()
    with pytest.raises(HarnessError, match="was closed"):
        made.run("", "", LIMITS)


def test_failed_start_is_a_harness_error(box, monkeypatch):
    broken = levels.Level(
        "bwrap", (), False, lambda stage: [], lambda stage, run: ["sh", "-c", "echo no luck >&2; exit 1"], str
    )
    monkeypatch.setattr(box, "level", broken)
    with pytest.raises(HarnessError, match="did not start: no luck"):
        box.run("", "", LIMITS)
    hangs = levels.Level("bwrap", (), False, lambda stage: [], lambda stage, run: ["sleep", "600"], str)
    monkeypatch.setattr(box, "level", hangs)
    with pytest.raises(HarnessError, match="did not start"):
        box.run("", "", SHORT)
    missing = levels.Level("bwrap", (), False, lambda stage: [], lambda stage, run: ["/nonexistent/bwrap"], str)
    monkeypatch.setattr(box, "level", missing)
    with pytest.raises(HarnessError, match="no program could be started"):
        box.run("", "", SHORT)


def test_bubblewrap_elsewhere_on_the_path_is_used(tmp_path, monkeypatch):
    found = shutil.which("bwrap")
    if found is None:
        pytest.skip("bubblewrap is not installed")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    shutil.copy(found, tmp_path / "bwrap")
    with Sandbox("bwrap") as made:
        command = made.level.command(made._stage, 1)
        assert found not in command and verdict(made, "x = 1", "assert x == 1") == ("passed", "")
    (tmp_path / "bwrap").write_text("#!/bin/sh\nexit 3\n")
    with pytest.raises(ConfigError, match="does not work here"):
        Sandbox("bwrap")


def test_failed_self_test_is_refused(monkeypatch):
    """The self-test finds levels that claim to isolate programs but do not."""
    real = levels.LEVELS["rlimits"]
    for change, what in [
        ({"network": False}, "keeps the network out"),
        ({"hidden": lambda stage: ["/usr"]}, "hides /usr"),
        ({"command": lambda stage, run: ["false"]}, "does not work here"),
        (
            {"site": lambda stage: "/nonexistent", "command": lambda stage, run: [str(levels.interpreter()), "-S"]},
            "runs a program",
        ),
    ]:
        fake = levels.Level(**{**vars(real), **change})
        monkeypatch.setitem(sandbox.LEVELS, "rlimits", fake)
        with pytest.raises(ConfigError, match=what):
            Sandbox("rlimits")


def test_missing_and_unknown_levels_are_refused(monkeypatch, caplog):
    with pytest.raises(ConfigError, match="auto, bwrap, unshare, rlimits"):
        Sandbox("docker")
    there = {"unshare", "setpriv", "mount"}
    monkeypatch.setattr(shutil, "which", lambda tool: tool if tool in there else None)
    assert sandbox._choose("auto").name == "unshare" and "bubblewrap is not installed" in caplog.text
    with pytest.raises(ConfigError, match="apt install bubblewrap"):
        sandbox._choose("bwrap")
    there.clear()
    with pytest.raises(ConfigError, match=r"--sandbox rlimits .*virtual machine"):  # auto never chooses it
        sandbox._choose("auto")
    assert sandbox._choose("rlimits").name == "rlimits"
