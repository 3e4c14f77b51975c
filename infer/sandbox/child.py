"""A program in its sandbox: loads the text that the judge sends, and calls the program's functions on request.

The sandbox passes the text of this file, after that of wire.py, to `python -c`. Requests arrive on standard input and
replies leave on standard output. Both are pipes. A running program can change everything in this process, so a reply is
only data that the judge compares, never a verdict.
"""

import builtins
import os
import resource
import signal
import site
import sys
import time
import types

from laneformer.infer.sandbox.wire import MUTABLE, TYPES, Reader, contents, dump, receive, send, write_library

# Copies of functions that the program may replace.
_getpid, _leave, _clock = os.getpid, os._exit, time.process_time


class Objects:
    """The objects that the judge refers to by number: functions, objects of the program's classes, iterators."""

    def __init__(self):
        self.kept, self.numbers = [], {}

    def reference(self, value):
        number = self.numbers.setdefault(id(value), len(self.kept))
        if number == len(self.kept):
            self.kept.append(value)  # keeps the object alive, so that its id is not reused
        kind = "iterator" if hasattr(type(value), "__next__") else "object"
        return {"remote": [number, kind]}

    def write(self, writer, value, depth):
        """JSON of a value that is not of a built-in type: library data as itself, an object of a subclass as its base,
        anything else as a reference.
        """
        written = write_library(writer, value)
        if written is not None:
            return written
        for base in type(value).__mro__[1:]:
            if base in BASES:
                plain = BASES[base](value)
                if base in MUTABLE:
                    known = writer.numbers.get(id(value))
                    if known is not None:
                        return {"ref": known}
                    written = writer(plain, depth)
                    writer.numbers[id(value)] = writer.numbers[id(plain)]
                    return written
                return writer(plain, depth)
        return self.reference(value)

    def read(self, name, content):
        if name != "remote":
            raise TypeError(name)
        return self.kept[content]


# Type -> function that returns the content of an object of a subclass, unaffected by methods that it redefines.
BASES: dict = {
    int: int.__int__,
    float: float.__float__,
    complex: lambda value: complex(complex.real.__get__(value), complex.imag.__get__(value)),
    str: str.__str__,
    bytes: lambda value: bytes([*bytes.__iter__(value)]),
    bytearray: lambda value: bytearray([*bytearray.__iter__(value)]),
    list: lambda value: [*list.__iter__(value)],
    tuple: lambda value: (*tuple.__iter__(value),),
    set: lambda value: {*set.__iter__(value)},
    frozenset: lambda value: frozenset(frozenset.__iter__(value)),
    dict: lambda value: dict(dict.items(value)),
}


def prepare(spec):
    """Sets the limits and the path of modules, and adds the built-in functions that Python's site would add."""
    for name, limit in spec["limits"].items():
        kind = getattr(resource, name)
        ceiling = resource.getrlimit(kind)[1]
        most = ceiling if ceiling != resource.RLIM_INFINITY else limit + (name == "RLIMIT_CPU")
        # The hard limit on CPU time is one second more: programs that ignore SIGXCPU then get SIGKILL.
        resource.setrlimit(kind, (min(limit, most), min(limit + (name == "RLIMIT_CPU"), most)))
    signal.alarm(spec["alarm"])  # ends this process if the process that started it is gone
    sys.path[:] = [*spec["path"], *sys.path, *site.getsitepackages()]
    for add in (site.setquit, site.setcopyright, site.sethelper):
        add()


def last_in_line():
    """Makes this process the first one that the kernel kills when memory runs out."""
    try:
        with open("/proc/self/oom_score_adj", "w", encoding="ascii") as file:
            file.write("1000")
    except OSError:
        pass


def describe(error, longest):
    try:
        return f"{type(error).__name__}: {error}"[:longest]
    except BaseException:  # the program defines the text of its exceptions
        return "an exception without a text"


def load(text, longest):
    """Runs a program's top level. Returns (module, None), or (None, (verdict, reason)) if that fails."""
    module = sys.modules["solution"] = types.ModuleType("solution")
    module.__dict__["__builtins__"] = builtins  # the originals, not the copy that this file uses
    try:
        code = compile(text, "<solution>", "exec")
    except MemoryError as error:
        return None, ("memory", describe(error, longest))
    except (SyntaxError, ValueError, RecursionError) as error:
        return None, ("syntax", describe(error, longest))
    try:
        exec(code, module.__dict__)
    except MemoryError as error:
        return None, ("memory", describe(error, longest))
    except BaseException as error:
        return None, ("failed", describe(error, longest))
    return module, None


def done(objects, module, kind, target, values):
    """Executes a request. Returns a function that makes the reply with a writer."""
    if kind == "names":
        found = {name: module.__dict__[name] for name in values if name in module.__dict__}
        return lambda w: [
            {name: objects.reference(value) if callable(value) else w(value) for name, value in found.items()}
        ]
    value = objects.kept[target]
    if kind == "call":
        result = value(*values[0], **values[1])
    elif kind == "next":
        result = next(value)
    elif kind == "get":
        result = getattr(value, values[0])
    else:
        setattr(value, *values)
        result = None
    return lambda w: [w(result)]


def raised(error, longest):
    """A function that makes the reply to a request that raised an exception: the names of its class and of the built-in
    classes that it is or derives from, its arguments if they are plain data, and its text.
    """
    bases = (kind.__name__ for kind in type(error).__mro__ if TYPES.get(kind.__name__) is kind)
    names = [type(error).__name__, *bases]
    try:
        text = str(error)[:longest]
    except BaseException:
        text = "an exception without a text"
    args = [*error.args] if {*map(type, error.args)} <= {int, float, str, bool} and len(text) < longest else [text]
    return lambda w: [names, w(args), w(text)]


def main():
    requests, replies = os.dup(0), os.dup(1)  # programs that the solution starts do not inherit these
    null = os.open(os.devnull, os.O_RDWR)
    for standard in (0, 1, 2):
        os.dup2(null, standard)
    me, objects = _getpid(), Objects()
    send(replies, dump(lambda w: [0.0, "started", [], []], (), None))
    spec, _ = receive(requests)
    prepare(spec)
    last_in_line()
    longest, text = spec["longest_error"], spec["solution"]
    del spec
    began = _clock()

    def reply(kind, make, known=(), before=()):
        changed = [
            (n, after)
            for n, (value, old) in enumerate(zip(known, before, strict=True))
            if len(after := contents(value)) != len(old) or any(map(differ, after, old))
        ]
        message = dump(
            lambda w: [_clock() - began, kind, make(w), [[n, w(after)] for n, after in changed]], known, objects.write
        )
        if _getpid() != me:  # this is a child that the program forked
            _leave(0)
        send(replies, message)

    module, verdict = load(text, longest)
    reply("loaded" if verdict is None else "ended", lambda w: [*map(w, verdict or ())])
    while (request := receive(requests)) is not None:
        (kind, target, values), beside = request
        reader = Reader((), objects.read, beside)
        values = reader(values)
        before = [*map(contents, reader.known)]
        try:
            make = done(objects, module, kind, target, values)
        except BaseException as error:
            reply("raised", raised(error, longest), reader.known, before)
            continue
        try:
            reply("value", make, reader.known, before)
        except BaseException as error:  # the result is too large or too deep, or cannot be read
            reply("raised", raised(error, longest))
    _leave(0)


def differ(one, other):
    return one is not other


if __name__ == "__main__":
    main()
