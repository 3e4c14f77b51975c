"""Answers with reasoning between two marks before the content, in the form of Qwen3 and DeepSeek R1.

    <think>
    2 + 2 is 4.
    </think>

    4

The marks are tokens. The prompt may end with the first mark. If it ends with both, the answer is content only. White
space after a mark belongs to the mark.
"""

from collections.abc import Sequence
from copy import copy
from typing import TYPE_CHECKING, NamedTuple, Self

from laneformer.infer.text.channels import Part

if TYPE_CHECKING:
    from tokenizers import Tokenizer

MARKS = (
    ("<think>", "</think>"),
    ("[THINK]", "[/THINK]"),
    ("<seed:think>", "</seed:think>"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
)
MOST_SPACES = 2  # tokens of white space between the marks and the content of an answer that has a grammar


class ThinkMarks(NamedTuple):
    """The ids of the two marks around reasoning."""

    open: int
    close: int
    spaces: tuple[int, ...]
    """Tokens of line ends, which models write after a mark."""

    @classmethod
    def find(cls, source: str, tokenizer: "Tokenizer") -> Self | None:
        """The marks that a chat template uses; None if it uses none, or they are not tokens. source: the template's
        text.
        """
        for texts in MARKS:
            opening, closing = map(tokenizer.token_to_id, texts)
            if texts[1] in source and opening is not None and closing is not None:
                spaces = (tokenizer.encode(text, add_special_tokens=False).ids for text in ("\n\n", "\n"))
                return cls(opening, closing, tuple(each[0] for each in spaces if len(each) == 1))
        return None


class Thinking:
    """The `Parts` of an answer with reasoning between two marks."""

    def __init__(self, marks: ThinkMarks, tokenizer: "Tokenizer", prompt: Sequence[int]):
        """prompt: token ids of the prompt. Only marks at its end belong to the answer; marks in its messages do not
        count.
        """
        self._marks, self._tokenizer = marks, tokenizer
        last = next((token for token in reversed(prompt) if not self._is_space(token)), None)
        self.part = Part.REASONING if last == marks.open else Part.CONTENT
        """Part of the next token, unless that is a mark."""
        self._may_open = last not in (marks.open, marks.close)
        self._behind_mark = last in (marks.open, marks.close)
        self._spaces = 0

    def copy(self) -> Self:
        """An independent copy at the same place in the answer, for another reader of the tokens."""
        return copy(self)

    @property
    def may_reason(self) -> bool:
        """Whether reasoning may follow."""
        return self._may_open or self.part is Part.REASONING

    @property
    def openings(self) -> tuple[int, ...]:
        """Tokens that may precede the content."""
        if self._may_open:
            return (self._marks.open,)
        return self._marks.spaces if self._behind_mark and self._spaces < MOST_SPACES else ()

    def add(self, token: int) -> Part:
        """Reads the answer's next token and returns its part."""
        if self._behind_mark and self._is_space(token):
            self._spaces += 1
            return Part.MARK
        if (opens := self._may_open and token == self._marks.open) or (
            self.part is Part.REASONING and token == self._marks.close
        ):
            self.part = Part.REASONING if opens else Part.CONTENT
            self._may_open, self._behind_mark, self._spaces = False, True, 0
            return Part.MARK
        self._may_open = self._behind_mark = False
        return self.part

    def _is_space(self, token: int) -> bool:
        text = self._tokenizer.decode([int(token)], skip_special_tokens=False)
        return bool(text) and not text.strip()
