"""Settings and building blocks of all models, the embedding, the head, and the Laneformer."""

import math

import numpy as np

KINDS = ("attention", "mlp")  # module m = 2 * layer + (0 for attention, 1 for the MLP)


# ---------------------------------------------------------------------------------------------------------- settings


def lanes_of(config):
    """Number of lanes L."""
    return config.get("num_lanes") or 1


def head_size(config):
    """Size e of one attention head."""
    return config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]


def epsilon(config):
    """Epsilon of the norms, which a config names norm_eps or rms_norm_eps."""
    return config["norm_eps"] if "norm_eps" in config else config.get("rms_norm_eps", 1e-5)


def window_of_layer(config, n):
    """Number of positions that a query of layer n sees, its own included, or None if it sees all earlier ones."""
    layers = config["num_hidden_layers"]
    slides_first_or_last = config.get("sliding_window_n_layers") or 0
    if config.get("sliding_window") is None:
        return None
    if config.get("swa_layers") is not None:
        slides = n in config["swa_layers"]
    elif slides_first_or_last >= 0:
        slides = n < slides_first_or_last
    else:
        slides = n >= layers + slides_first_or_last
    if n in (config.get("unclamped_layers") or ()):
        slides = False
    return config["sliding_window"] if slides else None


def uses_comm(config, kind):
    """Whether late modules of this kind ("attention" or "mlp") exchange their outputs. Older configs have one switch
    for both kinds.
    """
    return config.get(f"use_{kind}_comm", config.get("use_comm", True))


# ---------------------------------------------------------------------------------------------------- building blocks


def rmsnorm(x, gain, eps):
    """RMSNorm: x [..., D], gain [D] -> [..., D]."""
    return x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + eps) * gain


def silu(x):
    """x / (1 + exp(-x)), for any shape."""
    return x / (1 + np.exp(-x))


def activation(config, x):
    """The activation that `hidden_act` names, for any shape."""
    name = config.get("hidden_act") or "silu"
    if name == "silu":
        return silu(x)
    if name == "gelu":
        return x * (1 + np.vectorize(math.erf)(x / math.sqrt(2))) / 2
    if name == "gelu_pytorch_tanh":
        return x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))) / 2
    if name == "relu2":
        return np.where(x > 0, x**2, 0)
    if name == "quick_gelu":
        return x / (1 + np.exp(-1.702 * x))
    raise ValueError(f"unknown hidden_act {name!r}")


