"""OLMo-2 (arXiv 2501.00656): norms after the modules instead of before them, and a q/k norm over all heads together,
which lanes cannot compute alone: it loads with one lane.
"""

from laneformer.hf.llama import AFTER_NAMES, make_family

FAMILY = make_family(
    "OLMo-2",
    AFTER_NAMES,
    longest=2048,
    defaults={"norm_before": False, "norm_after": "sum", "qk_norm": True, "qk_norm_over": "projection"},
    refused=("attention_bias",),
    norm_eps=1e-5,
)
