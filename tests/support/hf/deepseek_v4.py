"""DeepSeek-V4 in float64 NumPy, computed position by position from weights with the names and shapes of its files."""

import math

import numpy as np


def rms(x, eps, gain=1.0):
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * gain


def softplus(x):
    return np.logaddexp(0, x)


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def softmax(x, axis):
    p = np.exp(x - x.max(axis, keepdims=True))
    return p / p.sum(axis, keepdims=True)


def frequencies(config: dict, ratio: int) -> np.ndarray:
    half = config["qk_rope_head_dim"] // 2
    theta = config["compress_rope_theta"] if ratio else config["rope_theta"]
    found = theta ** -(np.arange(half) / half)
    scaling = config.get("rope_scaling")
    if not ratio or not scaling:
        return found

    def turns(count):
        return half * math.log(scaling["original_max_position_embeddings"] / (count * 2 * math.pi)) / math.log(theta)

    low = max(math.floor(turns(scaling["beta_fast"])), 0)
    high = min(math.ceil(turns(scaling["beta_slow"])), 2 * half - 1)
    ramp = np.clip((np.arange(half) - low) / ((high - low) or 1e-3), 0, 1)
    return found * (1 - ramp) + found / scaling["factor"] * ramp


def turn(x, angles):
    """Rotates the last channels of x [..., k] pair by pair. angles: radians of each pair."""
    size = 2 * len(angles)
    pairs = x[..., -size:].reshape(*x.shape[:-1], -1, 2)
    turned = (pairs[..., 0] + 1j * pairs[..., 1]) * np.exp(1j * angles)
    last = np.stack([turned.real, turned.imag], -1).reshape(*x.shape[:-1], size)
    return np.concatenate([x[..., :-size], last], -1)


