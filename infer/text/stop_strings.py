"""Stop strings in a text that comes in pieces."""

from collections.abc import Iterable


class StopStrings:
    """Passes text on up to the first stop string; what could still become one is held back.

    The first is the one that is complete first as characters come one by one, the longest of several that end together:
    so the result does not depend on how the text is cut into pieces.
    """

    def __init__(self, strings: Iterable[str] = ()):
        self._strings = tuple(strings)
        self._held = ""
        self.found: str | None = None
        """The stop string that was found; nothing is passed on any more."""

    def add(self, piece: str) -> str:
        """The text that is certain to stand before any stop string."""
        if self.found is not None:
            return ""
        text = self._held + piece
        hits = [(start + len(stop), start, stop) for stop in self._strings if (start := text.find(stop)) >= 0]
        if hits:
            _, start, self.found = min(hits)
            self._held = ""
            return text[:start]
        longest = max((n for stop in self._strings for n in range(1, len(stop)) if text.endswith(stop[:n])), default=0)
        self._held = text[len(text) - longest :]
        return text[: len(text) - longest]

    def flush(self) -> str:
        """What is held back, at the end of the text."""
        held, self._held = self._held, ""
        return held
