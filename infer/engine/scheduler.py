"""Runs the requests of a session whose calls have several slots: one call after another, each with all requests in
flight.

A thread makes the calls while requests are in flight. A new request makes the running call yield: the call ends after
its current pass, and the next call includes the new request. A call also ends when one of its requests ends. This does
not change the answers of the others: noise is a function of position, their caches stay in their slots, and their next
call begins with the tokens that are not in these caches yet.

XLA reads the blocks of a long prompt one at a time, and the calls between two blocks yield after BETWEEN passes.
"""

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

import jax
import numpy as np

from laneformer import custom_calls
from laneformer.custom_calls import YIELDED, State
from laneformer.custom_calls.gpu.session import GpuSession
from laneformer.custom_calls.gpu.slot import GpuSlot
from laneformer.infer.engine.backend import Request
from laneformer.infer.engine.native import capacity_for, failures_of, request_for, room_for, texts_for
from laneformer.infer.engine.prefix import Caches, copied

BETWEEN = 8  # passes between two blocks of a new request's prompt


@dataclass(eq=False)
class Sequence:
    """A request in flight."""

    request: Request
    slot: int
    text: np.ndarray
    """Tokens of the prompt and of the answer so far, int32 [n]."""
    filled: int = 0
    """Number of positions that the slot's caches contain."""
    reading: "Reading | None" = None
    """The prompt while XLA reads it in blocks, into caches that are not the slot's yet; otherwise None."""
    joined: bool = False
    """Whether the request takes part in calls."""
    ended: threading.Event = field(default_factory=threading.Event)
    error: BaseException | None = None

    @property
    def drawn(self) -> int:
        """Number of tokens of the answer so far."""
        return len(self.text) - len(self.request.prompt)

    @property
    def rest(self) -> np.ndarray:
        """The tokens that go through the next call, int32 [n]."""
        return self.text[self.filled :]


class Reading(Protocol):
    """A prompt that XLA reads in blocks."""

    done: int
    """Number of positions read so far."""

    def block(self) -> bool:
        """Reads one block; False if no block is left."""

    @property
    def caches(self) -> Caches:
        """The caches in the form of the kernel; read them when no block is left."""


