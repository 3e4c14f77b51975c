"""Runs tests outside of the tested program's process, and reports their verdicts.

The sandbox passes the text of this file, after that of wire.py, to `python -c` in a separate sandbox. That process
imports NumPy once and forks for every program. The fork runs the tests. It calls the program's functions by message
(child.py) and compares the answers, which are plain data, with its own operators.
"""

import builtins
import gc
import importlib
import json
import os
import resource
import signal
import socket
import sys
import time
import types

from laneformer.infer.sandbox.wire import HEAD, Reader, WireError, dump, receive, send, write_library

EXCEPTIONS = {name: kind for name, kind in vars(builtins).items() if isinstance(kind, type)}
EXCEPTIONS = {name: kind for name, kind in EXCEPTIONS.items() if issubclass(kind, BaseException)}
# If a function of the program raised one of these exceptions, or a class derived from them, it would end a loop of the
# test as if all values had been compared.
ENDS = (StopIteration, StopAsyncIteration, GeneratorExit)
MODULES = {"np": "numpy"}  # common short name of a module -> its name
LIBRARY = {*sys.stdlib_module_names, "numpy"}
LONGEST_NAME = 100


class Ended(BaseException):
    """The program has ended, or has sent something other than a reply."""


class Remote:
    """A function of the program, or an object of one of its classes. It is equal only to itself."""

    __slots__ = ("_handle", "_program")

    def __init__(self, program, handle):
        object.__setattr__(self, "_program", program)
        object.__setattr__(self, "_handle", handle)

    def __call__(self, *args, **named):
        return self._program.ask("call", self._handle, [args, named])

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return self._program.ask("get", self._handle, [name])

    def __setattr__(self, name, value):
        self._program.ask("set", self._handle, [name, value])


class RemoteIterator(Remote):
    """An iterator of the program."""

    __slots__ = ()

    def __iter__(self):
        return self

    def __next__(self):
        return self._program.ask("next", self._handle, [])


class Program:
    """The program at the other end of two pipes. Every method raises Ended if the program has ended."""

    def __init__(self, requests, replies):
        self._requests, self._replies, self._remotes = requests, replies, {}
        self.cpu = 0.0
        self.broken = None
        """The reason why messages of the program are no longer accepted; None while they are."""

    def load(self, spec):
        """Loads the program. Returns None, or (verdict, reason) if that fails."""
        try:
            text = json.dumps(spec).encode()  # ASCII, because the spec may contain lone surrogates
            send(self._requests, [HEAD.pack(len(text), 0), text])
        except BrokenPipeError:
            self._end("the program ended before the tests were done")
        kind, content, _, beside = self._receive()
        if kind not in ("loaded", "ended"):
            self._end(f"the program sent {kind!r} before it was loaded")
        if kind == "loaded":
            return None
        verdict, error = Reader((), self._read, beside).items(content)
        return (verdict if verdict in ("syntax", "memory") else "failed"), str(error)

    def start(self):
        """Waits until the interpreter of the program is running."""
        if self._receive()[0] != "started":
            self._end("the program did not start")

    def names(self, names):
        """Name -> value, for those of `names` that the program defines."""
        found = self.ask("names", 0, sorted(names))
        return {name: found[name] for name in names if name in found}

    def ask(self, kind, target, values):
        """Sends a request and returns the answer, as plain data, or raises the exception that the program raised.
        Containers among `values` are changed as the program changed them.
        """
        known: list = []

        def make(writer):
            known[:] = ()
            content = writer(values)
            known.extend(writer.known)
            return [kind, target, content]

        try:
            message = dump(make, (), self._write)
        except (WireError, RecursionError) as error:
            raise TypeError(f"the test's data cannot be sent to the program: {error}") from None
        if self.broken:
            raise Ended
        try:
            send(self._requests, message)
        except BrokenPipeError:
            self._end("the program ended before the tests were done")
        answer, content, changed, beside = self._receive()
        result = failure = None
        try:
            reader = Reader(known, self._read, beside)
            if answer == "value":
                [node] = content
                # A dict of names is part of the reply, not a value of the program.
                result = {name: reader(value) for name, value in node.items()} if kind == "names" else reader(node)
            elif answer == "raised":
                names, args, text = content
                failure = rebuilt(names, reader(args), reader(text), kind == "next")
            else:
                raise WireError(f"a reply is {answer!r}")
            for number, content in changed:
                if type(number) is not int or number < 0:
                    raise WireError(f"a container is {number!r}")
                reader.restore(known[number], reader(content))
        except (MemoryError, Ended):
            raise
        except Exception as error:
            self._end(f"the program sent no plain data ({type(error).__name__}: {error})")
        if failure is not None:
            raise failure
        return result

    def _receive(self):
        if self.broken:
            raise Ended
        try:
            message = receive(self._replies)
        except WireError as error:
            self._end(f"the program sent no plain data ({error})")
        if message is None:
            self._end("the program ended before the tests were done")
        nodes, beside = message
        if type(nodes) is not list or len(nodes) != 4 or type(nodes[0]) is not float:
            self._end("the program sent no reply")
        cpu, kind, content, changed = nodes
        self.cpu = max(self.cpu, min(cpu, 1e9))
        return kind, content, changed, beside

    def _end(self, why):
        self.broken = why
        raise Ended

    def _write(self, writer, value, depth):
        if isinstance(value, Remote):
            return {"remote": object.__getattribute__(value, "_handle")}
        written = write_library(writer, value)
        if written is None:
            raise TypeError(f"the test passes a {type(value).__name__} to the program: pass plain data")
        return written

    def _read(self, name, content):
        if name != "remote":
            raise WireError(f"a type is {str(name)[:LONGEST_NAME]!r}")
        handle, kind = content
        if type(handle) is not int:
            raise WireError("a reference is not a number")
        if handle not in self._remotes:
            self._remotes[handle] = (RemoteIterator if kind == "iterator" else Remote)(self, handle)
        return self._remotes[handle]


