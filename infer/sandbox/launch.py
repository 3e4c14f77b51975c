"""Isolates the interpreter that runs this file: a separate mount tree, no privileges, a filter of system calls.

Level `unshare` passes the text of this file, before that of child.py or judge.py, to `python -c`, in new namespaces
made by util-linux's unshare. It runs as root of the machine or of the user namespace, before the interpreter receives
any text of a program.
"""

import ctypes
import os
import signal
import stat

# include/uapi/linux/mount.h, prctl.h, securebits.h and capability.h
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_REMOUNT, MS_BIND, MS_REC, MS_PRIVATE = (
    1,
    2,
    4,
    8,
    32,
    4096,
    1 << 14,
    1 << 18,
)
MNT_DETACH = 2
AT_EMPTY_PATH, AT_RECURSIVE = 0x1000, 0x8000
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_SECCOMP, PR_CAPBSET_DROP = 1, 4, 22, 24
PR_SET_SECUREBITS, PR_SET_NO_NEW_PRIVS, PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL = 28, 38, 47, 4
SECURE = 0b101111  # root has no capabilities, changing the user neither alters nor keeps any, and all this is locked
CAPABILITY_VERSION_3 = 0x20080522
MODE_FILTER = 2
# pivot_root, mount_setattr, capset
CALLS = {"x86_64": (155, 442, 126), "aarch64": (41, 442, 91)}
DEVICES = ("null", "zero", "full", "random", "urandom")
LINKS = {"fd": "/proc/self/fd", "stdin": "/proc/self/fd/0", "stdout": "/proc/self/fd/1", "stderr": "/proc/self/fd/2"}

_libc = ctypes.CDLL(None, use_errno=True)


def _checked(result, what):
    if result == -1:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), what)


def _mount(source, target, kind, flags, options=""):
    made = _libc.mount(source.encode(), target.encode(), kind.encode(), ctypes.c_ulong(flags), options.encode())
    _checked(made, f"mount {target}")


def _call(number, what, *args):
    _checked(_libc.syscall(ctypes.c_long(number), *args), what)


def _prctl(*args):
    _checked(_libc.prctl(*(ctypes.c_ulong(arg) for arg in (*args, 0, 0, 0, 0)[:5])), f"prctl {args[0]}")


def _bind(source, target, setattr_number):
    """Mounts a folder or a file read-only, with everything that is mounted below it."""
    if os.path.isdir(source):
        os.makedirs(target, exist_ok=True)
    else:
        os.makedirs(os.path.dirname(target), exist_ok=True)
        os.close(os.open(target, os.O_CREAT | os.O_WRONLY, 0o644))
    _mount(source, target, "", MS_BIND | MS_REC)
    attributes = (ctypes.c_uint64 * 4)(MS_RDONLY | MS_NOSUID | MS_NODEV, 0, 0, 0)  # MOUNT_ATTR_* have the same values
    path = ctypes.c_char_p(target.encode())
    _call(setattr_number, f"mount_setattr {target}", -100, path, AT_RECURSIVE, ctypes.byref(attributes), 32)


def _devices(root, shm_bytes):
    for name in DEVICES:
        os.close(os.open(f"{root}/dev/{name}", os.O_CREAT | os.O_WRONLY, 0o666))
        _mount(f"/dev/{name}", f"{root}/dev/{name}", "", MS_BIND)
    for name, target in LINKS.items():
        os.symlink(target, f"{root}/dev/{name}")
    os.mkdir(f"{root}/dev/shm")
    _mount("tmpfs", f"{root}/dev/shm", "tmpfs", MS_NOSUID | MS_NODEV, f"size={shm_bytes},mode=1777")


def _tree(spec, pivot_number, setattr_number):
    """Makes the mount tree below an empty folder and moves into it. Nothing of the old tree remains reachable."""
    root = spec["root"]
    _mount("none", "/", "", MS_REC | MS_PRIVATE)
    _mount("tmpfs", root, "tmpfs", MS_NOSUID | MS_NODEV, "size=1m,mode=755")
    for name in ("proc", "dev", "tmp"):
        os.mkdir(f"{root}/{name}")
    # Before the folders, because Python's may be below /tmp.
    _mount("tmpfs", f"{root}/tmp", "tmpfs", MS_NOSUID | MS_NODEV, f"size={spec['tmp_bytes']},mode=1777")
    for name, target in spec["links"].items():
        os.symlink(target, root + name)
    for source, name in spec["folders"]:
        _bind(source, root + name, setattr_number)
    _mount("proc", f"{root}/proc", "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC)
    _devices(root, spec["shm_bytes"])
    os.chdir(root)
    _call(pivot_number, "pivot_root", ctypes.c_char_p(b"."), ctypes.c_char_p(b"."))
    _checked(_libc.umount2(b".", MNT_DETACH), "umount2")
    _mount("none", "/", "", MS_REMOUNT | MS_BIND | MS_RDONLY | MS_NOSUID | MS_NODEV)
    os.chdir("/tmp")


def _drop(spec, capset_number):
    """Drops all privileges permanently, and changes to the user of the spec if it has one."""
    with open("/proc/sys/kernel/cap_last_cap", encoding="ascii") as file:
        last = int(file.read())
    _prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL)
    for capability in range(last + 1):
        _prctl(PR_CAPBSET_DROP, capability)
    _prctl(PR_SET_SECUREBITS, SECURE)
    if spec["user"] is not None:
        os.setgroups([])
        os.setresgid(*[spec["user"]] * 3)
        os.setresuid(*[spec["user"]] * 3)
    header = (ctypes.c_uint32 * 2)(CAPABILITY_VERSION_3, 0)
    none = (ctypes.c_uint32 * 6)()
    _call(capset_number, "capset", ctypes.byref(header), ctypes.byref(none))
    _prctl(PR_SET_NO_NEW_PRIVS, 1)


def _filter(program):
    """Loads a filter of system calls for this process and its children."""

    class Program(ctypes.Structure):
        _fields_ = [("length", ctypes.c_ushort), ("code", ctypes.c_char_p)]

    loaded = Program(len(program) // 8, program)
    _checked(_libc.prctl(PR_SET_SECCOMP, ctypes.c_ulong(MODE_FILTER), ctypes.byref(loaded), 0, 0), "seccomp")


def _first_process(child):
    """Waits for the child and exits with its status. The first process of a namespace does not receive SIGXCPU, so the
    program is the second one. When the first process ends, all others end too.
    """
    os.closerange(0, 64)
    while True:
        pid, status = os.wait()
        if pid == child:
            code = os.waitstatus_to_exitcode(status)
            os._exit(code if code >= 0 else 128 - code)


def enter(spec):
    """Isolates this process. spec: root (an empty folder), folders [source, place], links, sizes, user, filter."""
    handles = {int(name) for name in os.listdir("/proc/self/fd")} - {0, 1, 2}
    for handle in handles:
        try:
            if stat.S_ISDIR(os.fstat(handle).st_mode):  # it would reach the old tree
                os.close(handle)
        except OSError:
            pass
    pivot_number, setattr_number, capset_number = CALLS[os.uname().machine]
    _tree(spec, pivot_number, setattr_number)
    _drop(spec, capset_number)
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # changing the user has reset it
    _prctl(PR_SET_DUMPABLE, 0)
    _filter(bytes.fromhex(spec["filter"]))
    child = os.fork()
    if child:
        _first_process(child)
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    _prctl(PR_SET_DUMPABLE, 1)  # so that its own files in /proc are readable
