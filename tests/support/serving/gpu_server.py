"""`python -m tests.support.serving.gpu_server serve --backend cuda ...`: the server on emulated GPUs, or on the real
ones that tests/support/emulated.py selects.
"""

import sys

import pytest

from laneformer.infer.__main__ import main
from laneformer.infer.serve import worker as serve_worker

serve = serve_worker.main


def worker(connection, model):
    """Replaces serve_worker.main."""
    from tests.support import emulated  # imports JAX, which the web process does not need

    emulated.make_available(pytest.MonkeyPatch())
    serve(connection, model._replace(options=model.options | emulated.engine_options()))


if __name__ == "__main__":
    serve_worker.main = worker
    sys.exit(main())
