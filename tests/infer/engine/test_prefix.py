"""Kept prefixes: which prefix is reused, and that an answer has the same bits with and without it."""

import threading

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import laneformer
from laneformer import custom_calls
from laneformer.errors import ConfigError
from laneformer.infer import Engine, Sampling
from laneformer.infer.engine.backend import Request
from laneformer.infer.engine.prefix import LEAST, Caches, CallId, PrefixCache, Source
from laneformer.precision import Precision
from tests.support.engine_cases import CONFIG, RANDOM, large_arrays, model

needs_library = pytest.mark.skipif(custom_calls.unavailable() is not None, reason=str(custom_calls.unavailable()))
TEXT = np.random.default_rng(0).integers(0, 96, 2000, np.int32)


def request(tokens, **changes):
    return Request(np.asarray(tokens, np.int32), 1, Sampling(), (), **changes)


def caches(capacity):
    """Caches of one layer, in which every position contains a number."""
    return Caches([{name: jax.numpy.zeros((1, 1, capacity, 1, 1)) for name in ("keys", "values")}])


class Positions:
    """A prefix cache whose caches contain the tokens themselves, filled as a backend would fill them."""

    def __init__(self, slots):
        self.made, self.cache = [], PrefixCache(self._make, slots)

    def _make(self, capacity):
        self.made.append(capacity)
        return Caches(jax.tree.map(lambda array: array - 1.0, caches(capacity).layers))

    def run(self, tokens, capacity=256, **changes):
        """Takes caches, checks their content, fills the rest and keeps them. Returns the number of positions that were
        reused.
        """
        asked = request(tokens, **changes)
        lease = self.cache.take(asked, capacity)
        count = lease.count
        assert lease.caches.capacity >= capacity and count < len(tokens)
        filled = {}
        for name, array in lease.caches.layers[0].items():
            now = np.array(array)
            np.testing.assert_array_equal(now[0, 0, :count, 0, 0], asked.prompt[:count])
            now[0, 0, : len(tokens), 0, 0] = asked.prompt
            filled[name] = jax.numpy.array(now)
        self.cache.keep(lease, Caches([filled]), asked.prompt)
        return count


@pytest.mark.parametrize(("before", "after", "count"), [
    (TEXT[:100], TEXT[:150], 100),
    (TEXT[:100], TEXT[:100], 99),  # the last token's logits are needed
    (TEXT[:100], TEXT[:60], 59),
    (TEXT[:100], [*TEXT[:70], 95 - TEXT[70], *TEXT[71:120]], 70),
    (TEXT[:100], [95 - TEXT[0], *TEXT[1:100]], 0),
    (TEXT[:100], TEXT[: LEAST + 1], LEAST),
    (TEXT[:100], TEXT[:LEAST], 0),
    (TEXT[: LEAST - 1], TEXT[:100], 0),
    (TEXT[:100], TEXT[:1], 0),
])  # fmt: skip
def test_longest_common_prefix_is_taken(before, after, count):
    positions = Positions(1)
    assert positions.run(before) == 0 and positions.run(after) == count and positions.made == [256]


def test_prefix_moves_to_larger_caches():
    positions = Positions(1)
    assert [positions.run(TEXT[:n], c) for n, c in ((200, 256), (300, 512), (900, 1100), (100, 256))] == [
        *(0, 200, 300, 99)
    ]
    assert positions.made == [256, 512, 1100], "caches larger than needed are reused"
    assert positions.run(TEXT[500:600]) == 0 and positions.made[3:] == [256], "but only with a common prefix"


def test_prefixes_are_shared_only_with_equal_salts_and_consent():
    positions = Positions(1)
    positions.run(TEXT[:100], cache_salt="a")
    assert [positions.run(TEXT[:100], cache_salt=salt) for salt in ("b", "b", "", "a")] == [0, 99, 0, 0]
    assert positions.run(TEXT[:100], cache_salt="a", cache_prompt=False) == 0, "computed again"
    assert positions.run(TEXT[:100], cache_salt="a") == 0, "nor kept"
    assert positions.made == [256]
    assert Positions(0).run(TEXT[:100]) == 0
    none = Positions(0)
    assert [none.run(TEXT[:100]) for _ in range(3)] == [0, 0, 0] and none.made == [256]


def test_several_conversations_replace_the_least_recently_used():
    positions = Positions(2)
    one, two, three = TEXT[:200], TEXT[200:400], TEXT[400:600]
    assert [positions.run(tokens[:150]) for tokens in (one, two, one, two)] == [0, 0, 149, 149]
    assert [positions.run(tokens) for tokens in (one, three, two)] == [150, 0, 0], "the third took the second's place"
    positions.run(one, cache_prompt=False)
    assert positions.run(three) == 0 and positions.run(two) == 199 and positions.made == [256, 256]


