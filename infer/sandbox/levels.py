"""Isolation levels: the command that starts the interpreter under bubblewrap, unshare, or resource limits alone."""

import functools
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

TMP_BYTES, SHM_BYTES = 64 << 20, 16 << 20
# Users that own nothing (systemd's range for dynamic users). The limit on processes counts per user, so each run gets
# another user.
UIDS = range(61184, 65520)
ENVIRONMENT = {
    "PATH": "/usr/local/bin:/usr/bin:/bin",
    "HOME": "/tmp",
    "LANG": "C.UTF-8",
    "PYTHONHASHSEED": "0",  # verdicts may depend on the order of sets
    # On a machine with many cores one buffer per thread exceeds the limit on memory.
    "OPENBLAS_NUM_THREADS": "1",
    "OMP_NUM_THREADS": "1",
}
# Mounts folders where an unprivileged user can reach them: only root may enter /root, which may contain the Python.
BIND = 'while [ "$1" != -- ]; do mount --bind "$1" "$2"; shift 2; done; shift'
# Mounts empty folders over others, up to the next --.
HIDE = 'while [ "$1" != -- ]; do mount -t tmpfs -o size=4k,mode=555 tmpfs "$1"; shift; done; shift'
WORK = f'mount -t tmpfs -o size={TMP_BYTES},mode=1777 tmpfs "$1"; cd "$1"; shift'
EXEC = 'exec "$@"'
# A child of the shell: the first process of a namespace does not receive SIGXCPU.
RUN = '"$@"'


@dataclass(frozen=True)
class Level:
    """One way to isolate programs. `stage` is an empty folder with the subfolders `PLACES`, open to every user."""

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


@functools.cache
def interpreter() -> Path:
    """The running interpreter, not a virtual environment's link to it."""
    return Path(os.path.realpath(sys.executable))


@functools.cache
def needed() -> dict[str, Path]:
    """Folders that a program needs outside /usr, by their place below `stage`: Python's files, and numpy."""
    numpy = Path(os.path.realpath(np.__file__)).parent
    found = {
        "python": Path(os.path.realpath(sys.base_prefix)),
        "site/numpy": numpy,
        "site/numpy.libs": numpy.with_name("numpy.libs"),
    }
    return {place: folder for place, folder in found.items() if folder.is_dir() and not folder.is_relative_to("/usr")}


PLACES = ("python", "site", "site/numpy", "site/numpy.libs", "work")


def is_root() -> bool:
    return os.geteuid() == 0


def without_rights(run: int) -> list[str]:
    """The command that drops all capabilities for good and, for root, changes the user."""
    uid = str(UIDS[run % len(UIDS)])
    user = ["--reuid", uid, "--regid", uid, "--clear-groups"] if is_root() else []
    return ["setpriv", *user, "--pdeathsig", "KILL", "--bounding-set=-all", "--inh-caps=-all", "--no-new-privs"]


def staged(stage: Path) -> list[str]:
    return [str(name) for place, folder in needed().items() for name in (folder, stage / place)]


def bwrap(stage: Path, run: int) -> list[str]:
    """bubblewrap: no network; only the system's programs and this Python, read-only; /tmp in memory."""
    command = [
        "bwrap",
        "--unshare-all",
        "--unshare-user",
        "--disable-userns",
        "--die-with-parent",
        "--new-session",
        "--cap-drop",
        "ALL",
    ]
    command += ["--ro-bind", "/usr", "/usr"]
    for name in ("/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32"):
        if os.path.islink(name):
            command += ["--symlink", os.readlink(name), name]
        elif os.path.isdir(name):
            command += ["--ro-bind", name, name]
    for name in ("/etc/alternatives", "/etc/ld.so.cache", "/nix/store"):  # for shared libraries on some systems
        command += ["--ro-bind-try", name, name]
    for place, folder in needed().items():
        command += [
            "--ro-bind",
            str(stage / place if is_root() else folder),
            str(folder) if place == "python" else f"/{place}",
        ]
    command += ["--proc", "/proc", "--dev", "/dev"]
    for name, size in (("/tmp", TMP_BYTES), ("/dev/shm", SHM_BYTES)):
        command += ["--size", str(size), "--tmpfs", name]
    command += ["--remount-ro", "/dev", "--remount-ro", "/", "--chdir", "/tmp", "--", str(interpreter())]
    if not is_root():
        return command
    return [
        "unshare",
        "--mount",
        "sh",
        "-ec",
        f"{BIND}; {EXEC}",
        "sh",
        *staged(stage),
        "--",
        *without_rights(run),
        *command,
    ]


def unshare(stage: Path, run: int) -> list[str]:
    """Namespaces of util-linux: no network, homes hidden; other files stay readable and, without root, writable."""
    root = [] if is_root() else ["--map-root-user"]
    spaces = ["--mount", "--net", "--pid", "--ipc", "--uts", "--fork", "--kill-child", "--mount-proc"]
    script = f"{BIND}; {HIDE}; {WORK}; {RUN}"
    python = stage / "python" / interpreter().relative_to(needed()["python"]) if "python" in needed() else interpreter()
    shut = [*staged(stage), "--", *homes(stage), "--", str(stage / "work"), *without_rights(run), str(python)]
    return ["setpriv", "--pdeathsig", "KILL", "unshare", *root, *spaces, "sh", "-ec", script, "sh", *shut]


def homes(stage: Path) -> list[str]:
    """Home folders, without those that contain files a program needs (a HOME such as /)."""
    known = {Path("/root"), Path("/home"), Path(os.path.realpath(os.path.expanduser("~")))}
    return sorted(
        str(home)
        for home in known
        if home.is_dir() and not any(Path(kept).is_relative_to(home) for kept in ("/usr", stage))
    )


def rlimits(stage: Path, run: int) -> list[str]:
    """No isolation: only the limits on CPU time, memory, processes and file sizes that every level has."""
    return [str(interpreter())]


LEVELS = {
    level.name: level
    for level in (
        Level(
            "bwrap",
            tools=("bwrap", "unshare", "setpriv", "mount"),
            network=False,
            hidden=lambda stage: [str(stage), "/etc/passwd", "/var"],
            command=bwrap,
            site=lambda stage: "/site",
        ),
        Level(
            "unshare",
            tools=("unshare", "setpriv", "mount"),
            network=False,
            hidden=homes,
            command=unshare,
            site=lambda stage: f"{stage}/site",
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
