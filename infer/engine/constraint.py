"""Answers that follow a grammar: before each draw, a mask of the tokens that may follow, computed with llguidance
(github.com/guidance-ai).

A mask depends on the token before it, so it can be computed while the kernel runs the layers of the next pass. The end
of the grammar ends the answer. If the grammar also allows more text there, a stop token ends the answer; otherwise the
answer ends without a stop token.
"""

import json
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from laneformer.errors import ConfigError, InputError
from laneformer.infer.text.channels import Part, Parts
from laneformer.infer.text.grammar import WHITE_SPACE, Grammar
from laneformer.infer.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from llguidance import LLMatcher

SECONDS = 1.0  # time limit for compiling a grammar
LARGEST = 1 << 18  # characters of a grammar
KEPT = 16  # compiled grammars that are kept
LONGEST_MESSAGE = 300  # characters


class Masks(Protocol):
    """What determines the tokens that an answer may have next."""

    complete: bool
    """Whether the answer is complete."""

    def mask(self) -> np.ndarray | None:
        """The tokens that may follow, one bit per token, uint32 [ceil(vocab / 32)]; None if the answer is complete."""

    def __len__(self) -> int:
        """Number of tokens in the model's vocabulary."""

    def accept(self, token: int) -> None:
        """Advances by a drawn token, which the last mask must have allowed."""


class Constraint:
    """The state of one answer in its grammar. Only one thread at a time may use it."""

    def __init__(
        self,
        matcher: "LLMatcher",
        vocab_size: int,
        grammar: Grammar,
        stop_tokens: Sequence[int],
        channels: Parts | None,
    ):
        """matcher: a matcher at the start of the grammar; this object takes it over. channels: those of the answer, if
        only its content follows the grammar.
        """
        self._matcher, self._vocab, self._grammar = matcher, vocab_size, grammar
        self._channels = None if channels is None or grammar.whole else channels.copy()
        self._begun = False  # whether the content has started
        self._stops = bits_of(stop_tokens, vocab_size)
        self._free = bits_of(range(vocab_size), vocab_size) & ~self._stops
        self.complete = False
        """Whether the answer has ended because the grammar allows no more text."""

    def mask(self) -> np.ndarray | None:
        """The tokens that may follow, one bit per token, uint32 [ceil(vocab / 32)]; None if the answer is complete.
        Raises InputError if no token may follow, or if the grammar becomes too complex.
        """
        if self._channels is not None and self._channels.part is not Part.CONTENT:
            return self._free
        if self._matcher.is_stopped() and not self._matcher.is_error():
            self.complete = True
            return None
        words = next_tokens(self._matcher, self._vocab) & ~self._stops
        self._check()
        if self._matcher.is_accepting():
            words |= self._stops
        if self._channels is not None and not self._begun:
            words |= bits_of(self._channels.openings, self._vocab)
        if not words.any():
            raise InputError(f"{self._grammar.name} cannot be followed: no token of the model continues the text")
        return words

    def __len__(self) -> int:
        """Number of tokens in the model's vocabulary."""
        return self._vocab

    def accept(self, token: int) -> None:
        """Advances by a drawn token. The last mask must have allowed it, and it must not be a stop token. Raises
        InputError as `mask` does.
        """
        if self._channels is None or self._channels.add(token) is Part.CONTENT:
            self._begun = True
            self._matcher.consume_token(token)
            self._check()

    def _check(self) -> None:
        if self._matcher.is_error():
            raise InputError(f"{self._grammar.name} cannot be followed: {one_line(self._matcher.get_error())}")


class Elsewhere:
    """The constraint of an answer whose masks another process of the job computes. It allows all tokens."""

    complete = False

    def __init__(self, vocab_size: int):
        self._vocab, self._all = vocab_size, bits_of(range(vocab_size), vocab_size)

    def mask(self) -> np.ndarray:
        """A mask of all tokens, in the form of `Constraint.mask`."""
        return self._all

    def __len__(self) -> int:
        """Number of tokens in the model's vocabulary."""
        return self._vocab

    def accept(self, token: int) -> None:
        """Does nothing; see `Constraint.accept`."""


