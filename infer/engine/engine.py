"""The engine: a model, a backend that runs it, and a tokenizer. It checks requests and starts generations."""

import contextlib
import inspect
import logging
import threading
import time
import weakref
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

from laneformer.checkpoint import read_config
from laneformer.config import ModelConfig
from laneformer.custom_calls import DecodeSession
from laneformer.errors import ConfigError, InputError, LaneformerError
from laneformer.infer.engine.backend import Backend, CheckpointSource, ModelSource, Request, Source, Starter
from laneformer.infer.engine.constraint import Grammars
from laneformer.infer.engine.cpu import CpuBackend
from laneformer.infer.engine.following import Leader, follow
from laneformer.infer.engine.generation import Generation
from laneformer.infer.engine.gpu import CudaBackend, CudaGraphBackend, CudaOverlapBackend, HipBackend
from laneformer.infer.engine.healing import HealedBackend, Spelled
from laneformer.infer.engine.xla import XlaBackend
from laneformer.infer.sampling import SAMPLING_OPTIONS, Sampling
from laneformer.infer.text.channels import Parts
from laneformer.infer.text.grammar import Grammar
from laneformer.infer.text.healing import Spelling
from laneformer.infer.text.tokenizer import Tokenizer
from laneformer.mesh import make_mesh
from laneformer.model import Laneformer, check_ids
from laneformer.precision import Precision
from laneformer.processes import GroupError
from laneformer.weights import parameter_count

log = logging.getLogger("laneformer")

ORDER = ("cuda", "hip", "cpu", "xla")  # the order in which "auto" tries them
BACKENDS: dict[str, type[Backend]] = {
    backend.name: backend
    for backend in (CudaBackend, HipBackend, CpuBackend, XlaBackend, CudaGraphBackend, CudaOverlapBackend)
}
NAMES = (*ORDER, CudaGraphBackend.name, CudaOverlapBackend.name)  # "auto" never chooses the CUDA graphs
MOST_TOP_LOGPROBS = 20
# Values that a backend without the option accepts: they describe what it does anyway, or leave the choice to it.
WITHOUT = {
    "weights": ("bfloat16",),
    "prefix_cache": (0,),
    "speculation": (0, None),
    "parallel": (0, 1),
    "most_slowdown": (1.5,),
}


