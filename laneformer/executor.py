"""Runs the modules and exchanges of any layout in laneformer/layout.py."""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

from laneformer.layout import Landing, Payload, Schedule


def run_schedule(
    schedule: Schedule,
    x_lbsd: jax.Array,
    module: Callable[[int, jax.Array], jax.Array],
    sum_lanes: Callable[[jax.Array], jax.Array],
    num_lanes: int,
    observe: Callable[[jax.Array, jax.Array, jax.Array], None] | None = None,
    receive: Callable[[int, jax.Array, jax.Array], tuple[jax.Array, jax.Array]] = lambda m, total, o: (total, o),
    mix: Callable[[int, jax.Array, jax.Array], jax.Array] = lambda m, x, total: x + total,
) -> jax.Array:
    """Runs all modules over the lanes' streams. Returns the streams before the final norm, [l, b, s, d] in the stream
    dtype.

    A reduction is issued as soon as its last part exists, so that the compiler can overlap it with the modules until it
    lands.

    module(m, x): computes module m on every local lane, [l, b, s, d] -> [l, b, s, d].
    sum_lanes: sums over all lanes of the model, on this and other devices, [l, b, s, c] -> [1, b, s, c].
    observe(before, own, after): called for each time of the schedule, including the one before the final norm, with the
        streams before it, the lanes' own additions, and the streams after it.
    receive(m, total, o): returns what the streams receive of the sum that module m completes, and of the module's
        output on every local lane; by default both are unchanged.
    mix(m, x, total): returns the streams after the sum of module m has joined them, if the schedule mixes; by default
        the sum is added.
    """
    x = x_lbsd
    outputs: dict[int, jax.Array] = {}
    sums: dict[Payload, jax.Array] = {}

    def combine(payload: Payload, modules: Sequence[tuple[int, float]]) -> jax.Array:
        width = round(payload.channels * x_lbsd.shape[-1])
        first, *others = (w * outputs[m][..., :width] if w != 1.0 else outputs[m][..., :width] for m, w in modules)
        return sum(others, first)

    def land(x: jax.Array, landing: Landing) -> jax.Array:
        payload = landing.payload
        if payload.stream_mean_at is not None:  # the sum is the new stream of every lane
            return jnp.broadcast_to(sums[payload], x.shape)
        arrived = sums[payload]
        if schedule.mixes:
            return mix(payload.complete_at, x, arrived)
        if apart := [part for part in payload.parts if not schedule.own_lands_with(part[0], landing)]:
            arrived = arrived - combine(payload, apart)  # a lane adds its own share of these at another place
        if arrived.shape[-1] == x.shape[-1]:
            return x + arrived
        return x.at[..., : arrived.shape[-1]].add(arrived)

    for t in range(schedule.num_modules + 1):
        before = x
        if t < schedule.num_modules:
            outputs[t] = module(t, x)
        landings = [landing for landing in schedule.landings if landing.at == t]
        late = list({landing.payload: None for landing in landings if landing.payload.complete_at < t})
        if late and t < schedule.num_modules:
            # XLA would fuse a landing into kernels before module t, which would then wait for the sum.
            outputs[t], *arrived = jax.lax.optimization_barrier((outputs[t], *(sums[payload] for payload in late)))
            sums.update(zip(late, arrived, strict=True))
        for m, own in enumerate(schedule.own):
            if own.at == t and not any(schedule.own_lands_with(m, landing) for landing in landings):
                x = x + own.scale * outputs[m]
        for payload in schedule.payloads:
            if payload.complete_at == t:
                with jax.named_scope(f"reduce_{t}"):
                    share = combine(payload, payload.parts)
                    sums[payload] = sum_lanes(share if payload.stream_mean_at is None else share + before / num_lanes)
                    sums[payload], outputs[t] = receive(t, sums[payload], outputs[t])
        for landing in landings:
            with jax.named_scope(f"landing_{t}"):
                x = land(x, landing)
        if observe is not None:
            added = [own.scale * outputs[m] for m, own in enumerate(schedule.own) if own.at == t]
            observe(before, sum(added, jnp.zeros_like(before)), x)
    return x
