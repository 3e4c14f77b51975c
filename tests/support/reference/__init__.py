"""A reference implementation of the project's models in float64 NumPy, to which tests compare.

It is slow, caches nothing and shares no code with the package. Each equation is a line, and lanes are entries of a
list.

Shapes: b batch, s positions, D hidden size, N layers, L lanes, H query heads, K key/value heads, e head size,
F feed-forward size, V vocabulary. A lane's residual stream is [b, s, D], and X is the list of all L streams.
`config` is a config.json as a dict. `weights` is a dict of arrays by their names in the state_dict (lane axis first).
"""

from tests.support.reference import model
from tests.support.reference.dense import dense_logits
from tests.support.reference.layouts import LAYOUTS, add, layout_logits, others, scaled
from tests.support.reference.model import in_float64, reference_logits, rope_frequencies, rotate, window_of_layer
from tests.support.reference.weights import random_weights

__all__ = [
    "LAYOUTS",
    "add",
    "dense_logits",
    "in_float64",
    "layout_logits",
    "model",
    "others",
    "random_weights",
    "reference_logits",
    "rope_frequencies",
    "rotate",
    "scaled",
    "window_of_layer",
]
