"""What every backend takes and returns: the source of a model and requests in, chunks of tokens out."""

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

from infer.engine.constraint import Constraint, Elsewhere
from infer.sampling import Sampling
from laneformer.checkpoint import open_checkpoint
from laneformer.config import ModelConfig
from laneformer.formats import Bf12Product
from laneformer.mesh import put_weight
from laneformer.model import Laneformer
from laneformer.precision import Precision
from laneformer.quantized import Quantized
from laneformer.weights import parameter_table


class Source(Protocol):
    """A model to run. A backend reads its weights one at a time, or all of them as JAX arrays."""

    config: ModelConfig
    precision: Precision
    """Precision to compute in; its `param` is the dtype of the weights."""
    mesh: Mesh | None
    """Devices that the lanes are spread over; None for one device."""
    stored_dtype: str
    """Name of the dtype in which the weights are stored."""

    quantized: tuple[str, ...]
    """Paths of the weights that are records of laneformer/quantized."""

    def weights(self) -> Iterator[tuple[str, np.ndarray | Quantized]]:
        """Path and lane-first array of each weight, or its record, in any order, best in `packing_order`; an array is
        valid until the next one is read.
        """

    def model(self) -> Laneformer:
        """The model as JAX arrays, on its mesh."""


def model_of(source: Source) -> Laneformer:
    """Its weights as JAX arrays on its mesh, put there one at a time."""
    table = parameter_table(source.config)
    weights = {path: put_weight(weight, table[path].spec, source.mesh) for path, weight in source.weights()}
    return Laneformer(source.config, weights, source.precision, source.mesh)


class ModelSource:
    """A model that the caller holds."""

    def __init__(self, model: Laneformer):
        self._model = model
        self.config, self.mesh = model.config, model.mesh
        self.stored_dtype = model.tok_embeddings[...].dtype.name
        self.precision = dataclasses.replace(model.precision, param=self.stored_dtype)
        self.quantized = tuple(path for path, weight in model.weights().items() if isinstance(weight, Quantized))

    def weights(self) -> Iterator[tuple[str, np.ndarray | Quantized]]:
        for path, weight in self._model.weights().items():
            if isinstance(weight, Quantized):
                on_host = {name: _host_array(array) for name, array in weight.arrays.items()}
                yield path, dataclasses.replace(weight, **on_host)
            else:
                yield path, _host_array(weight)

    def model(self) -> Laneformer:
        return self._model


def _host_array(weight: jax.Array) -> np.ndarray:
    """The whole weight. After np.asarray the JAX array would keep its copy on the host as well."""
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
    """A checkpoint on disk; arguments and errors are those of laneformer.load."""

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
        """Matrices that a session can use as they are in the files."""
        return self._checkpoint.packed()

    def model(self) -> Laneformer:
        return self._checkpoint.model(self.mesh, self.precision)


class Cancellation(threading.Event):
    """Set once no more tokens are wanted; calls a function at that moment."""

    def __init__(self):
        super().__init__()
        self._calling, self._then = threading.RLock(), None

    def set(self) -> None:
        super().set()
        with self._calling:
            if self._then is not None:
                self._then()

    def call(self, then: Callable[[], None] | None) -> None:
        """Calls `then` when the event is set, or now if it already is; None removes it."""
        with self._calling:
            self._then = then
            if then is not None and self.is_set():
                then()


@dataclass(frozen=True)
class Request:
    """One checked generation."""

    prompt: np.ndarray
    """Token ids, int32 [n], n >= 1."""
    limit: int
    """Maximum number of tokens to draw, at least 1; prompt and answer together fit the model's context."""
    sampling: Sampling
    stop_tokens: tuple[int, ...]
    """Ids after which nothing is drawn."""
    tokens_per_dispatch: int | None = None
    """Tokens per dispatch, after which they reach the host; None lets the backend choose."""
    top_logprobs: int = 0
    """Number of most likely tokens to report at each position; at most the size of the vocabulary."""
    cache_prompt: bool = True
    """Whether the prompt may take keys and values that an earlier request left, and leave its own to later ones."""
    cache_salt: str = ""
    """Requests share keys and values only if their salts are equal."""
    cache_key: str = ""
    """Name of a conversation: of kept sequences that begin alike, its own is taken."""
    prediction: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int32))
    """Token ids of a text that the answer may repeat, int32 [n]: to draft from, where the backend drafts."""
    draft_max: int | None = None
    """Most drafts of a pass, if they are to be fewer than the backend's."""
    forced: tuple[int, ...] = ()
    """First tokens of the answer, whatever is drawn: for measurements, on backend cpu."""
    constraint: Constraint | Elsewhere | None = None
    """What the answer's text must be, where the backend adjusts."""
    cancelled: Cancellation = field(default_factory=Cancellation)
    """A backend whose calls last longer than a dispatch must poll this, or register a function with it."""


class Chunk(NamedTuple):
    """Tokens that reached the host together. A stop token can only be the last one."""

    tokens: list[int]
    logprobs: list[float]
    """Log softmax of the raw logits at each token."""
    top: list[list[tuple[int, float]]]
    """For each token, the `top_logprobs` most likely ones at its position by the raw logits and their
    log-probabilities; the most likely first, equals by ascending id.
    """
    cached: int = 0
    """Tokens of the prompt that were not computed: an earlier request had left their keys and values."""
    drafted: Sequence[bool] = ()
    """Of each token whether it was a draft that was right; () where the backend makes none."""
    others: Sequence[int] = ()
    """Of each token the other requests with rows in its pass; () where requests run one at a time."""


class Backend(Protocol):
    """Draws tokens for one request at a time, as infer/sampling.py defines them."""

    name: ClassVar[str]
    adjusts: ClassVar[bool]
    """Whether it has presence and frequency penalties, logit biases and masks."""
    source: Source
    conditions: dict[str, Any]
    """What the speed depends on: weights_dtype, compute_dtype, kv_dtype, device, devices, prefix_cache (sequences that
    are kept for later prompts), and facts of this backend.
    """

    @classmethod
    def unavailable(cls, source: Source) -> str | None:
        """The reason why this backend cannot run the model on this machine, and the remedy; None if it can."""

    def __init__(self, source: Source): ...

    def start(self, request: Request) -> Iterator[Chunk]:
        """Starts the prefill and returns the chunks: at most `limit` tokens, none after a stop token, fewer if
        cancelled.

        The first chunk is the first token alone. Closing the iterator at any point leaves the backend ready for the
        next request.
        """


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
    """Whether JAX's devices are the host's processor, however many devices it was split into."""
    return jax.default_backend() == "cpu"


def power_of_two(least: int) -> int:
    """The smallest power of two >= `least`; used for sizes of arrays, so that few programs are compiled."""
    return 1 << (least - 1).bit_length()
