"""What the chores' command lines share: options in, one line out, a user's mistake as one line on standard error."""

import sys
from collections.abc import Callable, Sequence

import tyro

from laneformer.errors import LaneformerError, say_errors_once


def run_command(
    act: Callable, options: type, program: str, arguments: Sequence[str] | None, description: str | None = None
) -> int:
    """Parses `options`, prints what `act(options)` returns, and gives the exit status: 0, or 2 for a user's mistake."""
    say_errors_once()
    try:
        print(act(tyro.cli(options, args=arguments, prog=program, description=description)))
    except (LaneformerError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0
