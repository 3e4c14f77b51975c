"""Native kernels behind XLA custom calls: a persistent decode kernel, the exchange between lanes, and what measures
them.
"""

from custom_calls.cpu.session import Session
from custom_calls.decode import ENDS, Inputs, Outputs, State, decode
from custom_calls.library import NativeError, default_threads, instruction_sets, read_bandwidth, unavailable
from custom_calls.plan import encode_schedule
from custom_calls.session import Drawn, Shapes

__all__ = [
    "ENDS",
    "Drawn",
    "Inputs",
    "NativeError",
    "Outputs",
    "Session",
    "Shapes",
    "State",
    "decode",
    "default_threads",
    "encode_schedule",
    "instruction_sets",
    "read_bandwidth",
    "unavailable",
]