def test_common_start_is_copied_and_the_conversation_stays():
    positions = Positions(2)
    other = np.concatenate([TEXT[:50], TEXT[1000:1100]])
    assert [positions.run(tokens) for tokens in (TEXT[:200], other, TEXT[:210], other)] == [0, 50, 200, 149]
    alone = Positions(1)
    assert [alone.run(tokens) for tokens in (TEXT[:200], other, TEXT[:210])] == [0, 50, 50]
    three = Positions(3)
    small = np.concatenate([TEXT[:50], TEXT[1000:1600]])
    assert [three.run(TEXT[:200]), three.run(small, 1024), three.run(TEXT[:210]), three.made] == [
        0,
        50,
        200,
        [256, 1024],
    ]


def test_conversation_prefers_its_own_sequence():
    """It does not take the last sequence of equal length, which the other conversation continues. But a longer sequence
    is better than its own.
    """
    start, one, two = TEXT[:100], TEXT[:240], np.concatenate([TEXT[:100], TEXT[300:400]])
    for key, left in (("one", two), ("", one)):  # without a key the newest sequence is taken
        positions = Positions(2)
        assert [positions.run(tokens, cache_key=name) for tokens, name in ((one, "one"), (two, "two"))] == [0, 100]
        again = np.concatenate([start, TEXT[500:600]])
        assert positions.run(again, cache_key=key) == 100
        assert positions.run(left) == len(left) - 1, key
    positions = Positions(2)
    positions.run(one, cache_key="one")
    assert positions.run(TEXT[:250], cache_key="two") == 240


def test_whole_sequences_are_taken_after_they_have_ended():
    prefixes = PrefixCache(caches, 3, 3, whole=True)
    runs = prefixes.take(request(TEXT[:100]), 256, CallId(0, 7))
    beside = prefixes.take(request(TEXT[:150]), 256, CallId(1, 8))
    assert (beside.count, beside.source) == (0, None), "later its state is that of a longer text"
    prefixes.drop(beside)
    prefixes.keep(runs, runs.caches, TEXT[:99])
    for tokens, count in ((TEXT[:99], 0), (TEXT[:60], 0), (TEXT[:100], 99)):
        assert prefixes.take(request(tokens), 256, CallId(1, 9)).count == count


def test_longest_prefix_may_be_that_of_a_running_request():
    prefixes = PrefixCache(caches, 3, 3)
    kept = prefixes.take(request(TEXT[:80]), 256)
    prefixes.keep(kept, kept.caches, TEXT[:80])
    runs = prefixes.take(request(TEXT[:100]), 256, CallId(0, 7))
    assert (runs.count, runs.source) == (80, None)
    other = prefixes.take(request(TEXT[:150]), 256, CallId(1, 8))
    assert (other.count, other.source) == (0, Source(CallId(0, 7), 99)), "its last token may not be computed yet"
    runs.drawn.extend(TEXT[100:120].tolist())
    third = prefixes.take(request(TEXT[:110]), 256, CallId(2, 9))
    assert third.source == Source(CallId(0, 7), 109)
    prefixes.drop(runs)
    prefixes.drop(other)
    prefixes.drop(third)
    for changes, source in (({}, 99), ({"cache_salt": "a"}, 0), ({"cache_prompt": False}, 0)):
        runs = prefixes.take(request(TEXT[:100], **changes), 256, CallId(0, 10))
        found = prefixes.take(request(TEXT[:100]), 256, CallId(1, 11)).source
        assert (found.count if found else 0) == source
        assert prefixes.take(request(TEXT[:100]), 256).source is None, "a call that cannot copy"
        prefixes._leases.clear()
    alone = PrefixCache(caches, 0, 2)
    alone.take(request(TEXT[:100]), 256, CallId(0, 1))
    assert alone.take(request(TEXT[:100]), 256, CallId(1, 2)).source is None, "nothing is kept, and nothing shared"


def test_taken_caches_are_lost_with_their_request():
    positions = Positions(1)
    positions.run(TEXT[:100])
    positions.cache.take(request(TEXT[:100]), 256)  # and fails
    assert positions.run(TEXT[:100]) == 0


# ---- on backend cpu

BFLOAT16 = {"dtype": "bfloat16"}
ROUNDED = BFLOAT16 | {"precision": Precision(param="bfloat16", compute="bfloat16")}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "layout": "tp"}
VARIANTS = [  # changes of the model, options of the backend
    (ROUNDED, {"threads": 3}),
    ({}, {"speculation": 6}),
    *(pytest.param(case, marks=pytest.mark.slow) for case in (({}, {}), (EXPERTS, {}), ({}, {"weights": "int8"}))),
    *(
        pytest.param((changes, {"instructions": name, **options}), marks=pytest.mark.exhaustive)
        for name in (() if custom_calls.unavailable() else custom_calls.instruction_sets())
        for changes, options in (
            (BFLOAT16, {"weights": "bf12"}),
            (ROUNDED | EXPERTS, {"one_thread_per_lane": True}),
            (ROUNDED, {"weights": "int4"}),
            ({"layout": "dtp(1)"}, {"weights": "mxfp4"}),
        )
    ),
]


