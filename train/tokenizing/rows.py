"""Rows of tables as documents: which columns are read, what a row contains, and which rows cannot be read."""

import sys
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import lru_cache
from typing import Any

from laneformer.errors import InputError
from laneformer.train.tokenizing.conversations import Conversation, Shape

NAMED = 5  # bad rows that are named
# Columns of code sets that hold the location of a file instead of its content.
REPOSITORY = ("repo", "repo_name", "commit_id", "blob_id")


class BadRows:
    """The units of a source that cannot be read: they are counted, and the first ones are named on standard error."""

    def __init__(self, limit: int | None = None):
        """limit: most units that are skipped (default: any number)."""
        self.limit = limit
        self.found: dict[Hashable, str] = {}

    def add(self, unit: Hashable, where: str, reason: str) -> None:
        """Skips a unit. A unit that was added before counts once. Raises InputError above the limit."""
        if unit in self.found:
            return
        self.found[unit] = f"{where}: {reason}"
        if len(self.found) <= NAMED:
            print(f"warning: skipped {self.found[unit]}", file=sys.stderr)
        elif len(self.found) == NAMED + 1:
            print("warning: more are skipped and counted", file=sys.stderr)
        if self.limit is not None and len(self.found) > self.limit:
            raise InputError(
                f"{len(self.found)} rows cannot be read, more than --max-bad-rows {self.limit}; the last one is"
                f" {self.found[unit]}; correct the data, or raise the limit"
            )

    @property
    def summary(self) -> str:
        """Text about the number of units for the result of a command; "" if there are none."""
        return f"; {len(self.found)} cannot be read" if self.found else ""


class RowReader:
    """Reads the content of rows: a text in one column or, with `chat`, a conversation."""

    def __init__(self, columns: Sequence[str], chat: bool):
        """columns: the columns chosen by the user; with `chat` none means any known shape of conversations."""
        self.chosen, self.chat = columns, chat
        self._shape: Callable[[tuple[str, ...]], Shape] = lru_cache(1024)(lambda found: Shape.find(found, columns))

    def columns(self, found: Sequence[str]) -> list[str]:
        """The columns to read of a table with the columns `found`. Raises InputError if it lacks them."""
        if self.chat:
            shape = self._shape(tuple(found))
            return [*shape.columns, *shape.beside]
        [column] = self.chosen
        if column in found:
            return [column]
        lists = [name for name in REPOSITORY if name in found and not {"content", "code", "text"} & set(found)]
        advice = (
            f"it has the locations of files ({', '.join(lists)}), not their contents; download them and tokenize"
            " their folder, or "
            if lists
            else ""
        )
        raise InputError(f"no column {column!r}; {advice}choose --column from {', '.join(found)}")

    def content(self, row: Mapping[str, Any]) -> str | Conversation | None:
        """The document in a row, None if it has no text. Raises InputError for a row of another form."""
        if self.chat:
            return self._shape(tuple(row)).read(row)
        text = row.get(self.chosen[0])
        if text is not None and not isinstance(text, str):
            raise InputError(
                f"column {self.chosen[0]!r} holds {type(text).__name__}, not text; choose another --column"
            )
        return text
