"""An interpreter of a plan's words in float64 NumPy. It reads only what a decode kernel receives, and computes what
every decode kernel must compute.

All positions are computed together. Shapes: s positions, d channels of a stream, e head_dim.
"""

import math
from collections.abc import Callable, Sequence

import numpy as np

from laneformer.custom_calls.plan import Dtype, Plan, Table, decode_plan
from laneformer.ops import (
    Activation,
    Attend,
    CompressedAttend,
    CompressedKeep,
    Compressor,
    DeltaNet,
    GatherStreams,
    HeadKind,
    LatentAttend,
    LatentKeep,
    Matrix,
    Norm,
    Op,
    Product,
    RootRoute,
    Rotary,
    Route,
    SharedExpert,
    SigmoidRoute,
    Value,
    Weight,
)

ACTIVATIONS = {
    Activation.NONE: lambda x: x,
    Activation.SILU: lambda x: x / (1 + np.exp(-x)),
    Activation.GELU: lambda x: x / 2 * np.vectorize(math.erfc)(-x / math.sqrt(2)),
    Activation.GELU_PYTORCH_TANH: lambda x: x / 2 * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
    Activation.RELU2: lambda x: np.maximum(x, 0) ** 2,
    Activation.QUICK_GELU: lambda x: x / (1 + np.exp(-1.702 * x)),
}


