"""Token healing: a prompt's last tokens may be others than those of a text that continues it.

A tokenizer that has the line end and the next line's indentation in one token never ends a training text with the line
end alone. So the tokens that a longer token could replace are removed from the prompt, and the first drawn tokens must
spell their text. (HF's GenerationConfig.token_healing and guidance do the same.)
"""

from bisect import bisect_left, bisect_right
from collections.abc import Sequence

from laneformer.infer.text.tokenizer import Tokenizer


class Spelling:
    """The texts of a vocabulary's tokens, in order. Any thread may use it."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int):
        """vocab_size: size of the model's vocabulary."""
        self._texts = [tokenizer.token_bytes(token) for token in range(vocab_size)]
        self._order = sorted(token for token, text in enumerate(self._texts) if text)
        self._order.sort(key=lambda token: self._texts[token])
        self._sorted = [self._texts[token] for token in self._order]
        self._ids: dict[bytes, list[int]] = {}
        for token in self._order:
            self._ids.setdefault(self._texts[token], []).append(token)
        self._longest = max(map(len, self._sorted), default=0)

    def text(self, token: int) -> bytes:
        """The UTF-8 bytes of a token; b"" for special tokens."""
        return self._texts[token]

    def unstable(self, ids: Sequence[int]) -> tuple[int, bytes]:
        """Number of tokens at the end of a prompt that a continuation may replace, and their text, whole characters.

        A token is unstable if the vocabulary has a token that begins inside or before it with the same text up to the
        end of the prompt, and goes on. The first token that has a text is never counted.
        """
        first = next((n for n, token in enumerate(ids) if self._texts[token]), len(ids))
        tail = b""
        sizes: list[int] = []
        for token in reversed(ids[first + 1 :]):
            text = self._texts[token]
            if not text or len(tail) >= self._longest:
                break
            tail, sizes = text + tail, [*sizes, len(text)]
        size = next((size for size in range(len(tail), 0, -1) if self._goes_on(tail[-size:])), 0)
        count, covered = 0, 0
        while covered < size:
            covered += sizes[count]
            count += 1
        while count and not _is_text(tail[len(tail) - covered :]):
            if count == len(sizes):
                return 0, b""
            covered += sizes[count]
            count += 1
        return count, tail[len(tail) - covered :]

    def allowed(self, rest: bytes, known: dict[bytes, bool]) -> list[int]:
        """The tokens that begin with a text, and those that it begins with if the remainder can be spelled too.

        known: results for remainders, which this method fills.
        """
        found = list(self._order[self._begin(rest) : self._end(rest)])
        for size in range(1, min(len(rest), self._longest + 1)):
            if rest[:size] in self._ids and self._spelled(rest[size:], known):
                found += self._ids[rest[:size]]
        return found

    def _spelled(self, rest: bytes, known: dict[bytes, bool]) -> bool:
        if rest not in known:
            known[rest] = self._begin(rest) < self._end(rest) or any(
                rest[:size] in self._ids and self._spelled(rest[size:], known)
                for size in range(min(len(rest) - 1, self._longest), 0, -1)
            )
        return known[rest]

    def _begin(self, text: bytes) -> int:
        return bisect_left(self._sorted, text)

    def _end(self, text: bytes) -> int:
        return bisect_right(self._sorted, text, key=lambda each: each[: len(text)])

    def _goes_on(self, text: bytes) -> bool:
        """Whether a token begins with this text and is longer."""
        return bisect_right(self._sorted, text) < self._end(text)


def _is_text(raw: bytes) -> bool:
    try:
        raw.decode()
    except UnicodeDecodeError:
        return False
    return True
