"""Runs one program inside a sandbox: infer/sandbox/sandbox.py passes the text of this file to `python -c`.

Standard input is a file: `size` bytes of JSON (solution, test, entry_point, limits, path), then a nonce. The verdict
is written to standard output as JSON lines. The nonce is read only after the last test has passed, and only a report
that contains it counts, so that a program that ends early, with any exit status or output, has not passed.
"""

import builtins
import json
import os
import resource
import signal
import sys
import time
import types

# Methods with which an object of the solution's classes could satisfy the tests.
OPERATORS = {
    *("__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__", "__bool__", "__len__", "__iter__", "__next__"),
    *("__getitem__", "__contains__", "__abs__", "__add__", "__radd__", "__sub__", "__rsub__", "__mul__", "__rmul__"),
    *("__truediv__", "__rtruediv__", "__floordiv__", "__mod__", "__pow__", "__neg__", "__pos__", "__float__"),
    *("__int__", "__index__", "__complex__", "__round__", "__array__", "__array_ufunc__", "__array_function__"),
    *("__getattr__", "__getattribute__", "__class__"),
}


def checked(function, module, isinstance=isinstance, type=type, id=id, vars=vars):
    """`function`, refusing results whose classes redefine operators, such as an object that equals everything."""

    def own(kind):
        """The first operator that a class of the solution redefines."""
        for base in type.mro(kind):
            if base.__flags__ & 1 << 9 and base.__module__ == module.__name__:  # a heap type that the solution made
                for name in vars(base):
                    if name in OPERATORS:
                        return f"{base.__name__}.{name}"
        return None

    def call(*args, **named):
        result = function(*args, **named)
        left, seen = [result], set()
        while left:
            value = left.pop()
            kind = type(value)
            if redefined := own(kind):
                raise AssertionError(f"the result contains an object whose class redefines {redefined}")
            if isinstance(value, (list, tuple, set, frozenset, dict)) and id(value) not in seen:
                seen.add(id(value))
                left += value
                left += value.values() if isinstance(value, dict) else ()
        return result

    return call


def main(size):
    request, report = os.dup(0), os.dup(1)  # not inherited by programs that the solution starts
    null = os.open(os.devnull, os.O_RDWR)
    for standard in (0, 1, 2):
        os.dup2(null, standard)
    spec = json.loads(os.pread(request, size, 0))
    for name, limit in spec["limits"].items():
        kind = getattr(resource, name)
        ceiling = resource.getrlimit(kind)[1]
        most = ceiling if ceiling != resource.RLIM_INFINITY else limit + 1
        # One more second of CPU time as hard limit: SIGXCPU first, then SIGKILL for programs that ignore it.
        resource.setrlimit(kind, (min(limit, most), min(limit + (name == "RLIMIT_CPU"), most)))
    signal.alarm(spec["alarm"])  # ends the program if the process that started it is gone
    try:
        with open("/proc/self/oom_score_adj", "w", encoding="ascii") as file:
            file.write("1000")  # when memory runs out, this process is killed first
    except OSError:
        pass
    sys.path[:0] = spec["path"]
    module = sys.modules["solution"] = types.ModuleType("solution")
    # The solution may replace the originals.
    write, read, leave, me, clock = os.write, os.pread, os._exit, os.getpid(), time.process_time
    getpid, dumps, longest = os.getpid, json.dumps, spec["longest_error"]

    def report_line(verdict, error="", **more):
        if getpid() == me:  # not a child that the solution forked
            line = {"verdict": verdict, "error": error, "cpu": clock() - began, **more}
            write(report, (dumps(line) + "\n").encode())

    def describe(error):
        try:
            return f"{type(error).__name__}: {error}"[:longest]
        except BaseException:  # the solution defines the text of its exceptions
            return "an exception without a text"

    began = clock()
    report_line("started")
    try:
        solution = compile(spec["solution"], "<solution>", "exec")
    except MemoryError as error:
        report_line("memory", describe(error))
        leave(0)
    except (SyntaxError, ValueError, RecursionError) as error:
        report_line("syntax", describe(error))
        leave(0)
    test, entry_point = compile(spec["test"], "<test>", "exec"), spec["entry_point"]
    del spec
    originals = dict(vars(builtins))  # a test's abs() is not the solution's
    try:
        exec(solution, module.__dict__)
        names = {name: value for name, value in module.__dict__.items() if name not in originals or name == entry_point}
        if isinstance(names.get(entry_point), types.FunctionType):
            names[entry_point] = checked(names[entry_point], module)
        exec(test, names | {"__builtins__": originals, "__name__": module.__name__})
    except MemoryError as error:
        report_line("memory", describe(error))
    except BaseException as error:
        report_line("failed", describe(error))
    else:
        report_line("passed", nonce=read(request, 64, size).decode())
    leave(0)


if __name__ == "__main__":
    main(int(sys.argv[1]))
