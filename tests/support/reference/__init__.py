"""What every model of this project computes, written out once in float64 numpy: the tests compare against it.

Nothing here is fast, cached or shared with the package: each equation is a line, each lane a Python list entry.

Shapes: b batch, s positions, D hidden size, N layers, L lanes, H query heads, K key/value heads, e head size,
F feed-forward size, V vocabulary. A lane's residual stream is [b, s, D]; "X" is the list of all L of them.
`config` is a config.json as a dict, `weights` a dict of arrays under their state_dict names (lane axis first).
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