class Engine:
    """Generates text with a model. Up to `parallel` generations run at a time, started from any threads.

    engine = laneformer.Engine.load("checkpoints/mine")
    for token in engine.generate("def fibonacci(n):", max_new_tokens=100):
        print(token.text, end="", flush=True)
    """

    def __init__(
        self,
        model: Laneformer | Source,
        backend: str = "auto",
        *,
        tokenizer: Tokenizer | None = None,
        name: str = "model",
        **options: Any,
    ):
        """backend: one of NAMES, or "auto" for the first of ORDER that can run this model here; `engine.backend` is its
        name. name: the model's name in reports. options: options of the backend, for cpu for example threads,
        prefix_cache, speculation and parallel (see infer/engine/cpu.py and gpu.py).

        Raises ConfigError for a backend that is unknown, not built or unable to run the model, and for an option that
        the backend does not have.
        """
        source = ModelSource(model) if isinstance(model, Laneformer) else model
        chosen = _choose(backend, source)
        for option, value in options.items():
            if option not in inspect.signature(chosen).parameters and value not in WITHOUT.get(option, ()):
                raise ConfigError(f"{option} = {value!r}: backend {chosen.name} has no such option")
        known = inspect.signature(chosen).parameters
        self._backend = chosen(source, **{name: value for name, value in options.items() if name in known})
        self.tokenizer, self.name = tokenizer, name
        self._running: list[weakref.ref[Generation]] = []
        self._starting = threading.Lock()
        self._leader: Leader | None = None
        self._grammars: Grammars | None = None
        self._spelling: Spelling | None = None
        self._making_grammars = threading.Lock()

    @classmethod
    def load(
        cls,
        path: str | Path,
        backend: str = "auto",
        *,
        dtype=None,
        devices: int = 1,
        num_lanes: int | None = None,
        precision: Precision | None = None,
        **options: Any,
    ) -> "Engine":
        """An engine for a checkpoint, with the tokenizer beside it if there is one.

        path, dtype, num_lanes, precision: as for laneformer.load; precision.param follows dtype. devices: number of
        devices to spread the lanes over. backend, options: as for the constructor. Raises CheckpointError or
        ConfigError.
        """
        mesh = make_mesh(read_config(path, num_lanes).num_lanes, lane=devices) if devices != 1 else None
        plain: Literal["bfloat16"] | None = "bfloat16" if options.get("weights") == "bfloat16" else None
        source = CheckpointSource(path, dtype, mesh=mesh, num_lanes=num_lanes, precision=precision, weights=plain)
        tokenizer = Tokenizer.find(path, source.config.bos_token_id)
        return cls(source, backend, tokenizer=tokenizer, name=Path(path).absolute().name, **options)

    @property
    def backend(self) -> str:
        """The name of the backend in use."""
        return self._backend.name

    @property
    def parallel(self) -> int:
        """Number of generations that can run together."""
        return getattr(self._backend, "parallel", 1)

    @property
    def model(self) -> Laneformer:
        """The model as backend xla runs it; its weights may be replaced between generations. Raises ConfigError on
        other backends.
        """
        if not isinstance(self._backend, XlaBackend):
            raise ConfigError(
                f"backend {self.backend} keeps packed weights and has no model: use laneformer.load, or backend xla"
            )
        return self._backend.model

    @property
    def session(self) -> DecodeSession | None:
        """The decode session of a native backend, for measurements such as the time of each token; None on backend
        xla.
        """
        return getattr(self._backend, "session", None)

    @property
    def config(self) -> ModelConfig:
        """The model's config."""
        return self._backend.source.config

    @property
    def precision(self) -> Precision:
        """The requested precision."""
        return self._backend.source.precision

    @property
    def conditions(self) -> dict[str, Any]:
        """The facts that a measured speed depends on, apart from the request. Report them with every figure."""
        return {
            "model": self.name,
            "parameters": parameter_count(self.config),
            "layout": self.config.layout,
            "lanes": self.config.num_lanes,
            "stored_dtype": self._backend.source.stored_dtype,
            "backend": self.backend,
            **self._backend.conditions,
            "batch_size": 1,
            "context": self.config.max_position_embeddings,
        }

    def encode(self, prompt: str | Sequence[int] | np.ndarray) -> np.ndarray:
        """Token ids of a prompt, int32 [n]. Raises InputError for a prompt that `generate` does not accept."""
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise InputError(
                    "a text prompt needs a tokenizer.json beside the checkpoint: add the file, or give token ids"
                )
            ids = np.asarray(self.tokenizer.encode(prompt), np.int64)
        else:
            ids = np.asarray(prompt)
        if ids.size == 0:
            raise InputError("the prompt is empty: give at least one token")
        if ids.ndim != 1 or not np.issubdtype(ids.dtype, np.integer):
            raise InputError(f"a prompt must be a string or a list of token ids, got {ids.dtype} {list(ids.shape)}")
        if ids.size >= self.config.max_position_embeddings:
            raise InputError(
                f"the prompt has {ids.size} tokens and the context {self.config.max_position_embeddings}: "
                "shorten the prompt to leave room for an answer"
            )
        check_ids(self.config, ids[None])
        return ids.astype(np.int32)

    def encode_prediction(self, text: str | Sequence[int]) -> np.ndarray:
        """Token ids of a text to draft from, int32 [n], cut to the length of the context. Raises InputError."""
        if isinstance(text, str):
            if self.tokenizer is None:
                raise InputError("a prediction in text needs a tokenizer, and the model has none: give token ids")
            text = self.tokenizer.encode_continuation(text)
        ids = np.asarray(text[: self.config.max_position_embeddings])
        if ids.size and (ids.ndim != 1 or not np.issubdtype(ids.dtype, np.integer)):
            raise InputError(f"a prediction must be a string or a list of token ids, got {ids.dtype} {list(ids.shape)}")
        if ids.size:
            check_ids(self.config, ids[None])
        return ids.astype(np.int32)

    def check_sampling(self, sampling: Sampling) -> None:
        """Raises ConfigError for a biased token outside the vocabulary, and for an option that the backend does not
        compute.
        """
        sampling.check(self.config.vocab_size)
        neutral = Sampling()
        given = {name for name in SAMPLING_OPTIONS if getattr(sampling, name) != getattr(neutral, name)}
        if lacking := given - self._backend.sampling_options:
            raise ConfigError(
                f"backend {self.backend} does not support {', '.join(sorted(lacking))}: leave it out, or use backend"
                " cpu or xla"
            )

    def check_constraint(self, constraint: Grammar) -> None:
        """Compiles a grammar in advance, so that a generation with it starts at once. Raises InputError for a grammar
        that cannot be used.
        """
        self._grammars_for(constraint).compile(constraint)

    def why_no_constraint(self, name: str) -> LaneformerError | None:
        """The error that any constraint called `name` would cause, if this engine supports no constraints; otherwise
        None.
        """
        try:
            self._grammars_for(Grammar.choice(["a"], name))
        except LaneformerError as error:
            return error
        return None

    @property
    def heals(self) -> bool:
        """Whether this engine supports `token_healing`."""
        return self._backend.masks and self.tokenizer is not None

    def check_healing(self, constraint: Grammar | None = None) -> Tokenizer:
        """Returns the tokenizer that `token_healing` uses. Raises InputError if it cannot be used, or not together with
        this constraint.
        """
        if self.tokenizer is None or not self._backend.masks:
            reason = "the model has no tokenizer" if self._backend.masks else f"backend {self.backend} has no masks"
            raise InputError(f"token_healing cannot be used ({reason}): leave it out, or use backend cpu or xla")
        if constraint is not None:
            raise InputError(f"token_healing cannot be used together with {constraint.name}: leave one of them out")
        return self.tokenizer

    def _stable(self, tokenizer: Tokenizer, ids: np.ndarray) -> tuple[np.ndarray, Spelled | None]:
        """The tokens of a prompt that no continuation replaces, int32 [n], and what spells the text of the others."""
        with self._making_grammars:  # reads the whole vocabulary once
            if self._spelling is None:
                self._spelling = Spelling(tokenizer, self.config.vocab_size)
        count, text = self._spelling.unstable(ids.tolist())
        return ids[: len(ids) - count], Spelled(self._spelling, text, self.config.vocab_size) if text else None

    def _grammars_for(self, constraint: Grammar) -> Grammars:
        if not isinstance(constraint, Grammar):
            raise InputError(f"constraint = {constraint!r}: give laneformer.Grammar.json_schema(...), ...")
        if not self._backend.masks:
            raise InputError(f"{constraint.name} cannot be used on backend {self.backend}: use backend cpu or xla")
        if self.tokenizer is None:
            raise InputError(f"{constraint.name} cannot be used: the model has no tokenizer")
        with self._making_grammars:  # reads the whole vocabulary once
            if self._grammars is None:
                self._grammars = Grammars(self.tokenizer, self.config.vocab_size)
        return self._grammars

    def generate(
        self,
        prompt: str | Sequence[int] | np.ndarray,
        *,
        max_new_tokens: int | None = None,
        sampling: Sampling = Sampling(),  # noqa: B008  frozen
        stop_tokens: int | Iterable[int] | None = None,
        stop_strings: str | Iterable[str] = (),
        tokens_per_dispatch: int | None = None,
        top_logprobs: int = 0,
        channels: Parts | None = None,
        spelled: Iterable[str] = (),
        cache_prompt: bool = True,
        cache_salt: str = "",
        cache_key: str = "",
        prediction: str | Sequence[int] = (),
        draft_max: int | None = None,
        forced: Sequence[int] = (),
        constraint: Grammar | None = None,
        token_healing: bool = False,
    ) -> Generation:
        """Starts a generation and returns the iterator over its tokens.

        prompt: text, before which the tokenizer may put tokens, or token ids, which are used unchanged.
        max_new_tokens: by default as many as fit the context.
        stop_tokens: by default the config's eos_token_id; () for none. They are not yielded.
        stop_strings: the text ends before the first of them. They are searched for in the answer's text, which does not
            contain special tokens.
        tokens_per_dispatch: number of tokens that reach the host together; by default as many as take about 75 ms.
        top_logprobs: number of most likely tokens, up to 20, to report with each token, with their log-probabilities by
            the raw logits.
        channels: from `ChatTemplate.channels`, for an answer that has reasoning besides its content. Stop strings are
            then searched for in the content alone.
        spelled: special tokens that appear in the answer's text, for example those that begin tool calls.
        cache_prompt: whether the prompt may reuse the keys and values of another request that begins with the same
            tokens, and later requests may reuse this request's. The answer is the same.
        cache_salt: keys and values are shared only among requests with equal salts.
        cache_key: name of a conversation. Among sequences that share equally many tokens with the prompt, that of the
            same conversation is reused.
        prediction: text or token ids that the answer may repeat. An engine that drafts copies drafts from it and from
            the prompt. The answer is the same.
        draft_max: limit on the drafts of a pass, if lower than the engine's; 0 for none.
        forced: first tokens of the answer, which replace the drawn ones, to measure a known text (backend cpu, or cuda
            with drafts).
        constraint: grammar of the answer's text, or of its content if it has channels (needs a tokenizer). The answer
            ends where its grammar ends, unless a stop string or a limit ends it earlier. It makes no drafts.
        token_healing: whether to remove the prompt's last tokens that a longer text could have otherwise, such as a
            line end before an indentation. The first tokens of the answer spell their text, count as tokens of the
            answer and have only the text after it. Not together with a constraint, channels or forced tokens.

        Raises InputError for a prompt or an option that the engine does not accept, and while `parallel` generations
        are running. Raises ConfigError for sampling settings that it does not support.
        """
        accepted = time.perf_counter()
        prompt_n, spelled_first = self.encode(prompt), None
        if token_healing:
            tokenizer = self.check_healing(constraint)
            if channels is not None or len(forced):
                raise InputError("token_healing excludes channels and forced tokens: leave it out")
            prompt_n, spelled_first = self._stable(tokenizer, prompt_n)
        room = self.config.max_position_embeddings - len(prompt_n)
        limit = room if max_new_tokens is None else min(room, _whole("max_new_tokens", max_new_tokens))
        if tokens_per_dispatch is not None:
            tokens_per_dispatch = _whole("tokens_per_dispatch", tokens_per_dispatch)
        top_logprobs = min(self.config.vocab_size, _whole("top_logprobs", top_logprobs, 0, MOST_TOP_LOGPROBS))
        if not isinstance(sampling, Sampling):
            raise InputError(f"sampling = {sampling!r}: give laneformer.Sampling(temperature=..., ...)")
        self.check_sampling(sampling)
        strings = (stop_strings,) if isinstance(stop_strings, str) else tuple(stop_strings)
        if not all(isinstance(string, str) and string for string in strings):
            raise InputError(f"stop_strings = {strings!r}: each must be a string of at least one character")
        if strings and self.tokenizer is None:
            raise InputError("stop strings need a tokenizer, and the model has none: give stop_tokens instead")
        if draft_max is not None:
            draft_max = _whole("draft_max", draft_max, 0)
        if len(forced):
            if not getattr(self._backend, "forces", False):
                raise InputError(
                    f"backend {self.backend} cannot force an answer: use backend cpu, or cuda with --draft-max"
                )
            check_ids(self.config, np.asarray(forced)[None])
        stops = self._stop_tokens(stop_tokens)
        made = None if constraint is None else self._grammars_for(constraint).constraint(constraint, stops, channels)
        request = Request(
            prompt_n,
            limit,
            sampling,
            stops,
            tokens_per_dispatch,
            top_logprobs,
            cache_prompt=cache_prompt,
            cache_salt=cache_salt,
            cache_key=cache_key,
            prediction=self.encode_prediction(prediction),
            draft_max=draft_max,
            forced=tuple(map(int, forced)),
            constraint=made,
        )
        with self._starting:
            self._require_free()
            backend: Starter = self._backend
            announce = self._leader.announce if self._leader else lambda request: None
            if spelled_first is not None:
                backend = HealedBackend(backend, spelled_first, announce)
            else:
                announce(request)
            skipped = 0 if spelled_first is None else spelled_first.characters
            generation = Generation(backend, request, self.tokenizer, strings, accepted, channels, spelled, skipped)
            self._running.append(weakref.ref(generation))
        return generation

    def warmup(self, prompt_tokens: int, max_new_tokens: int | None = None, top_logprobs: int = 0) -> float:
        """Compiles the programs for a request of this size, so that a later one runs without compiling. Returns the
        seconds that this took.

        Prompts and caches are padded to powers of two. Sampling settings, stop tokens and seeds need no compilation.
        """
        began = time.perf_counter()
        prompt = np.zeros(_whole("prompt_tokens", prompt_tokens), np.int32)
        with self.generate(
            prompt,
            max_new_tokens=max_new_tokens,
            top_logprobs=top_logprobs,
            cache_prompt=False,
            stop_tokens=(),
            tokens_per_dispatch=1,
        ) as generation:
            for _ in zip(range(2), generation, strict=False):  # a token of the prefill and one of the decode loop
                pass
        return time.perf_counter() - began

    @contextlib.contextmanager
    def leading(self) -> Iterator[None]:
        """For the first process of a job: inside this block, the other processes, which have called `follow`, run the
        same generations.

            if jax.process_index() == 0:
                with engine.leading():
                    ...  # engine.generate
            else:
                engine.follow()

        Leaving the block cancels generations that are still running. Inside it, `generate` also raises
        laneformer.processes.GroupError if a process is lost. In a job of one process the block has no effect.
        """
        self._leader = Leader(self._backend)
        try:
            yield
        finally:
            leader, self._leader = self._leader, None
            for running in self._generations():
                running.cancel()
                running.settle()
            with contextlib.suppress(GroupError):  # a lost process cannot be informed
                leader.end()

    def follow(self) -> None:
        """Runs the generations of the first process of the job, until that process leaves `leading`. Raises GroupError
        if it is lost.
        """
        follow(self._backend)

    def _generations(self) -> list[Generation]:
        """The generations that have not ended; forgets the others."""
        all_started = [(reference, reference()) for reference in self._running]
        found = [(one, running) for one, running in all_started if running is not None and not running.finished]
        self._running = [reference for reference, _ in found]
        return [running for _, running in found]

    def _require_free(self) -> None:
        running = self._generations()
        for one in running if len(running) >= self.parallel else ():
            if one.cancelled:
                one.settle()
                return
        if len(running) >= self.parallel:
            raise InputError("this engine is still generating: consume or cancel the running generation first")

    def _stop_tokens(self, tokens: int | Iterable[int] | None) -> tuple[int, ...]:
        if tokens is None:
            return self.config.eos_token_id
        tokens = (tokens,) if isinstance(tokens, int | np.integer) else tuple(tokens)
        for token in tokens:
            if (
                isinstance(token, bool)
                or not isinstance(token, int | np.integer)
                or not 0 <= token < self.config.vocab_size
            ):
                raise InputError(f"stop token {token!r}: give ids from 0 to {self.config.vocab_size - 1}")
        return tuple(int(token) for token in tokens)


