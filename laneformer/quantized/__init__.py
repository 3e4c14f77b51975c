"""Matrices in 8 and 4 bits per weight: the record of a matrix (`record`), and how weights are rounded (`rounding`).
This package is plain data and does not import JAX.
"""

from laneformer.quantized.record import E2M1, E4M3, WHOLE, Quantized, e8m0_values, narrow_scales, split_axis, stack

__all__ = ["E2M1", "E4M3", "WHOLE", "Quantized", "e8m0_values", "narrow_scales", "split_axis", "stack"]