class Interpreter:
    """words, floats: those of a Plan. arrays: the weights by their numbers in the plan, in the shapes of the table of
    laneformer/weights.py; only matrices are read. small: the array of small weights, float32.
    """

    def __init__(self, words: np.ndarray, floats: np.ndarray, arrays: Sequence[np.ndarray], small: np.ndarray):
        self.plan, self.places, size = decode_plan(words, floats)
        assert small.shape == (size,)
        self.arrays, self.small = arrays, small.astype(np.float64)
        self.routes: list[np.ndarray] = []
        """Experts that `logits` has chosen, [s, used], for each module and lane whose router is a softmax."""

    def logits(self, ids: Sequence[int]) -> np.ndarray:
        """Logits [s, vocab] of a sequence."""
        ops, self.ids = self.plan.ops, list(ids)
        embedded = self.matrix(ops.embedding, 0)[self.ids] * ops.embedding_multiplier
        if ops.head.gather:
            embedded = np.stack([embedded] * ops.head.gather.count, 1)
        modules = [module for layer in ops.layers for module in layer.modules]

        def module(m: int, streams: np.ndarray) -> np.ndarray:
            return np.stack([self.module(modules[m].ops, lane, x) for lane, x in enumerate(streams)])

        def norm_sum(m: int, total: np.ndarray) -> np.ndarray:
            return self.norm(modules[m].sum_norm, 0, total) if modules[m].sum_norm else total

        def join(m: int, streams: np.ndarray, total: np.ndarray) -> np.ndarray:
            """Mixes the streams [lanes, s, streams, d] and adds a module's sum [s, d] to them."""
            gather, joined = modules[m].ops[0], []
            for lane, x in enumerate(streams):
                _, post, between = self.mixture(gather, lane, x)
                joined.append(post[..., None] * total[:, None] + np.einsum("smn,smd->snd", between, x))
            return np.stack(joined)

        streams = np.stack([embedded] * ops.lanes)
        joins = join if ops.head.gather else None
        logits = self.head(run_schedule(self.plan.schedule, streams, module, norm_sum, joins))
        return softcap(logits, ops.head.softcap)

    def module(self, ops: Sequence[Op], lane: int, x: np.ndarray) -> np.ndarray:
        """Output [s, d] of a module on one lane, from the lane's stream [s, d] or streams [s, streams, d]."""
        values = {Value.STREAM: x}
        for op in ops:
            if isinstance(op, GatherStreams):
                values[Value.STREAM] = self.gathered(op, lane, x)
            elif isinstance(op, Product) and op.chosen is not None:
                values[op.writes] = self.experts(op, lane, values[op.reads], *values[Value.ROUTES])
            elif isinstance(op, Product) and op.blocks is not None:
                values[op.writes] = self.blocks(op, lane, values[op.reads])
            elif isinstance(op, Product):
                values[op.writes] = self.product(op, lane, values[op.reads])
            elif isinstance(op, Route):
                values[Value.ROUTES] = self.route(op, lane, values[Value.STREAM])
                self.routes.append(values[Value.ROUTES][0])
            elif isinstance(op, SigmoidRoute):
                values[Value.ROUTES] = self.route_by_sigmoids(op, lane, values[Value.STREAM])
            elif isinstance(op, RootRoute):
                values[Value.ROUTES] = self.route_by_roots(op, lane, values[Value.STREAM])
            elif isinstance(op, LatentKeep):
                values[Value.PROJECTED] = self.latents(op, lane, values[Value.PROJECTED])
            elif isinstance(op, LatentAttend):
                read = (values[value] for value in (Value.ABSORBED, Value.QUERIES, Value.PROJECTED))
                values[Value.ATTENDED] = self.attend_to_latents(op, *read)
            elif isinstance(op, SharedExpert):
                values[Value.OUTPUT] = values[Value.OUTPUT] + self.shared_expert(op, lane, values[Value.STREAM])
            elif isinstance(op, CompressedKeep):
                kept = self.compressed(op, lane, values[Value.PROJECTED])
            elif isinstance(op, CompressedAttend):
                values[Value.ATTENDED] = self.attend_to_entries(op, lane, values, *kept)
            elif isinstance(op, Attend):
                values[Value.ATTENDED] = self.attend(op, lane, values[Value.PROJECTED])
            elif isinstance(op, DeltaNet):
                values[Value.ATTENDED] = self.delta_net(op, lane, values[Value.PROJECTED])
            else:
                values[Value.OUTPUT] = self.norm(op.norm, lane, values[Value.OUTPUT])
        return values[Value.OUTPUT]

    def product(self, op: Product, lane: int, x: np.ndarray, expert: int | None = None) -> np.ndarray:
        if op.norm is not None:
            x = self.norm(op.norm, lane, x)
        rows = [self.rows(matrix, lane, x, expert) for matrix in op.matrices]
        activate = ACTIVATIONS[op.activation]
        if op.gated:
            gate, up = rows
            if op.limit is not None:
                gate, up = np.minimum(gate, op.limit), np.clip(up, -op.limit, op.limit)
            return activate(gate) * (up + op.up_offset)
        return activate(np.concatenate(rows, -1))

    def rows(self, matrix: Matrix, lane: int, x: np.ndarray, expert: int | None = None) -> np.ndarray:
        y = x @ self.matrix(matrix.weight, lane, expert).T
        return y if matrix.bias is None else y + self.vector(matrix.bias, lane, expert)

    def route(self, op: Route, lane: int, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Numbers of each position's experts and their shares, both [s, used]."""
        logits = self.rows(op.matrix, lane, x if op.norm is None else self.norm(op.norm, lane, x))
        numbers = np.argsort(-logits, -1, kind="stable")[:, : op.used]
        odds = np.exp(logits - logits.max(-1, keepdims=True))
        chosen = np.take_along_axis(odds, numbers, -1)
        return numbers, chosen / (chosen if op.normalized else odds).sum(-1, keepdims=True)

    def route_by_sigmoids(self, op: SigmoidRoute, lane: int, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        logits = self.rows(op.matrix, lane, x if op.norm is None else self.norm(op.norm, lane, x))
        scores = 1 / (1 + np.exp(-logits))
        choice = scores if op.correction is None else scores + self.vector(op.correction, lane)
        groups = choice.reshape(len(x), op.groups, -1)
        if op.groups > 1:
            best = np.argsort(-np.sort(groups, -1)[..., -2:].sum(-1), -1, kind="stable")[:, : op.groups_used]
            kept = (best[:, :, None] == np.arange(op.groups)).any(1)
            choice = np.where(kept[..., None], groups, -np.inf).reshape(choice.shape)
        numbers = np.argsort(-choice, -1, kind="stable")[:, : op.used]
        shares = np.take_along_axis(scores, numbers, -1)
        return numbers, op.factor * shares / (shares.sum(-1, keepdims=True) if op.normalized else 1)

    def route_by_roots(self, op: RootRoute, lane: int, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        logits = self.rows(op.matrix, lane, x if op.norm is None else self.norm(op.norm, lane, x))
        scores = np.sqrt(np.logaddexp(0, logits))
        choice = scores if op.correction is None else scores + self.vector(op.correction, lane)
        numbers = np.argsort(-choice, -1, kind="stable")[:, : op.used]
        if op.by_token is not None:
            numbers = self.vector(op.by_token, lane).reshape(op.by_token.shape)[self.ids].astype(int)
        shares = np.take_along_axis(scores, numbers, -1)
        return numbers, op.factor * shares / (shares.sum(-1, keepdims=True) if op.normalized else 1)

    def gathered(self, op: GatherStreams, lane: int, x: np.ndarray) -> np.ndarray:
        return np.einsum("sm,smd->sd", self.mixture(op, lane, x)[0], x)

    def mixture(self, op: GatherStreams, lane: int, x: np.ndarray) -> list[np.ndarray]:
        """Factors by which the streams are read [s, m] and, except in the head, factors on the module's sum in each
        stream [s, m] and factors that mix the streams [s, m, m].
        """
        flat, m = x.reshape(len(x), -1), op.count
        rows = self.rows(op.mix, lane, flat / np.sqrt((flat**2).mean(-1, keepdims=True) + op.norm_eps))
        factors, offsets = self.vector(op.factors, lane), self.vector(op.offsets, lane)
        sizes = np.repeat(factors, [m, m, m * m][: len(factors)])
        read, *written = np.split(rows * sizes + offsets, [m, 2 * m][: len(factors) - 1], -1)
        read = 1 / (1 + np.exp(-read)) + op.eps
        if not written:
            return [read]
        post, between = written
        between = between.reshape(-1, m, m)
        between = np.exp(between - between.max(-1, keepdims=True))
        between = between / between.sum(-1, keepdims=True) + op.eps
        for again in range(op.iterations):
            if again:
                between = between / (between.sum(-1, keepdims=True) + op.eps)
            between = between / (between.sum(-2, keepdims=True) + op.eps)
        return [read, 2 / (1 + np.exp(-post)), between]

    def blocks(self, op: Product, lane: int, x: np.ndarray) -> np.ndarray:
        """Products of a block matrix with the columns of x that belong to each block, concatenated."""
        own = [x[:, n * op.blocks.step :][:, : op.columns] for n in range(op.blocks.count)]
        return np.concatenate([self.product(op, lane, x, n) for n, x in enumerate(own)], -1)

    def experts(self, op: Product, lane: int, x: np.ndarray, numbers: np.ndarray, shares: np.ndarray) -> np.ndarray:
        """Products of each position with its experts' matrices: summed by their shares [s, d], or concatenated in the
        order of the experts.
        """
        width = op.columns if op.chosen.summed else 0
        found = [
            [
                self.product(op, lane, x[s, None, rank * width : rank * width + op.columns], expert)[0]
                for rank, expert in enumerate(numbers[s])
            ]
            for s in range(len(x))
        ]
        return np.einsum("sj,sjd->sd", shares, found) if op.chosen.summed else np.reshape(found, (len(x), -1))

    def shared_expert(self, op: SharedExpert, lane: int, x: np.ndarray) -> np.ndarray:
        y = self.module(op.products, lane, x)
        if op.gate is None:
            return y
        norm = op.products[0].norm
        return y / (1 + np.exp(-self.rows(op.gate, lane, x if norm is None else self.norm(norm, lane, x))))

    def attend(self, op: Attend, lane: int, projected: np.ndarray) -> np.ndarray:
        s, e = len(projected), op.head_dim
        heads = projected.reshape(s, -1, e)
        q, k, v, g = np.split(heads, np.cumsum([op.heads, op.kv_heads, op.kv_heads]), 1)
        q, k = (self.head_norm(norm, lane, x) for norm, x in ((op.q_norm, q), (op.k_norm, k)))
        if op.rotary is not None:
            q, k = rotate(op.rotary, q), rotate(op.rotary, k)
        k, v = (np.repeat(self.cached(x), op.heads // op.kv_heads, 1) for x in (k, v))
        distance = np.arange(s)[:, None] - np.arange(s)
        seen = (distance >= 0) & (distance < (s if op.window is None else op.window))
        scores = softcap(op.scale * np.einsum("she,the->hst", q, k), op.attn_logit_softcapping)
        scores = np.where(seen, scores, -np.inf)
        if op.sinks is not None:  # scores that belong to no value
            sinks = np.broadcast_to(self.vector(op.sinks, lane)[:, None, None], (op.heads, s, 1))
            scores, v = np.concatenate([sinks, scores], -1), np.concatenate([np.zeros_like(v[:1]), v])
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        attended = np.einsum("hst,the->she", weights / weights.sum(-1, keepdims=True), v)
        return (attended / (1 + np.exp(-g)) if op.attention_gate else attended).reshape(s, -1)

    def latents(self, op: LatentKeep, lane: int, projected: np.ndarray) -> np.ndarray:
        vectors, keys = np.split(projected, [op.rank], -1)
        keys = rotate(op.rotary, keys[:, None])[:, 0]
        return self.cached(np.concatenate([self.norm(op.norm, lane, vectors), keys], -1))

    def attend_to_latents(self, op: LatentAttend, absorbed, queries, latents: np.ndarray) -> np.ndarray:
        s, (absorbed, queries) = len(latents), (x.reshape(len(x), op.heads, -1) for x in (absorbed, queries))
        q = np.concatenate([absorbed, rotate(op.rotary, queries[..., op.still :])], -1)
        scores = np.where(np.tri(s, dtype=bool), op.scale * np.einsum("shi,ti->hst", q, latents), -np.inf)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        return np.einsum("hst,tc->shc", weights, latents[:, : op.rank]).reshape(s, -1)

    def compressed(self, op: CompressedKeep, lane: int, projected: np.ndarray) -> tuple[np.ndarray | None, ...]:
        """The vectors of all positions, the complete entries, and the index keys of these entries. The last two are
        None for an attention without them.
        """
        vectors = self.norm(op.norm, lane, projected[:, : op.channels])
        made = [own and self.entries(own, lane, projected) for own in (op.entries, op.keys)]
        return self.cached(rotate_last(op.rotary, vectors, np.arange(len(vectors)))), *made

    def entries(self, op: Compressor, lane: int, projected: np.ndarray) -> np.ndarray:
        """The complete entries of a compressor, [entries, channels]."""
        own = projected[:, op.first : op.first + 2 * op.width]
        biases = self.vector(op.biases, lane).reshape(op.ratio, op.width)
        x, gates = own[:, : op.width], own[:, op.width :] + np.resize(biases, (len(own), op.width))
        found = []
        for last in range(op.ratio, len(own) + 1, op.ratio):
            parts = [(slice(last - op.ratio, last), slice(-op.channels, None))]
            if op.overlaps and last > op.ratio:
                parts.insert(0, (slice(last - 2 * op.ratio, last - op.ratio), slice(op.channels)))
            part, gate = (np.concatenate([y[place] for place in parts]) for y in (x, gates))
            shares = np.exp(gate - gate.max(0))
            found.append((shares / shares.sum(0) * part).sum(0))
        entries = self.norm(op.norm, lane, np.reshape(found, (-1, op.channels)))
        return self.cached(rotate_last(op.rotary, entries, op.ratio * np.arange(len(entries))))

    def attend_to_entries(self, op: CompressedAttend, lane: int, values, vectors, entries, index_keys) -> np.ndarray:
        """Output of compressed attention [s, heads * channels], computed position by position."""
        heads, at, out = values[Value.QUERIES].reshape(len(vectors), op.heads, -1), np.arange(len(vectors)), []
        q = heads / np.sqrt((heads**2).mean(-1, keepdims=True) + op.norm_eps)
        q, sinks = rotate_last(op.rotary, q, at), self.vector(op.sinks, lane)
        for t in at:
            keys = vectors[max(0, t - op.window + 1) : t + 1]
            if op.ratio is not None:
                seen = np.arange((t + 1) // op.ratio)
                if op.index is not None and len(seen) > op.index.most:
                    first = op.index.first
                    weights = values[Value.PROJECTED][t, first : first + op.index.heads]
                    queries = values[Value.INDEX][t].reshape(op.index.heads, -1)
                    scores = np.maximum(rotate_last(op.rotary, queries, t) @ index_keys[: len(seen)].T, 0)
                    seen = np.argsort(-(weights @ scores), kind="stable")[: op.index.most]
                keys = np.concatenate([keys, entries[seen]])
            scores = np.concatenate([op.scale * q[t] @ keys.T, sinks[:, None]], -1)
            weights = np.exp(scores - scores.max(-1, keepdims=True))
            mixed = (weights / weights.sum(-1, keepdims=True))[:, :-1] @ keys
            out.append(rotate_last(op.rotary, mixed, -t))
        return np.reshape(out, (len(vectors), -1))

    def delta_net(self, op: DeltaNet, lane: int, projected: np.ndarray) -> np.ndarray:
        s, n, r = len(projected), op.key_heads, op.ratio
        width = 2 * op.key_dim + 2 * r * op.value_dim
        heads = projected[:, : n * width].reshape(s, n, width)
        qkv, z = heads[..., : width - r * op.value_dim], heads[..., width - r * op.value_dim :]
        b, a = np.split(projected[:, n * width :].reshape(s, n, 2 * r), 2, -1)
        ends = np.cumsum([op.key_dim, op.key_dim])
        u = np.concatenate([part.reshape(s, -1) for part in np.split(self.cached(qkv), ends, -1)], -1)
        weight = self.vector(op.convolution, lane).reshape(op.convolution.shape)
        taps = weight.shape[1]
        before = np.concatenate([np.zeros((taps - 1, u.shape[1])), u])
        mixed = sum(before[i : i + s] * weight[:, i] for i in range(taps))
        mixed = mixed / (1 + np.exp(-mixed))
        q, k, v = np.split(mixed, np.cumsum([n * op.key_dim] * 2), -1)
        q, k = (x.reshape(s, n, 1, op.key_dim) for x in (q, k))
        q, k = (x / np.sqrt((x**2).sum(-1, keepdims=True) + op.unit_eps) for x in (q, k))
        q, k = (np.repeat(x, r, 2) for x in (q / math.sqrt(op.key_dim), k))
        v = v.reshape(s, n, r, op.value_dim)
        rate, step = (self.vector(w, lane).reshape(n, r) for w in (op.decay, op.step))
        decay = np.exp(-np.exp(rate) * np.logaddexp(0, a + step))
        beta, state, found = 1 / (1 + np.exp(-b)), np.zeros((n, r, op.key_dim, op.value_dim)), []
        for t in range(s):
            state = decay[t, ..., None, None] * state
            change = beta[t, ..., None] * (v[t] - np.einsum("nrkv,nrk->nrv", state, k[t]))
            state = state + k[t, ..., None] * change[..., None, :]
            found.append(np.einsum("nrkv,nrk->nrv", state, q[t]))
        o = self.norm(op.norm, lane, np.array(found))
        z = z.reshape(o.shape)
        return (o * z / (1 + np.exp(-z))).reshape(s, -1)

    def cached(self, x: np.ndarray) -> np.ndarray:
        """Keys or values rounded to the cache's dtype. A kernel rounds those of the newest position too."""
        dtype = self.plan.cache_dtype
        return x if dtype is Dtype.float32 else x.astype(np.float32).astype(dtype.name).astype(np.float64)

    def head_norm(self, norm: Norm | None, lane: int, heads: np.ndarray) -> np.ndarray:
        """Normalizes heads [s, heads, e]: each head separately, or all heads together if the gain covers them all."""
        if norm is None:
            return heads
        return self.norm(norm, lane, heads.reshape(len(heads), -1, *norm.gain.shape)).reshape(heads.shape)

    def head(self, streams: np.ndarray) -> np.ndarray:
        """Logits [s, vocab] from the streams [lanes, s, d], or [lanes, s, streams, d] with several streams."""
        head, lanes = self.plan.ops.head, range(self.plan.ops.lanes)
        if head.gather is not None:
            streams = np.stack([self.gathered(head.gather, lane, x) for lane, x in enumerate(streams)])
        if head.norm_of_sum:
            return self.norm(head.norm, 0, streams.sum(0)) @ self.matrix(head.weight, 0).T
        normed = np.stack([self.norm(head.norm, lane, streams[lane]) for lane in lanes])
        if head.kind == HeadKind.REPLICATE:
            return normed.mean(0) @ self.matrix(head.weight, 0).T
        logits = [normed[lane] @ self.matrix(head.weight, lane).T for lane in lanes]
        return sum(logits) if head.kind == HeadKind.LANE else np.concatenate(logits, -1)

    def norm(self, norm: Norm, lane: int, x: np.ndarray) -> np.ndarray:
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + norm.eps) * self.vector(norm.gain, lane)[: x.shape[-1]]

    def matrix(self, weight: Weight, lane: int, expert: int | None = None) -> np.ndarray:
        array = np.asarray(self.arrays[int(weight.path)], np.float64)
        array = array[lane] if weight.lane_sharded else array
        return array if expert is None else array[expert]

    def vector(self, weight: Weight, lane: int, expert: int | None = None) -> np.ndarray:
        (offset, stride), size = self.places[int(weight.path)], math.prod(weight.shape)
        return self.small[offset + lane * stride + (expert or 0) * size :][:size]


def softcap(x: np.ndarray, cap: float | None) -> np.ndarray:
    return x if cap is None else cap * np.tanh(x / cap)


def rotate(rotary: Rotary, x: np.ndarray) -> np.ndarray:
    """Rotates the channels of x [s, heads, e] by pairs, at positions 0 to s - 1."""
    angles = np.arange(len(x))[:, None, None] * np.array(rotary.frequencies)
    cos, sin = rotary.factor * np.cos(angles), rotary.factor * np.sin(angles)
    even, odd = x[..., 0::2], x[..., 1::2]
    return np.stack([even * cos - odd * sin, even * sin + odd * cos], -1).reshape(x.shape)


def rotate_last(rotary: Rotary, x: np.ndarray, at: np.ndarray | int) -> np.ndarray:
    """Rotates the last channels of x [s, ..., e] at the positions `at` [s], or those of x [..., e] at one position."""
    first, at = x.shape[-1] - 2 * len(rotary.frequencies), np.asarray(at)
    turns = np.exp(1j * at.reshape(*at.shape, *[1] * (x.ndim - at.ndim)) * np.array(rotary.frequencies)) * rotary.factor
    turned = (x[..., first::2] + 1j * x[..., first + 1 :: 2]) * turns
    last = np.stack([turned.real, turned.imag], -1).reshape(*x.shape[:-1], -1)
    return np.concatenate([x[..., :first], last], -1)


def run_schedule(
    table: Table,
    x: np.ndarray,
    module: Callable[[int, np.ndarray], np.ndarray],
    norm_sum: Callable[[int, np.ndarray], np.ndarray] = lambda m, total: total,
    join: Callable[[int, np.ndarray, np.ndarray], np.ndarray] | None = None,
) -> np.ndarray:
    """Streams [lanes, ..., d] before the final norm, from the embedded streams x.

    module(m, x): output of module m on every lane. norm_sum(m, total): the sum over the lanes that module m completes,
    after its norm if it has one. join(m, x, total): x after this sum has landed, for models with several streams, in
    which it is not just added.
    """
    modules, outputs, kept = len(table.events) - 1, {}, {}
    for time, events in enumerate(table.events):
        for i, total in enumerate(table.sums):
            if total.stream_mean and total.complete_at == time:
                kept[i] = x
        if time < modules:
            outputs[time] = module(time, x)
        for event in events:
            if event.payload < 0:
                x = x + event.weight * outputs[event.module]
                continue
            total = table.sums[event.payload]
            assert total.complete_at <= time, "the sum lands before it is complete"
            share = sum(weight * outputs[m][..., : total.width] for m, weight in total.parts)
            if total.stream_mean:
                mean = norm_sum(total.complete_at, (share + kept[event.payload] / len(x)).sum(0))
                x = np.broadcast_to(mean, x.shape)
                continue
            if join is not None:
                x = join(total.complete_at, x, share.sum(0))
                continue
            apart = sum(weight * outputs[m][..., : total.width] for m, weight in event.apart)
            x = x.copy()
            x[..., : total.width] += norm_sum(total.complete_at, share.sum(0)) - apart
    return x


def interpret(plan: Plan, weights: dict[str, np.ndarray], ids: Sequence[int]) -> np.ndarray:
    """Logits [s, vocab] of a plan. weights: by the plan's paths, or by those of the table in laneformer/weights.py."""
    return interpreter(plan, weights).logits(ids)


def interpreter(plan: Plan, weights: dict[str, np.ndarray]) -> Interpreter:
    """An Interpreter of a plan. weights: as in `interpret`."""
    weights = {own: array for path, weight in weights.items() for own, array in plan.parts(path, weight).items()}
    small = np.zeros(plan.small_size, np.float32)
    for path in plan.places:
        plan.place(small, path, weights[path])
    return Interpreter(plan.words, plan.floats, [weights[path] for path in plan.weights], small)
