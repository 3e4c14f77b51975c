"""What every backend takes and gives: a request in, chunks of tokens out."""

import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple, Protocol

import numpy as np

from infer.sampling import Sampling
from laneformer.model import Laneformer


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
    cancelled: threading.Event = field(default_factory=threading.Event)
    """Set when nobody wants more. A backend that keeps the host waiting for longer than a dispatch must look at it."""


class Chunk(NamedTuple):
    """Tokens that reached the host together. A stop token is the last one."""

    tokens: list[int]
    logprobs: list[float]
    """Log softmax of the raw logits at each token."""


class Backend(Protocol):
    """Draws tokens for one request at a time; the tokens follow infer/sampling.py."""

    name: ClassVar[str]
    model: Laneformer
    """The model as this backend runs it."""

    @classmethod
    def unavailable(cls, model: Laneformer) -> str | None:
        """Why this backend cannot run the model on this machine, and the remedy; None if it can."""

    def __init__(self, model: Laneformer): ...

    def start(self, request: Request) -> Iterator[Chunk]:
        """Sets the prefill going and gives the chunks: at most `limit` tokens, none after a stop token, fewer if cancelled.

        The first chunk is the first token alone. Closing the iterator at any point leaves the backend ready for the next request.
        """
