"""The XLA backend: the whole decode loop is one compiled program, on any device and any mesh that JAX supports."""

import dataclasses
import logging
import math
import time
from collections.abc import Generator
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from laneformer.errors import InputError
from laneformer.infer.engine.backend import Chunk, Chunks, Request, Source, device_name, power_of_two
from laneformer.infer.engine.constraint import as_flags
from laneformer.infer.sampling import SAMPLING_OPTIONS, Adjustments, sample, top_logprobs
from laneformer.model import Laneformer
from laneformer.quantized import Quantized
from laneformer.state import Cache, capacity_of, emptied
from laneformer.weights import parameter_table

log = logging.getLogger("laneformer")

PREFILL_BLOCK = 512  # tokens; the attention scores and logits of a whole long prompt would not fit in memory
SMALLEST_PREFILL, SMALLEST_CACHE = 16, 256
LONGEST_DISPATCH = 1024  # tokens; size of the output buffer
DISPATCH_SECONDS = 0.075
GROWTH = 4  # largest ratio of the tokens of a dispatch to those of the previous one


class State(NamedTuple):
    """The values that the decode loop carries from token to token."""

    cache: Cache
    token: jax.Array
    """Last token drawn, int32 scalar; not yet in the cache."""
    seen: jax.Array
    """Whether the prompt or the answer so far contains each token, bool [v]."""
    drawn: jax.Array | None
    """How often each token was drawn in the answer so far, int32 [v]; None if the draw does not depend on it."""


