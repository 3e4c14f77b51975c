"""Paths of the project and of the tests' data, and the Python command that tests run."""

import sys
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
ROOT = TESTS.parent
ORACLE = TESTS / "oracle"
DENSE = TESTS / "dense"
MOE = TESTS / "moe"

# Python for whole commands: all warnings are errors except one. JAX warns when it cannot read a program from the shared
# compilation cache because another thread or process is still writing it, and then compiles the program itself.
PYTHON = (sys.executable, "-W", "error", "-W", "ignore:Error reading persistent compilation cache entry")
