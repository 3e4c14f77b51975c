"""Stop strings in a text that arrives in pieces."""

from collections.abc import Iterable


class StopStrings:
    """Passes text on up to the first stop string, and holds back what may become one.

    The first stop string is the one that is complete first, read character by character, and the longest of several
    that end together: so the result does not depend on how the text is cut into pieces.
    """

    def __init__(self, strings: Iterable[str] = ()):
        self._strings = tuple(strings)
        self._held = ""
        self.found: str | None = None
        """The stop string that was found; after that no text is passed on."""

    def add(self, piece: str) -> str:
        """The text that is certain to be before any stop string."""
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
        """The text that is held back, at the end of the text."""
        held, self._held = self._held, ""
        return held