@pytest.fixture(scope="module")
def engines(request):
    """An engine that keeps up to three sequences, and one that computes every prompt and makes no drafts."""
    changes, options = request.param
    ours = Engine(model(**changes), "cpu", prefix_cache=3, **options)
    if most := options.get("speculation"):
        ours._backend.session.speculate(most, [1.0] * 16)  # fixed prices of passes
    return ours, Engine(model(**changes), "cpu", prefix_cache=0, **options | {"speculation": 0})


@st.composite
def schedules(draw):
    """Requests that continue texts of earlier requests: which part of which text, the new tokens, the settings, and
    whether the request is cancelled.
    """
    return [
        {
            "of": draw(st.integers(0, 5)),
            "share": draw(st.sampled_from([0.0, 0.3, 0.9, 1.0])),
            "change": draw(st.booleans()) and draw(st.booleans()),
            "more": draw(st.integers(1, 150)),
            "seed": draw(st.integers(0, 3)),
            "limit": draw(st.sampled_from([1, 2, 9, 40])),
            "sampling": draw(st.sampled_from([Sampling(), RANDOM])),
            "salt": draw(st.sampled_from(["", "", "", "a"])),
            "keep": draw(st.sampled_from([True, True, True, False])),
            "cancel": draw(st.sampled_from([None, None, 0, 3])),
        }
        for _ in range(draw(st.integers(2, 7)))
    ]


def next_prompt(texts, step):
    """A prompt of part of an earlier text, perhaps with its last token changed, and new tokens."""
    old = texts[-1 - step["of"] % len(texts)]
    begin = old[: round(step["share"] * len(old))].copy()
    if step["change"] and len(begin):
        begin[-1] = 95 - begin[-1]
    new = np.random.default_rng(step["seed"]).integers(0, 96, step["more"], np.int32)
    return np.concatenate([begin, new])[: CONFIG.max_position_embeddings - 1]


@needs_library
@pytest.mark.parametrize("engines", VARIANTS, indirect=True)
@settings(max_examples=12)
@given(schedule=schedules())
def test_answers_have_the_bits_of_requests_alone(engines, schedule):
    ours, alone = engines
    ours._backend._prefixes._kept.clear()
    texts = [TEXT[:300]]
    for step in schedule:
        ask = {"max_new_tokens": step["limit"], "sampling": step["sampling"], "top_logprobs": 2, "stop_tokens": (7,)}
        prompt = next_prompt(texts, step)
        with large_arrays():
            expected, result = alone.generate(prompt, **ask).result, run_step(ours, prompt, ask, step)
        n = len(result.tokens)
        assert n == len(expected.tokens) or result.finish_reason == "cancelled"
        for name in ("tokens", "logprobs", "top_logprobs"):
            assert getattr(result, name) == getattr(expected, name)[:n]  # equal in every bit
        assert expected.cached_tokens == 0 and (step["keep"] or result.cached_tokens == 0)
        check_kept(ours, alone, step["keep"], np.concatenate([prompt, np.array(expected.tokens, np.int32)]))
        texts.append(np.concatenate([prompt, np.array(result.tokens, np.int32)]))


def run_step(engine, prompt, ask, step):
    """The result of a request, perhaps cancelled."""
    generation = engine.generate(prompt, **ask, cache_prompt=step["keep"], cache_salt=step["salt"])
    if step["cancel"] is not None:
        for _ in zip(range(step["cancel"]), generation, strict=False):
            pass
        generation.cancel()
        generation.settle()
    return generation.result


def check_kept(ours, alone, keeps, text):
    """Checks that the kept tokens begin the text, and that their keys and values equal those of the text computed
    alone.
    """
    [reference] = alone._backend._prefixes._kept
    kept = ours._backend._prefixes._kept[-1 if keeps else 0]
    n = len(kept.tokens)
    assert (n > 0) == keeps and n <= len(text) and kept.tokens.tolist() == text[:n].tolist()
    for a, b in zip(*(jax.tree.leaves(found.caches.layers) for found in (kept, reference)), strict=True):
        assert np.asarray(a)[:, :, :n].tobytes() == np.asarray(b)[:, :, :n].tobytes()


