"""`python -m train RECIPE [--section.option value ...]`: pretrains, or goes on with, the run that the recipe describes."""

import shlex
import sys
from collections.abc import Sequence

from laneformer.errors import LaneformerError
from train.loop import Interrupted, train
from train.recipes import parse


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status: 0 done, 2 a user's mistake, 130 or 143 stopped by a signal and saved."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    try:
        train(parse(arguments))
    except (LaneformerError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except Interrupted as stopped:
        print(f"{stopped}; to go on: python -m train {shlex.join(arguments)}", file=sys.stderr)
        return 130 if "SIGINT" in str(stopped) else 143
    except KeyboardInterrupt:
        print(f"stopped without saving; to go on from the last checkpoint: python -m train {shlex.join(arguments)}", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
