"""Tables of the roofline, with a status below each heading and the assumptions below each table."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

MEASURED: Final = "measured"  # the user's --rate may also be "simulated"
PROJECTED: Final = "projected"


@dataclass(frozen=True)
class Column:
    """A heading, the format of its numbers, and their status: measured, simulated or projected, or "" for inputs and
    words.
    """

    name: str
    format: str = ""
    status: str = ""


@dataclass(frozen=True)
class Table:
    """Rows of numbers and words; None is printed as unknown."""

    name: str
    title: str
    columns: tuple[Column, ...]
    rows: Sequence[tuple[Any, ...]]
    assumptions: str
    """The assumptions behind the figures, in one line."""

    def text(self) -> str:
        """The table as text for the terminal."""
        body = [
            tuple(_cell(value, column) for value, column in zip(row, self.columns, strict=True)) for row in self.rows
        ]
        lines = [
            tuple(column.name for column in self.columns),
            tuple(f"({c.status})" if c.status else "" for c in self.columns),
            *body,
        ]
        widths = [max(map(len, cells)) for cells in zip(*lines, strict=True)]
        if not any(lines[1]):
            del lines[1]
        numeric = [any(isinstance(row[i], int | float) for row in self.rows) for i in range(len(self.columns))]

        def line(cells: tuple[str, ...]) -> str:
            padded = (c.rjust(w) if right else c.ljust(w) for c, w, right in zip(cells, widths, numeric, strict=True))
            return "  " + "  ".join(padded).rstrip()

        return "\n".join([self.title, *map(line, lines), f"  Assumes: {self.assumptions}."])

    def record(self) -> dict:
        """The table for JSON: rows keyed by column name, and the status of each column."""
        names = [column.name for column in self.columns]
        return {
            "table": self.name,
            "title": self.title,
            "status": {column.name: column.status for column in self.columns if column.status},
            "rows": [dict(zip(names, row, strict=True)) for row in self.rows],
            "assumptions": self.assumptions,
        }


def _cell(value: Any, column: Column) -> str:
    if value is None:
        return "unknown"
    if isinstance(value, str):
        return value
    return format(value, ",.1f" if "tok/s" in column.name and value < 100 else column.format)  # slow speeds: a decimal
