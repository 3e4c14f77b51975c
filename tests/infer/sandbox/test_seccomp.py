"""The filter of system calls, tested with an interpreter of its instructions."""

import errno
import socket
import struct

import pytest

from laneformer.errors import ConfigError
from laneformer.infer.sandbox.seccomp import MACHINES, NAMESPACES, REFUSED, SPECIAL, filter_program

ALLOWED, KILLED = "allowed", "killed"
OTHERS = {"x86_64": (0, 1, 2, 3, 9, 57, 59, 302), "aarch64": (56, 57, 63, 64, 222, 221, 261)}  # read, write, exec, ...


def filtered(program, architecture, number, *args):
    """The result of the filter for a call: ALLOWED, KILLED or an error number."""
    data = struct.pack("<iIQ6Q", number, architecture, 0, *args, *[0] * (6 - len(args)))
    code, at, value = [*struct.iter_unpack("=HBBI", program)], 0, 0
    while True:
        operation, yes, no, operand = code[at]
        at += 1
        match operation:
            case 0x20:
                [value] = struct.unpack_from("<I", data, operand)
            case 0x15:
                at += yes if value == operand else no
            case 0x35:
                at += yes if value >= operand else no
            case 0x45:
                at += yes if value & operand else no
            case 0x06:
                kind = operand & 0xFFFF0000
                return {0x7FFF0000: ALLOWED, 0x80000000: KILLED}.get(kind, operand & 0xFFFF)
            case _:
                raise AssertionError(f"instruction {operation:#x}")


@pytest.mark.parametrize("machine", MACHINES)
def test_filter_returns_the_table(machine):
    program, (column, architecture) = filter_program(machine), MACHINES[machine]
    run = lambda number, *args: filtered(program, architecture, number, *args)  # noqa: E731
    assert {name: run(numbers[column]) for name, numbers in REFUSED.items() if numbers[column] is not None} == {
        name: errno.EPERM for name, numbers in REFUSED.items() if numbers[column] is not None
    }
    assert {run(number) for number in OTHERS[machine]} == {ALLOWED}
    number = {name: numbers[column] for name, numbers in SPECIAL.items()}
    for name in ("socket", "socketpair"):
        families = {family: run(number[name], family, 1, 0) for family in (*range(50), 1 << 31, (1 << 32) + 2)}
        assert [family for family, result in families.items() if result == ALLOWED] == [socket.AF_UNIX]
        assert {*families.values()} == {ALLOWED, errno.EAFNOSUPPORT}
    assert run(number["clone3"]) == errno.ENOSYS
    assert run(number["clone"], 17) == run(number["clone"], 0x3D0F00) == ALLOWED  # fork, thread
    flags = [1 << bit for bit in range(32) if NAMESPACES & 1 << bit]
    assert len(flags) == 7 and {run(number["clone"], flag | 17) for flag in flags} == {errno.EPERM}


def test_foreign_interfaces_are_killed():
    program = filter_program("x86_64")
    assert filtered(program, 0x40000003, 1) == KILLED  # 32-bit calls
    assert filtered(program, MACHINES["x86_64"][1], 0x40000000 + 41, 2) == KILLED  # x32
    assert filtered(filter_program("aarch64"), 0x40000028, 1) == KILLED


def test_unknown_machines_are_refused():
    with pytest.raises(ConfigError, match="riscv64"):
        filter_program("riscv64")
