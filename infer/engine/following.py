"""Jobs of several processes: the first process receives the requests, and the others run the same generations."""

import dataclasses
import logging
import math

import numpy as np

from laneformer.custom_calls import NativeError
from laneformer.infer.engine.backend import Backend, Request
from laneformer.infer.engine.constraint import Elsewhere
from laneformer.infer.sampling import Sampling
from laneformer.processes import END_SECONDS, Group

log = logging.getLogger("laneformer")

SECONDS = 300  # time limit for the other processes to end the previous request and to compile for the next one


class Leader:
    """Announces the requests of this process to the others, which call `follow`. Does nothing in a job of one
    process.
    """

    def __init__(self, backend: Backend):
        self._group = Group(backend.source.mesh, SECONDS, "follow the first one")

    def announce(self, request: Request) -> None:
        """Announces a request; call this before the request starts in this process. Raises GroupError if another
        process does not follow, and InputError if the first mask of the request's constraint cannot be computed.
        """
        if self._group.several:
            if request.constraint is not None:
                request.constraint.mask()  # fails here if the answer cannot begin, before the others wait for it
            self._group.share({"request": _as_json(request)})

    def end(self) -> None:
        """Releases the other processes from `follow`."""
        self._group.share({}, END_SECONDS)


def follow(backend: Backend) -> None:
    """Runs the generations of the leading process until its `Leader` ends. Raises GroupError if the leading process is
    lost.
    """
    group = Group(backend.source.mesh, SECONDS, "lead the others")
    while group.several and (request := group.share({}, math.inf)[group.processes[0]].get("request")):
        try:
            for _ in backend.start(_from_json(request, backend.source.config.vocab_size)):
                pass
        except NativeError as error:  # concerns this request only; the leader reports it too
            log.warning("%s", error)


def _as_json(request: Request) -> dict:
    names = ("limit", "stop_tokens", "tokens_per_dispatch", "top_logprobs", "cache_prompt", "cache_salt", "cache_key")
    named = {name: getattr(request, name) for name in names}
    named |= {"prompt": request.prompt.tolist(), "sampling": dataclasses.asdict(request.sampling)}
    return {**named, "masked": request.constraint is not None}


def _from_json(fields: dict, vocab_size: int) -> Request:
    masked = fields.pop("masked")
    known = {"prompt": np.array(fields["prompt"], np.int32), "sampling": Sampling(**fields["sampling"])}
    constraint = Elsewhere(vocab_size) if masked else None
    return Request(**{**fields, **known, "stop_tokens": tuple(fields["stop_tokens"])}, constraint=constraint)
