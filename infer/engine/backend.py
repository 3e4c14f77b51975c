"""The interface of all backends: they take the source of a model and requests, and return chunks of tokens."""

import dataclasses
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple, Protocol

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh

from laneformer.checkpoint import open_checkpoint
from laneformer.config import ModelConfig
from laneformer.formats import Bf12Product
from laneformer.infer.engine.constraint import Masks
from laneformer.infer.sampling import Sampling
from laneformer.mesh import put_weight
from laneformer.model import Laneformer
from laneformer.precision import Precision
from laneformer.quantized import Quantized
from laneformer.weights import parameter_table


class Source(Protocol):
    """A model to run. A backend reads its weights one at a time, or all of them as JAX arrays."""

    config: ModelConfig
    precision: Precision
    """Precision of the computation; its `param` is the dtype of the weights."""
    mesh: Mesh | None
    """Devices that the lanes are spread over; None for one device."""
    stored_dtype: str
    """Name of the dtype in which the weights are stored."""

    quantized: tuple[str, ...]
    """Paths of the weights that are records of laneformer/quantized."""

    def weights(self) -> Iterator[tuple[str, np.ndarray | Quantized]]:
        """Yields the path of each weight with its lane-first array or its record. Any order is allowed, `packing_order`
        is best. An array is valid until the next one is read.
        """

    def model(self) -> Laneformer:
        """The model as JAX arrays, on its mesh."""


def model_of(source: Source) -> Laneformer:
    """The model of a source, made by putting its weights on its mesh one at a time."""
    table = parameter_table(source.config)
    weights = {path: put_weight(weight, table[path].spec, source.mesh) for path, weight in source.weights()}
    return Laneformer(source.config, weights, source.precision, source.mesh)


class ModelSource:
    """A model that the caller already has as JAX arrays. A `Source`."""

    def __init__(self, model: Laneformer):
        self._model = model
        self.config, self.mesh = model.config, model.mesh
        self.stored_dtype = model.tok_embeddings[...].dtype.name
        self.precision = dataclasses.replace(model.precision, param=self.stored_dtype)
        self.quantized = tuple(path for path, weight in model.weights().items() if isinstance(weight, Quantized))

    def weights(self) -> Iterator[tuple[str, np.ndarray | Quantized]]:
        for path, weight in self._model.weights().items():
            if isinstance(weight, Quantized):
                yield path, weight.with_arrays({name: _host_array(array) for name, array in weight.arrays.items()})
            else:
                yield path, _host_array(weight)

    def model(self) -> Laneformer:
        return self._model


def _host_array(weight: jax.Array) -> np.ndarray:
    """The whole weight as a NumPy array. (Plain np.asarray would leave a second copy cached in the JAX array.)"""
    if not (weight.is_fully_addressable or weight.is_fully_replicated):
        return multihost_utils.process_allgather(weight, tiled=True)
    host = jax.local_devices(backend="cpu")[0]
    parts = [
        (shard.index, jax.device_put(shard.data, host)) for shard in weight.addressable_shards if shard.replica_id == 0
    ]
    if len(parts) == 1:
        return np.asarray(parts[0][1])
    whole = np.empty(weight.shape, weight.dtype)
    for index, part in parts:
        whole[index] = part
    return whole


class CheckpointSource:
    """A checkpoint on disk. Arguments and errors are those of laneformer.load. A `Source`."""

    def __init__(
        self,
        path: str | Path,
        dtype=None,
        *,
        mesh: Mesh | None = None,
        num_lanes: int | None = None,
        precision: Precision | None = None,
        weights: Literal["bfloat16"] | None = None,
    ):
        self._checkpoint = open_checkpoint(path, dtype, num_lanes, weights)
        self.quantized = self._checkpoint.quantized
        self.config, self.stored_dtype, self.mesh = self._checkpoint.config, self._checkpoint.dtype, mesh
        self.precision = dataclasses.replace(precision or Precision.default(self.stored_dtype), param=self.stored_dtype)

    def weights(self, without: Collection[str] = ()) -> Iterator[tuple[str, np.ndarray | Quantized]]:
        return self._checkpoint.weights(without)

    def packed(self) -> Iterator[Bf12Product]:
        """Matrices in the format that a session uses directly from the files."""
        return self._checkpoint.packed()

    def check_files(self) -> None:
        """Raises CheckpointError if a file that a session uses directly was changed."""
        for file in self._checkpoint.mapped.values():
            file.check()

    def model(self) -> Laneformer:
        return self._checkpoint.model(self.mesh, self.precision)