def rebuilt(names, args, text, is_next):
    """The exception of a reply. names: the name of its class, then those of its built-in base classes; the exception
    belongs to the first of the latter. is_next: whether the request was for an iterator's next value.
    """
    name, *bases = (str(each)[:LONGEST_NAME] for each in names)
    text = str(text)
    kind = next((EXCEPTIONS[each] for each in bases if each in EXCEPTIONS), Exception)
    if issubclass(kind, ENDS) and not (is_next and issubclass(kind, StopIteration)):
        return RuntimeError(f"the program raised {name}")
    try:
        made = kind(*args)
        if name == kind.__name__ and str(made) == text:
            return made
    except (TypeError, ValueError):
        pass
    return type(name, (kind,), {"__init__": lambda self: None, "__str__": lambda self: text})()


def wanted(code):
    """All names that a code object and its nested code objects refer to."""
    return {*code.co_names}.union(*(wanted(each) for each in code.co_consts if isinstance(each, types.CodeType)))


def trusted(name, value):
    """The judge's own module if `name` is one of the standard library or numpy; otherwise the value. (Tests may use
    modules that only the program imports.)
    """
    name = MODULES.get(name, name)
    return importlib.import_module(name) if name in LIBRARY else value


def run_tests(spec, program):
    """Runs the tests of a loaded program. Raises the exception that they raise."""
    space = {"__name__": "solution"}
    exec(compile(spec["context"], "<context>", "exec"), space)
    test, entry_point = compile(spec["test"], "<test>", "exec"), spec["entry_point"]
    asked = wanted(test) - space.keys() - vars(builtins).keys()
    if entry_point is not None:
        space.pop(entry_point, None)
        asked.add(entry_point)
    found = program.names(asked) if asked else {}
    space |= {name: value if name == entry_point else trusted(name, value) for name, value in found.items()}
    exec(test, space)


def judge(spec, program, report):
    """Runs the tests of one program, reports the verdict and exits."""
    began = time.process_time()

    def end(verdict, error=""):
        line = {"verdict": verdict, "error": error[: spec["longest_error"]]}
        line["cpu"] = program.cpu + time.process_time() - began
        if program.broken:  # regardless of how the test handled it
            line = {"broken": program.broken[: spec["longest_error"]]}
        os.write(report, (json.dumps(line) + "\n").encode())
        os._exit(0)

    def late(*_):
        end("timeout", f"the tests took more than {spec['limits']['RLIMIT_CPU']} s of CPU time")

    limit(spec, late)
    try:
        program.start()
    except Ended:
        os._exit(1)  # without a report
    try:
        os.write(report, b"started\n")
        failure = program.load(spec["program"])
        if failure is not None:
            end(*failure)
        run_tests(spec, program)
    except MemoryError as error:
        end("memory", f"MemoryError: {error}")
    except BaseException as error:
        end("failed", describe(error))
    end("passed")


def describe(error):
    try:
        return f"{type(error).__name__}: {error}"
    except Exception:
        return type(error).__name__


def limit(spec, late):
    for name, most in spec["limits"].items():
        kind = getattr(resource, name)
        hard = resource.getrlimit(kind)[1]
        extra = name == "RLIMIT_CPU"  # the hard limit is one second more, so that SIGXCPU arrives first
        if hard == resource.RLIM_INFINITY or most + extra <= hard:
            resource.setrlimit(kind, (most, most + extra))
    signal.signal(signal.SIGXCPU, late)
    signal.alarm(spec["alarm"])
    if "numpy.random" in sys.modules:
        sys.modules["numpy.random"].seed()  # otherwise all forks would have the same state


def serve(control):
    """Judges one program per message. The descriptors of a message are the spec's file, requests, replies and the
    report.
    """
    while True:
        message, handles, _, _ = socket.recv_fds(control, 1, 4)
        if not message:
            return
        if os.fork() == 0:
            file, requests, replies, report = handles
            control.close()
            spec = json.loads(os.pread(file, os.fstat(file).st_size, 0))
            judge(spec, Program(requests, replies), report)
        for handle in handles:
            os.close(handle)


def main(site):
    control = socket.socket(fileno=os.dup(0))
    null = os.open(os.devnull, os.O_RDWR)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    sys.path[:0] = [site]
    try:
        import numpy  # once here, not in every fork
        import numpy.random  # noqa: F401
    except ImportError:
        pass
    for standard in (0, 1, 2):
        os.dup2(null, standard)
    gc.collect()
    gc.freeze()
    serve(control)


if __name__ == "__main__":
    main(sys.argv[1])
