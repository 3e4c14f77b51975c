"""python -m custom_calls: compile the native library and print its path."""

import argparse
import sys
from pathlib import Path

from laneformer.custom_calls.build import SANITIZERS, BuildError, build, cache


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m custom_calls", description="Compile the native library.")
    parser.add_argument("--out", type=Path, help=f"folder of the library (default: {cache()})")
    parser.add_argument("--sanitizer", choices=SANITIZERS, help="compile it with this sanitizer of the compiler")
    options = parser.parse_args()
    try:
        print(build(options.out, options.sanitizer))
    except BuildError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
