"""What every backend takes and gives: a model's source and then requests in, chunks of tokens out."""

import dataclasses
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Protocol

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh

from infer.sampling import Sampling
from laneformer.checkpoint import open_checkpoint
from laneformer.config import ModelConfig
from laneformer.model import Laneformer
from laneformer.precision import Precision


class Source(Protocol):
    """A model to run, whose weights a backend takes in the form that suits it: one at a time, or all as JAX arrays."""

    config: ModelConfig
    precision: Precision
    """The wanted one; its `param` is the weights' dtype."""
    mesh: Mesh | None
    """Over which the lanes spread; None for one device."""
    stored_dtype: str
    """Dtype name of the weights as they come."""

    def weights(self) -> Iterator[tuple[str, np.ndarray]]:
        """Path and lane-first array of each weight in the order of `parameter_table`; valid until the next one is asked
        for.
        """

    def model(self) -> Laneformer:
        """The model, on its mesh."""


class ModelSource:
    """A model that the caller holds."""

    def __init__(self, model: Laneformer):
        self._model = model
        self.config, self.mesh = model.config, model.mesh
        self.stored_dtype = model.tok_embeddings[...].dtype.name
        self.precision = dataclasses.replace(model.precision, param=self.stored_dtype)

    def weights(self) -> Iterator[tuple[str, np.ndarray]]:
        return ((path, _host_array(weight)) for path, weight in self._model.weights().items())

    def model(self) -> Laneformer:
        return self._model


def _host_array(weight: jax.Array) -> np.ndarray:
    """The whole weight, without what np.asarray would do: the array would keep its copy on the host for good."""
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
    ):
        self._checkpoint = open_checkpoint(path, dtype, num_lanes)
        self.config, self.stored_dtype, self.mesh = self._checkpoint.config, self._checkpoint.dtype, mesh
        self.precision = dataclasses.replace(precision or Precision.default(self.stored_dtype), param=self.stored_dtype)

    def weights(self) -> Iterator[tuple[str, np.ndarray]]:
        return self._checkpoint.weights()

    def model(self) -> Laneformer:
        return self._checkpoint.model(self.mesh, self.precision)


class Cancellation(threading.Event):
    """Set when nobody wants more."""

    def __init__(self):
        super().__init__()
        self._calling, self._then = threading.RLock(), None

    def set(self) -> None:
        super().set()
        with self._calling:
            if self._then is not None:
                self._then()

    def call(self, then: Callable[[], None] | None) -> None:
        """`then` at the moment it is set, or now if it is; None for nothing any more."""
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
    """Tokens to draw at most, at least 1; prompt and answer together fit the model's context."""
    sampling: Sampling
    stop_tokens: tuple[int, ...]
    """Nothing is drawn after one of these."""
    tokens_per_dispatch: int | None = None
    """Tokens between two looks of the host; None lets the backend choose."""
    top_logprobs: int = 0
    """How many of the most likely tokens to tell at each position; no more than the vocabulary has."""
    cancelled: Cancellation = field(default_factory=Cancellation)
    """A backend that keeps the host waiting for longer than a dispatch must look at it, or be called."""


class Chunk(NamedTuple):
    """Tokens that reached the host together. A stop token is the last one."""

    tokens: list[int]
    logprobs: list[float]
    """Log softmax of the raw logits at each token."""
    top: list[list[tuple[int, float]]]
    """For each token the `top_logprobs` most likely ones at its position by the raw logits, with their
    log-probabilities: the most likely first, the lowest id first among equals.
    """


class Backend(Protocol):
    """Draws tokens for one request at a time; the tokens follow infer/sampling.py."""

    name: ClassVar[str]
    source: Source
    conditions: dict[str, Any]
    """What its speed depends on: weights_dtype, compute_dtype, kv_dtype, device, devices, and what else there is to
    say.
    """

    @classmethod
    def unavailable(cls, source: Source) -> str | None:
        """Why this backend cannot run the model on this machine, and the remedy; None if it can."""

    def __init__(self, source: Source): ...

    def start(self, request: Request) -> Iterator[Chunk]:
        """Sets the prefill going and gives the chunks: at most `limit` tokens, none after a stop token, fewer if
        cancelled.

        The first chunk is the first token alone. Closing the iterator at any point leaves the backend ready for the
        next request.
        """


def device_name(device: jax.Device) -> str:
    """The GPU's or the CPU's model."""
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
    """The smallest one that is at least so large: sizes of arrays, so that few programs are compiled."""
    return 1 << (least - 1).bit_length()
