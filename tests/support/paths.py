"""Where the tests find the project, their data and Python."""

import sys
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
ROOT = TESTS.parent
ORACLE = TESTS / "oracle"
DENSE = TESTS / "dense"
MOE = TESTS / "moe"

# Python for whole commands: warnings are errors, but for JAX's of a compiled program that another thread or process is
# still writing to the shared folder, which it then compiles itself.
PYTHON = (sys.executable, "-W", "error", "-W", "ignore:Error reading persistent compilation cache entry")
