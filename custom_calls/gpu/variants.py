"""Variants of the GPU kernel that measurements on a GPU must decide between. They change no bit of a result.

Each is a name in `Layout.variants` and a constant of the kernel's header. To add one, write an entry in VARIANTS, its
constant in header.py, and the code that tests the constant.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

VARIABLE = "LANEFORMER_GPU_VARIANTS"
"""Environment variable with the names of the variants to use, separated by commas."""


@dataclass(frozen=True)
class Variant:
    summary: str
    """What is different."""
    refusal: Callable[[Any], str | None]
    """A function of a Layout: why it cannot have the variant; None if it can."""


def _without_bulk(layout) -> str | None:
    return None if layout.machine.bulk_copies else "needs an NVIDIA GPU"


def _without_dense(layout) -> str | None:
    if layout.any_experts or layout.streams:
        return "does not support experts or several residual streams"
    return _without_bulk(layout)


def _without_spare(layout) -> str | None:
    if layout.grid > layout.machine.multiprocessors:
        return f"needs {layout.grid} multiprocessors, the device has {layout.machine.multiprocessors}"
    return None


VARIANTS = {
    "out-of-line": Variant(
        "refills of the ring and the slow part of waits are functions that are not inlined", _without_bulk
    ),
    "triples": Variant("vectors of products travel as three float32 and a tag in 16 bytes", _without_dense),
    "spare-writer": Variant("a CTA that computes no op writes to host memory", _without_spare),
}


def from_environment() -> tuple[str, ...]:
    """The names in VARIABLE."""
    return tuple(name for name in os.environ.get(VARIABLE, "").split(",") if name)


def check(layout) -> None:
    """Raises ValueError if a variant of a Layout is unknown or not possible."""
    for name in layout.variants:
        if name not in VARIANTS:
            raise ValueError(f"unknown variant {name!r} of the GPU kernel; choose {', '.join(VARIANTS)}")
        if problem := VARIANTS[name].refusal(layout):
            raise ValueError(f"variant {name!r} of the GPU kernel {problem}: omit it")
