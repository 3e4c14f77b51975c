"""Finds programs in the texts of models: the lines that are Python, whatever fences, prose or quotes are around them.

EvalPlus looks for the longest run of lines that parses, by trying all pairs of lines. Here the search starts at the
lines that define the function, and goes down and up from there.
"""

import io
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from laneformer.infer.evaluate.needed import LONGEST
from laneformer.infer.evaluate.problems import parse
from laneformer.infer.text.thinking import MARKS

WORK = 1 << 21  # characters parsed in one search: about a second
HIGHEST = 64  # lines above a program that do not parse, after which the search for its beginning ends
FENCE = re.compile(r"(?:^[ \t>*+\-\d.)]*|\s)(?:`{3,}|~{3,})[^`\n]*$")
HEADER = re.compile(r"(?:class|def|async|if|try|for|while|with|match)\b.*:")
MIDDLE = re.compile(r"(?:elif|else|except|finally|case)\b.*:")  # belongs to a header of the same indentation
ON_THEIR_LINE = re.compile(r"[ \t]*(`{3,}|~{3,})[ \t]*(?:(?:python3?|py)\b)?[ \t]*", re.IGNORECASE)


@dataclass(frozen=True)
class Span:
    """A run of lines that is a program."""

    code: str
    """The program, without indentation or quote marks before all lines."""
    first: int
    """Number of its first line in the text, from 0."""
    last: int
    """Number of its last line."""

    @property
    def size(self) -> int:
        """Number of lines that are not blank, by which EvalPlus compares programs."""
        return sum(1 for line in self.code.splitlines() if line.strip())


class Work:
    """Parses texts as long as they have at most WORK characters together."""

    def __init__(self):
        self._left = WORK

    @property
    def spent(self) -> bool:
        return self._left < 0

    def parses(self, code: str) -> bool:
        """Whether a text is Python; False when the work is spent, and for what the parser cannot take."""
        try:
            self.parse(code)
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            return False
        return True

    def parse(self, code: str) -> None:
        """Raises SyntaxError for what is not Python. Raises ValueError, RecursionError or MemoryError for null bytes,
        lone surrogates and deep nesting, and ValueError when the work is spent.
        """
        self._left -= len(code)
        if self._left < 0 or len(code) > LONGEST:
            raise ValueError("the text takes too long to parse")
        parse(code)


def programs(text: str, name: str) -> Iterator[Span]:
    """The programs in a text that have a line which defines `name`, in their order; each is as long as it can be.

    Finds nothing in a text of more than LONGEST characters.
    """
    text = text.replace("\r\n", "\n")
    if len(text) > LONGEST:
        return
    lines, work, done = text.split("\n"), Work(), -1
    defines = re.compile(
        rf"(((?:[ \t]*>)*)[ \t]*)(?:(?:async[ \t]+)?def[ \t]+{re.escape(name)}\b|class[ \t]+{re.escape(name)}\b"
        rf"|{re.escape(name)}[ \t]*(?::[^=\n]+)?=(?!=))"
    )
    for at, line in enumerate(lines):
        if at > done and (found := defines.match(line)):
            quote = found[2]
            quoted = _unquoted(lines, at, quote) if quote else lines
            for root in _roots(quoted, at):
                if work.spent:
                    return
                if span := _span(quoted, root, at, done + 1, work):
                    yield span
                    done = span.last
                    break


def apart(text: str) -> str:
    """A text with each fence on a separate line, without the name of the language."""
    return ON_THEIR_LINE.sub(r"\n\1\n", text)


def between_fences(text: str) -> list[str]:
    """The parts of a text between lines with fences."""
    parts: list[list[str]] = [[]]
    for line in text.replace("\r\n", "\n").split("\n"):
        if FENCE.search(line):
            parts.append([])
        else:
            parts[-1].append(line)
    return ["\n".join(part) + "\n" for part in parts if any(map(str.strip, part))]


def without_reasoning(text: str) -> str:
    """A text without the parts between marks of reasoning: `<think>` at the start of a line up to `</think>` or to the
    end, and whatever is before a `</think>` that nothing opened.
    """
    for begin, end in MARKS:
        close = rf"(?<![\"']){re.escape(end)}(?![\"'])"
        text = re.sub(rf"^[ \t]*{re.escape(begin)}.*?(?:{close}|\Z)", "", text, flags=re.DOTALL | re.MULTILINE)
        text = re.split(close, text)[-1]
    return text


def whole_statements(text: str, check: Callable[[str], object] = parse) -> str:
    """The longest prefix of whole lines that is valid Python; the text itself if no prefix is.

    It goes back from one syntax error to the previous one, so that a few parses suffice for a text of any length.
    check: raises the errors of `parse`.
    """
    lines = list(io.StringIO(text, newline="\n"))
    end = len(lines)
    while end:
        try:
            check("".join(lines[:end]))
            return "".join(lines[:end])
        except SyntaxError as error:
            end = min(end, error.lineno or end) - 1
        except (ValueError, RecursionError, MemoryError):  # null bytes, lone surrogates, too deep nesting
            return text
    return text


def _unquoted(lines: Sequence[str], at: int, quote: str) -> list[str]:
    """The lines without their quote marks. A line that is not quoted like line `at` becomes one that is not Python."""
    depth = quote.count(">")
    mark = re.compile(rf"(?:[ \t]*>){{{depth}}}[ ]?")
    return [line[found.end() :] if (found := mark.match(line)) else "```" for line in lines]


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip(" \t"))


def _roots(lines: Sequence[str], at: int) -> list[int]:
    """The lines at which a program that contains line `at` may begin: headers of the blocks around it, the outermost
    first, then the line itself.
    """
    found, room = [at], _indent(lines[at])
    for n in range(at - 1, -1, -1):
        line = lines[n]
        if not room or FENCE.search(line):
            break
        if not line.strip() or _indent(line) >= room:
            continue
        if MIDDLE.match(line.lstrip()):
            room = _indent(line) + 1
        elif HEADER.match(line.lstrip()):
            room = _indent(line)
            found.append(n)
        else:
            break
    return found[::-1]


def _span(lines: Sequence[str], root: int, at: int, floor: int, work: Work) -> Span | None:
    """The longest program that begins at line `root` or above it, not above line `floor`, and contains line `at`; None
    if there is none.
    """
    lead = lines[root][: _indent(lines[root])]

    def without_lead(line: str) -> str:
        return line[len(lead) :] if line.startswith(lead) else line.lstrip(" \t")

    below = "\n".join(map(without_lead, lines[root:])) + "\n"
    below = whole_statements(below, work.parse)
    count = below.count("\n")
    if count <= at - root or not work.parses(below):
        return None
    first, failed = root, 0
    for n in range(root - 1, floor - 1, -1):
        if lines[n].strip() and not lines[n].startswith(lead):
            break
        if FENCE.search(lines[n]) and first == n + 1:
            break
        above = "\n".join(map(without_lead, lines[n:root])) + "\ndef _():\n    pass\n"
        if work.parses(above):
            first, failed = n, 0
        else:
            failed += 1
            if failed > HIGHEST:
                break
    code = "".join(without_lead(line) + "\n" for line in lines[first:root]) + below
    if not work.parses(code):
        first, code = root, below
    return Span(code, first, root + count - 1)
