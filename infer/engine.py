"""The engine: a model, a backend that runs it, and a tokenizer; checks requests and starts generations."""

import time
import weakref
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from infer.backend import Backend, Request
from infer.generation import Generation
from infer.sampling import Sampling
from infer.tokenizer import Tokenizer
from infer.xla_engine import XlaBackend
from laneformer.checkpoint import load, read_config
from laneformer.config import ModelConfig
from laneformer.errors import ConfigError, InputError
from laneformer.mesh import make_mesh
from laneformer.model import Laneformer, check_ids
from laneformer.parameters import parameter_count

ORDER = ("cuda", "hip", "cpu", "xla")  # in which "auto" tries them
BACKENDS: dict[str, type[Backend]] = {backend.name: backend for backend in (XlaBackend,)}


class Engine:
    """Generates text with a model, one generation at a time.

        engine = infer.Engine.load("checkpoints/mine")
        for token in engine.generate("def fibonacci(n):", max_new_tokens=100):
            print(token.text, end="", flush=True)
    """

    def __init__(self, model: Laneformer, backend: str = "auto", *, tokenizer: Tokenizer | None = None, name: str = "model"):
        """backend: one of ORDER, or "auto" for the first that can run this model here; `engine.backend` says which.

        name: of the model, for reports. Raises ConfigError for a backend that is unknown, not built or not able to run the model.
        """
        self._backend = _choose(backend, model)(model)
        self._stored_dtype = model.tok_embeddings[...].dtype.name
        self.tokenizer, self.name = tokenizer, name
        self._running: weakref.ref[Generation] | None = None

    @classmethod
    def load(cls, path: str | Path, backend: str = "auto", *, dtype=None, devices: int = 1, num_lanes: int | None = None) -> "Engine":
        """An engine for a checkpoint and the tokenizer.json beside it, if there is one.

        path, dtype, num_lanes: as for laneformer.load. devices: over how many the lanes spread. Raises CheckpointError or ConfigError.
        """
        mesh = make_mesh(read_config(path, num_lanes).num_lanes, lane=devices) if devices != 1 else None
        model = load(path, dtype, mesh=mesh, num_lanes=num_lanes)
        tokenizer = Tokenizer.find(path, model.config.bos_token_id)
        return cls(model, backend, tokenizer=tokenizer, name=Path(path).absolute().name)

    @property
    def backend(self) -> str:
        """The backend in use."""
        return self._backend.name

    @property
    def model(self) -> Laneformer:
        """The model as the backend runs it."""
        return self._backend.model

    @property
    def config(self) -> ModelConfig:
        """The model's config."""
        return self.model.config

    @property
    def conditions(self) -> dict[str, Any]:
        """What a measured speed depends on, apart from the request; belongs beside every figure."""
        weight = self.model.tok_embeddings[...]
        devices = weight.devices()
        return {
            "model": self.name,
            "parameters": parameter_count(self.config),
            "layout": self.config.layout,
            "lanes": self.config.num_lanes,
            "weights_dtype": weight.dtype.name,
            "stored_dtype": self._stored_dtype,
            "compute_dtype": self.model.precision.compute,
            "backend": self.backend,
            "device": _device_name(next(iter(devices))),
            "devices": len(devices),
            "batch_size": 1,
            "context": self.config.max_position_embeddings,
        }

    def encode(self, prompt: str | Sequence[int] | np.ndarray) -> np.ndarray:
        """The prompt as generate() takes it: token ids, int32 [n]. Raises InputError unless it leaves room for an answer."""
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise InputError("a text prompt needs a tokenizer.json beside the checkpoint: put it there, or give token ids")
            ids = np.asarray(self.tokenizer.encode(prompt), np.int64)
        else:
            ids = np.asarray(prompt)
        if ids.size == 0:
            raise InputError("the prompt is empty: give at least one token")
        if ids.ndim != 1 or not np.issubdtype(ids.dtype, np.integer):
            raise InputError(f"a prompt is a text or a list of token ids, not {ids.dtype} {list(ids.shape)}")
        if ids.size >= self.config.max_position_embeddings:
            raise InputError(
                f"the prompt has {ids.size} tokens and the context {self.config.max_position_embeddings}: "
                "shorten it so that there is room for an answer"
            )
        check_ids(self.config, ids[None])
        return ids.astype(np.int32)

    def generate(
        self,
        prompt: str | Sequence[int] | np.ndarray,
        *,
        max_new_tokens: int | None = None,
        sampling: Sampling = Sampling(),  # noqa: B008  frozen
        stop_tokens: int | Iterable[int] | None = None,
        stop_strings: str | Iterable[str] = (),
        tokens_per_dispatch: int | None = None,
    ) -> Generation:
        """Starts to generate; the tokens come from the returned iterator.

        prompt: a text (needs a tokenizer, which adds the begin-of-text token) or token ids, taken as they are. max_new_tokens: by default
        as many as the context has room for. stop_tokens: by default the config's eos_token_id; () for none; not handed out.
        stop_strings: the text ends before the first of them; they are looked for in the answer's text, which special tokens are not in.
        tokens_per_dispatch: tokens between two looks of the host, by default as many as take about 75 ms.

        Raises InputError for a prompt or a limit that cannot work, and while another generation of this engine runs.
        """
        accepted = time.perf_counter()
        self._require_free()
        prompt_n = self.encode(prompt)
        room = self.config.max_position_embeddings - len(prompt_n)
        limit = room if max_new_tokens is None else min(room, _whole("max_new_tokens", max_new_tokens))
        if tokens_per_dispatch is not None:
            tokens_per_dispatch = _whole("tokens_per_dispatch", tokens_per_dispatch)
        if not isinstance(sampling, Sampling):
            raise InputError(f"sampling = {sampling!r}: give infer.Sampling(temperature=..., ...)")
        strings = (stop_strings,) if isinstance(stop_strings, str) else tuple(stop_strings)
        if not all(isinstance(string, str) and string for string in strings):
            raise InputError(f"stop_strings = {strings!r}: give texts of at least one character")
        if strings and self.tokenizer is None:
            raise InputError("stop strings need the model's tokenizer, which was not found: give stop_tokens instead")
        request = Request(prompt_n, limit, sampling, self._stop_tokens(stop_tokens), tokens_per_dispatch)
        generation = Generation(self._backend, request, self.tokenizer, strings, accepted)
        self._running = weakref.ref(generation)
        return generation

    def warmup(self, prompt_tokens: int, max_new_tokens: int | None = None) -> float:
        """Compiles what a request of that size runs, so that its times are those of the machine alone; returns the seconds it took.

        Prompts and caches come in a few sizes (powers of two); sampling settings, stop tokens and seeds need no compilation.
        """
        began = time.perf_counter()
        prompt = np.zeros(_whole("prompt_tokens", prompt_tokens), np.int32)
        with self.generate(prompt, max_new_tokens=max_new_tokens, stop_tokens=(), tokens_per_dispatch=1) as generation:
            for _ in zip(range(2), generation, strict=False):  # the prefill's token and one of the decode loop
                pass
        return time.perf_counter() - began

    def _require_free(self) -> None:
        running = self._running and self._running()
        if running is None or running.finished:
            return
        if not running.cancelled:
            raise InputError("this engine is still generating: take all of it, or call .cancel() on that generation, before the next one")
        running.settle()

    def _stop_tokens(self, tokens: int | Iterable[int] | None) -> tuple[int, ...]:
        if tokens is None:
            return self.config.eos_token_id
        tokens = (tokens,) if isinstance(tokens, int | np.integer) else tuple(tokens)
        for token in tokens:
            if isinstance(token, bool) or not isinstance(token, int | np.integer) or not 0 <= token < self.config.vocab_size:
                raise InputError(f"stop token {token!r}: give ids from 0 to {self.config.vocab_size - 1}")
        return tuple(int(token) for token in tokens)


def _choose(name: str, model: Laneformer) -> type[Backend]:
    """The backend of that name, or the first that can run the model."""
    reasons = {known: "not built here" if known not in BACKENDS else BACKENDS[known].unavailable(model) for known in ORDER}
    able = [known for known in ORDER if reasons[known] is None]
    if name == "auto":
        return BACKENDS[able[0]]
    if name not in ORDER:
        raise ConfigError(f"backend = {name!r}: known are auto, {', '.join(ORDER)}")
    if reasons[name] is not None:
        raise ConfigError(f"backend {name} is not available ({reasons[name]}); available: {', '.join(able)}, or auto for the first of them")
    return BACKENDS[name]


def _whole(name: str, value: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < 1:
        raise InputError(f"{name} = {value!r}: give a whole number of at least 1")
    return int(value)


def _device_name(device: jax.Device) -> str:
    """The GPU's or the CPU's model."""
    if device.platform == "cpu":
        try:
            lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
            return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
        except (OSError, StopIteration):
            pass
    return device.device_kind
