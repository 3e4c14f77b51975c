"""Pauses of the web process and of the engine process."""

import gc
import pickle
import subprocess
from types import SimpleNamespace

from laneformer.infer.serve.worker import _Worker
from tests.support.paths import PYTHON, ROOT

FREEZE = """
import gc, sys
from laneformer.infer.serve.processes.pauses import SWITCH_SECONDS, shorten_pauses
shorten_pauses()
print(gc.get_freeze_count() > 0, sys.getswitchinterval() == SWITCH_SECONDS)
"""


def test_libraries_are_kept_out_of_collections():
    done = subprocess.run([*PYTHON, "-c", FREEZE], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True", "True"]


def test_collections_do_not_visit_the_most_likely_tokens():
    worker = object.__new__(_Worker)
    worker._engine = SimpleNamespace(tokenizer=None)
    top = pickle.loads(pickle.dumps(worker._top([(1, -0.5), (2, -1e9)])))
    assert top == ((b"token_id:1", -0.5), (b"token_id:2", -9999.0))
    for _ in range(2):
        gc.collect()
    assert not gc.is_tracked(top) and not any(map(gc.is_tracked, top))
