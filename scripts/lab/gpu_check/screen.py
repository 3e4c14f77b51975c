"""What the check prints: at most as many characters as come back from a machine that returns only the end of an output.
Needs only Python.
"""

from pathlib import Path

from laneformer.commands.lab.gpu_check.stage import Outcome, text_of

MOST = 12_000  # characters in all
MOST_TAILS = 6_000  # of them for the ends of failed logs
TAIL, MOST_LINE = 1500, 400  # characters of the end of a log, and of a stage's line
KEPT = 300  # for the last lines


class Screen:
    def __init__(self) -> None:
        self._left, self._tails = MOST, MOST_TAILS

    def say(self, text: str, most: int = MOST) -> None:
        """Prints a text, or its beginning if there is not enough room."""
        most = min(most, self._left - KEPT - 1)
        if len(text) > most:
            text = text[: max(0, most - 4)] + " ..."
        self._print(text)

    def last(self, text: str) -> None:
        """Prints one of the last lines, for which room is kept."""
        self._print(text[: max(0, self._left - 1)])

    def outcome(self, out: Path, outcome: Outcome) -> None:
        """Prints a line about a stage, and the ends of its failed logs: shorter ones if many have failed."""
        self.say(f"{outcome.stage}: {outcome.status}, {outcome.seconds:.0f} s {outcome.detail}".rstrip(), MOST_LINE)
        for name in outcome.logs:
            size = min(TAIL, self._tails // 2)
            text = text_of(out / name).rstrip()[-size:]
            self._tails -= len(text)
            if text:
                self.say(f"--- end of {name}\n{text}\n---")

    def _print(self, text: str) -> None:
        print(text, flush=True)
        self._left -= len(text) + 1