class Cancellation(threading.Event):
    """An event that is set when no more tokens are needed. It calls a registered function at that moment."""

    def __init__(self):
        super().__init__()
        self._calling, self._then = threading.RLock(), None

    def set(self) -> None:
        super().set()
        with self._calling:
            if self._then is not None:
                self._then()

    def call(self, then: Callable[[], None] | None) -> None:
        """Registers a function to call when the event is set; calls it now if the event is set already. None removes
        the function.
        """
        with self._calling:
            self._then = then
            if then is not None and self.is_set():
                then()


@dataclass(frozen=True)
class Request:
    """The checked arguments of one generation."""

    prompt: np.ndarray
    """Token ids, int32 [n], n >= 1."""
    limit: int
    """Maximum number of tokens to draw, at least 1. Prompt and answer together fit the model's context."""
    sampling: Sampling
    stop_tokens: tuple[int, ...]
    """Ids after which nothing is drawn."""
    tokens_per_dispatch: int | None = None
    """Number of tokens that reach the host together; None lets the backend choose."""
    top_logprobs: int = 0
    """Number of most likely tokens to report at each position; at most the size of the vocabulary."""
    cache_prompt: bool = True
    """Whether the prompt may reuse keys and values of other requests, and later requests may reuse this request's."""
    cache_salt: str = ""
    """Requests share keys and values only if their salts are equal."""
    cache_key: str = ""
    """Name of a conversation. Its own sequence is preferred among kept sequences that match equally many tokens."""
    prediction: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int32))
    """Token ids of a text that the answer may repeat, int32 [n]. A backend that drafts copies drafts from it."""
    draft_max: int | None = None
    """Limit on the drafts of a pass, if lower than the backend's."""
    forced: tuple[int, ...] = ()
    """First tokens of the answer, which replace the drawn ones: for measurements, on a backend that `forces`."""
    constraint: Masks | None = None
    """Constraint on the answer's text; only on a backend with `masks`."""
    cancelled: Cancellation = field(default_factory=Cancellation)
    """Event that ends the request. A backend whose calls last longer than a dispatch must poll it, or register a
    function with it.
    """


class Chunk(NamedTuple):
    """Tokens that reached the host together. Only the last one can be a stop token."""

    tokens: list[int]
    logprobs: list[float]
    """Log softmax of the raw logits at each token."""
    top: list[list[tuple[int, float]]]
    """The most likely tokens at the position of each token, `Request.top_logprobs` of them, with their
    log-probabilities by the raw logits; the most likely first, equals by ascending id.
    """
    cached: int = 0
    """Number of prompt tokens that were not computed, because keys and values of another request were reused."""
    drafted: Sequence[bool] = ()
    """Whether each token was a correct draft; () if the backend makes no drafts."""
    others: Sequence[int] = ()
    """Number of other requests with rows in the pass that drew each token; () if requests run one at a time."""


class Chunks(Protocol):
    """An iterator over the chunks of an answer."""

    def __iter__(self) -> Iterator[Chunk]: ...
    def __next__(self) -> Chunk: ...
    def close(self) -> None:
        """Ends the answer. Leaves the backend ready for the next request."""


class Starter(Protocol):
    """Starts the answers to requests: a backend, or a HealedBackend (infer/engine/healing.py)."""

    def start(self, request: Request) -> Chunks:
        """Starts the prefill and returns an iterator over the chunks: at most `limit` tokens, none after a stop token,
        fewer if cancelled.

        The first chunk is the first token alone.
        """


class Backend(Starter, Protocol):
    """Draws tokens for requests, as infer/sampling.py defines them."""

    name: ClassVar[str]
    masks: ClassVar[bool]
    """Whether a draw may have a mask of the tokens that are allowed."""
    sampling_options: ClassVar[frozenset[str]]
    """Names of the fields of `Sampling` that the backend computes."""
    source: Source

    @property
    def conditions(self) -> dict[str, Any]:
        """The facts that the speed depends on: weights_dtype, compute_dtype, kv_dtype, device, devices, prefix_cache
        (number of sequences kept for later prompts), and facts of this backend.
        """

    @classmethod
    def unavailable(cls, source: Source) -> str | None:
        """The reason why this backend cannot run the model on this machine, with the remedy; None if it can."""

    def __init__(self, source: Source): ...


def device_name(device: jax.Device) -> str:
    """The product name of the GPU or CPU."""
    if device.platform == "cpu":
        try:
            lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
            return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
        except (OSError, StopIteration):
            pass
    return device.device_kind


def on_host() -> bool:
    """Whether JAX's default devices are the host's CPU, split into any number of devices."""
    return jax.default_backend() == "cpu"


def power_of_two(least: int) -> int:
    """The smallest power of two >= `least`. Array sizes are rounded up to it, so that few programs are compiled."""
    return 1 << (least - 1).bit_length()
