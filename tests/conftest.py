"""Eight host devices for the whole test run, asked for before anything touches JAX, and the same hypothesis examples every time.

Programs are compiled without the optimizations that take long, here and in processes that tests start: most of the time of these
tests is compiling. The programs stay the same; what is left out makes their machine code fast.
"""

import os
import signal

import hypothesis
import jax

import laneformer

laneformer.use_host_devices(8)
if "LANEFORMER_TEST_GPU" not in os.environ:  # there it is the programs that count
    jax.config.update("jax_disable_most_optimizations", True)
    os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"

signal.signal(signal.SIGINT, signal.default_int_handler)  # also where the tests run as a background job, which ignores Ctrl-C

hypothesis.settings.register_profile("laneformer", derandomize=True, deadline=None)
hypothesis.settings.load_profile("laneformer")