class XlaBackend:
    """Runs prefill and decode loop through XLA. The memory of the cache is kept for the next request of the same size.

    If the devices belong to several processes, each process must make the same requests. A request that one process
    cancels ends in all of them. A token may be drawn only if the masks of all processes allow it.
    """

    name: ClassVar[str] = "xla"
    masks: ClassVar[bool] = True
    sampling_options: ClassVar[frozenset[str]] = SAMPLING_OPTIONS

    @classmethod
    def unavailable(cls, source: Source) -> str | None:
        return None

    def __init__(self, source: Source):
        self.source, self.model = source, _for_its_devices(source.model())
        model, embedding = self.model, self.model.tok_embeddings[...]
        self.conditions = {
            "weights_dtype": embedding.dtype.name,
            **_quantized(model),
            "compute_dtype": model.precision.compute,
            "kv_dtype": model.precision.compute,
            "prefix_cache": 0,  # XLA's order of summation for a position depends on the positions computed with it
            "device": device_name(next(iter(embedding.devices()))),
            "devices": len(embedding.devices()),
        }
        self._cache: list[dict[str, jax.Array]] | None = None  # by layer; None while a dispatch owns the arrays
        weight = embedding.sharding
        everywhere = weight if model.mesh is None else NamedSharding(model.mesh, P())

        def share(logits_v):
            """Gathers the logits of a head that is split over the devices, because every device draws from all of
            them.
            """
            return logits_v if model.mesh is None else jax.lax.with_sharding_constraint(logits_v, everywhere)

        def of_all(allowed) -> jax.Array | None:
            """The tokens that the masks of all processes allow, bool [v]. allowed: bool [v], or a row per device."""
            return None if allowed is None else share(allowed.reshape(-1, allowed.shape[-1]).all(0))

        def draw(state: State, logits_v, params, adjust: Adjustments | None, allowed, top) -> tuple[State, tuple]:
            """Draws one token. Returns the new state, and the output for the host: the token, its log-probability and,
            if `top` > 0, the `top` most likely tokens and their log-probabilities. allowed: a mask, bool [v], or None.
            """
            logits_v = share(logits_v)
            drawn = state.drawn
            added = None if adjust is None or drawn is None else adjust.of(drawn)
            token, logprob = sample(logits_v, state.seen, state.cache.length, params, added, allowed)
            output = (token, logprob, *(top_logprobs(logits_v, top) if top else ()))
            drawn = None if drawn is None else drawn.at[token].add(1)
            return State(state.cache, token, state.seen.at[token].set(True), drawn), output

        def absorb(model, cache, ids_bs) -> Cache:
            return model.extend(ids_bs, cache, last_only=True)[1]

        def begin(model, cache, ids_bs, real, seen, params, adjust, allowed, top) -> tuple[State, tuple]:
            """Reads the end of the prompt and draws the first token. ids_bs [1, s]: `real` tokens and padding."""
            logits, cache = model.extend(ids_bs, cache, count=real)
            drawn = None if adjust is None else jnp.zeros(seen.shape, jnp.int32)
            state = State(cache, jnp.int32(0), seen, drawn)
            return draw(state, logits[0, real - 1], params, adjust, of_all(allowed), top)

        def decode(model, state, params, adjust, allowed, stop_tokens, counts, top) -> tuple[State, tuple, jax.Array]:
            """Draws tokens up to a stop token, at most the smallest of `counts`, which has one count per process.
            Returns the state, the outputs for the host, each [LONGEST_DISPATCH, ...], and the number of tokens drawn.
            """
            count, allowed = counts.min(), of_all(allowed)

            def unfinished(carry):
                _, _, n, stopped = carry
                return (n < count) & ~stopped

            def step(carry):
                state, lists, n, _ = carry
                logits, cache = model.extend(state.token[None, None], state.cache, last_only=True)
                state, output = draw(state._replace(cache=cache), logits[0, 0], params, adjust, allowed, top)
                stopped = (state.token == stop_tokens).any()
                return state, tuple(x.at[n].set(one) for x, one in zip(lists, output, strict=True)), n + 1, stopped

            kinds = [((), jnp.int32), ((), jnp.float32), *([((top,), jnp.int32), ((top,), jnp.float32)] if top else [])]
            lists = tuple(jnp.zeros((LONGEST_DISPATCH, *shape), dtype) for shape, dtype in kinds)
            return jax.lax.while_loop(unfinished, step, (state, lists, jnp.int32(0), jnp.bool_(False)))[:3]

        # Outputs have the shardings of the inputs, so that the cache is updated in place and one program serves all
        # calls.
        smallest = self.model.make_cache(1, SMALLEST_CACHE).layers
        layers = jax.tree.map(lambda array: weight if model.mesh is None else array.sharding, smallest)
        self._place = Cache(layers, everywhere)  # type: ignore[arg-type]  # a tree of shardings, as the next
        state = State(self._place, everywhere, everywhere, everywhere)  # type: ignore[arg-type]
        self._absorb = jax.jit(absorb, donate_argnums=1, out_shardings=self._place)
        self._begin = jax.jit(begin, donate_argnums=1, static_argnums=8, out_shardings=(state, everywhere))
        self._decode = jax.jit(
            decode, donate_argnums=1, static_argnums=7, out_shardings=(state, everywhere, everywhere)
        )
        self._several = len({device.process_index for device in embedding.devices()}) > 1

    def start(self, request: Request) -> Chunks:
        model, prompt = self.model, request.prompt
        cache = self._take_cache(len(prompt) + request.limit)
        whole = (len(prompt) - 1) // PREFILL_BLOCK * PREFILL_BLOCK
        for n in range(0, whole, PREFILL_BLOCK):
            cache = self._absorb(model, cache, prompt[None, n : n + PREFILL_BLOCK])
            jax.block_until_ready(cache.length)  # on host devices, launches with collectives must not queue up
        real = len(prompt) - whole
        padded = np.zeros((1, min(max(SMALLEST_PREFILL, power_of_two(real)), cache.capacity - whole)), np.int32)
        padded[0, :real] = prompt[whole:]
        seen = np.zeros(model.config.vocab_size, bool)
        seen[prompt] = True
        settings = request.sampling.parameters(), request.sampling.adjustments(model.config.vocab_size)
        mask = self._of_all(_mask(request))
        begun = self._begin(model, cache, padded, np.int32(real), seen, *settings, mask, request.top_logprobs)
        chunks = self._chunks(request, settings, *begun)
        next(chunks)
        return chunks

    def _chunks(self, request: Request, settings: tuple, state: State, first: tuple) -> Generator[Chunk, None, None]:
        chunk: Chunk | None = None
        drawn, pace = 0, 1
        stop_tokens = np.full(power_of_two(max(4, len(request.stop_tokens))), -1, np.int32)
        stop_tokens[: len(request.stop_tokens)] = request.stop_tokens

        def dispatch(count: int, mask: np.ndarray | None = None) -> tuple[tuple, int]:
            """Draws up to `count` more tokens, all with the same mask. Returns the outputs of `decode` on the host, and
            the number of tokens drawn.
            """
            nonlocal state
            self._cache = None
            state, lists, n = self._decode(
                *(self.model, state, *settings, self._of_all(mask), stop_tokens),
                *(self._of_all(np.asarray(count, np.int32)), request.top_logprobs),
            )
            lists, n = jax.device_get((lists, n))
            self._cache = state.cache.layers
            return lists, int(n)

        def ended(chunk: Chunk) -> bool:
            return drawn >= request.limit or chunk.tokens[-1] in request.stop_tokens

        def leave() -> None:
            """Ends the answer in the other processes, which wait for this process in the next dispatch."""
            masked = request.constraint is not None  # all processes must run the same program
            dispatch(0, np.ones(self.model.config.vocab_size, bool) if masked else None)

        try:
            yield Chunk([], [], [])  # for `start`: closing a generator before its first yield would skip the handler
            chunk, drawn = _chunk(*(one[None] for one in jax.device_get(first))), 1
            self._cache = state.cache.layers
            while True:
                yield chunk
                if ended(chunk):
                    return
                mask, count = None, min(request.tokens_per_dispatch or pace, LONGEST_DISPATCH, request.limit - drawn)
                if request.constraint is not None:  # a mask is valid for one token
                    request.constraint.accept(chunk.tokens[-1])
                    mask, count = _mask(request), 1
                    if mask is None:
                        if self._several:
                            leave()
                        return
                began = time.perf_counter()
                lists, n = dispatch(count, mask)
                if n == 0:  # cancelled in another process
                    return
                seconds = (time.perf_counter() - began) / n
                pace = max(1, min(GROWTH * count, int(DISPATCH_SECONDS / seconds)))
                chunk, drawn = _chunk(*(x[:n] for x in lists)), drawn + n
        except (GeneratorExit, InputError):  # cancelled, or the mask could not be computed
            if self._several:
                if chunk is None:
                    chunk, drawn = _chunk(*(one[None] for one in jax.device_get(first))), 1
                if not ended(chunk):
                    leave()
            raise

    def _of_all(self, own: np.ndarray | None) -> np.ndarray | jax.Array | None:
        """The values of all processes, with a row for each device. own: the value of this process. In a job of one
        process, or for None, returns `own` unchanged.
        """
        mesh = self.model.mesh
        if own is None or mesh is None or not self._several:
            return own
        return jax.make_array_from_callback(
            (mesh.size, *own.shape), NamedSharding(mesh, P(mesh.axis_names)), lambda _: own[None]
        )

    def _take_cache(self, positions: int) -> Cache:
        """An empty cache with room for `positions`, rounded up to a power of two, at most the whole context."""
        capacity = min(max(SMALLEST_CACHE, power_of_two(positions)), self.model.config.max_position_embeddings)
        kept, self._cache = self._cache, None
        if kept is not None and capacity_of(kept) == capacity:
            cache = emptied(self.model.config, kept)
        else:
            cache = self.model.make_cache(1, capacity)
        return jax.device_put(cache, self._place)


