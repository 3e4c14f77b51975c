"""Chores: tokenizing, converting, plotting, checking a machine."""

import sys
from pathlib import Path

if __name__ == "scripts":  # in a clone, `python -m scripts.gpu_check` runs scripts/lab/gpu_check
    __path__.append(str(Path(__file__).with_name("lab")))

if sys.argv[:1] == ["-m"]:  # `python -m` imports this package before the command
    from laneformer.interrupts import end_at_interrupt

    end_at_interrupt()