class Grammars:
    """Compiles grammars for a tokenizer, and keeps the most recently used ones. Any thread may use it."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int):
        """vocab_size: size of the model's vocabulary. Raises ConfigError if llguidance is not installed."""
        try:
            import llguidance
        except ImportError:
            raise ConfigError(
                "answers that follow a grammar need the llguidance library: pip install 'laneformer[grammar]'"
            ) from None
        self._library, self._vocab = llguidance, vocab_size
        self._tokenizer = llguidance.LLTokenizer(llguidance.TokenizerWrapper(_Vocabulary(tokenizer, vocab_size)))
        self._limits = llguidance.LLParserLimits(verbose_errors=False)
        self._compiled: OrderedDict[tuple, LLMatcher] = OrderedDict()
        self._keeping, self._compiling = threading.Lock(), threading.Lock()

    def constraint(
        self, grammar: Grammar, stop_tokens: Sequence[int] = (), channels: Parts | None = None
    ) -> Constraint:
        """A constraint for a new answer. Raises InputError for a grammar that cannot be compiled within SECONDS."""
        return Constraint(self.compile(grammar).deep_copy(), self._vocab, grammar, stop_tokens, channels)

    def compile(self, grammar: Grammar) -> "LLMatcher":
        """The matcher of a grammar at its start. Raises InputError for a grammar that cannot be compiled within
        SECONDS.
        """
        form = grammar.form
        key = (grammar.kind, grammar.text, None if form is None else (form.kind, form.text))
        with self._keeping:
            if key in self._compiled:
                self._compiled.move_to_end(key)
                return self._compiled[key]
        if len(grammar.text) > LARGEST:
            raise InputError(f"{grammar.name} has {len(grammar.text)} characters: give at most {LARGEST}")
        matcher = self._in_time(grammar)
        with self._keeping:
            self._compiled[key] = matcher
            while len(self._compiled) > KEPT:
                self._compiled.popitem(last=False)
        return matcher

    def _in_time(self, grammar: Grammar) -> "LLMatcher":
        """Compiles on a thread, one grammar at a time. The library releases the interpreter lock meanwhile."""
        made: list[Any] = []

        def run() -> None:
            with self._compiling:
                try:
                    made.append(self._compile(grammar))
                except Exception as error:  # the library raises errors of any kind
                    made.append(error)

        thread = threading.Thread(target=run, name="laneformer-grammar", daemon=True)
        thread.start()
        thread.join(SECONDS)
        if not made:
            raise InputError(f"{grammar.name} cannot be compiled within {SECONDS:g} s: simplify it")
        if isinstance(made[0], Exception):
            raise InputError(f"{grammar.name} cannot be used: {one_line(str(made[0]))}")
        return made[0]

    def _compile(self, grammar: Grammar) -> "LLMatcher":
        form = self._described(grammar)
        if grammar.form is not None:
            described = self._described(grammar.form)
            part = json.loads(described)["grammars"][0] if described.startswith("{") else {"lark_grammar": described}
            form = json.dumps({"grammars": [{"name": "answer", "lark_grammar": form}, {**part, "name": "form"}]})
        matcher = self._library.LLMatcher(self._tokenizer, form, limits=self._limits, log_level=0)
        first = next_tokens(matcher.deep_copy(), self._vocab)
        if matcher.is_error():
            raise ValueError(matcher.get_error())
        if not first.any():
            raise ValueError("it allows no text of the model's tokens")
        return matcher

    def _described(self, grammar: Grammar) -> str:
        """The grammar in a form that the library accepts: JSON, or rules in Lark's form."""
        if grammar.kind == "json_schema":
            return self._library.LLMatcher.grammar_from_json_schema(grammar.text, {"whitespace_pattern": WHITE_SPACE})
        return self._library.grammar_from(grammar.kind, grammar.text)


