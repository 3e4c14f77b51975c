"""OLMo-2 (arXiv 2501.00656): norms after the modules instead of before them, and norms of q and k over all heads
together. A lane cannot compute these norms alone, so the model loads with one lane only.
"""

from laneformer.hf.families.llama import AFTER_NAMES, make_family

FAMILY = make_family(
    "OLMo-2",
    AFTER_NAMES,
    longest=2048,
    defaults={"norm_before": False, "norm_after": "sum", "qk_norm": True, "qk_norm_over": "projection"},
    refused=("attention_bias",),
    norm_eps=1e-5,
)
