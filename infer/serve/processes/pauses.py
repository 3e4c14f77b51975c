"""How long one thread of a process keeps its others waiting."""

import gc
import sys

SWITCH_SECONDS = 0.001  # after which a thread that runs Python gives way to another


def shorten_pauses() -> None:
    """Makes threads take turns often, and keeps the objects of now, which are libraries, out of garbage collections:
    with JAX a collection of all objects took 0.3 s. Call it once, when everything is loaded.
    """
    sys.setswitchinterval(SWITCH_SECONDS)
    gc.collect()
    gc.freeze()