class Model:
    def __init__(self, config: dict, tensors: dict):
        self.config = config
        self.w = {name: np.asarray(w, np.int64 if w.dtype.kind == "i" else np.float64) for name, w in tensors.items()}

    def __call__(self, ids) -> tuple[np.ndarray, list[np.ndarray]]:
        """Logits [s, v] of one sequence, and the experts of its tokens [s, k] in each layer."""
        config, w, eps = self.config, self.w, self.config["rms_norm_eps"]
        x = np.repeat(w["embed.weight"][ids][:, None], config["hc_mult"], 1)
        routes = []
        for n in range(config["num_hidden_layers"]):
            for kind in ("attn", "ffn"):
                pre, post, between = self.mixture(x, f"layers.{n}.hc_{kind}")
                h = rms(np.einsum("sm,smd->sd", pre, x), eps, w[f"layers.{n}.{kind}_norm.weight"])
                if kind == "attn":
                    o = self.attention(h, n)
                else:
                    o, chosen = self.experts(h, n, ids)
                    routes.append(chosen)
                x = post[..., None] * o[:, None] + np.einsum("smn,smd->snd", between, x)
        u = rms(x.reshape(len(x), -1), eps)
        rows = u @ w["hc_head_fn"].T * w["hc_head_scale"] + w["hc_head_base"]
        y = np.einsum("sm,smd->sd", sigmoid(rows) + config["hc_eps"], x)
        return rms(y, eps, w["norm.weight"]) @ w["head.weight"].T, routes

    def mixture(self, x, name):
        m, eps = self.config["hc_mult"], self.config["hc_eps"]
        rows = rms(x.reshape(len(x), -1), self.config["rms_norm_eps"]) @ self.w[f"{name}_fn"].T
        scale, base = self.w[f"{name}_scale"], self.w[f"{name}_base"]
        pre = sigmoid(rows[:, :m] * scale[0] + base[:m]) + eps
        post = 2 * sigmoid(rows[:, m : 2 * m] * scale[1] + base[m : 2 * m])
        between = softmax((rows[:, 2 * m :] * scale[2] + base[2 * m :]).reshape(-1, m, m), -1) + eps
        between = between / (between.sum(1, keepdims=True) + eps)
        for _ in range(self.config["hc_sinkhorn_iters"] - 1):
            between = between / (between.sum(2, keepdims=True) + eps)
            between = between / (between.sum(1, keepdims=True) + eps)
        return pre, post, between

    def compressed(self, h, name, ratio, angle):
        """Entries [entries, size] of all complete windows of `ratio` positions."""
        x, gate = h @ self.w[f"{name}.wkv.weight"].T, h @ self.w[f"{name}.wgate.weight"].T
        size, found = len(self.w[f"{name}.norm.weight"]), []
        for first in range(0, len(h) - ratio + 1, ratio):
            own = gate[first : first + ratio] + self.w[f"{name}.ape"]
            values = x[first : first + ratio]
            if ratio == 4:
                own, values = own[:, size:], values[:, size:]
                if first:
                    before = gate[first - ratio : first] + self.w[f"{name}.ape"]
                    own = np.concatenate([before[:, :size], own])
                    values = np.concatenate([x[first - ratio : first, :size], values])
            entry = (softmax(own, 0) * values).sum(0)
            entry = rms(entry, self.config["rms_norm_eps"], self.w[f"{name}.norm.weight"])
            found.append(turn(entry, first * angle))
        return np.array(found).reshape(len(found), size)

    def attention(self, h, n):
        config, eps, ratio = self.config, self.config["rms_norm_eps"], self.config["compress_ratios"][n]
        heads, size, name = config["num_attention_heads"], config["head_dim"], f"layers.{n}.attn"
        w = {key.removeprefix(f"{name}."): value for key, value in self.w.items() if key.startswith(f"{name}.")}
        angle, out = frequencies(config, ratio), []
        rank = rms(h @ w["wq_a.weight"].T, eps, w["q_norm.weight"])
        q = rms((rank @ w["wq_b.weight"].T).reshape(-1, heads, size), eps)
        kv = rms(h @ w["wkv.weight"].T, eps, w["kv_norm.weight"])
        kv = np.array([turn(x, t * angle) for t, x in enumerate(kv)])
        entries = self.compressed(h, f"{name}.compressor", ratio, angle) if ratio else np.zeros((0, size))
        if ratio == 4:
            keys = self.compressed(h, f"{name}.indexer.compressor", ratio, angle)
            iq = (rank @ w["indexer.wq_b.weight"].T).reshape(len(h), config["index_n_heads"], -1)
            iw = h @ w["indexer.weights_proj.weight"].T * config["index_n_heads"] ** -0.5
        for t in range(len(h)):
            closed = (t + 1) // ratio if ratio else 0
            seen = np.arange(closed)
            if ratio == 4 and closed > config["index_topk"]:
                scores = np.maximum(turn(iq[t], t * angle) @ keys[:closed].T, 0) * config["index_head_dim"] ** -0.5
                seen = np.argsort(-(iw[t] @ scores), kind="stable")[: config["index_topk"]]
            near = kv[max(0, t - config["sliding_window"] + 1) : t + 1]
            keys_t = np.concatenate([near, entries[seen]])
            scores = turn(q[t], t * angle) @ keys_t.T * size**-0.5
            p = softmax(np.concatenate([scores, w["attn_sink"][:, None]], 1), 1)[:, :-1]
            out.append(turn(p @ keys_t, -t * angle))
        groups = np.array(out).reshape(len(h), config["o_groups"], -1)
        wo_a = w["wo_a.weight"].reshape(config["o_groups"], config["o_lora_rank"], -1)
        return np.einsum("sgi,goi->sgo", groups, wo_a).reshape(len(h), -1) @ w["wo_b.weight"].T

    def experts(self, h, n, ids):
        config, w, name = self.config, self.w, f"layers.{n}.ffn"
        scores = np.sqrt(softplus(h @ w[f"{name}.gate.weight"].T))
        if n < config["num_hash_layers"]:
            chosen = w[f"{name}.gate.tid2eid"][ids]
        else:
            choice = scores + w[f"{name}.gate.bias"]
            chosen = np.argsort(-choice, -1, kind="stable")[:, : config["num_experts_per_tok"]]
        shares = np.take_along_axis(scores, chosen, -1)
        shares = shares / (shares.sum(-1, keepdims=True) + 1e-20) * config["routed_scaling_factor"]
        o = self.mlp(h, f"{name}.shared_experts")
        for t in range(len(h)):
            for e, share in zip(chosen[t], shares[t], strict=True):
                o[t] += share * self.mlp(h[t], f"{name}.experts.{e}")
        return o, chosen

    def mlp(self, h, name):
        limit = self.config["swiglu_limit"]
        gate, up = (h @ self.w[f"{name}.{matrix}.weight"].T for matrix in ("w1", "w3"))
        gate, up = np.minimum(gate, limit), np.clip(up, -limit, limit)
        return (gate * sigmoid(gate) * up) @ self.w[f"{name}.w2.weight"].T
