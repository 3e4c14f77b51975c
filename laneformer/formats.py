"""The formats of weights and values: names, widths and scales. Plain data, imported where JAX is not."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Format:
    """How numbers are stored: `bits` each and, where `group` is set, a scale of `scale_bits` per group."""

    name: str
    bits: int
    """Bits of one number, without its share of a scale."""
    id: int | None = None
    """Number of the format in the kernels' interfaces; None: no kernel reads it yet, the roofline projects it."""
    group: int = 0
    """Numbers that share a scale; 0: no scale, or one whose bytes do not count (fp8: one per 128 x 128)."""
    scale_bits: int = 0
    """Bits of one scale."""

    @property
    def bytes(self) -> float:
        """Bytes of one number, its share of the scale included."""
        return (self.bits + (self.scale_bits / self.group if self.group else 0)) / 8


FORMATS = {
    format.name: format
    for format in (
        Format("float32", 32, id=0),
        Format("bfloat16", 16, id=1),
        Format("float16", 16, id=2),
        Format("fp8", 8),
        Format("int8", 8),
        Format("int4", 4, group=32, scale_bits=16),
        Format("mxfp4", 4, group=32, scale_bits=8),
    )
}
KERNEL_FORMATS = tuple(format.name for format in FORMATS.values() if format.id is not None)
"""Formats that models compute with and kernels read."""
