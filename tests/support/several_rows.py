"""Comparisons of GPU sessions with several rows per pass to sessions with one row."""

import jax
import jax.numpy as jnp
import numpy as np

from laneformer.custom_calls import State
from laneformer.custom_calls.gpu.layout import MOST_ROWS
from tests.support import emulated, small
from tests.support.gpu_cases import jitted, state_of

ROOM = 48
EQUAL = [1.0] * MOST_ROWS


class Model:
    """A model with two sessions whose answers are compared: one with one row per pass, one with `rows`."""

    def __init__(self, plan, weights, rows=4, mesh=None, **options):
        self.plan, self.mesh, self.rows = plan, mesh, rows
        self.sessions = [emulated.open_session(plan, weights, mesh=mesh, rows=n, **options) for n in (1, rows)]
        self.calls = [jitted(session, mesh, room=ROOM, top=2, logits=True) for session in self.sessions]

    def answer(self, prompt, limit, *, rows, most=0, drafts=(), before=(), forced=(), cache=0.0, **options):
        """All defined results of a call: outputs of the drawn tokens, status, seen tokens, and filled cache entries.

        rows: 0 for the session with one row, 1 for the session with several. most: the most drafts in a pass. cache:
        initial value of all cache entries.
        """
        session = self.sessions[rows]
        if rows:
            session.speculate(most, EQUAL[: self.rows])
            options |= {"given": drafts, "before": before, "forced": forced}
        state = state_of(self.plan, 64) if self.mesh is None else self._sharded(64)
        state = State(state.seen, jax.tree.map(lambda x: jnp.full_like(x, cache), state.layers))
        outputs, state = self.calls[rows](small.make_inputs(prompt, limit, room=ROOM, **options), state)
        assert session.failure is None
        drawn, _, position = outputs.status.tolist()
        filled = [np.asarray(cache[:, :, : position - 1]) for cache in small.arrays_of(state, "keys", "values")]
        of_tokens = [np.asarray(rows)[:drawn] for rows in outputs[:-1]]
        return jax.tree.map(np.asarray, (of_tokens, outputs.status, state.seen, filled))

    def _sharded(self, capacity):
        lanes, everywhere = (
            jax.sharding.NamedSharding(self.mesh, jax.sharding.PartitionSpec(*axes)) for axes in (["lane"], [])
        )
        state = state_of(self.plan, capacity)
        return State(jax.device_put(state.seen, everywhere), jax.device_put(state.layers, lanes))

    def check(self, prompt, limit, **options):
        """Asserts that both sessions give the same results without drafts, with drafts predicted from the text, with
        correct drafts, and with drafts of which every third is wrong. Returns the answer's tokens.
        """
        expected = self.answer(prompt, limit, rows=0, **options)
        tokens = expected[0][0].tolist()
        every_third = [(token + (n % 3 == 2)) % self.plan.ops.vocab_size for n, token in enumerate(tokens)]
        all_rows = self.rows - 1
        for most, drafts in ((0, ()), (all_rows, ()), (all_rows, tokens), (all_rows, every_third), (1, tokens)):
            found = self.answer(prompt, limit, rows=1, most=most, drafts=drafts, **options)
            assert small.same(found, expected), (most, drafts)
        return tokens
