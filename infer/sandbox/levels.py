"""Isolation levels: the commands that start the interpreter under bubblewrap, unshare, or resource limits only."""

import functools
import os
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from laneformer.infer.sandbox.seccomp import filter_program

TMP_BYTES, SHM_BYTES = 64 << 20, 16 << 20
# Users that own no files (systemd's range for dynamic users). The limit on processes is per user, so each run has a
# different user.
UIDS = range(61184, 65520)
ENVIRONMENT = {
    "PATH": "/usr/local/bin:/usr/bin:/bin",
    "HOME": "/tmp",
    "LANG": "C.UTF-8",
    "PYTHONHASHSEED": "0",  # verdicts may depend on the order of sets
    # On a machine with many cores, one buffer per thread would exceed the limit on memory.
    "OPENBLAS_NUM_THREADS": "1",
    "OMP_NUM_THREADS": "1",
}
# Mounts folders where an unprivileged user can reach them. (Python may be in /root, which only root may enter.)
BIND = 'while [ "$1" != -- ]; do mount --bind "$1" "$2"; shift 2; done; shift'
FILTER_HANDLE = 9
EXEC = f'filter=$1; shift; exec "$@" {FILTER_HANDLE}<"$filter"'
SITE = "/site"  # the folder in the sandbox that contains numpy
PLACES = ("python", "site", "site/numpy", "site/numpy.libs", "work", "root")


@dataclass(frozen=True)
class Level:
    """One way to isolate programs. `stage` is a folder that `prepare` has filled, readable by every user."""

    name: str
    tools: tuple[str, ...]
    """Programs that the level needs."""
    network: bool
    """Whether a program can reach the network."""
    hidden: Callable[[Path], list[str]]
    """stage -> paths that must be absent or empty in the sandbox."""
    command: Callable[[Path, int], list[str]]
    """(stage, number of the run) -> the command up to and including the interpreter."""
    site: Callable[[Path], str]
    """stage -> the folder in the sandbox that contains numpy, for sys.path."""
    prelude: Callable[[Path, int], dict | None] = lambda stage, run: None
    """(stage, number of the run) -> the argument of `enter` in launch.py; None if the level does not use launch.py."""


@functools.cache
def interpreter() -> Path:
    """The path of the running interpreter, with a virtual environment's link resolved."""
    return Path(os.path.realpath(sys.executable))


@functools.cache
def needed() -> dict[str, Path]:
    """Folders outside /usr that a program needs, by their place below `stage`: Python's files, and numpy."""
    numpy = Path(os.path.realpath(np.__file__)).parent
    found = {
        "python": Path(os.path.realpath(sys.base_prefix)),
        "site/numpy": numpy,
        "site/numpy.libs": numpy.with_name("numpy.libs"),
    }
    return {place: folder for place, folder in found.items() if folder.is_dir() and not folder.is_relative_to("/usr")}


def system() -> tuple[dict[str, str], list[str]]:
    """Links at the root of the system (name -> target), and folders and files that programs need besides `needed`."""
    names = [name for name in ("/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32") if os.path.exists(name)]
    links = {name: os.readlink(name) for name in names if os.path.islink(name)}
    # The last three are for shared libraries on some systems.
    more = ("/etc/alternatives", "/etc/ld.so.cache", "/nix/store")
    return links, ["/usr", *(n for n in names if n not in links), *(n for n in more if os.path.exists(n))]


def mounts() -> list[tuple[str, str]]:
    """(place below `stage`, path in the sandbox) of each folder of `needed`. Python keeps the path that it has on the
    machine.
    """
    return [(place, str(folder) if place == "python" else f"/{place}") for place, folder in needed().items()]


def shown(path: Path) -> Path | None:
    """The mounted folder through which isolated programs can read a file of this machine; None if they cannot read
    it.
    """
    folders = [*map(Path, system()[1]), *needed().values()]
    return next((folder for folder in folders if path.resolve().is_relative_to(folder.resolve())), None)


def is_root() -> bool:
    return os.geteuid() == 0


def tool(name: str) -> str:
    """The full path of a program, because PATH differs inside the sandbox; its name if it is not found."""
    return shutil.which(name) or name


