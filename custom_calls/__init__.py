"""Native kernels behind XLA custom calls: a persistent decode kernel and the exchange between lanes."""

from laneformer.custom_calls.cpu.session import Session, fastest_way
from laneformer.custom_calls.decode import ENDS, YIELDED, Outputs, State, decode, empty_layers
from laneformer.custom_calls.library import (
    NativeError,
    arithmetic_peak,
    default_threads,
    instruction_sets,
    read_bandwidth,
    unavailable,
)
from laneformer.custom_calls.plan import Plan, make_plan
from laneformer.custom_calls.request import Request
from laneformer.custom_calls.session import DecodeSession, Drafting, EmittedTokens

__all__ = [
    "ENDS",
    "YIELDED",
    "DecodeSession",
    "Drafting",
    "EmittedTokens",
    "NativeError",
    "Outputs",
    "Plan",
    "Request",
    "Session",
    "State",
    "arithmetic_peak",
    "decode",
    "default_threads",
    "empty_layers",
    "fastest_way",
    "instruction_sets",
    "make_plan",
    "read_bandwidth",
    "unavailable",
]
