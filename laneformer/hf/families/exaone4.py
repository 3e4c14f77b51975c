"""EXAONE 4 (arXiv 2507.11407): norms after the modules instead of before them. If some layers have a window, the other
layers do not rotate q and k.
"""

from laneformer.hf.families.llama import AFTER_NAMES, FULL, SLIDING, layer_types, make_family
from laneformer.hf.fields import Fields

WINDOW, PATTERN = 4096, 4


def windows(fields: Fields) -> tuple[int | None, list[str]]:
    """A window on the layers that `layer_types` names, by default on all but every sliding_window_pattern-th layer;
    null means no window.
    """
    window = fields.optional_size("sliding_window", WINDOW)
    if window is None or fields.sequence("layer_types") is not None:
        fields.get("sliding_window_pattern")  # read but not used; it may be a text such as LLLG
        return window, layer_types(fields, [FULL] * fields.layers)
    every = fields.size("sliding_window_pattern", PATTERN)
    return window, layer_types(fields, [FULL if (n + 1) % every == 0 else SLIDING for n in range(fields.layers)])


def nope_layers(fields: Fields) -> tuple[int, ...]:
    """The full layers, if the model has a window."""
    window, types = windows(fields)
    return tuple(n for n, kind in enumerate(types) if window is not None and kind == FULL)


FAMILY = make_family(
    "EXAONE 4",
    AFTER_NAMES,
    longest=2048,
    defaults={"norm_before": False, "norm_after": "sum", "qk_norm": True},
    refused=("attention_bias",),
    norm_eps=1e-5,
    windows=windows,
    nope_layers=nope_layers,
)
