"""`python -m train RECIPE [--section.option value ...]`: starts or resumes the run that the recipe describes.

With --dry-run it trains nothing and reports what the run would need on a described cluster, or with --sweep mesh on
many meshes.
"""

import shlex
import sys
from collections.abc import Sequence

from laneformer.errors import as_run, run_command
from laneformer.interrupts import end, importing


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit status: 0 when done, 2 after a user's mistake, 130 or 143 after a signal."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    resume = f"resume from the last checkpoint with: python -m train {shlex.join(arguments)}"
    interrupted = f"stopped without saving; {resume}"
    return run_command(lambda: _run(arguments, interrupted), interrupted=interrupted)


def _run(arguments: Sequence[str], interrupted: str) -> int:
    with importing(interrupted):  # takes seconds
        from laneformer.train.loop import Interrupted, train
        from laneformer.train.planning.plan import dry_run
        from laneformer.train.planning.sweep import mesh_sweep
        from laneformer.train.recipes import parse

    try:
        if "--dry-run" in arguments:
            print(mesh_sweep(arguments) if "--sweep" in arguments else dry_run(arguments))
        else:
            train(parse(arguments))
    except Interrupted as stopped:
        print(as_run(f"{stopped}; resume with: python -m train {shlex.join(arguments)}"), file=sys.stderr)
        return 128 + stopped.signal
    return 0


if __name__ == "__main__":
    end(main())
