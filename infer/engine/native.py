"""Shared code of the backends that use the native library: one custom call generates a whole answer, and the host reads
its tokens while it runs.
"""

import heapq
import logging
import math
import threading
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, ClassVar, get_args

import jax
import numpy as np
from tqdm import tqdm

from laneformer import custom_calls
from laneformer.custom_calls import DecodeSession, Drafting, Plan, State, make_plan
from laneformer.custom_calls.request import END_OF_TEXT
from laneformer.custom_calls.session import Bf12Weights, CallStream
from laneformer.decoder import decoder_ops
from laneformer.errors import ConfigError
from laneformer.formats import BF12_MOST_EXCEPTIONS
from laneformer.infer.engine.backend import (
    Cancellation,
    CheckpointSource,
    Chunk,
    Chunks,
    Request,
    Source,
    model_of,
    power_of_two,
)
from laneformer.infer.engine.constraint import Masks, give_masks
from laneformer.infer.engine.prefix import Caches, CallId, Lease, PrefixCache
from laneformer.model import Laneformer
from laneformer.quantized import Quantized
from laneformer.quantized.rounding import Kind, round_to
from laneformer.weights import parameter_table

log = logging.getLogger("laneformer")

SMALLEST_CACHE, SMALLEST_ROOM = 256, 16
LARGE = 100_000_000  # parameters from which on packing shows a progress bar


class NativeBackend(ABC):
    """Runs a request in each slot of the session. Packed weights stay with their threads or devices. Caches are reused
    by later requests.
    """

    name: ClassVar[str]
    masks: ClassVar[bool] = False
    sampling_options: ClassVar[frozenset[str]]
    source: Source
    session: DecodeSession
    patience: ClassVar[float] = 0.002
    """Seconds between two reads of the stream of tokens, unless a request sets tokens_per_dispatch."""

    def _use(self, session: DecodeSession, prefix_cache: int = 0) -> None:
        """Completes the backend; call it once, at the end of __init__. prefix_cache: number of sequences to keep for
        later prompts.
        """
        self.session = session
        whole = any(kept.fixed for layer in session.plan.kept for kept in layer.values())
        self._prefixes = PrefixCache(self._new_caches, prefix_cache, self.parallel, whole)
        self._free = list(range(self.parallel))  # slots, a heap
        # One function per slot: with a shared one, the first call of a size would block the other slots until it ends.
        self._runs = [
            jax.jit(
                partial(custom_calls.decode, session, mesh=self.source.mesh),
                static_argnames=("room", "top", "logits"),
                donate_argnums=1,
            )
            for _ in session.slots
        ]

    @property
    @abstractmethod
    def conditions(self) -> dict[str, Any]:
        """As `Backend.conditions`."""

    @property
    def forces(self) -> bool:
        """Whether a request can force the tokens of its answer, for measurements."""
        return False

    @property
    def parallel(self) -> int:
        """Number of requests that can run together."""
        return len(self.session.slots)

    def start(self, request: Request) -> Chunks:
        capacity = capacity_for(request, self.source.config.max_position_embeddings)
        slot = heapq.heappop(self._free)  # the lowest free slot
        freed = partial(heapq.heappush, self._free, slot)
        stream = self.session.slots[slot]
        try:
            number = stream.begin()
            call = CallId(slot, number) if number else None  # None if calls cannot copy from each other
            lease = self._prefixes.take(request, capacity, call)
        except BaseException:
            freed()
            raise
        return _Answer(stream, lease, partial(self._answer, lease, slot), freed, self.patience)

    def _absorb(self, prompt: np.ndarray, start: int, caches: Caches) -> tuple[int, Caches]:
        """Fills positions of the prompt before the call. Returns the number of positions that are filled then, at most
        all but the last, and the caches. start: number of positions that are filled already.
        """
        return start, caches

    def _fields(self, lease: Lease, start: int) -> dict[str, Any]:
        """The fields of the kernel's request that only this backend has. start: position of the first token that goes
        through the call.
        """
        return texts_for(lease.request, lease.request.prompt, start)

    def _answer(self, lease: Lease, slot: int) -> None:
        """Runs the whole call. Another thread reads the tokens from its slot meanwhile."""
        try:
            tokens, caches = self._call(lease, slot)
        except BaseException:
            self._prefixes.drop(lease)
            raise
        self._prefixes.keep(lease, caches, tokens)

    def _call(self, lease: Lease, slot: int) -> tuple[np.ndarray, Caches]:
        """Runs the call. Returns the tokens of the positions that are filled after it, int32 [n], and the caches."""
        request, kept = lease.request, lease.count
        config, prompt = self.source.config, request.prompt
        seen = np.zeros(config.vocab_size, np.uint8)
        seen[prompt] = 1
        start, caches = self._absorb(prompt, kept, lease.caches)
        asked = request_for(request, prompt[start:], start, request.limit, slot=slot, **self._fields(lease, start))
        # The arrays are as large as if no position had been kept, so that the same program serves both cases.
        inputs = self.session.inputs(asked, most_tokens=len(prompt) - start + kept)
        room = room_for(request.limit, config.max_position_embeddings)
        state = State(seen, caches.layers)
        with failures_of(self.session):
            outputs, state = jax.block_until_ready(
                self._runs[slot](inputs, state, self.session.operands, room=room, top=request.top_logprobs)
            )
        drawn, _, position = np.asarray(outputs.status).tolist()
        filled = position - (drawn > 0)  # the last drawn token has no keys and values yet
        text = np.concatenate([prompt, np.asarray(outputs.tokens)[:drawn]])
        return text[:filled], Caches(state.layers)

    def _new_caches(self, capacity: int) -> Caches:
        if self.session.together > 1:
            return Caches([])  # the scheduler has the caches of all slots
        return Caches(custom_calls.empty_layers(self.session.plan, capacity, self.source.mesh))


