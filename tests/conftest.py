"""Eight host devices for the whole test run, asked for before anything touches JAX, and the same hypothesis examples
every time.

Most of the time of these tests is compiling. Programs are compiled without the optimizations that take long, and kept
for as long as the tests run, by all that enters them; both here and in processes that tests start. The programs stay
the same.
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

# Bytecode is kept, also in a container whose environment says otherwise: without it each process of the tests takes
# five seconds to rewrite the assertions of all test files.
sys.dont_write_bytecode = False

laneformer.use_host_devices(8)
if "LANEFORMER_TEST_GPU" not in os.environ:  # there it is the programs that count
    # A third of the time to compile: one LLVM module per program, and no second compiler for fused operations; jaxlib
    # 0.11 has no such option, and ends a process that asks for it.
    QUICK = "--xla_cpu_parallel_codegen_split_count=1"
    if jaxlib.version.__version_info__ < (0, 11):
        QUICK += " --xla_cpu_use_fusion_emitters=false"
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {QUICK}".strip()
    jax.config.update("jax_disable_most_optimizations", True)
    os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"
    # On a machine with a GPU too, where JAX would take it, or warn on standard error that it cannot.
    jax.config.update("jax_platforms", "cpu")
    os.environ["JAX_PLATFORMS"] = "cpu"

# Tracing makes many objects that live: collections that find no garbage took a fifth of its time.
gc.freeze()
gc.set_threshold(50_000, 20, 50)

signal.signal(
    signal.SIGINT, signal.default_int_handler
)  # also where the tests run as a background job, which ignores Ctrl-C

hypothesis.settings.register_profile("laneformer", derandomize=True, deadline=None)
hypothesis.settings.load_profile("laneformer")


@pytest.fixture(scope="session", autouse=True)
def compiled(tmp_path_factory):
    """Where all workers keep compiled programs: a process that finds its programs starts in 2 s instead of 7."""
    if "JAX_COMPILATION_CACHE_DIR" in os.environ:
        return
    folder = str(shared_folder(tmp_path_factory) / "compiled")
    jax.config.update("jax_compilation_cache_dir", folder)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    os.environ |= {"JAX_COMPILATION_CACHE_DIR": folder, "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