class _Vocabulary:
    """The tokens in the form that the library expects. An additional token, which the model does not have, ends a
    text.
    """

    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer, vocab_size: int):
        self.eos_token_id = vocab_size
        self._texts = [tokenizer.token_bytes(token) for token in range(vocab_size)] + [b""]
        self.special_token_ids = [token for token, text in enumerate(self._texts) if not text]
        # The library requires a distinct name for each special token, and does not match these names as text.
        self.tokens = [text or f"<|{token}|>".encode() for token, text in enumerate(self._texts)]
        self._tokenizer = tokenizer

    def __call__(self, text: bytes) -> list[int]:
        """Tokens whose bytes are exactly `text`, for text that a grammar forces: as the tokenizer would cut it inside a
        longer text, if possible.
        """
        for before in ("", "\n"):  # some tokenizers put a space before a text
            ids, size = self._tokenizer.encode(before + text.decode(errors="replace")), 0
            for count, token in enumerate(reversed(ids), 1):
                size += len(self._texts[token])
                if size >= len(text):
                    if b"".join(self._texts[each] for each in ids[-count:]) == text:
                        return ids[-count:]
                    break
        return self._longest(text)

    def _longest(self, text: bytes) -> list[int]:
        """Tokens of a text by always taking the longest token that fits. Stops where no token fits."""
        ids: list[int] = []
        while text:
            size = next((n for n in range(min(len(text), self._most), 0, -1) if text[:n] in self._ids), 0)
            if size == 0:
                break
            ids.append(self._ids[text[:size]])
            text = text[size:]
        return ids

    @cached_property
    def _ids(self) -> dict[bytes, int]:
        return {text: token for token, text in enumerate(self._texts) if text}

    @cached_property
    def _most(self) -> int:
        """Bytes of the longest token."""
        return max(map(len, self._texts))


def next_tokens(matcher: "LLMatcher", vocab_size: int) -> np.ndarray:
    """The tokens that may continue a matcher's text, one bit per token, uint32 [ceil(vocab_size / 32)]; no bit is set
    after an error.
    """
    words = np.zeros((vocab_size + 32) // 32, np.uint32)
    matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
    words[vocab_size // 32] &= np.uint32((1 << vocab_size % 32) - 1)  # clear the additional token that ends a text
    return words[: (vocab_size + 31) // 32]


def as_flags(words: np.ndarray, vocab_size: int) -> np.ndarray:
    """A mask of bits, uint32 [ceil(vocab_size / 32)], as bool [vocab_size]."""
    return np.unpackbits(words.view(np.uint8), bitorder="little")[:vocab_size].astype(bool)


def give_masks(stream: Any, constraint: Masks, stops: Sequence[int], limit: int, running: Callable[[], bool]) -> None:
    """Passes a stream the mask of each token, from the first to the last. Runs on a thread beside the call's.

    stream: a custom_calls.cpu.session.Slot. stops: stop tokens. limit: the most tokens of the answer. running: returns
    whether the call may still draw. Raises InputError as `Constraint.mask` does.
    """
    drawn = 0
    while drawn < limit:
        words = constraint.mask()
        if words is None or not running():
            return
        stream.give_mask(drawn, words)
        while stream.wait(drawn) == drawn:
            if stream.finished or not running():
                return
        token = int(stream.drawn(drawn, 1).tokens[0])
        if token in stops:
            return
        constraint.accept(token)
        drawn += 1


def one_line(message: str) -> str:
    """A message of the library as one line, shortened to LONGEST_MESSAGE characters."""
    line = " ".join(message.replace("<non-verbose/>", "").split())
    return line if len(line) <= LONGEST_MESSAGE else line[:LONGEST_MESSAGE] + "..."


def bits_of(tokens: Sequence[int], vocab_size: int) -> np.ndarray:
    """A mask of bits that allows these tokens, uint32 [ceil(vocab_size / 32)]."""
    flags = np.zeros((vocab_size + 31) // 32 * 32, bool)
    flags[list(tokens)] = True
    return np.packbits(flags, bitorder="little").view(np.uint32)
