"""The filter of system calls that every isolating level loads, as a program for the kernel's packet filter.

It refuses sockets of all families except AF_UNIX (a network namespace does not confine AF_VSOCK), new namespaces and
mounts, and calls that reach into other processes or large parts of the kernel. The numbers of system calls are from
Linux's arch/x86/entry/syscalls/syscall_64.tbl and include/uapi/asm-generic/unistd.h. The layout of `struct
seccomp_data` and the return values are from include/uapi/linux/seccomp.h.
"""

import errno
import os
import struct
from dataclasses import dataclass

from laneformer.errors import ConfigError

AF_UNIX = 1
# CLONE_NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET
NAMESPACES = 0x20000 | 0x2000000 | 0x4000000 | 0x8000000 | 0x10000000 | 0x20000000 | 0x40000000
KILL, ERRNO, ALLOW = 0x80000000, 0x00050000, 0x7FFF0000
LOAD, AND, EQUAL, AT_LEAST, ANY_BIT, RETURN = 0x20, 0x54, 0x15, 0x35, 0x45, 0x06
NUMBER, ARCHITECTURE, ARGUMENTS = 0, 4, 16  # offsets in struct seccomp_data
X32 = 0x40000000  # bit that marks calls of the x32 interface

# Name -> number on x86-64 and on 64-bit ARM; None if the call does not exist there.
SPECIAL = {"socket": (41, 198), "socketpair": (53, 199), "clone": (56, 220), "clone3": (435, 435)}
REFUSED = {
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "process_madvise": (440, 440),
    "pidfd_getfd": (438, 438),
    "kcmp": (312, 272),
    "keyctl": (250, 219),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "bpf": (321, 280),
    "userfaultfd": (323, 282),
    "perf_event_open": (298, 241),
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "unshare": (272, 97),
    "setns": (308, 268),
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fspick": (433, 433),
    "mount_setattr": (442, 442),
    "open_tree_attr": (467, 467),
    "name_to_handle_at": (303, 264),
    "open_by_handle_at": (304, 265),
    "fanotify_init": (300, 262),
    "fanotify_mark": (301, 263),
    "quotactl": (179, 60),
    "quotactl_fd": (443, 443),
    "swapon": (167, 224),
    "swapoff": (168, 225),
    "acct": (163, 89),
    "reboot": (169, 142),
    "kexec_load": (246, 104),
    "kexec_file_load": (320, 294),
    "init_module": (175, 105),
    "finit_module": (313, 273),
    "delete_module": (176, 106),
    "syslog": (103, 116),
    "lookup_dcookie": (212, 18),
    "nfsservctl": (180, 42),
    "uselib": (134, None),
    "vhangup": (153, 58),
    "iopl": (172, None),
    "ioperm": (173, None),
    "settimeofday": (164, 170),
    "clock_settime": (227, 112),
    "clock_adjtime": (305, 266),
    "adjtimex": (159, 171),
    "sethostname": (170, 161),
    "setdomainname": (171, 162),
}
MACHINES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}  # column, AUDIT_ARCH


@dataclass(frozen=True)
class Jump:
    """A conditional jump to `label`. If the condition is false, it jumps to `otherwise`, or continues with the next
    instruction if that is "".
    """

    code: int
    value: int
    label: str
    otherwise: str = ""


def filter_program(machine: str | None = None) -> bytes:
    """The filter as an array of `struct sock_filter`.

    machine: as in `os.uname`; by default this machine. Raises ConfigError for a machine that is not in MACHINES.
    """
    machine = machine or os.uname().machine
    if machine not in MACHINES:
        raise ConfigError(
            f"the sandbox has no filter of system calls for {machine}: run it on {' or '.join(MACHINES)}, or choose"
            " --sandbox rlimits in a virtual machine"
        )
    column, architecture = MACHINES[machine]
    number = {name: numbers[column] for name, numbers in SPECIAL.items()}
    code = [(LOAD, ARCHITECTURE), Jump(EQUAL, architecture, "known", "kill"), "known", (LOAD, NUMBER)]
    if machine == "x86_64":
        code.append(Jump(AT_LEAST, X32, "kill"))
    code += [Jump(EQUAL, number[name], "family") for name in ("socket", "socketpair")]
    code += [Jump(EQUAL, number[name], name) for name in ("clone", "clone3")]
    refused = (numbers[column] for numbers in REFUSED.values())
    code += [Jump(EQUAL, call, "refuse") for call in refused if call is not None]
    code += [(RETURN, ALLOW)]
    code += ["family", (LOAD, ARGUMENTS), Jump(EQUAL, AF_UNIX, "allow"), (RETURN, ERRNO | errno.EAFNOSUPPORT)]
    code += ["clone", (LOAD, ARGUMENTS), Jump(ANY_BIT, NAMESPACES, "refuse", "allow")]
    code += ["clone3", (RETURN, ERRNO | errno.ENOSYS)]  # its flags are in memory; the C library falls back to clone
    code += ["kill", (RETURN, KILL), "refuse", (RETURN, ERRNO | errno.EPERM), "allow", (RETURN, ALLOW)]
    return _assemble(code)


def _assemble(code: list) -> bytes:
    """Encodes instructions, jumps and labels (strings)."""
    labels, at = {}, 0
    for line in code:
        if isinstance(line, str):
            labels[line] = at
        else:
            at += 1
    words, at = [], 0
    for line in code:
        if isinstance(line, str):
            continue
        at += 1
        if isinstance(line, Jump):
            targets = (labels[line.label] - at, labels[line.otherwise] - at if line.otherwise else 0)
            words.append(struct.pack("=HBBI", line.code, *targets, line.value))
        else:
            words.append(struct.pack("=HBBI", line[0], 0, 0, line[1]))
    return b"".join(words)