def _choose(name: str, source: Source) -> type[Backend]:
    """The backend of this name, or for "auto" the first one that can run the model. Raises ConfigError."""
    if name not in ("auto", *NAMES):
        raise ConfigError(f"unknown backend = {name!r}: choose auto, {', '.join(NAMES)}")

    def unavailable(known: str) -> str | None:  # may compile, so call it only where its result is needed
        return BACKENDS[known].unavailable(source) if known in BACKENDS else "not built here"

    if name == "auto":
        for known in ORDER:
            if (reason := unavailable(known)) is None:
                log.info("backend %s (auto)", known)
                return BACKENDS[known]
            log.debug("backend %s: %s", known, reason)
    elif (reason := unavailable(name)) is None:
        return BACKENDS[name]
    able = [known for known in NAMES if unavailable(known) is None]
    raise ConfigError(f"backend {name} is not available ({reason}): choose {', '.join(able)}, or auto")


def _whole(name: str, value: int, least: int = 1, most: int | None = None) -> int:
    if (
        isinstance(value, bool)
        or not isinstance(value, int | np.integer)
        or value < least
        or (most is not None and value > most)
    ):
        allowed = f"of at least {least}" if most is None else f"from {least} to {most}"
        raise InputError(f"{name} = {value!r}: give a whole number {allowed}")
    return int(value)