@needs_library
@pytest.mark.parametrize("devices", [1, 8])
def test_second_turn_computes_only_new_tokens(devices):
    made = model(None if devices == 1 else laneformer.make_mesh(devices))
    engine, alone = Engine(made, "cpu"), Engine(made, "cpu", prefix_cache=0)
    assert (engine.conditions["prefix_cache"], alone.conditions["prefix_cache"]) == (1, 0)
    ask = {"max_new_tokens": 20, "sampling": RANDOM, "stop_tokens": ()}
    first = engine.generate(TEXT[:230], **ask).result
    second = [*TEXT[:230], *first.tokens, *TEXT[500:530]]  # in larger caches
    result, expected = (each.generate(second, **ask).result for each in (engine, alone))
    assert first.cached_tokens == expected.cached_tokens == 0 and result.cached_tokens == 249
    assert (result.tokens, result.logprobs) == (expected.tokens, expected.logprobs)
    again = engine.generate(second, **ask).result
    assert (again.cached_tokens, again.tokens) == (279, expected.tokens)
    assert engine._backend._runs[0]._cache_size() == alone._backend._runs[0]._cache_size() + 1, (
        "a prefix must not need another program"
    )
    whole = engine.generate(np.resize(TEXT, CONFIG.max_position_embeddings - 5), stop_tokens=()).result
    full = [*np.resize(TEXT, CONFIG.max_position_embeddings - 5), *whole.tokens[:4]]
    last = [each.generate(full, **ask).result for each in (engine, alone)]
    assert last[0].cached_tokens == len(full) - 1 and last[0].logprobs == last[1].logprobs


@needs_library
def test_cancelled_prompt_keeps_its_computed_positions():
    engine = Engine(model(), "cpu", chaos_us=300)
    generation = engine.generate(TEXT[:1000], max_new_tokens=2)
    generation.cancel()
    generation.settle()
    [kept] = engine._backend._prefixes._kept
    absorbed = len(kept.tokens)
    assert 0 < absorbed < 1000
    result = engine.generate(TEXT[:1000], max_new_tokens=2).result
    expected = engine.generate(TEXT[:1000], max_new_tokens=2, cache_prompt=False).result
    assert (result.cached_tokens, expected.cached_tokens) == (absorbed, 0)
    assert result.logprobs == expected.logprobs


@needs_library
def test_failed_call_keeps_nothing(monkeypatch):
    engine = Engine(model(), "cpu")
    expected = engine.generate(TEXT[:100], max_new_tokens=5).result
    run = engine._backend._runs[0]

    def fail(*_, **__):
        raise RuntimeError("out of memory")

    monkeypatch.setattr(engine._backend, "_runs", [fail])
    with pytest.raises(RuntimeError, match="out of memory"):
        list(engine.generate(TEXT[:100], max_new_tokens=5))
    monkeypatch.setattr(engine._backend, "_runs", [run])
    result = engine.generate(TEXT[:100], max_new_tokens=5).result
    assert result.cached_tokens == 0 and result.logprobs == expected.logprobs


def test_others_do_not_wait_while_caches_are_made():
    began, may_end = threading.Event(), threading.Event()

    def make(capacity):
        if capacity == 1024:
            began.set()
            assert may_end.wait(60)
        return caches(capacity)

    cache = PrefixCache(make, 3)
    first = cache.take(request(TEXT[:200]), 256)
    cache.keep(first, first.caches, TEXT[:200])
    slow = cache.take(request([*TEXT[:50], *TEXT[1000:1100]]), 1024)  # copies from the first sequence
    thread = threading.Thread(target=lambda: slow.caches)
    thread.start()
    assert began.wait(60)
    other = cache.take(request(TEXT[:210]), 256)
    assert (slow.count, other.count, other.caches.capacity) == (50, 0, 256), "a sequence is not used while it is copied"
    may_end.set()
    thread.join()
    assert cache.take(request(TEXT[:210]), 256).count == 200, "but afterwards"


def test_sequence_stays_if_the_request_that_copies_it_fails():
    def make(capacity):
        if capacity == 1024:
            raise MemoryError
        return caches(capacity)

    cache = PrefixCache(make, 3)
    first = cache.take(request(TEXT[:200]), 256)
    cache.keep(first, first.caches, TEXT[:200])
    failing = cache.take(request([*TEXT[:50], *TEXT[1000:1100]]), 1024)
    with pytest.raises(MemoryError):
        failing.caches  # noqa: B018
    cache.drop(failing)
    assert cache.take(request(TEXT[:210]), 256).count == 200


def test_backend_xla_keeps_no_prefixes():
    engine = Engine(model(), "xla", prefix_cache=False)
    for _ in range(2):
        assert engine.generate(TEXT[:100], max_new_tokens=1).result.cached_tokens == 0
    assert engine.conditions["prefix_cache"] == 0
    with pytest.raises(ConfigError, match="prefix_cache = 2: backend xla has no such option"):
        Engine(model(), "xla", prefix_cache=2)
