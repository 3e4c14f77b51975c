"""Where the tests find the project and their data."""

from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
ROOT = TESTS.parent
ORACLE = TESTS / "oracle"
DENSE = TESTS / "dense"
MOE = TESTS / "moe"