def _mask(request: Request) -> np.ndarray | None:
    """The tokens that may be drawn next, bool [v]. None if all may be, and if the answer is complete."""
    if request.constraint is None or (words := request.constraint.mask()) is None:
        return None
    return as_flags(words, len(request.constraint))


def _chunk(
    tokens: np.ndarray,
    logprobs: np.ndarray,
    likely: np.ndarray | None = None,
    likely_logprobs: np.ndarray | None = None,
) -> Chunk:
    """A chunk from tokens [n], logprobs [n] and, if requested, likely and likely_logprobs [n, top_logprobs]."""
    top: list[list[tuple[int, float]]]
    if likely is None or likely_logprobs is None:
        top = [[] for _ in tokens]
    else:
        top = [list(zip(*both, strict=True)) for both in zip(likely.tolist(), likely_logprobs.tolist(), strict=True)]
    return Chunk(tokens.tolist(), logprobs.tolist(), top)


def _for_its_devices(model: Laneformer) -> Laneformer:
    """The model, with its weights converted to float32 if a CPU multiplies in float32. XLA would otherwise convert
    16-bit weights again for every product.
    """
    weight = model.tok_embeddings[...]
    if (
        next(iter(weight.devices())).platform != "cpu"
        or weight.dtype == jnp.float32
        or model.precision.compute != "float32"
    ):
        return model
    log.info(
        "backend xla on a CPU: converted the weights from %s to float32, which runs about 20 times faster", weight.dtype
    )
    precision = dataclasses.replace(model.precision, param="float32")
    weights = {
        path: jax.block_until_ready(_in_float32(w))  # one at a time
        for path, w in model.weights().items()
    }
    return Laneformer(model.config, weights, precision, model.mesh)


def _in_float32(w: jax.Array | Quantized[jax.Array]) -> jax.Array | Quantized[jax.Array]:
    """An array of floats, converted; another weight unchanged."""
    return w if isinstance(w, Quantized) or jnp.issubdtype(w.dtype, jnp.integer) else w.astype(jnp.float32)


def _quantized(model: Laneformer) -> dict[str, Any]:
    """Conditions to report about quantized weights: the number that a token reads, their bytes and their formats. Empty
    if no weight is quantized.
    """
    table = parameter_table(model.config)
    records = [(w, table[path].share) for path, w in model.weights().items() if isinstance(w, Quantized)]
    if not records:
        return {}
    return {
        "quantized_weights": round(sum(math.prod(record.shape) * share for record, share in records)),
        "quantized_bytes": round(sum(record.nbytes * share for record, share in records)),
        "quantized_formats": sorted({record.name for record, _ in records}),
    }
