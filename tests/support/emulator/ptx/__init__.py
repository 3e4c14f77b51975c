"""Translates PTX, the code that nvcc makes of a kernel, to C++ that runs on the emulator (emulator.h).

parse.py reads the text, forms.py has a row for each form of an instruction, emit.py writes a C++ function for each
function of the module, and runtime.h has what the instructions do. Registers become local variables and branches gotos.
Meanings are those of "Parallel Thread Execution ISA", https://docs.nvidia.com/cuda/parallel-thread-execution/, for
sm_90a. An unknown form is an error.

port_host.h replaces all that is special to CUDA; here it runs. Thus this finds wrong operands of inline assembly, wrong
bookkeeping of mbarriers, wrong state spaces, misaligned accesses, also those that nvcc joins, wrong fragments of matrix
products, and accesses beyond shared memory. It does not show memory order, timing, divergent warps or what ptxas does.
"""

from tests.support.emulator.ptx.emit import translate
from tests.support.emulator.ptx.parse import Unsupported

__all__ = ["Unsupported", "translate"]