@contextmanager
def failures_of(session: DecodeSession) -> Iterator[None]:
    """Raises NativeError with the session's reason if the call in the block failed on the devices, also if the launch
    ended in a driver's error.
    """
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if session.failure is None:
            raise
        raise custom_calls.NativeError(session.failure) from error
    if session.failure is not None:
        raise custom_calls.NativeError(session.failure)


def capacity_for(request: Request, context: int) -> int:
    """Number of positions that the caches of a request need, at most `context`."""
    return min(max(SMALLEST_CACHE, power_of_two(len(request.prompt) + request.limit)), context)


def room_for(limit: int, context: int) -> int:
    """Number of tokens that the result of a call has room for. limit: the most tokens that the call draws."""
    return min(power_of_two(max(SMALLEST_ROOM, limit)), context)


def request_for(request: Request, tokens: np.ndarray, start: int, limit: int, **fields: Any) -> custom_calls.Request:
    """A request as the kernels need it.

    tokens: int32 [n], the tokens that go through the call, the first one at position `start`. limit: the most tokens to
    draw. fields: other fields of the kernels' request.
    """
    stops, sampling = tuple(request.stop_tokens), request.sampling
    fields |= {"prompt": tokens, "start": start, "limit": limit, "stops": stops, "sampling": sampling}
    return custom_calls.Request(**fields)


def texts_for(request: Request, text: np.ndarray, start: int, drawn: int = 0) -> dict[str, Any]:
    """Fields of the kernels' request: the texts to draft from, and the tokens that the call is forced to draw.

    text: int32 [n], the prompt and the answer so far. start: number of its first positions that do not go through the
    call. drawn: number of tokens of the answer so far.
    """
    other = [*request.prediction, END_OF_TEXT] if len(request.prediction) else []
    before = np.concatenate([other, text[:start]]).astype(np.int32)
    return {"before": before, "forced": request.forced[drawn:], "most_drafts": request.draft_max}


