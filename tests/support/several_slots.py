"""Requests in slots of one GPU session beside each of them alone, in a kernel for one row."""

import dataclasses
from collections import deque

import jax
import numpy as np

import custom_calls
from custom_calls import ENDS, YIELDED, Inputs, NativeError, State
from tests.support import emulated, small
from tests.support.gpu_cases import jitted, state_of

ROOM, CAPACITY, STOPS = 48, 64, 2


@dataclasses.dataclass
class Request:
    """What a client asks for, and what it has got so far."""

    prompt: list[int]
    limit: int
    options: dict
    """As for small.make_inputs."""
    cancel: bool = False
    """Whether it is cancelled once it has begun, at some time."""
    drawn: int = 0
    filled: int = 0
    """Positions whose keys and values are in the cache."""
    parts: list = dataclasses.field(default_factory=list)
    """What each call has left."""
    end: int = YIELDED

    @property
    def text(self) -> list[int]:
        return self.prompt + [token for tokens, *_ in self.parts for token in tokens.tolist()]

    def inputs(self) -> Inputs:
        """Of the next call."""
        rest = self.text[self.filled :]
        options = {"start": self.filled, "slot": self.drawn, "room": ROOM} | self.options
        inputs = small.make_inputs(rest, self.limit - self.drawn, **options)
        return inputs._replace(stops=np.resize(inputs.stops, STOPS))


class Slots:
    """A model with a session of one slot and one of several, of which answers are compared."""

    def __init__(self, plan, weights, rows=4, slots=3, mesh=None, **options):
        self.plan, self.mesh = plan, mesh
        self.alone = emulated.open_session(plan, weights, mesh=mesh, **options)
        self.session = emulated.open_session(plan, weights, mesh=mesh, rows=rows, slots=slots, **options)
        self.call_alone, self.call = (
            jitted(session, mesh, room=ROOM, top=2, logits=True) for session in (self.alone, self.session)
        )
        self.state = self._put(State.of(None, custom_calls.empty_layers(plan, CAPACITY, slots=slots)))
        self.slots: list[Request | None] = [None] * slots

    def _put(self, state: State) -> State:
        """On the devices of the mesh, if there is one."""
        if self.mesh is None:
            return state
        lanes = jax.sharding.NamedSharding(self.mesh, jax.sharding.PartitionSpec("lane"))
        return State(state.seen, *([jax.device_put(x, lanes) for x in arrays] for arrays in state[1:]))

    def expected(self, request: Request) -> list:
        """Tokens, log-probabilities, top tokens and theirs, logits, `seen` and caches of the request alone."""
        state = self._put(state_of(self.plan, CAPACITY))
        inputs = small.make_inputs(request.prompt, request.limit, room=ROOM, **request.options)
        outputs, state = self.call_alone(inputs, state._replace(seen=np.zeros(self.plan.ops.vocab_size, np.uint8)))
        assert self.alone.failure is None
        count, end, position = outputs.status.tolist()
        return [[np.asarray(part)[:count] for part in outputs[:-1]], end, self._kept(state, 0, position - 1)]

    def _kept(self, state: State, slot: int, filled: int):
        """Keys, values and latents of the positions; a recurrent state is seen by what is drawn with it."""
        return [np.asarray(array)[:, slot, :filled] for array in (*state.keys, *state.values, *state.latents)]

    def run(self, passes: int = 0) -> list[Request]:
        """A call of all requests in slots, which yields after that many passes; those that have ended leave."""
        empty = small.make_inputs([], 0, room=ROOM)._replace(stops=np.full(STOPS, -1, np.int32))
        inputs = [empty if request is None else request.inputs() for request in self.slots]
        seen = np.zeros((len(self.slots), self.plan.ops.vocab_size), np.uint8)
        for slot, request in enumerate(self.slots):
            if request is not None:
                seen[slot, request.text[len(request.prompt) :]] = 1  # as alone: the prompt's are not
        self.session.yield_after(passes)
        outputs, self.state = self.call(
            Inputs(*map(np.stack, zip(*inputs, strict=True))), self.state._replace(seen=seen)
        )
        if self.session.failure is not None:
            raise NativeError(self.session.failure)
        ended = []
        for slot, request in enumerate(self.slots):
            count, request_end, position = outputs.status[slot].tolist()
            if request is None:
                assert (count, request_end) == (0, YIELDED)
                continue
            request.parts.append([np.asarray(part)[slot, :count] for part in outputs[:-1]])
            request.drawn += count
            request.filled, request.end = position - (request.drawn > 0), request_end
            if request_end != YIELDED:
                request.kept = self._kept(self.state, slot, request.filled)
                self.slots[slot] = None
                ended.append(request)
        assert ended or passes in (0, self.session.passes)
        return ended

    def check(self, request: Request) -> None:
        """A request that has ended has the bits that it has alone, as far as it got."""
        parts, end, kept = self.expected(request)
        found = [np.concatenate(part) for part in zip(*request.parts, strict=True)]
        if request.end == ENDS.index("cancelled"):
            parts = [part[: request.drawn] for part in parts]
            kept = [array[:, : request.filled] for array in kept]
        else:
            assert request.end == end
        assert small.same(found, parts) and small.same(request.kept, kept)

    def serve(self, requests: list[Request], rng: np.random.Generator) -> None:
        """Random joins, yields and cancellations."""
        waiting, ended = deque(requests), []
        while waiting or any(self.slots):
            for slot, request in enumerate(self.slots):
                if request is None and waiting and rng.random() < 0.7:
                    self.slots[slot] = waiting.popleft()
                    self.session.slots[slot].begin()
            for slot, request in enumerate(self.slots):
                if request is not None and request.cancel and rng.random() < 0.3:
                    self.session.slots[slot].cancel()
            if any(self.slots):
                ended += self.run(int(rng.choice([1, 2, 3, 5, 9, 0])))
        for request in ended:
            self.check(request)
        assert len(ended) == len(requests)


SETTINGS = (
    {},
    {"penalty": 1.5},
    {"temperature": 1.0},
    {"temperature": 0.8, "top_k": 5},
    {"temperature": 2.0, "top_k": 8, "top_p": 0.5, "min_p": 0.02, "penalty": 1.3},
)


def random_requests(rng: np.random.Generator, vocab: int, count: int = 6) -> list[Request]:
    """With prompts of 1 to 20 tokens, answers of 1 to 25, and settings and stops of their own."""
    return [
        Request(
            rng.integers(0, vocab, rng.integers(1, 21)).tolist(),
            int(rng.integers(1, 26)),
            {"seed": (number, 7), "stops": [int(rng.integers(-1, vocab))]} | SETTINGS[rng.integers(len(SETTINGS))],
            cancel=bool(rng.random() < 0.2),
        )
        for number in range(count)
    ]
