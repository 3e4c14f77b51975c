"""What the tests of GPU kernels share."""

from functools import partial

import jax
import numpy as np
import pytest

import custom_calls
from custom_calls import ENDS
from custom_calls.gpu.layout import Machine
from tests.support import small

ROOM = 160

AMD = Machine(warp_size=64, ctas=8, warps=2, shared_bytes=65_536, bulk_copies=False)


def some(cases, fast):
    """Compiling a kernel for each takes its time: a few of the cases always, the others among the exhaustive tests."""
    return [
        pytest.param(
            *(case if isinstance(case, tuple) else (case,)),
            id=str(case),
            marks=() if case in fast else pytest.mark.exhaustive,
        )
        for case in cases
    ]


def jitted(session, mesh=None, **sizes):
    """decode(inputs, state) with the state donated, which returns when the device has done it."""
    function = jax.jit(partial(custom_calls.decode, session, mesh=mesh, **sizes), donate_argnums=1)
    return lambda inputs, state: jax.block_until_ready(function(inputs, state, session.operands))


def same(a, b) -> bool:
    """Whether two results are equal in every bit that is defined: rows of tokens that were drawn."""
    count = int(a.status[0])
    cut = [
        [x[:count] for x in (r.tokens, r.logprobs, r.top_tokens, r.top_logprobs, r.logits)] + [r.status] for r in (a, b)
    ]
    return small.same(*cut)


REFUSED = {
    "more prompt than there is": small.make_inputs([1], 4)._replace(control=np.array([2, 0, 4, 0], np.int32)),
    "a token beyond the vocabulary": small.make_inputs([1, 40], 4),
    "a negative token": small.make_inputs([-1], 4),
    "no token to draw": small.make_inputs([1], 0),
    "more tokens than the cache has": small.make_inputs([1] * 50, 150),
    "a negative position": small.make_inputs([1], 1, start=-1),
}


def fail_often(session, config, monkeypatch, calls: int) -> None:
    """One CTA stands still in the middle of each call and comes back when the others have given it up: all tokens told
    are right.
    """
    call = jitted(session, room=ROOM)
    for index in range(calls):
        inputs = small.make_inputs([3 + index % 5], 30, room=ROOM)
        expected = call(inputs, small.make_state(config, 160))[0].tokens
        monkeypatch.setenv("EMULATOR_STILL", f"{index % (config.num_lanes * session.layout.ctas)},{3 + index % 7}")
        session.begin()
        outputs, _ = call(inputs, small.make_state(config, 160))
        monkeypatch.delenv("EMULATOR_STILL")
        count = int(outputs.status[0])
        assert outputs.status[1] == len(ENDS) and "did not come within" in session.failure
        assert 3 + index % 7 <= count < 30 and outputs.tokens[:count].tolist() == expected[:count].tolist()
        assert session.drawn(0, count).tokens.tolist() == expected[:count].tolist()
        session.begin()
