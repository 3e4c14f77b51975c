"""A running generation: an iterator of tokens that ends with a result."""

import math
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import zip_longest
from typing import Literal

from laneformer.custom_calls import Drafting
from laneformer.errors import CheckpointError
from laneformer.infer.engine.backend import Request, Starter
from laneformer.infer.text.channels import Part, Parts
from laneformer.infer.text.stop_strings import StopStrings
from laneformer.infer.text.tokenizer import Detokenizer, Tokenizer


class Token(int):
    """A token id with its text, log-probability and time."""

    text: str
    """Text that became printable with this token; "" without a tokenizer, and while a character or a possible stop
    string is incomplete.
    """
    logprob: float
    """Natural logarithm of the token's probability by the raw logits, whatever the sampling settings."""
    time: float
    """Seconds from the acceptance of the request to the token's arrival on the host."""
    top_logprobs: tuple[tuple[int, float], ...]
    """The most likely tokens at this position and their log-probabilities, the most likely first."""
    part: Part
    """Part of the answer that the token and its text belong to; always the content in an answer without channels."""
    drafted: bool
    """Whether the token was a correct draft, so that the same pass also drew the next token."""
    others: int
    """Number of other requests with rows in the pass that drew this token."""

    def __new__(
        cls,
        token: int,
        text: str = "",
        logprob: float = 0.0,
        time: float = 0.0,
        top_logprobs: tuple[tuple[int, float], ...] = (),
        part: Part = Part.CONTENT,
        drafted: bool = False,
        others: int = 0,
    ):
        self = super().__new__(cls, token)
        self.drafted, self.others = drafted, others
        self.text, self.logprob, self.time, self.top_logprobs, self.part = text, logprob, time, top_logprobs, part
        return self


@dataclass(frozen=True)
class Result:
    """A finished generation. Times are in seconds since the acceptance of the request, measured on the host."""

    tokens: tuple[int, ...]
    """Ids that were yielded: without a stop token, with the tokens of a stop string."""
    text: str
    """Text of the content up to the stop string; "" without a tokenizer."""
    reasoning: str
    """Text of the reasoning; "" in an answer without channels."""
    finish_reason: Literal["stop", "length", "cancelled"]
    stop_reason: int | str | None
    """The stop token or stop string that ended the generation."""
    prompt_tokens: int
    cached_tokens: int
    """Number of prompt tokens that were not computed, because keys and values of another request were reused."""
    logprobs: tuple[float, ...]
    """Log-probability of each token."""
    top_logprobs: tuple[tuple[tuple[int, float], ...], ...]
    """The most likely tokens at each position and their log-probabilities; () if none were requested."""
    time_to_first_token: float | None
    """Time until the first token, possibly a stop token, was on the host: tokenizing, prefill and the first draw."""
    prefill_time: float | None
    """The backend's part of time_to_first_token: without tokenizing and checks."""
    token_times: tuple[float, ...]
    """Arrival time of each token; tokens of one dispatch arrive together."""
    time_per_token: float | None
    """Sustained time per token, from the first token to the last dispatch. None with fewer than two tokens."""
    total_time: float
    """Time until the last dispatch, including the time that the caller spent between tokens."""
    tokens_per_dispatch: tuple[int, ...]
    """Number of tokens drawn in each dispatch, including a stop token and tokens after a stop string."""
    drafting: Drafting | None = None
    """Counts of the passes after the prompt and of the drafts that they checked; None on backends without drafts."""
    shared_passes: int = 0
    """Number of passes that also had rows of other requests. If it is above 0, the times are not those of a request
    that ran alone.
    """

    @property
    def tokens_per_pass(self) -> float:
        """Mean number of tokens per pass over the weights, after the first token; 1 without drafts."""
        return 1.0 if self.drafting is None else self.drafting.tokens_per_pass


