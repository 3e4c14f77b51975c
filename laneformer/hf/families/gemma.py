"""Gemma, Gemma 2 (arXiv 2408.00118) and the language models of Gemma 3 (arXiv 2503.19786): a scaled embedding, norms
that multiply by 1 + weight, from Gemma 2 on also after the modules, and softcaps or norms of q and k.

In Gemma 2 every second layer has a window, in Gemma 3 all but every sixth; there these layers also rotate by another
base. Published files of Gemma 3 leave many fields out, so their defaults matter.
"""

import math
from collections.abc import Mapping
from typing import Any

from laneformer.hf.families.llama import FULL, NAMES, SLIDING, layer_types, make_family
from laneformer.hf.fields import SAME_ACTIVATION, Fields

AROUND_NAMES = NAMES | {  # norms before and after the modules
    "attention_post_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "ffn_post_norm": "post_feedforward_layernorm",
}
WINDOW, PATTERN = 4096, 6
TANH = "gelu_pytorch_tanh"
COMMON: dict[str, Any] = {"head_dim": 256, "tie_word_embeddings": True, "norm_plus_one": True, "hidden_act": TANH}
USUAL_3 = {
    "vocab_size": 262_208,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "bos_token_id": 2,
    "eos_token_id": 1,
}


def windows(fields: Fields, every: int) -> tuple[int | None, list[str]]:
    """A window on the layers that `layer_types` names, by default on all but every `every`-th layer; null means no
    window.
    """
    window = fields.optional_size("sliding_window", WINDOW)
    fields.get("sliding_window_size")  # repeats sliding_window
    return window, layer_types(fields, [FULL if (n + 1) % every == 0 else SLIDING for n in range(fields.layers)])


def windows_3(fields: Fields) -> tuple[int | None, list[str]]:
    """As `windows`, with the pattern of the file."""
    older = fields.size("_sliding_window_pattern", PATTERN)
    return windows(fields, fields.size("sliding_window_pattern", older))


def embedding(fields: Fields, name: str) -> dict[str, Any]:
    """What all generations have. name: that of the activation."""
    return {"embedding_multiplier": math.sqrt(fields.hidden), "hidden_act": SAME_ACTIVATION.get(name, name)}


def embedding_1(fields: Fields) -> dict[str, Any]:
    """Gemma's first files say gelu and mean the approximation by tanh."""
    fields.get("hidden_activation")  # repeats hidden_act
    name = fields.word("hidden_act", TANH)
    return embedding(fields, TANH if name == "gelu" else name)


def scores(fields: Fields, caps: Mapping[str, float]) -> dict[str, Any]:
    """Also the scale of the scores, and the softcaps; null means that there is none. caps: their defaults."""
    found = embedding(fields, fields.word("hidden_activation", TANH))
    found |= {"attention_multiplier": fields.size("query_pre_attn_scalar", 256) ** -0.5}
    for name in ("attn_logit_softcapping", "final_logit_softcapping"):
        found[name] = None if fields.is_null(name) else fields.get(name, caps.get(name))
    return found


def scores_2(fields: Fields) -> dict[str, Any]:
    return scores(fields, {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0})


def scores_3(fields: Fields) -> dict[str, Any]:
    return scores(fields, {})


GEMMA = make_family("Gemma", longest=8192, defaults=COMMON, refused=("attention_bias",), more=embedding_1)
GEMMA_2 = make_family(
    "Gemma 2",
    AROUND_NAMES,
    longest=8192,
    defaults=COMMON | {"norm_after": "sum"},
    usual={"num_key_value_heads": 4},
    refused=("attention_bias",),
    windows=lambda fields: windows(fields, 2),
    more=scores_2,
)
GEMMA_3 = make_family(
    "Gemma 3",
    AROUND_NAMES,
    longest=131_072,
    defaults=COMMON | {"norm_after": "sum", "qk_norm": True},
    usual=USUAL_3,
    refused=("attention_bias",),
    theta=1_000_000.0,
    local_rope=True,
    local_theta=10_000.0,
    windows=windows_3,
    more=scores_3,
)
