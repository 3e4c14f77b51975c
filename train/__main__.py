"""`python -m train RECIPE [--section.option value ...]`: pretrains, or goes on with, the run that the recipe describes.

With --dry-run it only says what the run would take on a described cluster.
"""

import shlex
import sys
from collections.abc import Sequence

from laneformer.errors import LaneformerError, say_errors_once


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status: 0 done, 2 a user's mistake, 130 or 143 stopped by a signal and saved."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    try:
        return _run(arguments)
    except (LaneformerError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(
            f"stopped without saving; to go on from the last checkpoint: python -m train {shlex.join(arguments)}",
            file=sys.stderr,
        )
        return 130


def _run(arguments: Sequence[str]) -> int:
    from train.loop import Interrupted, train  # seconds, in which Ctrl-C is answered already
    from train.planning.plan import dry_run
    from train.recipes import parse

    say_errors_once()
    try:
        if "--dry-run" in arguments:
            print(dry_run(arguments))
        else:
            train(parse(arguments))
    except Interrupted as stopped:
        print(f"{stopped}; to go on: python -m train {shlex.join(arguments)}", file=sys.stderr)
        return 128 + stopped.signal
    return 0


if __name__ == "__main__":
    sys.exit(main())
