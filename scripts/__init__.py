"""Chores: tokenizing, converting, plotting, checking a machine."""

import sys

if sys.argv[:1] == ["-m"]:  # `python -m` imports this package before the command
    from laneformer.interrupts import end_at_interrupt

    end_at_interrupt()
