"""Settings of every test run: eight host devices, set before JAX starts, and the same hypothesis examples every time.

Compiling takes most of the time of these tests. XLA therefore skips its slow optimizations, also in the processes
that tests start, which share a cache of compiled programs. Both change how XLA compiles a program, not the program
itself.
"""

import gc
import os
import signal
import sys

import hypothesis
import jax
import jaxlib.version
import pytest

import laneformer
from tests.support.workers import shared_folder

# Write bytecode even if the environment forbids it: without bytecode, each test process spends five seconds rewriting
# the assertions of all test files.
sys.dont_write_bytecode = False

laneformer.use_host_devices(8)
if "LANEFORMER_TEST_GPU" not in os.environ:  # tests on a GPU measure the optimized programs
    # These options save two thirds of the time to compile: one LLVM module per program, and no second compiler for
    # fused operations. jaxlib 0.11 lacks the second option and ends a process that sets it.
    QUICK = "--xla_cpu_parallel_codegen_split_count=1"
    if jaxlib.version.__version_info__ < (0, 11):
        QUICK += " --xla_cpu_use_fusion_emitters=false"
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {QUICK}".strip()
    jax.config.update("jax_disable_most_optimizations", True)
    os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"
    # On a machine with a GPU, JAX would otherwise use it, or warn on standard error that it cannot.
    jax.config.update("jax_platforms", "cpu")
    os.environ["JAX_PLATFORMS"] = "cpu"

# Tracing allocates many long-lived objects: garbage collections that found nothing took a fifth of its time.
gc.freeze()
gc.set_threshold(50_000, 20, 50)

signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job of a shell would ignore SIGINT

hypothesis.settings.register_profile("laneformer", derandomize=True, deadline=None)
hypothesis.settings.load_profile("laneformer")


@pytest.fixture(scope="session", autouse=True)
def compiled(tmp_path_factory):
    """The commands that tests start share a folder of compiled programs: one that finds its programs starts in 2 s, not
    in 7. The tests' own processes do without, since they would write thousands of programs and find few.
    """
    if "JAX_COMPILATION_CACHE_DIR" in os.environ:
        return
    folder = str(shared_folder(tmp_path_factory) / "compiled")
    os.environ |= {"JAX_COMPILATION_CACHE_DIR": folder, "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
