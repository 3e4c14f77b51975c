"""`python -m tests.support.serving.recorded_server serve ...`: the server. Each of its processes adds its name to the
file LANEFORMER_TEST_RECORD, and later what it registers with Python's resource tracker, such as named semaphores.
"""

import os
import sys
from multiprocessing import resource_tracker
from pathlib import Path

from laneformer.infer.__main__ import main


def record(line: str) -> None:
    with Path(os.environ["LANEFORMER_TEST_RECORD"]).open("a", encoding="utf-8") as file:
        file.write(f"{line}\n")


resource_tracker.register = lambda name, kind: record(f"{kind} {name}")
record(__name__)
if __name__ == "__main__":
    sys.exit(main())