class _Answer(Iterator[Chunk]):
    """Iterates over the tokens of a call. The call runs on its own thread, so that the caller's thread stays free for
    Ctrl-C and can read tokens meanwhile.
    """

    drafting: Drafting | None = None
    """Counts of passes and drafts, set when the answer has ended."""
    shared_passes: int = 0
    """Number of passes that had rows of other requests, set when the answer has ended."""

    def __init__(
        self, stream: CallStream, lease: Lease, run: Callable[[], None], freed: Callable[[], None], patience: float
    ):
        """stream: the stream of a call that `begin` has announced. run: makes the call. freed: called once, when the
        stream may serve another request. patience: see `NativeBackend`.
        """
        request = lease.request
        self._stream, self._request, self._lease = stream, request, lease
        self._patience = patience if request.tokens_per_dispatch is None else 0.0
        self._have, self._looked = 0, 0.0
        self._errors: list[BaseException] = []
        self._thread = threading.Thread(target=_run, args=(run, self._errors), name="laneformer-decode", daemon=True)
        self._threads = [self._thread]
        if request.constraint is not None:
            masks = partial(_give_masks, stream, request.constraint, request, self._thread)
            self._threads.append(
                threading.Thread(target=_run, args=(masks, self._errors), name="laneformer-masks", daemon=True)
            )
        for thread in self._threads:
            thread.start()
        request.cancelled.call(stream.cancel)
        # The finalizer also runs when this object is dropped, and when the process ends.
        self._freed = weakref.finalize(self, _free, stream, self._threads, request.cancelled, freed)

    def close(self) -> None:
        """Ends the call if it is still running."""
        if self._freed.alive:
            _end(self._stream, self._threads, self._request.cancelled)
            self.drafting = getattr(self._stream, "drafting", None)
            self.shared_passes = getattr(self._stream, "shared_passes", 0)
            self._freed()

    def __next__(self) -> Chunk:
        request, have = self._request, self._have
        wanted = have + (request.tokens_per_dispatch or 1 if have else 1)
        drawn = self._wait(min(wanted, request.limit))
        if drawn == have:
            self.close()
            raise StopIteration
        if have == 0:  # the first token is a chunk alone, because the benchmark reports its time
            drawn = 1
        elif request.tokens_per_dispatch is not None:
            drawn = min(drawn, wanted)
        self._have = drawn
        return self._chunk(have, drawn)

    def _wait(self, count: int) -> int:
        """Waits for `count` tokens or the end of the call. Returns the number of tokens drawn; raises the call's
        exception.
        """
        rest = self._looked + self._patience - time.perf_counter()
        if rest > 0:  # wait that long, unless the answer ends earlier
            self._stream.wait(self._request.limit - 1, math.ceil(1000 * rest))
        while (drawn := self._stream.wait(count - 1)) < count:
            if self._stream.finished or not self._thread.is_alive():
                for thread in self._threads:
                    thread.join()
                if self._errors:
                    raise self._errors[0]
                drawn = self._stream.wait(count, 0)
                break
        self._looked = time.perf_counter()
        return drawn

    def _chunk(self, first: int, last: int) -> Chunk:
        drawn = self._stream.drawn(first, last - first, self._request.top_logprobs)
        ranked = [
            list(zip(ids, logprobs, strict=True))
            for ids, logprobs in zip(drawn.top_tokens.tolist(), drawn.top_logprobs.tolist(), strict=True)
        ]
        tokens, cached = drawn.tokens.tolist(), self._lease.count + self._stream.copied
        self._lease.drawn.extend(tokens)
        return Chunk(tokens, drawn.logprobs.tolist(), ranked, cached, drawn.drafted.tolist(), drawn.others.tolist())


def _run(run: Callable[[], None], errors: list[BaseException]) -> None:
    try:
        run()
    except BaseException as error:  # raised again by the thread that reads the tokens
        errors.append(error)


def _give_masks(stream: CallStream, constraint: Masks, request: Request, call: threading.Thread) -> None:
    """Computes the masks of a call, and ends the call when no further token is allowed."""
    try:
        give_masks(stream, constraint, request.stop_tokens, request.limit, call.is_alive)
    finally:
        stream.cancel()  # without effect after the last token


def _end(stream: CallStream, threads: Sequence[threading.Thread], cancelled: Cancellation) -> None:
    """Ends the call if it is still running, and waits until it has ended, because it writes to buffers that the next
    call needs. threads: the thread of the call, and that of its masks.
    """
    cancelled.call(None)
    for thread in threads:
        if thread.is_alive():
            stream.cancel()
            if thread is not threading.current_thread():  # garbage collection may run this on that thread
                thread.join()


def _free(
    stream: CallStream, threads: Sequence[threading.Thread], cancelled: Cancellation, freed: Callable[[], None]
) -> None:
    _end(stream, threads, cancelled)
    freed()


