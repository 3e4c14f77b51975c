"""Answers in harmony, the format of gpt-oss (OpenAI, "Harmony response format"): reasoning and content are separate
messages.

    <|start|>assistant<|channel|>analysis<|message|>2 + 2 is 4.<|end|>
    <|start|>assistant<|channel|>final<|message|>4<|return|>

A prompt ends with <|start|> and the role. The header of a message for a tool contains " to=NAME". <|return|> and
<|call|> end a turn, <|end|> a message.
"""

from collections.abc import Sequence
from copy import copy
from enum import Enum
from typing import TYPE_CHECKING, NamedTuple, Protocol, Self

if TYPE_CHECKING:
    from tokenizers import Tokenizer

TO, FUNCTIONS = "to=", "functions."  # in the header of a message for a function: to=functions.NAME
SHOWN = ("final", "commentary")  # channels whose messages are content, unless they are for a tool


class Part(Enum):
    """The part of an answer that a token belongs to."""

    CONTENT = "content"
    REASONING = "reasoning"
    MARK = "mark"
    """Tokens that structure the answer: marks that begin and end messages, and the headers of messages."""
    CALL = "call"
    """Arguments of a function call."""


class Parts(Protocol):
    """Assigns each token of one answer to a part."""

    @property
    def part(self) -> Part:
        """Part of the next token, unless that is a mark."""

    @property
    def openings(self) -> tuple[int, ...]:
        """Tokens that may precede the content."""

    @property
    def may_reason(self) -> bool:
        """Whether reasoning may follow."""

    def copy(self) -> Self:
        """An independent copy at the same place in the answer, for another reader of the tokens."""

    def add(self, token: int) -> Part:
        """Reads the answer's next token and returns its part."""


class Harmony(NamedTuple):
    """The ids of the harmony tokens in a vocabulary."""

    start: int
    channel: int
    message: int
    end: int
    turn_ends: tuple[int, ...]
    """Ids of <|return|> and <|call|>, if the vocabulary has them."""

    @classmethod
    def find(cls, tokenizer: "Tokenizer") -> Self | None:
        """The ids in a tokenizer; None if it lacks one of the first four."""
        names = ("start", "channel", "message", "end", "return", "call")
        start, channel, message, end, *turn_ends = (tokenizer.token_to_id(f"<|{name}|>") for name in names)
        if start is None or channel is None or message is None or end is None:
            return None
        return cls(start, channel, message, end, tuple(token for token in turn_ends if token is not None))

    def turn_stops(self, tokens: Sequence[int]) -> tuple[int, ...]:
        """Ids that end an answer: `tokens` and the ends of a turn, but not the end of a message."""
        return tuple(dict.fromkeys(token for token in (*tokens, *self.turn_ends) if token != self.end))


class Channels:
    """The `Parts` of an answer in harmony.

    An answer that does not begin with a mark is content, because its model does not use the format.
    """

    def __init__(self, harmony: Harmony, tokenizer: "Tokenizer", prompt: Sequence[int], calls: bool = False):
        """prompt: token ids of the prompt, whose last message the answer continues. calls: whether messages for
        functions are Part.CALL; otherwise they are reasoning.
        """
        self._harmony, self._tokenizer, self._calls = harmony, tokenizer, calls
        self.recipient: str | None = None
        """The tool that the current message is for; None if it is not for a tool."""
        self._header: list[int] | None = None  # ids of the current header so far; None outside of headers
        self._body = Part.CONTENT
        prompt = list(prompt)
        if harmony.start in prompt:
            for token in prompt[len(prompt) - prompt[::-1].index(harmony.start) - 1 :]:
                self.add(token)
            if self._header is not None and harmony.channel not in self._header:
                self._header = None  # the role alone; the answer's first mark begins the rest of the header

    def copy(self) -> Self:
        """An independent copy at the same place in the answer, for another reader of the tokens."""
        made = copy(self)
        made._header = None if self._header is None else [*self._header]
        return made

    @property
    def may_reason(self) -> bool:
        """Whether reasoning may follow."""
        return True

    @property
    def openings(self) -> tuple[int, ...]:
        """Marks with which a message may begin after the prompt."""
        return self._harmony.channel, self._harmony.start

    @property
    def part(self) -> Part:
        """Part of the next token, unless that is a mark."""
        return self._body if self._header is None else Part.MARK

    def add(self, token: int) -> Part:
        """Reads the answer's next token and returns its part."""
        harmony = self._harmony
        if token == harmony.message:
            self._body, self._header = self._part_of(self._header or []), None
        elif token == harmony.start or (token == harmony.channel and self._header is None):
            self._header = [token]
        elif token == harmony.end:
            self._header = []
        elif self._header is not None:
            self._header.append(token)
        else:
            return self._body
        return Part.MARK

    def _part_of(self, header: list[int]) -> Part:
        """The part of a message's body, by its header, a list of ids. Sets `recipient`."""
        self.recipient = None
        if self._harmony.channel not in header:
            return Part.CONTENT
        at = header.index(self._harmony.channel)
        role, channel = (self._tokenizer.decode(ids).split() for ids in (header[:at], header[at + 1 :]))
        self.recipient = next((word[len(TO) :] for word in role + channel if word.startswith(TO)), None)
        if self._calls and (self.recipient or "").startswith(FUNCTIONS):
            return Part.CALL
        return Part.CONTENT if channel[:1] and channel[0] in SHOWN and self.recipient is None else Part.REASONING
