"""Decode calls that are refused, after which the next call works; streaming and cancellation of answers."""

import re
import threading
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.errors import JaxRuntimeError

from laneformer import CheckpointError, custom_calls
from laneformer.custom_calls import ENDS, Session
from laneformer.custom_calls.request import Source
from laneformer.custom_calls.words import request_words
from tests.support import small

pytestmark = small.needs_library

CAPACITY, ROOM = 64, 48


@pytest.fixture(scope="module")
def model():
    config = small.make_config(lanes=2)
    return config, small.make_weights(config)


@pytest.fixture(scope="module")
def session(model):
    return small.make_session(*model, threads=2)


@pytest.fixture(scope="module")
def call(session):
    return small.jitted(session, room=ROOM)


@pytest.fixture
def works(model, call):
    """Checks that a valid call gives the same tokens after a test as before it."""

    def tokens():
        return call(small.make_inputs([1, 2, 3], 10), small.make_state(model[0], CAPACITY))[0].tokens.tolist()

    before = tokens()
    yield
    assert tokens() == before


WORDS = request_words(small.make_inputs([1], 4).request)


def changed_words(changes: dict[int, int]) -> np.ndarray:
    """The words of a valid request with some of them changed."""
    words = WORDS.copy()
    words[[*changes]] = [*changes.values()]
    return words


REFUSED = {
    "empty prompt": (small.make_inputs([], 4), "a prompt of 0 tokens"),
    "no words": (np.zeros(20, np.int32), "it has 0 words in an array of 20"),
    "more words than the array has": (changed_words({0: 1000}), "it has 1000 words in an array of"),
    "fewer words than the fields": (changed_words({0: 20}), "it is truncated"),
    "more words than the fields": (changed_words({0: WORDS[0] + 1}), "words follow its end"),
    "prompt longer than the words": (changed_words({1: 1000}), "a list of 1000 elements is truncated"),
    "negative length": (changed_words({1: -1}), "a list of -1 elements"),
    "token beyond the vocabulary": (small.make_inputs([1, 40], 4), "token 40 is outside the vocabulary of 40"),
    "negative token": (small.make_inputs([-1], 4), "token -1 is outside"),
    "no token to draw": (small.make_inputs([1], 0), "a prompt of 1 tokens at position 0 and 0 more do not fit"),
    "more tokens than room": (small.make_inputs([1], ROOM + 1), "room for 48 tokens"),
    "prompt longer than the cache": (
        small.make_inputs([1] * 65, 1),
        "65 tokens at position 0 and 1 more do not fit a cache of 64",
    ),
    "answer longer than the cache": (
        small.make_inputs([1] * 50, 16),
        "a prompt of 50 tokens at position 0 and 16 more do not fit",
    ),
    "position beyond the cache": (small.make_inputs([1], 1, start=64), "at position 64"),
    "negative position": (small.make_inputs([1], 1, start=-1), "at position -1"),
    "unknown slot": (small.make_inputs([1], 1, slot=1), "slot 1 is not among the 1 slots of this session"),
    "biased token beyond the vocabulary": (small.make_inputs([1], 1, logit_bias=((40, 1.0),)), "token 40 is outside"),
    "source of an unknown slot": (small.make_inputs([1], 1, source=Source(3, 1, 1)), "source's slot 3 is not among"),
    "wrong dtype": (WORDS.astype(np.uint32), "dtype"),
    "wrong rank": (WORDS[None], "rank"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_invalid_inputs_are_refused(name, model, call, works):
    inputs, words = REFUSED[name]
    with pytest.raises(JaxRuntimeError, match=words):
        jax.block_until_ready(call(inputs, small.make_state(model[0], CAPACITY)))


def test_last_position_of_a_cache_can_be_used(model, call):
    outputs, _ = call(small.make_inputs([1] * 50, 15), small.make_state(model[0], CAPACITY))
    assert outputs.status.tolist() == [15, ENDS.index("length"), 65]


def changed(state, layer, **changes):
    """The state with the keys of one layer replaced by zeros of another shape or dtype."""
    old = state.layers[layer]["keys"]
    new = jnp.zeros(changes.get("shape", old.shape), changes.get("dtype", old.dtype))
    return with_layer(state, layer, state.layers[layer] | {"keys": new})


def with_layer(state, number, layer):
    """The state with other arrays in one layer."""
    return state._replace(layers=[*state.layers[:number], layer, *state.layers[number + 1 :]])


SHAPE = r"float32 \[2, 1, {}, 1, 6\] on each device"
STATES = {
    "another dtype": (
        partial(changed, layer=0, dtype=jnp.bfloat16),
        f"keys of layer 0 must be {SHAPE.format('entries')}",
    ),
    "another head size": (
        partial(changed, layer=1, shape=(2, 1, CAPACITY, 1, 8)),
        f"keys of layer 1 must be {SHAPE.format(CAPACITY)}",
    ),
    "another number of lanes": (partial(changed, layer=0, shape=(3, 1, CAPACITY, 1, 6)), "keys of layer 0 must be"),
    "a batch": (partial(changed, layer=0, shape=(2, 2, CAPACITY, 1, 6)), "keys of layer 0 must be"),
    "another rank": (partial(changed, layer=0, shape=(2, CAPACITY, 1, 6)), "keys of layer 0 must be"),
    "another capacity": (
        partial(changed, layer=2, shape=(2, 1, CAPACITY - 1, 1, 6)),
        f"keys of layer 2 must be {SHAPE.format(CAPACITY)}",
    ),
    "another vocabulary": (lambda s: s._replace(seen=jnp.zeros(41, jnp.uint8)), "each token of the vocabulary"),
}


@pytest.mark.parametrize("name", STATES)
def test_invalid_states_are_refused(name, model, session, works):
    change, words = STATES[name]
    with pytest.raises(JaxRuntimeError, match=words):
        jax.block_until_ready(
            small.jitted(session, room=ROOM)(small.make_inputs([1], 1), change(small.make_state(model[0], CAPACITY)))
        )


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda s: s._replace(layers=s.layers[1:]), "the arrays of 3 layers, got 2"),
        (
            lambda s: with_layer(s, 1, {"keys": s.layers[1]["keys"]}),
            "layer 1 must have the arrays keys, values, got keys",
        ),
        (lambda s: with_layer(s, 2, s.layers[2] | {"latents": s.seen}), "layer 2 .* got keys, latents, values"),
    ],
)
def test_states_of_other_arrays_are_refused(change, words, model, session):
    state = change(small.make_state(model[0], CAPACITY))
    with pytest.raises(ValueError, match=words):
        small.jitted(session, room=ROOM)(small.make_inputs([1], 1), state)


