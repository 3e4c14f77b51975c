"""Several concurrent generations: each has the same bits as if it ran alone, whatever else runs meanwhile."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import laneformer
from laneformer import custom_calls
from laneformer.config import CompressedAttention, DeltaNetSizes, ResidualStreams
from laneformer.errors import ConfigError, InputError
from laneformer.infer import Engine, Sampling
from laneformer.infer.engine import cpu
from tests.support.engine_cases import ADJUSTED, CONFIG, RANDOM, large_arrays, model, run_clients

pytestmark = pytest.mark.skipif(custom_calls.unavailable() is not None, reason=str(custom_calls.unavailable()))
TEXT = np.random.default_rng(0).integers(0, 96, 400, np.int32)
PARALLEL = 3
# Prices of passes: with FREE, prompts are read in blocks, with DEAR in chunks of 2.
FREE, DEAR = [1.0] * 16, [1 + 0.2 * n for n in range(16)]


@pytest.fixture(scope="module", autouse=True)
def few_programs():
    with large_arrays():
        yield


@pytest.fixture(scope="module")
def engines():
    """An engine for several generations, and one for a single generation."""
    ours = Engine(model(), "cpu", parallel=PARALLEL, prefix_cache=2, speculation=5)
    return ours, Engine(model(), "cpu", prefix_cache=0)


@pytest.fixture(scope="module")
def slow():
    """An engine with passes that are slow enough for requests to overlap."""
    return Engine(model(), "cpu", parallel=PARALLEL, chaos_us=200)


@st.composite
def requests(draw):
    """The consecutive requests of a client. Each prompt is part of a common text and new tokens; some requests are
    cancelled.
    """
    return [
        {
            "prompt": np.concatenate([
                TEXT[: draw(st.sampled_from([0, 40, 300]))],
                np.random.default_rng(draw(st.integers(0, 3))).integers(0, 96, draw(st.integers(1, 90)), np.int32),
            ]),
            "limit": draw(st.sampled_from([1, 5, 30])),
            "sampling": draw(st.sampled_from([Sampling(), RANDOM, ADJUSTED])),
            "cancel": draw(st.sampled_from([None, None, None, 0, 2])),
        }
        for _ in range(draw(st.integers(1, 3)))
    ]  # fmt: skip


@pytest.mark.parametrize("prices", [FREE, DEAR], ids=["free", "dear"])
@settings(max_examples=12)
@given(clients=st.lists(requests(), min_size=PARALLEL, max_size=PARALLEL))
def test_answers_have_the_bits_of_generations_alone(engines, prices, clients):
    ours, alone = engines
    ours._backend.session.speculate(5, prices)

    def run(*steps):
        for step in steps:
            ask = {"max_new_tokens": step["limit"], "sampling": step["sampling"], "stop_tokens": (7,)}
            with ours.generate(step["prompt"], **ask, top_logprobs=2) as generation:
                if step["cancel"] is not None:
                    for _ in zip(range(step["cancel"]), generation, strict=False):
                        pass
                    generation.cancel()
                step["result"] = generation.result

    run_clients(run, clients)
    for step in (step for steps in clients for step in steps):
        ask = {"max_new_tokens": step["limit"], "sampling": step["sampling"], "stop_tokens": (7,)}
        expected, result = alone.generate(step["prompt"], **ask, top_logprobs=2).result, step["result"]
        n = len(result.tokens)
        assert n == len(expected.tokens) or (step["cancel"] is not None and result.finish_reason == "cancelled")
        for name in ("tokens", "logprobs", "top_logprobs"):
            assert getattr(result, name) == getattr(expected, name)[:n]  # equal in every bit


DELTA = {"delta_layers": (0,), "delta_net": DeltaNetSizes(key_heads=8, value_heads=16, key_dim=4, value_dim=4)}
COMPRESSED = {
    **{"layout": "tp", "num_key_value_heads": 1, "sliding_window": None, "sliding_window_n_layers": 0},
    "residual_streams": ResidualStreams(count=2, iterations=3),
    "compressed_attention": CompressedAttention(
        **{"ratios": (4, 3), "window": 7, "q_lora_rank": 8, "qk_rope_head_dim": 2, "o_groups": 8, "o_lora_rank": 4},
        **{"index_heads": 4, "index_head_dim": 4, "index_topk": 6},
    ),
}


@pytest.fixture(scope="module", params=[DELTA, COMPRESSED], ids=["delta net", "compressed attention"])
def recurrent(request):
    """Like `engines`, with gated DeltaNet in the first layer, or with compressed attention."""
    made = model(**request.param)
    ours = Engine(made, "cpu", parallel=PARALLEL, prefix_cache=2, speculation=15)
    return ours, Engine(made, "cpu", prefix_cache=0)


TURNS = st.tuples(st.integers(1, 90), st.sampled_from([1, 5, 30]), st.sampled_from([None, None, 0, 2, 9]))


@settings(max_examples=10)
@given(
    clients=st.lists(st.lists(TURNS, min_size=2, max_size=4), min_size=PARALLEL, max_size=PARALLEL),
    prices=st.sampled_from([FREE, DEAR]),
)
def test_conversations_with_a_recurrent_state_have_the_bits_of_generations_alone(recurrent, clients, prices):
    """Each turn continues the text of the previous turn, cancelled or not. clients: for each turn the new tokens, the
    length of the answer, and the number of tokens after which it is cancelled.
    """
    ours, alone = recurrent
    ours._backend.session.speculate(15, prices)
    asked = []

    def run(client, turns):
        text = TEXT[40 * client :][:40]
        for added, limit, cancel in turns:
            text = np.concatenate([text, np.resize(TEXT[added:], added)])
            with ours.generate(text, max_new_tokens=limit, stop_tokens=(), top_logprobs=2) as generation:
                if cancel is not None:
                    for _ in zip(range(cancel), generation, strict=False):
                        pass
                    generation.cancel()
                asked.append((text, limit, generation.result))
            text = np.concatenate([text, np.array(generation.result.tokens, np.int32)])

    run_clients(run, list(enumerate(clients)))
    for text, limit, result in asked:
        expected = alone.generate(text, max_new_tokens=limit, stop_tokens=(), top_logprobs=2).result
        for name in ("tokens", "logprobs", "top_logprobs"):
            assert getattr(result, name) == getattr(expected, name)[: len(result.tokens)]  # equal in every bit


def test_turns_of_a_recurrent_model_compute_only_new_tokens(recurrent):
    ours, _ = recurrent
    first = ours.generate(TEXT[:60], max_new_tokens=8, stop_tokens=()).result
    again = np.concatenate([TEXT[:60], first.tokens, TEXT[300:320]])
    assert ours.generate(again, max_new_tokens=8, stop_tokens=()).result.cached_tokens == 67
    with ours.generate(TEXT[:200], max_new_tokens=1000, stop_tokens=()) as running:
        next(running)
        beside = ours.generate(TEXT[:220], max_new_tokens=8, stop_tokens=()).result
        assert beside.cached_tokens == 0


def test_generations_report_shared_passes(engines, slow):
    slow._backend.session.speculate(0, FREE)
    with slow.generate(TEXT[:9], max_new_tokens=1000, stop_tokens=()) as first:
        next(first)
        others = [slow.generate(TEXT[n : n + 9], max_new_tokens=20, stop_tokens=()) for n in (1, 2)]
        with pytest.raises(InputError, match="still generating"):
            slow.generate(TEXT[:4])
        drawn = [list(other) for other in others]
        results = [other.result for other in others]
    for tokens, result in zip(drawn, results, strict=True):
        assert 0 < sum(token.others > 0 for token in tokens) <= result.shared_passes
        assert {token.others for token in tokens} <= {0, 1, 2}
    for n, result in enumerate([first.result, *results]):
        expected = engines[1].generate(TEXT[n : n + 9], max_new_tokens=1000 if n == 0 else 20, stop_tokens=()).result
        assert result.tokens == expected.tokens[: len(result.tokens)] and result.shared_passes > 0
    assert [len(result.tokens) for result in results] == [20, 20]
    alone = slow.generate(TEXT[:9], max_new_tokens=20)
    assert [token.others for token in alone] == [0] * len(alone.result.tokens) and alone.result.shared_passes == 0


@pytest.mark.parametrize("tokens", [0, 1])
@pytest.mark.parametrize("cancels", [False, True])
def test_prompt_is_copied_from_a_running_generation(engines, slow, tokens, cancels):
    """This includes a generation that is still reading its prompt, or is cancelled at that moment."""
    slow._backend.session.speculate(0, FREE)
    slow._backend._prefixes._kept.clear()
    with slow.generate(TEXT[:300], max_new_tokens=1000, stop_tokens=()) as first:
        for _ in range(tokens):
            next(first)
        second = slow.generate(np.append(TEXT[:250], 5), max_new_tokens=20, top_logprobs=2, stop_tokens=())
        other = slow.generate(TEXT[:290], max_new_tokens=1, cache_salt="b")
        if cancels:
            first.cancel()
        result = second.result
        assert (250 if tokens and not cancels else 0) <= result.cached_tokens <= 250
        if not cancels:
            assert result.cached_tokens == 250
        assert other.result.cached_tokens == 0
    expected = engines[1].generate(np.append(TEXT[:250], 5), max_new_tokens=20, top_logprobs=2, stop_tokens=()).result
    for name in ("tokens", "logprobs", "top_logprobs"):
        assert getattr(result, name) == getattr(expected, name)
    again = slow.generate(np.append(TEXT[:250], 5), max_new_tokens=1).result
    assert again.cached_tokens == 250 and again.tokens == expected.tokens[:1]


def test_answers_from_one_prompt_compute_it_once(engines, slow):
    """Such generations start together, like the choices of a request."""
    slow._backend.session.speculate(0, FREE)
    slow._backend._prefixes._kept.clear()
    ask = {"max_new_tokens": 100, "stop_tokens": ()}
    drawn = [Sampling(temperature=1, seed=seed) for seed in range(PARALLEL)]
    several = [slow.generate(TEXT[:300], **ask, sampling=sampling) for sampling in drawn]
    results = [generation.result for generation in several]
    assert [result.cached_tokens for result in results] == [0, 299, 299]
    for result, sampling in zip(results, drawn, strict=True):
        expected = engines[1].generate(TEXT[:300], **ask, sampling=sampling).result
        assert (result.tokens, result.logprobs) == (expected.tokens, expected.logprobs)


def test_requests_wait_if_a_pass_would_cost_too_much(slow):
    slow._backend.session.speculate(0, [1 + 0.6 * n for n in range(16)])
    with slow.generate(TEXT[:9], max_new_tokens=1000, stop_tokens=()) as first:
        next(first)
        second, third = (slow.generate(TEXT[n : n + 9], max_new_tokens=20, stop_tokens=()) for n in (1, 2))
        third.cancel()  # while it waits
        assert (third.result.finish_reason, third.result.tokens) == ("cancelled", ())
        assert slow.session.slots[1].wait(0, 20) == 0  # no token is drawn
    assert len(second.result.tokens) == 20
    assert [running.result.shared_passes for running in (first, second, third)] == [0, 0, 0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"parallel": 17}, "parallel must be 1 to 16, or 0"),
        ({"parallel": -1}, "parallel must be 1 to 16, or 0"),
        ({"most_slowdown": 0.9}, "most_slowdown must be at least 1, got 0.9"),
        ({"parallel": 2, "backend": "xla"}, "backend xla has no such option"),
    ],
)
def test_wrong_options_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        Engine(model(), **{"backend": "cpu"} | options)


def test_several_devices_run_one_request():
    made = model(laneformer.make_mesh(2))
    with pytest.raises(ConfigError, match="parallel must be 1 on 2 devices, got 3"):
        Engine(made, "cpu", parallel=3)
    assert Engine(made, "cpu", parallel=0).parallel == 1


@pytest.mark.parametrize(("available", "count"), [(10**12, cpu.MOST_PARALLEL), (None, 2), (0, 1)])
def test_free_memory_decides_the_default_of_parallel(monkeypatch, available, count):
    """available: bytes; None for free memory of which a quarter holds the caches of two requests."""
    cache = CONFIG.max_position_embeddings * laneformer.weights.kv_bytes_per_token(CONFIG, 0, 4)
    free = 9 * cache + laneformer.weights.weight_bytes_per_token(CONFIG) if available is None else available
    monkeypatch.setattr(cpu, "available_memory", lambda: free)
    assert Engine(model(), "cpu", parallel=0).parallel == count