def plan_of(source: Source) -> Plan:
    """The model as a plan for the kernels.

    If products compute in float32, weights are packed as they are stored, which is exact; otherwise in the dtype of the
    products.
    """
    compute = source.precision.compute
    return make_plan(
        decoder_ops(source.config),
        source.config.schedule,
        weight_dtype=source.stored_dtype if compute == "float32" else compute,
        cache_dtype=compute,
        rounded_activations=compute != "float32",
    )


def check_weights(weights: str | None, plan: Plan, rounded: tuple[str, ...] = ()) -> None:
    """Raises ConfigError for a format that is unknown or cannot hold the plan's weights. weights: the --weights option.
    rounded: formats with fewer bits that the backend supports.
    """
    known = ("bfloat16", "bf12", *rounded)
    if weights not in (None, *known):
        raise ConfigError(f"weights must be {', '.join(known)} on this backend, got {weights}")
    if weights == "bf12" and plan.weight_dtype.name != "bfloat16":
        raise ConfigError(f"--weights bf12 needs bfloat16 weights, got {plan.weight_dtype.name}: add --dtype bfloat16")


def check_rounding(weights: str | None, source: Source) -> None:
    """Raises ConfigError for a --weights format that would round quantized weights again."""
    if source.quantized and weights not in (None, "bfloat16"):
        raise ConfigError(
            f"--weights {weights}: weight {source.quantized[0]} is quantized already; leave --weights out to keep its"
            " format, or choose bfloat16"
        )


class RoundedSource:
    """A model with the matrices of its products rounded to a kind of laneformer/quantized/rounding.py. Each matrix is
    rounded once. A `Source`.
    """

    def __init__(self, source: Source, plan: Plan, kind: Kind):
        self.config, self.precision, self.mesh = source.config, source.precision, source.mesh
        self.stored_dtype, self.quantized = source.stored_dtype, tuple(plan.matrices)
        self._source, self._kind = source, kind
        self._rounded: dict[str, Quantized] = {}

    def weights(self) -> Iterator[tuple[str, np.ndarray | Quantized]]:
        for path, weight in self._source.weights():
            if path in self.quantized and path not in self._rounded and not isinstance(weight, Quantized):
                self._rounded[path] = round_to(weight, self._kind, search=False)
            yield path, self._rounded.get(path, weight)

    def model(self) -> Laneformer:
        return model_of(self)


def report_left(packed: Bf12Weights) -> None:
    """Logs how many matrices were not packed in 12 bits because they have too many exceptions, if any."""
    if packed.left:
        log.info(
            "%d of %d matrices stay bfloat16: over %g of their weights are exceptions of bf12",
            *(packed.left, packed.left + packed.matrices, BF12_MOST_EXCEPTIONS),
        )


def bf12_conditions(packed: Bf12Weights) -> dict[str, int]:
    """The conditions to report about weights in 12 bits; empty if none are."""
    return {"bf12_weights": packed.weights, "bf12_exceptions": packed.exceptions} if packed.weights else {}


def rounded_kind(weights: str | None) -> Kind | None:
    """The kind of laneformer/quantized/rounding.py that the --weights option names; None for another format."""
    return next((kind for kind in get_args(Kind) if kind == weights), None)


def pack(session: DecodeSession, source: Source, without: Collection[str] = (), rounded: Kind | None = None) -> None:
    """Packs all weights except the paths in `without`, one at a time, with a progress bar for large models. rounded: a
    kind of laneformer/quantized/rounding.py to round the matrices of products to.
    """
    # tqdm's default lock is a system semaphore, which would leak if the engine process of a server is killed.
    tqdm.set_lock(threading.RLock())
    table, matrices = parameter_table(source.config), session.plan.matrices
    rest = sum(weight.size for path, weight in table.items() if path not in without)
    names = tqdm(
        source.weights(without) if isinstance(source, CheckpointSource) else source.weights(),
        "packing weights",
        total=len(table) - len(without),
        unit="weight",
        leave=False,
        disable=None if rest >= LARGE else True,
    )
    for path, weight in names:
        for part, own in session.plan.parts(path, weight).items():
            if rounded and part in matrices and not isinstance(own, Quantized):
                session.pack(part, round_to(own, rounded, search=False))
            else:
                session.pack(part, own)