def prepare(stage: Path, level: Level) -> None:
    """Fills an empty folder with the files that the commands of a level use. Raises ConfigError if there is no filter
    of system calls for this machine.
    """
    for place in (".", *PLACES):
        (stage / place).mkdir(exist_ok=True)
        (stage / place).chmod(0o755)  # regardless of the umask
    if level.tools:
        (stage / "filter").write_bytes(filter_program())
    if "bwrap" in level.tools and is_root() and not tool("bwrap").startswith("/usr/"):
        shutil.copyfile(tool("bwrap"), stage / "bwrap")  # another user may be unable to enter its folder
        (stage / "bwrap").chmod(0o755)


def without_rights(run: int) -> list[str]:
    """The command that drops all capabilities permanently and, if it runs as root, changes the user."""
    uid = str(UIDS[run % len(UIDS)])
    user = ["--reuid", uid, "--regid", uid, "--clear-groups"] if is_root() else []
    return [tool("setpriv"), *user, "--pdeathsig", "KILL", "--bounding-set=-all", "--inh-caps=-all", "--no-new-privs"]


def bwrap(stage: Path, run: int) -> list[str]:
    """The command for bubblewrap: no network, only the system's programs and this Python, read-only, and /tmp in
    memory.
    """
    command = [str(stage / "bwrap") if (stage / "bwrap").exists() else tool("bwrap")]
    command += ["--unshare-all", "--unshare-user", "--disable-userns", "--die-with-parent", "--new-session"]
    command += ["--cap-drop", "ALL", "--seccomp", str(FILTER_HANDLE)]
    links, folders = system()
    for name in folders:
        command += ["--ro-bind", name, name]
    for name, target in links.items():
        command += ["--symlink", target, name]
    command += ["--size", str(TMP_BYTES), "--tmpfs", "/tmp"]  # before the next mounts: Python may be below /tmp
    for place, inside in mounts():
        command += ["--ro-bind", str(stage / place if is_root() else needed()[place]), inside]
    command += ["--proc", "/proc", "--dev", "/dev"]
    command += ["--size", str(SHM_BYTES), "--tmpfs", "/dev/shm"]
    command += ["--remount-ro", "/dev", "--remount-ro", "/", "--chdir", "/tmp", "--", str(interpreter())]
    if not is_root():
        return ["/bin/sh", "-ec", EXEC, "sh", str(stage / "filter"), *command]
    binds = [str(name) for place, folder in needed().items() for name in (folder, stage / place)]
    script = ["/bin/sh", "-ec", f"{BIND}; {EXEC}", "sh", *binds, "--", str(stage / "filter")]
    return [tool("unshare"), "--mount", *script, *without_rights(run), *command]


def unshare(stage: Path, run: int) -> list[str]:
    """The command for namespaces by util-linux. Inside them, launch.py makes the same tree as bubblewrap."""
    root = [] if is_root() else ["--map-root-user"]
    spaces = ["--mount", "--net", "--pid", "--ipc", "--uts", "--cgroup", "--fork", "--kill-child"]
    return [tool("setpriv"), "--pdeathsig", "KILL", tool("unshare"), *root, *spaces, str(interpreter())]


def inside_unshare(stage: Path, run: int) -> dict:
    """The argument of `enter` in launch.py."""
    links, folders = system()
    return {
        "root": str(stage / "root"),
        "links": links,
        "folders": [(n, n) for n in folders] + [(str(needed()[place]), inside) for place, inside in mounts()],
        "tmp_bytes": TMP_BYTES,
        "shm_bytes": SHM_BYTES,
        "user": UIDS[run % len(UIDS)] if is_root() else None,
        "filter": (stage / "filter").read_bytes().hex(),
    }


def rlimits(stage: Path, run: int) -> list[str]:
    """The command without isolation. Only the limits of every level on CPU time, memory, processes and file sizes
    apply.
    """
    return [str(interpreter())]


def outside(stage: Path) -> list[str]:
    """Paths of the machine that an isolated program must not reach."""
    return [str(stage), "/etc/passwd", "/var"]


LEVELS = {
    level.name: level
    for level in (
        Level(
            "bwrap",
            tools=("bwrap", "unshare", "setpriv", "mount"),
            network=False,
            hidden=outside,
            command=bwrap,
            site=lambda stage: SITE,
        ),
        Level(
            "unshare",
            tools=("unshare", "setpriv"),
            network=False,
            hidden=outside,
            command=unshare,
            site=lambda stage: SITE,
            prelude=inside_unshare,
        ),
        Level(
            "rlimits",
            tools=(),
            network=True,
            hidden=lambda stage: [],
            command=rlimits,
            site=lambda stage: str(Path(np.__file__).parent.parent),
        ),
    )
}
