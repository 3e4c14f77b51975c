"""Engine processes that fail, with the interface of infer.serve.worker.main. They need no model."""

import os
import time

from laneformer.infer.serve import worker
from laneformer.infer.serve.processes import log

FACTS = {"name": "bad", "parallel": 1, "conditions": {"context": 100, "prefix_cache": 0}, "seconds": 0.0}


def dies_when_ready(connection, model):
    connection.send(("ready", FACTS))
    os._exit(3)


def lacks_memory(connection, model):
    os.write(2, b"terminate called after throwing\n" * 40 + b"std::bad_alloc\n")
    os.abort()


def fails_to_load(connection, model):
    os.write(2, b"a library's line\n")
    log.say("a line of the log")
    os.abort()


def reads_nothing(connection, model):
    """Reads nothing for `model.engine.seconds` after it is ready, and then answers every check."""
    connection.send(("ready", FACTS))
    time.sleep(model.engine.seconds)
    while True:
        kind, number, *_ = connection.recv()
        if kind == "check":
            connection.send(("checked", number, worker.Encoded([1] * 100_000, [])))
        elif kind == "ping":
            connection.send(("pong", number))
        elif kind == "generate":
            connection.send(("error", number, "no answer"))
