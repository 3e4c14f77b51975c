"""`python -m train RECIPE [--section.option value ...]`: pretrains, or goes on with, the run that the recipe describes.

With --dry-run it only says what the run would take on a described cluster.
"""

import logging
import shlex
import sys
from collections.abc import Sequence

from laneformer.errors import LaneformerError
from train.loop import Interrupted, train
from train.plan import dry_run
from train.recipes import parse


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status: 0 done, 2 a user's mistake, 130 or 143 stopped by a signal and saved."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    _say_errors_once()
    try:
        if "--dry-run" in arguments:
            print(dry_run(arguments))
        else:
            train(parse(arguments))
    except (LaneformerError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except Interrupted as stopped:
        print(f"{stopped}; to go on: python -m train {shlex.join(arguments)}", file=sys.stderr)
        return 128 + stopped.signal
    except KeyboardInterrupt:
        print(f"stopped without saving; to go on from the last checkpoint: python -m train {shlex.join(arguments)}", file=sys.stderr)
        return 130
    return 0


def _say_errors_once() -> None:
    """Silences what Orbax, asyncio and TensorStore print, with tracebacks, of a failed read or save beside raising it to us."""
    for library in ("absl", "asyncio"):
        logging.getLogger(library).setLevel(logging.CRITICAL)
    before = sys.unraisablehook

    def hook(unraisable):
        if str(unraisable.exc_value) != "Event loop is closed":  # a TensorStore thread that ends after Orbax has stopped waiting for it
            before(unraisable)

    sys.unraisablehook = hook


if __name__ == "__main__":
    sys.exit(main())
