"""Native kernels behind XLA custom calls: a persistent decode kernel and the exchange between lanes."""

from custom_calls.cpu.session import Session, amx_pays, bf12_pays
from custom_calls.decode import ENDS, Inputs, Outputs, State, decode
from custom_calls.library import (
    NativeError,
    arithmetic_peak,
    default_threads,
    instruction_sets,
    read_bandwidth,
    unavailable,
)
from custom_calls.plan import Plan, make_plan
from custom_calls.session import DecodeSession, EmittedTokens

__all__ = [
    "ENDS",
    "DecodeSession",
    "EmittedTokens",
    "Inputs",
    "NativeError",
    "Outputs",
    "Plan",
    "Session",
    "State",
    "amx_pays",
    "arithmetic_peak",
    "bf12_pays",
    "decode",
    "default_threads",
    "instruction_sets",
    "make_plan",
    "read_bandwidth",
    "unavailable",
]
