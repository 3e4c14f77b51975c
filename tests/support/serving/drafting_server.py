"""`python drafting_server.py serve ...`: the server with equal prices of passes for all numbers of rows, so that it
checks every draft and admits every request, even on a busy machine.
"""

import sys

from laneformer import custom_calls
from laneformer.infer.__main__ import main
from laneformer.infer.serve import worker as serve_worker

serve = serve_worker.main


def worker(connection, model):
    """Replaces serve_worker.main."""
    speculate = custom_calls.Session.speculate
    custom_calls.Session.speculate = lambda self, most: speculate(self, most, [1.0] * 16)
    serve(connection, model)


if __name__ == "__main__":
    serve_worker.main = worker
    sys.exit(main())
