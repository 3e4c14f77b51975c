"""The layouts other than Laneformer's. Each maps the embedded streams X (L of [b, s, D]) to the streams that the final
norm reads.
"""

import math

import numpy as np

from tests.support.reference import model
from tests.support.reference.model import embed, head, in_float64, modules_of, normed_sum


def allreduce(values):
    """Sum of all devices' values, on every device."""
    total = sum(values)
    return [total for _ in values]


def add(*lists):
    """Sums on each device: [a0 + b0 + ..., a1 + b1 + ..., ...]."""
    return [sum(values) for values in zip(*lists, strict=True)]


def scaled(factor, values):
    """Each device's value times the factor."""
    return [factor * value for value in values]


def others(values):
    """Sum of the other devices' values, on every device: an all-reduce minus the device's own value."""
    return [total - own for total, own in zip(allreduce(values), values, strict=True)]


def tp(config, weights, X):
    """Tensor parallelism (Megatron): every module ends in an all-reduce."""
    for m in modules_of(config):
        X = add(X, normed_sum(config, weights, m, allreduce(model.module(config, weights, m, X))))
    return X


def parallel(config, weights, X):
    """PaLM, GPT-J: attention and MLP of a layer read the same stream, and one all-reduce sums both outputs."""
    for n in range(config["num_hidden_layers"]):
        both = add(model.module(config, weights, 2 * n, X), model.module(config, weights, 2 * n + 1, X))
        X = add(X, allreduce(both))
    return X


def ladder(config, weights, X):
    """Ladder-Residual: a module's all-reduce runs while the next module computes, so the next module does not read its
    result.
    """
    in_flight = None
    for m in modules_of(config):
        o = model.module(config, weights, m, X)
        if in_flight is not None:
            X = add(X, in_flight)
        in_flight = normed_sum(config, weights, m, allreduce(o))
    return add(X, in_flight)


def desync(config, weights, X, n):
    """Desync-Residual: only every n-th module is reduced. Its all-reduce also averages the streams, which differ by
    then.
    """
    L = len(X)
    for m in modules_of(config):
        o = model.module(config, weights, m, X)
        if m % n == n - 1:
            X = allreduce([o[l] + X[l] / L for l in range(L)])
        else:
            X = add(X, o)
    return X


def spd(config, weights, X, drop):
    """Sync-Point Drop: layers in `drop` skip the all-reduce after attention. The all-reduce after their MLP sums both
    outputs.
    """
    for n in range(config["num_hidden_layers"]):
        a = model.module(config, weights, 2 * n, X)
        if n in drop:
            f = model.module(config, weights, 2 * n + 1, add(X, a))
            X = add(X, allreduce(add(a, f)))
        else:
            X = add(X, allreduce(a))
            X = add(X, allreduce(model.module(config, weights, 2 * n + 1, X)))
    return X


def caat(config, weights, X, p):
    """CAAT-Net: only the first round(p D) channels of the partial outputs are all-reduced. The other channels stay on
    their devices.
    """
    c = round(p * config["hidden_size"])
    for m in modules_of(config):
        o = model.module(config, weights, m, X)
        shared = allreduce([part[..., :c] for part in o])
        private = [part[..., c:] for part in o]
        X = add(X, [np.concatenate(both, axis=-1) for both in zip(shared, private, strict=True)])
    return X


def kraken(config, weights, X):
    """Kraken: one exchange of a layer's two partial outputs runs while the next layer's attention computes."""
    in_flight = None
    for n in range(config["num_hidden_layers"]):
        a = model.module(config, weights, 2 * n, X)
        X = add(X, a)
        if in_flight is not None:
            X = add(X, others(in_flight))
        f = model.module(config, weights, 2 * n + 1, X)
        X = add(X, f)
        in_flight = add(a, f)
    return add(X, others(in_flight))


def track(config, weights, X, D):
    """Parallel Track: devices run D layers independently, then exchange everything that they have added to their
    streams. They also exchange it after the last layer.
    """
    last = config["num_hidden_layers"] - 1
    start = X
    for n in range(config["num_hidden_layers"]):
        X = add(X, model.module(config, weights, 2 * n, X))
        X = add(X, model.module(config, weights, 2 * n + 1, X))
        if (n + 1) % D == 0 or n == last:
            X = start = add(start, allreduce(add(X, scaled(-1, start))))
    return X


def dtp(config, weights, X, delta):
    """Delayed tensor parallelism: the other lanes' outputs of module m are added after module m + delta, if it
    exists.
    """
    L = len(X)
    sent = []
    for m in modules_of(config):
        o = model.module(config, weights, m, X)
        sent.append(o)
        if m < delta:
            X = add(X, scaled(math.sqrt(L), o))
        else:
            X = add(X, o, others(sent[m - delta]))
    return X


def none(config, weights, X):
    """No exchange: each lane adds its own output times sqrt(L), the size of a sum of L independent outputs."""
    for m in modules_of(config):
        X = add(X, scaled(math.sqrt(len(X)), model.module(config, weights, m, X)))
    return X


LAYOUTS = {f.__name__: f for f in (tp, parallel, ladder, desync, spd, caat, kraken, track, dtp, none)}

# A case of every layout, with the arguments of its function above, for the tests that must know all layouts. The wiring
# of "laneformer" is model.reference_logits, with its arguments from the config.
CASES = {
    "tp": {},
    "parallel": {},
    "ladder": {},
    "desync(2)": {"n": 2},
    "spd(1)": {"drop": {1}},
    "caat(0.5)": {"p": 0.5},
    "kraken": {},
    "track(2)": {"D": 2},
    "dtp(3)": {"delta": 3},
    "laneformer": {},
    "none": {},
}


def layout_logits(name, args, config, weights, ids):
    """A model with layout `name` and its arguments as a dict, such as "desync" and {"n": 2}: ids [b, s] -> logits
    [b, s, V].
    """
    weights = in_float64(weights)
    X = LAYOUTS[name](config, weights, embed(config, weights, ids), **(args or {}))
    return head(config, weights, X)
