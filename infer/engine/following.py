"""In a job of several processes one takes the requests, and the others follow it: what it generates, they generate with
it.
"""

import dataclasses
import logging
import math

import numpy as np

from custom_calls import NativeError
from infer.engine.backend import Backend, Request
from infer.sampling import Sampling
from laneformer.processes import END_SECONDS, Group

log = logging.getLogger("infer")

SECONDS = 300  # for the others to end the request before, and to compile for this one


class Leader:
    """Tells the other processes what this one generates; made while they begin to `follow`. Alone it has
    nothing to do.
    """

    def __init__(self, backend: Backend):
        self._group = Group(backend.source.mesh, SECONDS, "follow the first one")

    def announce(self, request: Request) -> None:
        """Before it starts here. Raises GroupError if a process does not follow."""
        if self._group.several:
            self._group.share({"request": _as_json(request)})

    def end(self) -> None:
        """The others need not follow any more."""
        self._group.share({}, END_SECONDS)


def follow(backend: Backend) -> None:
    """Generates what the leading process does, in step with it, until that ends. Raises GroupError if it has gone."""
    group = Group(backend.source.mesh, SECONDS, "lead the others")
    while group.several and (request := group.share({}, math.inf)[group.processes[0]].get("request")):
        try:
            for _ in backend.start(_from_json(request)):
                pass
        except NativeError as error:  # of this request; the leader has it too
            log.warning("%s", error)


def _as_json(request: Request) -> dict:
    named = {name: getattr(request, name) for name in ("limit", "stop_tokens", "tokens_per_dispatch", "top_logprobs")}
    return {"prompt": request.prompt.tolist(), "sampling": dataclasses.asdict(request.sampling), **named}


def _from_json(fields: dict) -> Request:
    known = {"prompt": np.array(fields["prompt"], np.int32), "sampling": Sampling(**fields["sampling"])}
    return Request(**{**fields, **known, "stop_tokens": tuple(fields["stop_tokens"])})
