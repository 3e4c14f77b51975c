"""Several concurrent generations on emulated GPUs (tests/support/emulated.py): each has the bits that it has alone."""

import itertools
import threading

import jax
import numpy as np
import pytest

import laneformer
from laneformer import ConfigError, Laneformer, infer
from laneformer.custom_calls import NativeError
from laneformer.errors import InputError
from laneformer.infer import Sampling
from laneformer.infer.engine.gpu import rows_for
from tests.support import emulated, small
from tests.support.decode_cases import DELTA_NET
from tests.support.engine_cases import run_clients

pytestmark = [small.needs_library, emulated.needs_gpu]
ALL = Sampling(temperature=2.0, top_k=8, top_p=0.5, min_p=0.02, repetition_penalty=1.3, seed=3)


@pytest.fixture(scope="module", autouse=True)
def available():
    with pytest.MonkeyPatch.context() as patch:
        emulated.make_available(patch)
        yield


def make_engines(config, parallel=2, **options):
    """An engine for several generations, and one for a single generation."""
    model = model_of(config)
    return make_engine(model, parallel=parallel, **options), make_engine(model, **options)


def model_of(config) -> Laneformer:
    return Laneformer(config, {path: jax.device_put(weight) for path, weight in small.make_weights(config).items()})


def make_engine(model, backend="cuda", **options) -> infer.Engine:
    return infer.Engine(model, backend, **options, **emulated.engine_options())


@pytest.fixture(scope="module")
def engines():
    return make_engines(small.windowed_model()[0])


def ask_together(engine, clients: list[list[dict]]) -> list[tuple[dict, infer.Result]]:
    """The answers to clients that each send one request after another, as many at a time as the engine allows."""
    answers, room = [], threading.Semaphore(engine.parallel)

    def run(*steps):
        for step in steps:
            ask = {name: value for name, value in step.items() if name != "leaves_after"}
            with room, engine.generate(**ask) as generation:
                if (count := step["leaves_after"]) is not None:
                    [*itertools.islice(generation, count)]
                    generation.cancel()
                answers.append((ask, generation.result))

    run_clients(run, clients)
    return answers


def check(engine, answers) -> None:
    """Checks that each answer has the bits of this engine's answer, up to its end."""
    for ask, result in answers:
        count = len(result.tokens)
        with engine.generate(**ask) as generation:
            if result.finish_reason == "cancelled":
                [*itertools.islice(generation, count)]
                generation.cancel()
            expected = generation.result
        assert count == len(expected.tokens) or result.finish_reason == "cancelled"
        for name in ("tokens", "logprobs", "top_logprobs"):
            assert getattr(result, name) == getattr(expected, name)[:count]


def client(seed: int, vocab: int, requests: int, lengths=(1, 9, 70, 200)) -> list[dict]:
    """The requests of a client: prompts for the kernel or for blocks of XLA, with various settings, stop tokens and
    lengths. Some are cancelled.
    """
    rng = np.random.default_rng(seed)
    return [
        {
            "prompt": rng.integers(0, vocab, int(rng.choice(lengths))).tolist(),
            "max_new_tokens": int(rng.choice([1, 6, 18])),
            "sampling": [Sampling(), Sampling(temperature=1.0, seed=seed), ALL][rng.integers(3)],
            "stop_tokens": [int(rng.integers(vocab))],
            "top_logprobs": int(rng.choice([0, 2])),
            "leaves_after": [None, None, None, 0, 3][rng.integers(5)],
        }
        for _ in range(requests)
    ]


@pytest.mark.parametrize("seed", [0, *(pytest.param(n, marks=pytest.mark.exhaustive) for n in range(1, 9))])
def test_three_clients_get_the_bits_of_generations_alone(seed, engines):
    ours, alone = engines
    vocab = ours.config.vocab_size
    check(alone, ask_together(ours, [client(10 * seed + n, vocab, 3) for n in range(3)]))


def test_generations_report_shared_passes(engines):
    ours, alone = engines
    assert ours.parallel == ours.conditions["parallel"] == 2 and alone.conditions["parallel"] == 1
    first = ours.generate([3], max_new_tokens=300, stop_tokens=())
    next(first)
    second = ours.generate([4], max_new_tokens=8, stop_tokens=())
    with pytest.raises(InputError, match="still generating"):
        ours.generate([5])
    tokens = [*second]
    assert [token.others for token in tokens] == [1] * 8 and second.result.shared_passes == 8
    first.cancel()
    count = len(first.result.tokens)
    assert first.result.finish_reason == "cancelled" and first.result.shared_passes >= 8
    check(alone, [({"prompt": [3], "max_new_tokens": 300, "stop_tokens": ()}, first.result)])
    assert count < 300 and [token.others for token in ours.generate([3], max_new_tokens=4)] == [0] * 4