def softmax(x):
    """Softmax over the last axis, for any shape."""
    weights = np.exp(x - x.max(axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True)


def softcap(x, cap):
    """x limited to values between -cap and cap; unchanged without a cap."""
    return cap * np.tanh(x / cap) if cap else x


def rope_settings(config):
    """Theta, and the dict of the scaling with at least "rope_type", from any of the published spellings."""
    new_style = config.get("rope_parameters") or {}
    theta = config.get("rope_theta") or new_style.get("rope_theta") or 10000.0
    if config.get("rope_scaling_args"):
        return theta, {"rope_type": "llama3", **config["rope_scaling_args"]}
    scaling = dict(config.get("rope_scaling") or new_style)
    scaling["rope_type"] = scaling.get("rope_type") or scaling.get("type") or "default"
    return theta, scaling


def rope_frequencies(config):
    """Radians per position of each pair [e/2], and the factor on cos and sin."""
    theta, scaling = rope_settings(config)
    e = head_size(config)
    pair = np.arange(e // 2)
    frequency = theta ** (-2.0 * pair / e)
    factor = scaling.get("factor")
    old_context = scaling.get("original_max_position_embeddings") or scaling.get("old_context_len")

    if scaling["rope_type"] in ("default", "none"):
        return frequency, 1.0

    if scaling["rope_type"] == "linear":  # positions divided by the factor
        return frequency / factor, 1.0

    if scaling["rope_type"] == "llama3":  # low frequencies divided by the factor, high ones kept, a linear mix between
        low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
        turns = old_context * frequency / (2 * math.pi)  # turns of the pair within the old context
        kept = np.clip((turns - low) / (high - low), 0, 1)
        return frequency * kept + frequency / factor * (1 - kept), 1.0

    if scaling["rope_type"] == "yarn":  # as llama3, but the mix is linear in the index of the pair
        old_context = old_context or config["max_position_embeddings"]
        factor = factor or config["max_position_embeddings"] / old_context

        def pair_that_turns(turns):
            return e * math.log(old_context / (turns * 2 * math.pi)) / (2 * math.log(theta))

        first = pair_that_turns(scaling.get("beta_fast") or 32)
        last = pair_that_turns(scaling.get("beta_slow") or 1)
        if scaling.get("truncate", True):
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0), min(last, e - 1)
        if first == last:
            last += 0.001
        kept = 1 - np.clip((pair - first) / (last - first), 0, 1)

        def magnitude(mscale):
            return 0.1 * mscale * math.log(factor) + 1 if factor > 1 else 1.0

        amplitude = scaling.get("attention_factor")
        if amplitude is None and scaling.get("mscale") and scaling.get("mscale_all_dim"):
            amplitude = magnitude(scaling["mscale"]) / magnitude(scaling["mscale_all_dim"])
        if amplitude is None:
            amplitude = magnitude(1.0)
        return frequency * kept + frequency / factor * (1 - kept), amplitude

    raise ValueError(f"unknown rope_type {scaling['rope_type']!r}")


def rotate(config, x):
    """Rotates interleaved pairs (x[2i], x[2i+1]) of x [b, s, heads, e] at positions 0 to s - 1."""
    frequency, amplitude = rope_frequencies(config)
    angle = np.arange(x.shape[1])[:, None, None] * frequency  # [s, 1, e/2]
    cos, sin = amplitude * np.cos(angle), amplitude * np.sin(angle)
    even, odd = x[..., 0::2], x[..., 1::2]
    rotated = np.empty_like(x)
    rotated[..., 0::2] = even * cos - odd * sin
    rotated[..., 1::2] = odd * cos + even * sin
    return rotated


def attend(config, q, k, v, window, sinks=None):
    """Causal grouped-query attention with H' query heads and K' key/value heads: q [b, s, H', e], k and v
    [b, s, K', e] -> [b, s, H' e].

    sinks [H']: a score of each head that belongs to no key.
    """
    b, s, heads, e = q.shape
    local = config.get("rope_local_base_freq")  # of layers with a window, if they have their own rotation
    rope = config | {"rope_theta": local, "rope_scaling": None} if local and window is not None else config
    q, k = rotate(rope, q), rotate(rope, k)
    scale = config.get("attention_multiplier") or 1 / math.sqrt(e)
    queries_per_key = heads // k.shape[2]
    query_pos, key_pos = np.arange(s)[:, None], np.arange(s)[None, :]
    visible = key_pos <= query_pos
    if window is not None:
        visible &= key_pos > query_pos - window
    out = np.empty_like(q)
    for j in range(heads):
        kv = j // queries_per_key
        scores = scale * q[:, :, j] @ k[:, :, kv].swapaxes(1, 2)  # [b, s queries, s keys]
        scores = softcap(scores, config.get("attn_logit_softcapping"))
        sink = np.full((b, s, 1), -np.inf if sinks is None else sinks[j])
        out[:, :, j] = softmax(np.concatenate([np.where(visible, scores, -np.inf), sink], -1))[..., :-1] @ v[:, :, kv]
    return out.reshape(b, s, heads * e)


def norm_gain(weights, name, l):
    """Gain [D] of a norm for lane l, from "<name>.weight" [D], shared by all lanes, or "<name>.scale" [L, D]."""
    return weights[f"{name}.weight"] if f"{name}.weight" in weights else weights[f"{name}.scale"][l]


def read_stream(config, weights, name, l, x):
    """Input of a module of lane l: the stream, normalized unless the config has no norms before modules."""
    return rmsnorm(x, norm_gain(weights, name, l), epsilon(config)) if config.get("norm_before", True) else x


def attention(config, weights, n, l, x):
    """Lane l's share of the attention of layer n, norm included: stream x [b, s, D] -> partial output [b, s, D]."""
    name = f"model.layers.{n}.attention"
    b, s, _ = x.shape
    h = read_stream(config, weights, f"{name}_norm", l, x)
    q, k, v = (h @ weights[f"{name}.{part}.weight"][l].T for part in ("wq", "wk", "wv"))
    q, k, v = (y.reshape(b, s, -1, head_size(config)) for y in (q, k, v))
    sinks = weights[f"{name}.sinks"][l] if config.get("attention_sinks") else None
    a = attend(config, q, k, v, window_of_layer(config, n), sinks)
    if config.get("attention_gate"):
        a = a / (1 + np.exp(-h @ weights[f"{name}.wg.weight"][l].T))
    o = a @ weights[f"{name}.wo.weight"][l].T
    return o + weights[f"{name}.wo.bias"][l] if config.get("out_bias") else o


def mlp(config, weights, n, l, x):
    """Lane l's share of the MLP of layer n, norm included: stream x [b, s, D] -> partial output [b, s, D]."""
    name = f"model.layers.{n}"
    h = read_stream(config, weights, f"{name}.ffn_norm", l, x)
    a = activation(config, h @ weights[f"{name}.feed_forward.w1.weight"][l].T)
    if config.get("gated_mlp", True):
        a = a * (h @ weights[f"{name}.feed_forward.w3.weight"][l].T)
    return a @ weights[f"{name}.feed_forward.w2.weight"][l].T


def module(config, weights, m, X):
    """Module m on every lane: streams X (L of [b, s, D]) -> partial outputs (L of [b, s, D]). The outputs are
    normalized if the config has norms of lanes' outputs, or norms of sums and only one lane, whose output is the sum.
    """
    compute = (attention, mlp)[m % 2]
    o = [compute(config, weights, m // 2, l, x) for l, x in enumerate(X)]
    if config.get("norm_after") == "lane" or (config.get("norm_after") == "sum" and len(X) == 1):
        o = [rmsnorm(o[l], norm_gain(weights, norm_after_name(m), l), epsilon(config)) for l in range(len(X))]
    return o


def norm_after_name(m):
    """Name of the norm after module m."""
    return f"model.layers.{m // 2}.{('attention', 'ffn')[m % 2]}_post_norm"


def normed_sum(config, weights, m, sums):
    """The sums of module m's output on every device, normalized if the config has norms of sums, as Gemma 2 and
    OLMo-2.
    """
    if config.get("norm_after") != "sum" or len(sums) == 1:
        return sums
    return [rmsnorm(total, weights[f"{norm_after_name(m)}.weight"], epsilon(config)) for total in sums]


def modules_of(config):
    """Indices of all modules, range(2N): attention of layer 0, MLP of layer 0, attention of layer 1, ..."""
    return range(2 * config["num_hidden_layers"])


# ------------------------------------------------------------------------------------------------ embedding and head


def in_float64(weights):
    """The weights with all arrays in float64."""
    return {name: np.asarray(w, np.float64) for name, w in weights.items()}


def embed(config, weights, ids):
    """The embedding: ids [b, s] -> L equal streams [b, s, D]."""
    rows = weights["model.tok_embeddings.weight"][np.asarray(ids)] * (config.get("embedding_multiplier") or 1)
    return [rows for _ in range(lanes_of(config))]


def head(config, weights, X):
    """Final norm, output matrix and softcap: streams X (L of [b, s, D]) -> logits [b, s, V]."""
    return softcap(products_of_head(config, weights, X), config.get("final_logit_softcapping"))


def products_of_head(config, weights, X):
    """The logits before their softcap."""
    L, eps = lanes_of(config), epsilon(config)
    kind = config.get("lm_head_type") or "replicate"
    tied = config.get("tie_word_embeddings", False)

    if config.get("pre_norm_lane_agg"):
        assert kind == "replicate", "pre_norm_lane_agg needs the replicate head"
        y = rmsnorm(sum(X), weights["model.norm.weight"], eps)
    else:
        normed = [rmsnorm(x, norm_gain(weights, "model.norm", l), eps) for l, x in enumerate(X)]
        y = sum(normed) / L

    if kind == "replicate":
        matrix = weights["model.tok_embeddings.weight" if tied else "lm_head.weight"]  # [V, D]
        return y @ matrix.T
    if kind == "lane":
        assert not tied, "a lane head reads L * D values, so it cannot be the embedding"
        return np.concatenate(normed, axis=-1) @ weights["lm_head.linear.weight"].T  # [V, L D]
    if kind == "vocab_parallel":
        parts = (
            np.split(weights["model.tok_embeddings.weight"], L) if tied else weights["lm_head.weight"]
        )  # [L, V/L, D]
        return np.concatenate([normed[l] @ parts[l].T for l in range(L)], axis=-1)
    raise ValueError(f"unknown lm_head_type {kind!r}")


# ------------------------------------------------------------------------------------------------------- the Laneformer


def reference_logits(config, weights, ids, trace=None):
    """The Laneformer: ids [b, s] -> logits [b, s, V]. trace: a list to which the streams after every layer are
    appended, [b, s, L, D].
    """
    weights = in_float64(weights)
    L, d = lanes_of(config), config["broadcast_delay"]
    X = embed(config, weights, ids)
    outputs = []  # outputs[m][j]: raw output of module m on lane j
    for m in modules_of(config):
        n = m // 2
        o = module(config, weights, m, X)
        outputs.append(o)
        for l in range(L):
            if n < d and config.get("use_early_comm", True):
                X[l] = X[l] + sum(o)
            elif n >= d and uses_comm(config, KINDS[m % 2]):
                P = outputs[m - 2 * d]  # the same kind of module, d layers earlier
                X[l] = X[l] + o[l] + sum(P[j] for j in range(L) if j != l)
            else:
                X[l] = X[l] + math.sqrt(L) * o[l]
        if trace is not None and m % 2 == 1:
            trace.append(np.stack(X, axis=2))
    return head(config, weights, X)