class Scheduler:
    """Runs requests from any threads, each in its slot."""

    def __init__(
        self,
        session: GpuSession,
        context: int,
        mesh: jax.sharding.Mesh | None,
        read: Callable[[np.ndarray, Callable[[], Caches]], "Reading | None"],
    ):
        """context: the model's context, in positions. read(prompt, make_caches): starts the reading of a prompt through
        XLA, into caches of one slot; None if the kernel reads the whole prompt.
        """
        self._session, self._context, self._mesh, self._read_prompt = session, context, mesh, read
        self._slots = [slot for slot in session.slots if isinstance(slot, GpuSlot)]
        self._layers: list[dict[str, jax.Array]] | None = None  # caches of all slots
        self._lock = threading.Lock()
        self._waiting: list[Sequence] = []
        self._sequences: list[Sequence] = []
        self._serving = False
        self._call = jax.jit(
            partial(custom_calls.decode, session, mesh=mesh), static_argnames=("room", "top"), donate_argnums=1
        )

    def run(self, request: Request, slot: int) -> None:
        """Runs the whole request; its tokens appear in the slot's stream as they are drawn. Raises the exception of its
        call.
        """
        sequence = Sequence(request, slot, request.prompt)
        with self._lock:
            self._waiting.append(sequence)
            self._session.yield_()
            if not self._serving:
                self._serving = True
                threading.Thread(target=self._serve, name="laneformer-scheduler", daemon=True).start()
        sequence.ended.wait()
        if sequence.error is not None:
            raise sequence.error

    def _serve(self) -> None:
        while True:
            with self._lock:
                self._session.begin()  # clears yields so far; a request that arrives later yields again
                self._sequences += self._waiting
                self._waiting = []
                self._serving = bool(self._sequences)
                if not self._serving:
                    return
            try:
                self._step()
            except BaseException as error:  # raised again by the threads of the requests
                self._layers = None  # the failed call was given the arrays
                for sequence in [*self._sequences]:
                    self._end(sequence, error)

    def _end(self, sequence: Sequence, error: BaseException | None = None) -> None:
        self._sequences.remove(sequence)
        sequence.error, sequence.reading = error, None
        sequence.ended.set()

    def _step(self) -> None:
        """Reads a block of each prompt that XLA must read, and makes a call."""
        for sequence in [*self._sequences]:
            if self._slots[sequence.slot].cancelled and not sequence.joined:
                self._end(sequence)
        self._make_room()
        reading = [sequence for sequence in self._sequences if not sequence.joined and not self._read(sequence)]
        together = [sequence for sequence in self._sequences if sequence.joined]
        if together:
            self._session.yield_after(BETWEEN if reading else 0)
            self._run(together)

    def _empty(self, capacity: int, slots: int = 1) -> Caches:
        return Caches(custom_calls.empty_layers(self._session.plan, capacity, self._mesh, slots))

    def _make_room(self) -> None:
        """Enlarges the caches if a request needs more positions."""
        capacity = max((capacity_for(one.request, self._context) for one in self._sequences), default=0)
        now = None if self._layers is None else Caches(self._layers)
        if capacity > (0 if now is None else now.capacity):
            larger = self._empty(capacity, self._session.together)
            self._layers = (larger if now is None else copied(larger, now, now.capacity)).layers

    def _read(self, sequence: Sequence) -> bool:
        """Reads a block of the prompt and returns False. If no block is left, lets the request join the calls and
        returns True.
        """
        request = sequence.request
        if sequence.filled == 0 and sequence.reading is None:
            sequence.reading = self._read_prompt(
                request.prompt, lambda: self._empty(capacity_for(request, self._context))
            )
        if (reading := sequence.reading) is not None:
            if reading.block():
                return False
            sequence.filled, sequence.reading = reading.done, None
            self._layers = _put(self._layers, reading.caches.layers, np.int32(sequence.slot))
        sequence.joined = True
        return True

    def _run(self, together: list[Sequence]) -> None:
        """Makes one call with these requests, and updates them."""
        slots = self._slots
        seen = np.zeros((len(slots), self._session.plan.ops.vocab_size), np.uint8)
        of_slots: list[custom_calls.Request | None] = [None] * len(slots)
        for one in together:
            request, slot = one.request, one.slot
            texts = texts_for(request, one.text, one.filled, one.drawn)
            left = request.limit - one.drawn
            of_slots[slot] = request_for(request, one.rest, one.filled, left, drawn=one.drawn, **texts)
            seen[slot, one.text] = 1
            slots[slot].join(one.drawn, len(together) - 1)
        inputs = self._session.inputs(*of_slots)
        room = room_for(max(one.request.limit for one in together), self._context)
        top = max(one.request.top_logprobs for one in together)
        layers, self._layers = self._layers or [], None
        with failures_of(self._session):
            outputs, state = jax.block_until_ready(
                self._call(inputs, State(seen, layers), self._session.operands, room=room, top=top)
            )
            self._layers = state.layers
        tokens, status = np.asarray(outputs.tokens), np.asarray(outputs.status)
        for one in together:
            drawn, end, position = status[one.slot].tolist()
            slots[one.slot].leave(self._session.passes)
            one.text = np.concatenate([one.text, tokens[one.slot, :drawn]])
            one.filled = position - (one.drawn > 0)  # the last drawn token has no keys and values yet
            if end != YIELDED:
                self._end(one)


@partial(jax.jit, donate_argnums=0)
def _put(into: list[dict[str, jax.Array]], own: list[dict[str, jax.Array]], slot: jax.Array):
    """The caches of all slots, `into`, with those of slot `slot` replaced by `own`, which may have fewer positions."""
    return jax.tree.map(lambda whole, one: jax.lax.dynamic_update_slice_in_dim(whole, one, slot, axis=1), into, own)