def test_concurrent_generations_have_drafts(engines):
    """Drafts come from the text and from predictions, right and wrong, in all calls of a generation."""
    alone = engines[1]
    ours = make_engine(model_of(small.windowed_model()[0]), parallel=2, speculation=3)
    assert ours.conditions["speculation"] == 3 and ours.conditions["parallel"] == 2
    asks = [
        {"prompt": [n, 7], "max_new_tokens": 40, "stop_tokens": (), "sampling": Sampling(temperature=1.0, seed=n)}
        for n in range(4)
    ]
    expected = [alone.generate(**ask).result for ask in asks]
    predicted = [result.tokens for result in expected]
    right, wrong, none, few = [
        ask | {"leaves_after": None, "prediction": tokens}
        for ask, tokens in zip(asks, (predicted[0], predicted[0], (), predicted[3]), strict=True)
    ]
    answers = ask_together(ours, [[right, few | {"draft_max": 1}], [wrong, none]])
    for ask, result in answers:
        own = expected[ask["prompt"][0]]
        assert (result.tokens, result.logprobs) == (own.tokens, own.logprobs)
    found = {ask["prompt"][0]: result.drafting for ask, result in answers}
    assert found[0].predicted_accepted > 16 and found[0].tokens_per_pass > 1.5
    assert found[3].predicted_accepted > 10 and sum(found[3].rows[2:]) == 0
    assert found[0].passes + sum(found[0].accepted) == 39  # the prompt's last pass draws the first token
    forced = [*range(5, 25)] * 2
    with ours.generate([3], max_new_tokens=300, stop_tokens=()) as other:
        next(other)
        result = ours.generate([4], max_new_tokens=40, stop_tokens=(), forced=forced).result
    assert list(result.tokens) == forced and result.drafting.tokens_per_pass > 1.3


def test_long_prompt_is_read_between_calls(engines, monkeypatch):
    """XLA reads one block at a time, and the other generation runs some passes between two blocks."""
    ours, alone = engines
    monkeypatch.setattr("laneformer.infer.engine.gpu.BLOCK", 64)
    ask = {"prompt": small.prompt_of(ours.config, 330), "max_new_tokens": 5, "stop_tokens": ()}
    with ours.generate([3], max_new_tokens=150, stop_tokens=()) as first:
        next(first)
        result = ours.generate(**ask).result
        assert ours.session.slots[0].wait(0, 0) >= 8 * 4
    check(alone, [(ask, result)])
    with ours.generate([3], max_new_tokens=400, stop_tokens=()) as first:
        next(first)
        leaving = ours.generate(**ask)
        leaving.cancel()
        assert leaving.result.tokens == ()
        assert ours.generate([4], max_new_tokens=3, stop_tokens=()).result.finish_reason == "length"


REQUESTS = [pytest.param(2, marks=pytest.mark.slow), pytest.param(4, marks=pytest.mark.exhaustive)]


@pytest.mark.parametrize("requests", REQUESTS)
def test_recurrent_states_change_no_bit(requests):
    ours, alone = make_engines(small.make_config(**DELTA_NET["delta net"]), parallel=3)
    check(alone, ask_together(ours, [client(n, ours.config.vocab_size, requests) for n in range(4)]))


@pytest.mark.parametrize("requests", REQUESTS)
def test_prompts_of_the_kernel_change_no_bit(requests):
    ours, alone = make_engines(small.windowed_model()[0], absorb=False)
    lengths = (1, 9, 70)  # the emulated kernel reads one token at a time
    check(alone, ask_together(ours, [client(n, ours.config.vocab_size, requests, lengths) for n in range(3)]))


@pytest.mark.slow
def test_several_devices_of_a_process_change_no_bit(tmp_path):
    laneformer.save_hf(model_of(small.windowed_model()[0]), tmp_path)
    options = {"devices": 3} | emulated.engine_options()
    ours, alone = (infer.Engine.load(tmp_path, "cuda", parallel=n, **options) for n in (2, 1))
    check(alone, ask_together(ours, [client(n, ours.config.vocab_size, 2, (1, 9, 70)) for n in range(3)]))


def test_device_error_ends_the_running_generations(engines, monkeypatch):
    ours, alone = engines
    before = alone.generate([1], max_new_tokens=5).result.tokens
    with monkeypatch.context() as patch:
        patch.setattr(
            "laneformer.infer.engine.native.power_of_two", lambda n: 1
        )  # makes caches that are too small for the call
        patch.setattr("laneformer.infer.engine.native.SMALLEST_CACHE", 1)
        ours._backend._scheduler._layers = None
        with pytest.raises(NativeError, match="do not fit the cache"):
            list(ours.generate([1], max_new_tokens=5))
    assert ours.generate([1], max_new_tokens=5).result.tokens == before


@pytest.mark.parametrize(
    ("parallel", "speculation", "rows"),
    [(1, 0, 1), (1, 1, 2), (1, 2, 4), (3, 0, 3), (2, 1, 3), (2, 3, 4), (4, 3, 5), (8, 1, 8)],
)
def test_rows_cover_requests_and_drafts(parallel, speculation, rows):
    assert rows_for(parallel, speculation) == rows


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"parallel": 9}, "parallel must be 1 to 8 on backend cuda, got 9"),
        ({"parallel": 2, "backend": "cuda-graph"}, "need launch 'persistent'"),
    ],
)
def test_wrong_options_are_refused(options, message):
    model = model_of(small.windowed_model()[0])
    with pytest.raises(ConfigError, match=message):
        make_engine(model, **options)
