"""Stop strings in a text that arrives in pieces."""

from collections.abc import Iterable


class StopStrings:
    """Passes text on up to the first stop string, and holds back text that may become a stop string.

    The first stop string is the first one to be complete when the text is read character by character; if several end
    there, the longest. The result therefore does not depend on how the text is cut into pieces.
    """

    def __init__(self, strings: Iterable[str] = ()):
        self._strings = tuple(strings)
        self._beginnings = {stop[:n] for stop in self._strings for n in range(1, len(stop))}
        self._longest = max(map(len, self._beginnings), default=0)
        self._held = ""
        self.found: str | None = None
        """The stop string that was found; no text is passed on after it."""

    def add(self, piece: str) -> str:
        """Adds a piece, and returns the text that is now certain to be before any stop string."""
        if self.found is not None:
            return ""
        text = self._held + piece
        hits = [(start + len(stop), start, stop) for stop in self._strings if (start := text.find(stop)) >= 0]
        if hits:
            _, start, self.found = min(hits)
            self._held = ""
            return text[:start]
        most = min(self._longest, len(text))
        longest = next((n for n in range(most, 0, -1) if text[-n:] in self._beginnings), 0)
        self._held = text[len(text) - longest :]
        return text[: len(text) - longest]

    def flush(self) -> str:
        """Returns the text that is held back; call it at the end of the text."""
        held, self._held = self._held, ""
        return held