def test_call_of_a_closed_session_is_refused(model, works):
    session = small.make_session(*model, threads=1)
    call = small.jitted(session, room=ROOM)
    number = session.id
    call(small.make_inputs([1], 2), small.make_state(model[0], CAPACITY))
    session.close()
    with pytest.raises(JaxRuntimeError, match=f"the decode session {number} was closed"):
        jax.block_until_ready(call(small.make_inputs([1], 2), small.make_state(model[0], CAPACITY)))
    session.close()  # a second close does nothing


def test_session_closed_during_a_call_finishes_it(model):
    session = small.make_session(*model, threads=2, chaos_us=300)
    call = small.jitted(session, room=ROOM)
    with running(call, session, small.make_inputs([1], 20), small.make_state(model[0], CAPACITY)) as result:
        assert session.wait(0, 60_000) > 0
        session.close()
    assert result[0][0].status[0] == 20


@pytest.mark.parametrize(
    ("name", "rows", "dtype", "words"),
    [
        ("wx", 12, "float32", r"no weight called layers\.0\.attention\.wx"),
        ("wq", 12, "float64", "float64: the kernel packs"),
        ("wq", 13, "float32", r"wq has the shape \(2, 13, 20\), .* \(2, 12, 20\)"),
    ],
)
def test_invalid_weights_are_refused(name, rows, dtype, words, session):
    with pytest.raises(custom_calls.NativeError, match=words):
        session.pack(f"layers.0.attention.{name}", np.zeros((2, rows, 20), dtype))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("stored", ["float32", "bfloat16", "float16"])