class Generation(Iterator[Token]):
    """Yields `Token`s as they arrive. `Engine.generate` makes it.

    `list(generation)` is the list of ids. `.result` has the text, the finish reason and the timings; reading it first
    runs the generation to its end. `.cancel()` ends the generation from any thread. Leaving a `with` block or dropping
    the last reference also ends it.

    Text may be held back until it cannot become a stop string. If the generation ends after its last token was yielded,
    the result's text and `texts()` include the text held back until then; the texts of the tokens do not.

    A KeyboardInterrupt while waiting for a token cancels the generation and is raised again.
    """

    def __init__(
        self,
        backend: Starter,
        request: Request,
        tokenizer: Tokenizer | None,
        stop_strings: tuple[str, ...],
        accepted: float,
        channels: Parts | None = None,
        spelled: Iterable[str] = (),
        skipped: int = 0,
    ):
        """accepted: time.perf_counter() when the request was accepted. channels, spelled: see `Engine.generate`.
        skipped: number of characters at the beginning of the answer's text that belong to the prompt.
        """
        self._request, self._accepted = request, accepted
        self._channels, self._part = channels, Part.CONTENT  # the part that held-back text belongs to
        self._detokenizer = None if tokenizer is None else Detokenizer(tokenizer, request.prompt, spelled)
        self._stops, self._skipped = StopStrings(stop_strings), skipped
        self._ready: deque[Token] = deque()
        self._given: list[Token] = []
        self._dispatches: list[tuple[int, float]] = []  # tokens drawn, arrival
        self._drawn = 0  # their sum
        self._cached = 0
        self._end: tuple[Literal["stop", "length"], int | str | None] | None = None
        self._tail = ""
        self._result: Result | None = None
        self._error: BaseException | None = None
        self._lock = threading.Lock()
        self._checked = time.perf_counter() - accepted
        self._chunks = backend.start(request)

    @property
    def result(self) -> Result:
        """The result. Runs the generation to its end if it has not ended."""
        for _ in self:
            pass
        if self._result is None:
            raise RuntimeError("the generation ended without a result")
        return self._result

    @property
    def finished(self) -> bool:
        """Whether the generation has ended and no longer uses the engine."""
        return self._result is not None or self._error is not None

    @property
    def cancelled(self) -> bool:
        """Whether `cancel` was called; the generation may not have finished yet."""
        return self._request.cancelled.is_set()

    def cancel(self) -> None:
        """Ends the generation: at once, or after the current dispatch if another thread waits for a token."""
        self._request.cancelled.set()
        if self._lock.acquire(blocking=False):
            try:
                if not self.finished:
                    self._finish()
            finally:
                self._lock.release()

    def texts(self) -> Iterator[str]:
        """Yields the content in pieces, as it becomes printable. The joined pieces equal `result.text`."""
        for token in self:
            if token.text and token.part is Part.CONTENT:
                yield token.text
        rest = self.result.text[len(self._given_text(Part.CONTENT)) :]
        if rest:
            yield rest

    def settle(self) -> None:
        """Waits until a cancelled generation has ended."""
        with self._lock:
            if not self.finished:
                self._finish()

    def __next__(self) -> Token:
        with self._lock:
            if self._error is not None:
                raise self._error
            if self._result is None:
                try:
                    while not self._ready and self._end is None and not self.cancelled:
                        chunk = next(self._chunks, None)
                        if chunk is None:
                            constraint = self._request.constraint
                            if constraint is None or not constraint.complete:  # cancelled meanwhile
                                break
                            self._end = ("stop", None)
                            self._flush()
                            continue
                        self._take(chunk)
                    if self._ready and not self.cancelled:
                        self._given.append(self._ready.popleft())
                        return self._given[-1]
                except KeyboardInterrupt:
                    self._request.cancelled.set()
                    self._finish()
                    raise
                except BaseException as error:
                    self._error = error
                    self._chunks.close()
                    raise
                self._finish()
            raise StopIteration(self._result)

    def _take(self, chunk) -> None:
        """Turns a chunk into ready tokens, up to the end of the generation if the chunk contains it. Raises
        CheckpointError for a log-probability that is NaN.
        """
        now = time.perf_counter() - self._accepted
        drawn = self._drawn
        self._drawn += len(chunk.tokens)
        self._dispatches.append((len(chunk.tokens), now))
        self._cached = chunk.cached
        origins = zip_longest(chunk.drafted or (False,) * len(chunk.tokens), chunk.others, fillvalue=0)
        drawn_tokens = zip(chunk.tokens, chunk.logprobs, chunk.top, origins, strict=True)
        for token, logprob, top, (drafted, others) in drawn_tokens:
            if math.isnan(logprob):
                position = len(self._request.prompt) + drawn
                raise CheckpointError(
                    f"the model's output at position {position} is not a number: its weights are damaged, or too large"
                    " for their dtype; copy the checkpoint again, or load it with dtype='bfloat16' or 'float32'"
                )
            drawn += 1
            if token in self._request.stop_tokens:
                self._end = ("stop", token)
                break
            text, part = self._read(token)
            self._ready.append(Token(token, text, logprob, now, tuple(top), part, bool(drafted), others))
            if self._stops.found is not None:
                self._end = ("stop", self._stops.found)
                break
            if drawn == self._request.limit:
                self._end = ("length", None)
        if self._end is not None:
            self._flush()

    def _read(self, token: int) -> tuple[str, Part]:
        """The text that became printable with a token, and the part it belongs to. A mark ends the text of the part
        before it, so nothing more is held back.
        """
        if self._detokenizer is None:
            return "", Part.CONTENT
        part = Part.CONTENT if self._channels is None else self._channels.add(token)
        if part is Part.MARK:
            held = self._held()
            return held, self._part if held else part
        self._part = part
        text = self._detokenizer.add(token)
        hidden = min(self._skipped, len(text))
        self._skipped, text = self._skipped - hidden, text[hidden:]
        return (self._stops.add(text) if part is Part.CONTENT else text), part

    def _held(self) -> str:
        """Removes and returns the text that was held back."""
        text = "" if self._detokenizer is None else self._detokenizer.flush()
        return self._stops.add(text) + self._stops.flush() if self._part is Part.CONTENT else text

    def _flush(self) -> None:
        """Appends the text that was held back to the last ready token. Keeps it in `_tail` if no ready token belongs to
        the same part.
        """
        if self._detokenizer is not None:
            self._tail = self._held()
        if self._ready and self._ready[-1].part is self._part:
            self._ready[-1].text += self._tail
            self._tail = ""

    def _given_text(self, part: Part) -> str:
        return "".join(token.text for token in self._given if token.part is part)

    def _finish(self) -> None:
        """Makes the result from the tokens that were yielded. Tokens that were not yielded are dropped, which makes the
        finish reason "cancelled".
        """
        self._chunks.close()
        reason, stop_reason = self._end or ("cancelled", None)
        if self._ready:
            reason, stop_reason = "cancelled", None
        given, arrivals = self._given, self._dispatches
        later = sum(count for count, _ in arrivals[1:])
        tail = "" if self._ready else self._tail
        self._result = Result(
            tokens=tuple(int(token) for token in given),
            text=self._given_text(Part.CONTENT) + (tail if self._part is Part.CONTENT else ""),
            reasoning=self._given_text(Part.REASONING) + (tail if self._part is Part.REASONING else ""),
            finish_reason=reason,
            stop_reason=stop_reason,
            prompt_tokens=len(self._request.prompt),
            cached_tokens=self._cached,
            logprobs=tuple(token.logprob for token in given),
            top_logprobs=tuple(token.top_logprobs for token in given) if self._request.top_logprobs else (),
            time_to_first_token=arrivals[0][1] if arrivals else None,
            prefill_time=arrivals[0][1] - self._checked if arrivals else None,
            token_times=tuple(token.time for token in given),
            time_per_token=(arrivals[-1][1] - arrivals[0][1]) / later if later else None,
            total_time=arrivals[-1][1] if arrivals else time.perf_counter() - self._accepted,
            tokens_per_dispatch=tuple(count for count, _ in arrivals),
            drafting=getattr(self._chunks, "drafting", None),
            shared_passes=getattr(self._chunks, "shared_passes", 0),
        )
        self._ready.clear()

    def __enter__(self) -> "Generation":
        return self

    def __exit__(self, *_) -> None:
        self.cancel()
