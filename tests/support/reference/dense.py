"""The dense model, and functions that join the lanes' parts of a matrix."""

import numpy as np

from tests.support.reference.model import (
    attend,
    epsilon,
    head_size,
    in_float64,
    lanes_of,
    rmsnorm,
    silu,
    window_of_layer,
)


def fold_rows(w):
    """Joins lanes that split the rows: [L, rows, D] -> [L rows, D]."""
    return np.concatenate(list(w), axis=0)


def fold_columns(w):
    """Joins lanes that split the columns: [L, D, columns] -> [D, L columns]."""
    return np.concatenate(list(w), axis=1)


def fold_gain(weights, name):
    """Gain [D] of a norm. Asserts that gains of the lanes are equal, since others have no dense counterpart."""
    if f"{name}.weight" in weights:
        return weights[f"{name}.weight"]
    gains = weights[f"{name}.scale"]
    assert (gains == gains[0]).all(), f"{name}: the lanes' gains differ"
    return gains[0]


def fold_head(config, weights):
    """The dense output matrix [V, D] that gives the same logits when all lanes are equal."""
    if config.get("tie_word_embeddings", False):
        return weights["model.tok_embeddings.weight"]
    if "lm_head.linear.weight" in weights:
        return sum(np.split(weights["lm_head.linear.weight"], lanes_of(config), axis=1))
    w = weights["lm_head.weight"]
    return w if w.ndim == 2 else fold_rows(w)


def dense_logits(config, weights, ids, wiring="sequential"):
    """The Llama model with whole matrices: ids [b, s] -> logits [b, s, V].

    wiring: "sequential" is Llama's. In "parallel", attention and MLP read the same stream. In "ladder", an output skips
    the next module and is added before the one after it. The layouts of these two names compute the same for any number
    of lanes.
    """
    weights = in_float64(weights)
    eps, e = epsilon(config), head_size(config)
    x = weights["model.tok_embeddings.weight"][np.asarray(ids)]
    b, s, _ = x.shape
    late = 0.0  # the output that "ladder" has not yet added
    for n in range(config["num_hidden_layers"]):
        name = f"model.layers.{n}"

        def matrix(part, fold, name=name):
            return fold(weights[f"{name}.{part}.weight"])

        h = rmsnorm(x, fold_gain(weights, f"{name}.attention_norm"), eps)
        q, k, v = ((h @ matrix(f"attention.{part}", fold_rows).T).reshape(b, s, -1, e) for part in ("wq", "wk", "wv"))
        a = attend(config, q, k, v, window_of_layer(config, n)) @ matrix("attention.wo", fold_columns).T
        seen_by_mlp = {"sequential": x + a, "parallel": x, "ladder": x + late}[wiring]

        h = rmsnorm(seen_by_mlp, fold_gain(weights, f"{name}.ffn_norm"), eps)
        gate, up = (h @ matrix(f"feed_forward.{part}", fold_rows).T for part in ("w1", "w3"))
        f = (silu(gate) * up) @ matrix("feed_forward.w2", fold_columns).T
        x = {"sequential": x + a + f, "parallel": x + a + f, "ladder": x + late + a}[wiring]
        late = f if wiring == "ladder" else 0.0
    return rmsnorm(x + late, fold_gain(weights, "model.norm"), eps) @ fold_head(config, weights).T
