"""The sandbox for a user without rights, whose Python is below /tmp, with and without user namespaces."""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest

from tests.support.paths import ROOT
from tests.support.sandboxes import ISOLATING, open_sandbox

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root to become another user"),
    pytest.mark.skipif(shutil.which("setpriv") is None, reason="setpriv is not installed"),
]
USER = 65534
BIND = 'while [ "$1" != -- ]; do mount --bind "$1" "$2"; shift 2; done; shift; exec "$@"'
CODE = """
import sys, os
from laneformer.infer.sandbox.sandbox import Sandbox, Limits
assert os.getuid() != 0
with Sandbox(sys.argv[1]) as box:
    for program, test in (("def f(): return 3", "assert f() == 3"),
                          ("import os", "assert not os.path.exists(%r)" % sys.argv[2]),
                          ("import numpy", "assert numpy.arange(3).sum() == 3")):
        outcome = box.run(program, test, Limits(cpu_seconds=5, wall_seconds=20))
        print(outcome.verdict, outcome.error)
"""


@pytest.fixture
def place():
    """A folder below /tmp that every user can enter."""
    with tempfile.TemporaryDirectory(dir="/tmp") as name:
        for part in (".", "python", "site", "repository"):
            Path(name, part).mkdir(exist_ok=True)
            Path(name, part).chmod(0o755)
        yield Path(name)


def run(place, level, *enter):
    """Runs CODE with this machine's Python, which is mounted in `place`. enter: command that runs it as a user."""
    python = Path(os.path.realpath(sys.executable)).relative_to(os.path.realpath(sys.base_prefix))
    folders = {"python": sys.base_prefix, "site": Path(np.__file__).parents[1], "repository": ROOT}
    binds = [str(each) for name, folder in folders.items() for each in (os.path.realpath(folder), place / name)]
    paths = f"PYTHONPATH={place}/repository:{place}/site"
    environment = ["env", "-i", "HOME=/tmp", "PATH=/usr/local/bin:/usr/bin:/bin", "PYTHONDONTWRITEBYTECODE=1", paths]
    program = [*environment, str(place / "python" / python), "-c", CODE, level, str(place / "repository")]
    command = ["unshare", "--mount", "sh", "-ec", BIND, "sh", *binds, "--", *enter, *program]
    return subprocess.run(command, check=False, cwd="/", capture_output=True, text=True, timeout=100)


@pytest.mark.parametrize("level", ISOLATING)
def test_users_without_rights_can_isolate_programs(place, level):
    open_sandbox(level).close()  # skips the test where the machine cannot isolate
    found = run(
        place, level, "setpriv", "--reuid", str(USER), "--regid", str(USER), "--clear-groups", "--inh-caps=-all"
    )
    assert found.stdout.split() == ["passed"] * 3, found.stdout + found.stderr


@pytest.mark.parametrize("level", ISOLATING)
def test_forbidden_namespaces_are_reported(place, level):
    """A limit of one user namespace, which the user's own one takes, forbids all further ones."""
    open_sandbox(level).close()
    limit = (
        f'echo 1 > /proc/sys/user/max_user_namespaces; exec unshare --user --map-user={USER} --map-group={USER} "$@"'
    )
    found = run(place, level, "unshare", "--user", "--map-root-user", "sh", "-ec", limit, "sh")
    last = found.stderr.strip().splitlines()[-1]
    assert found.returncode == 1 and f"ConfigError: sandbox {level} does not work here" in last, found
    assert "allow them" in last and "--sandbox rlimits" in last
