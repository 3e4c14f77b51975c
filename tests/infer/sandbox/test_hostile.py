"""Programs that try to pass without solving their problem, and programs that try to reach out of the sandbox. Each one
is run at every isolating level of this machine.
"""

import os
import platform
import socket
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from laneformer.infer.sandbox.sandbox import Limits
from laneformer.infer.sandbox.seccomp import MACHINES, REFUSED, SPECIAL
from tests.support.hostile.programs import CHECK, FORGERIES, NAMES, REACHES, RIGHT
from tests.support.paths import ROOT
from tests.support.sandboxes import ISOLATING, LIMITS, open_sandbox

PATIENT = Limits(cpu_seconds=30, wall_seconds=120)  # for walks through all files
MARK, KEY = f"laneformer-hostile-{os.getpid()}", 0x1A7E0000 + os.getpid() % 0x10000  # of this process
COLUMN = MACHINES[platform.machine()][0]
NUMBERS = {name: numbers[COLUMN] for name, numbers in {**REFUSED, **SPECIAL}.items()}
FOLDERS = ("/tmp", "/var/tmp", "/dev/shm", "/run", "/var/run", str(Path.home()), str(ROOT), "/")


@pytest.fixture(scope="module", params=ISOLATING)
def box(request):
    with open_sandbox(request.param) as made:
        yield made


def outcomes(box, jobs):
    """Name -> (verdict, error) of each job. jobs: name -> arguments of Sandbox.run."""
    with ThreadPoolExecutor(2) as pool:
        running = {name: pool.submit(box.run, *args, **named) for name, (args, named) in jobs.items()}
        return {name: (job.result().verdict, job.result().error) for name, job in running.items()}


def test_forged_verdicts_do_not_pass(box):
    ended = outcomes(box, {n: ((code, CHECK, LIMITS), {"entry_point": "f"}) for n, code in FORGERIES.items()})
    assert {name: how for name, how in ended.items() if how[0] not in ("failed", "killed")} == {}
    assert box.run(RIGHT, CHECK, LIMITS, entry_point="f").verdict == "passed"


def test_names_of_tests_are_out_of_reach(box):
    jobs = {n: ((code, t, LIMITS), {"entry_point": "f", "context": c}) for n, (code, c, t) in NAMES.items()}
    assert {name: how for name, how in outcomes(box, jobs).items() if how[0] != "failed"} == {}


def traces():
    """Traces of hostile programs on this machine: files, shared memory and message queues."""
    found = {os.path.join(folder, n) for folder in FOLDERS if os.path.isdir(folder) for n in os.listdir(folder)}
    lines = [line for kind in ("shm", "msg") for line in Path(f"/proc/sysvipc/{kind}").read_text().splitlines()]
    return {path for path in found if MARK in path} | {line for line in lines if str(KEY) in line.split()[:1]}


def test_nothing_outside_is_reached(box, tmp_path):
    """Every attempt fails and leaves no trace."""
    for folder in ("/tmp", "/var/tmp", "/dev/shm"):
        assert not (Path(folder) / MARK).exists()
    bait = [Path(folder) / f"{MARK}.bait" for folder in ("/tmp", "/var/tmp", "/dev/shm") if os.access(folder, os.W_OK)]
    names = {"mark": MARK, "root": str(ROOT), "data": str(tmp_path), "key": KEY, "pid": os.getpid(), **NUMBERS}
    jobs = {name: ((code.format(**names), "", PATIENT), {}) for name, code in REACHES.items()}
    listening = socket.socket(socket.AF_UNIX)
    try:
        for path in bait:
            path.write_text("bait")
            path.chmod(0o666)
        listening.bind(f"/tmp/{MARK}.socket")
        listening.listen()
        os.chmod(f"/tmp/{MARK}.socket", 0o777)
        ended = outcomes(box, jobs)
        assert {name: how for name, how in ended.items() if how != ("passed", "")} == {}
        left = {str(path) for path in bait} | {f"/tmp/{MARK}.socket"}
        assert traces() == left and all(path.read_text() == "bait" for path in bait)
    finally:
        listening.close()
        for path in (*bait, Path(f"/tmp/{MARK}.socket")):
            path.unlink(missing_ok=True)
    for _ in range(50):
        running = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout
        if f": {MARK}" not in running:
            break
        time.sleep(0.1)
    else:
        raise AssertionError("a process outlived its sandbox")


@pytest.mark.skipif(platform.machine() != "x86_64", reason="other interfaces of the kernel exist on x86-64")
def test_foreign_system_calls_kill(box):
    x32 = "import ctypes\nctypes.CDLL(None).syscall(ctypes.c_long(0x40000000 + 41), 2, 1, 0)"
    assert box.run(x32, "", LIMITS).verdict == "killed"


def test_stubborn_programs_end(box):
    """test_sandbox.py also ends programs that fork without end."""
    short = Limits(cpu_seconds=1, wall_seconds=1)
    ignore = (
        "import signal\nfor s in range(1, 32):\n    try: signal.signal(s, signal.SIG_IGN)\n    except OSError: pass\n"
    )
    programs = {
        "spin": ignore + "while True: pass",
        "sleep": ignore + "import time\nwhile True: time.sleep(9)",
        "silent": ignore + "import os, time\nos.closerange(3, 64)\nwhile True: time.sleep(9)",
        "answers": "import itertools\ndef f(): return itertools.count()",
        "comparison": "class L(list): pass\ndef f():\n    a = [0] * 10**6\n    return iter(lambda: a, 1)",
    }
    jobs = {name: ((code, "for x in f(): pass", short), {}) for name, code in programs.items()}
    began = time.monotonic()
    ended = outcomes(box, jobs)
    assert {verdict for verdict, _ in ended.values()} <= {"timeout", "failed", "memory"}, ended
    assert time.monotonic() - began < 60
    assert box.run("", "assert True", LIMITS).verdict == "passed"