def test_values_that_are_not_finite_are_located(dtype, stored, model):
    """Values are infinite as stored, or only in the packed dtype. The weights are matrices with and without lanes, a
    norm and the embedding table.
    """
    config, weights = model
    session = small.make_session(
        config, {p: np.asarray(w).astype(jnp.dtype(dtype)) for p, w in weights.items()}, threads=3
    )
    for path in ("layers.1.attention.wq", "layers.0.feed_forward.w2", "norm", "tok_embeddings", "lm_head"):
        good = np.asarray(weights[path]).astype(jnp.dtype(stored))
        session.pack(path, good)
        places = [(0,) * good.ndim, tuple(n - 1 for n in good.shape), tuple(n // 2 for n in good.shape)]
        for place, value in zip(places, (np.nan, -np.inf, np.inf), strict=True):
            bad = good.copy()
            bad[place] = value
            shown = re.escape(f"weight {path} has {bad[place]} at [{', '.join(map(str, place))}], which")
            with pytest.raises(CheckpointError, match=shown):
                session.pack(path, bad)
        for place in places:
            bad[place] = np.nan
        with pytest.raises(CheckpointError, match=re.escape(f"at [{', '.join('0' * good.ndim)}], which")):
            session.pack(path, bad)
    large = np.zeros_like(np.asarray(weights["layers.0.attention.wq"]), np.float32)
    large[1, 2, 3] = 1e30
    if dtype == "float16":
        with pytest.raises(CheckpointError, match=r"has 1\.0\d*e\+30 at \[1, 2, 3\], which is not finite as packed"):
            session.pack("layers.0.attention.wq", large)
    else:
        session.pack("layers.0.attention.wq", large)
    if dtype == stored:
        largest = np.full_like(good, jnp.finfo(good.dtype).max)
        session.pack("lm_head", largest)
        session.pack("lm_head", -largest)


def test_missing_weights_are_counted(model):
    config, weights = model
    session = small.make_session(
        config, {path: weight for path, weight in weights.items() if path not in ("norm", "layers.1.ffn_norm")}
    )
    with pytest.raises(
        custom_calls.NativeError, match=r"2 weights have not been packed, among them layers\.1\.ffn_norm"
    ):
        small.jitted(session, room=ROOM)(small.make_inputs([1], 2), small.make_state(config, CAPACITY))
    session.pack("norm", weights["norm"])
    session.pack("layers.1.ffn_norm", weights["layers.1.ffn_norm"])
    small.jitted(session, room=ROOM)(small.make_inputs([1], 2), small.make_state(config, CAPACITY))


def test_invalid_numbers_of_threads_are_refused(model):
    with pytest.raises(custom_calls.NativeError, match="threads must be at least 1, got 0"):
        small.make_session(*model, threads=0)
    with pytest.raises(custom_calls.NativeError, match="threads must be at most 1024, got 1000000"):
        small.make_session(*model, threads=10**6)


class running:
    """Runs a call on another thread. The context's value is a list, which at the end contains the call's result or the
    error that it raised.
    """

    def __init__(self, call, session: Session, *arguments):
        session.begin()
        self.result = []
        self.thread = threading.Thread(target=self._run, args=(call, arguments))

    def _run(self, call, arguments):
        try:
            self.result.append(jax.block_until_ready(call(*arguments)))
        except JaxRuntimeError as error:
            self.result.append(error)

    def __enter__(self):
        self.thread.start()
        return self.result

    def __exit__(self, *_):
        self.thread.join()


@pytest.fixture(scope="module")
def slow(model):
    """A session that is slowed down by delays, and its call."""
    session = small.make_session(*model, threads=2, chaos_us=300)
    return session, small.jitted(session, room=ROOM, top=2)


def test_second_call_at_the_same_time_is_refused(model, slow):
    """The calls are on two devices, because on one device XLA lets the second call wait."""
    session, call = slow
    inputs = small.make_inputs([1], 2).inputs(session)
    second = jax.device_put((inputs, small.make_state(model[0], CAPACITY)), jax.devices()[1])
    with running(call, session, small.make_inputs([1], 40), small.make_state(model[0], CAPACITY)) as first:
        assert session.wait(0, 60_000) > 0
        with pytest.raises(JaxRuntimeError, match="already generating"):
            jax.block_until_ready(call(*second))
        assert not session.finished
    assert first[0][0].status.tolist() == [40, ENDS.index("length"), 41]


def test_tokens_are_streamed_while_the_call_runs(model, slow):
    session, call = slow
    have, pieces = 0, []
    with running(call, session, small.make_inputs([1], 30), small.make_state(model[0], CAPACITY)) as result:
        while have < 30:
            drawn = session.wait(have, 60_000)
            assert drawn > have
            pieces.append(session.drawn(have, drawn - have, 2))
            have = drawn
    outputs, _ = result[0]
    assert len(pieces) > 1 and session.finished and session.wait(30, 60_000) == 30
    tokens, logprobs, times, top_tokens, top_logprobs, *_ = (np.concatenate(part) for part in zip(*pieces, strict=True))
    assert small.same((outputs.tokens[:30], outputs.logprobs[:30]), (tokens, logprobs))
    assert small.same((outputs.top_tokens[:30], outputs.top_logprobs[:30]), (top_tokens, top_logprobs))
    assert (np.diff(times) > 0).all()


def test_cancelled_call_returns_the_tokens_so_far(model, slow):
    session, call = slow
    whole, _ = call(small.make_inputs([1], 45), small.make_state(model[0], CAPACITY))
    with running(call, session, small.make_inputs([1], 45), small.make_state(model[0], CAPACITY)) as result:
        seen = session.wait(2, 60_000)
        session.cancel()
    outputs, state = result[0]
    count, end, position = outputs.status.tolist()
    assert 3 <= seen <= count < 45 and ENDS[end] == "cancelled" and position == 1 + count
    assert outputs.tokens.tolist() == whole.tokens[:count].tolist() + [0] * (ROOM - count)
    assert np.flatnonzero(state.seen).tolist() == sorted(set(outputs.tokens[:count].tolist()))


def test_call_cancelled_before_its_start_ends_in_its_prompt(model, slow):
    session, call = slow
    session.begin()
    session.cancel()
    outputs, state = call(small.make_inputs([1] * 56, 8), small.make_state(model[0], CAPACITY))
    assert outputs.status.tolist() == [0, ENDS.index("cancelled"), 48]
    assert not np.asarray(state.layers[2]["keys"][:, :, 48:]).any()  # it ended after the first block of the prompt
    outputs, _ = call(small.make_inputs([1] * 56, 8), small.make_state(model[0], CAPACITY))
    assert outputs.status[:2].tolist() == [8, ENDS.index("length")]


def test_late_worker_ends_the_call(model):
    session = small.make_session(*model, one_thread_per_lane=True, chaos_us=200_000, timeout_ms=1)
    call = small.jitted(session, room=ROOM)
    with pytest.raises(JaxRuntimeError, match=r"within 1 ms"):
        jax.block_until_ready(call(small.make_inputs([1], 40), small.make_state(model[0], CAPACITY)))
    assert session.finished


@pytest.mark.parametrize("use", ["threads", "instructions", "packed_bytes", "finished"])
def test_closed_session_reports_that_it_is_closed(use, model):
    session = small.make_session(*model, threads=1)
    session.close()
    with pytest.raises(custom_calls.NativeError, match="was closed"):
        getattr(session, use)


def test_closed_session_refuses_weights(model):
    session = small.make_session(*model, threads=1)
    session.close()
    with pytest.raises(custom_calls.NativeError, match="was closed"):
        session.pack("norm", model[1]["norm"])


@pytest.mark.parametrize("path", ["layers.3.attention.wq", "layers.-1.attention_norm"])
def test_weights_of_unknown_layers_are_refused(path, model, session):
    with pytest.raises(custom_calls.NativeError, match="layer"):
        session.pack(path, model[1][path.replace("3", "0").replace("-1", "0")])


@pytest.mark.parametrize("path", ["lm_head", "norm", "layers.0.attention.wq", "tok_embeddings"])
def test_weights_of_another_shape_are_refused(path, model, session):
    with pytest.raises(custom_calls.NativeError, match=r"shape|elements"):
        session.pack(path, model[1][path][:1])


def test_refused_call_is_finished(model, session, call):
    session.begin()
    with pytest.raises(JaxRuntimeError, match="token 99"):
        jax.block_until_ready(call(small.make_inputs([99], 2), small.make_state(model[0], CAPACITY)))
    assert session.finished
