"""The engine on its XLA backend: reference tokens, seeds, meshes, caches, limits and errors; how a backend is
chosen.
"""

import itertools
import tracemalloc

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import laneformer
from laneformer import infer
from laneformer.errors import CheckpointError, ConfigError, InputError
from laneformer.infer import Engine, Sampling
from laneformer.infer.engine.backend import ModelSource
from laneformer.infer.engine.gpu import CudaBackend, HipBackend
from laneformer.infer.engine.xla import XlaBackend
from laneformer.infer.sampling import sample, top_logprobs
from laneformer.precision import Precision
from tests.support import small
from tests.support.engine_cases import CASES, CONFIG, PROMPT, RANDOM, model
from tests.support.paths import MOE, ORACLE
from tests.support.serve_cases import BACKEND


@pytest.fixture(scope="module")
def engine():
    return Engine(model(), "xla")


@pytest.fixture(scope="module")
def spread():
    """A model with a head that is split over eight devices. All tests request TOP log-probabilities of it."""
    return Engine.load(ORACLE / "case_12", "xla", devices=8)


TOP = 7  # the number of top_logprobs in all tests, since each number compiles separate programs

# A head that is split over the devices. The tests of the model cover the other cases, and below one device draws what
# the model's logits define.
FAST, SLOW = (("case_12", 8),), (("case_06", 1),)


@pytest.mark.parametrize(
    ("case", "devices"),
    [
        pytest.param(*case, marks=() if case in FAST else pytest.mark.slow if case in SLOW else pytest.mark.exhaustive)
        for case in itertools.product(CASES, (1, 8))
    ],
)
def test_greedy_tokens_match_the_reference_models(case, devices, request):
    lanes = 8 if case in ("case_03", "case_12") else 4
    data = np.load(ORACLE / case / "io.npz")
    fast = (case, devices) in FAST
    engine = (
        request.getfixturevalue("spread") if fast else Engine.load(ORACLE / case, "xla", devices=min(devices, lanes))
    )
    generation = engine.generate(data["greedy_prompt"], max_new_tokens=12, top_logprobs=TOP if fast else 0)
    assert list(generation) == data["greedy_ids"].tolist()
    assert generation.result.finish_reason == "length" and engine.conditions["devices"] == min(devices, lanes)


draw = jax.jit(sample)


def padded(ids, length=32):
    """Token ids, int32 [1, length]. Padding has no effect on earlier positions, and a single length compiles once."""
    return np.pad(np.array([ids], np.int32), ((0, 0), (0, length - len(ids))))


def by_definition(engine, prompt, count, sampling):
    """Tokens and log-probabilities of the model without a cache: one forward pass of the whole text per token."""
    ids, logprobs = list(prompt), []
    for _ in range(count):
        logits = engine.model(padded(ids, 32 if len(prompt) < 12 else 1100))
        seen = np.isin(np.arange(CONFIG.vocab_size), ids)
        token, logprob = draw(logits[0, len(ids) - 1], seen, np.int32(len(ids)), sampling.parameters())
        ids.append(int(token))
        logprobs.append(float(logprob))
    return ids[len(prompt) :], logprobs


@pytest.mark.parametrize("sampling", [Sampling(repetition_penalty=1.2), RANDOM])
def test_tokens_follow_the_definition(engine, sampling):
    expected, logprobs = by_definition(engine, PROMPT, 20, sampling)
    generation = engine.generate(PROMPT, max_new_tokens=20, sampling=sampling)
    assert list(generation) == expected
    np.testing.assert_allclose(generation.result.logprobs, logprobs, atol=1e-4)


@pytest.mark.slow
def test_long_prompts_are_read_in_blocks(engine):
    for n in (1025, 1090):  # two blocks and one token, or a rest whose padding is cut at the end of the context
        prompt = np.random.default_rng(n).integers(0, 96, n)
        expected, _ = by_definition(engine, prompt, 4, RANDOM)
        assert list(engine.generate(prompt, max_new_tokens=4, sampling=RANDOM)) == expected


def test_seeded_tokens_do_not_depend_on_chunks(engine):
    expected = list(engine.generate(PROMPT, max_new_tokens=30, sampling=RANDOM))
    for chunk in (1, 3, 7, 1000):
        generation = engine.generate(PROMPT, max_new_tokens=30, sampling=RANDOM, tokens_per_dispatch=chunk)
        assert list(generation) == expected
        assert set(generation.result.tokens_per_dispatch[1:-1]) <= {chunk}
    other = Sampling(
        temperature=1.0, top_k=60, top_p=0.95, min_p=0.01, repetition_penalty=1.1, seed=RANDOM.seed + 2**32
    )
    assert list(engine.generate(PROMPT, max_new_tokens=30, sampling=other)) != expected


def test_seeded_tokens_do_not_depend_on_devices(spread):
    alone = Engine.load(ORACLE / "case_12", BACKEND)
    ask = {"max_new_tokens": 30, "sampling": RANDOM, "top_logprobs": TOP}
    one, eight = (engine.generate(PROMPT, **ask).result for engine in (alone, spread))
    assert one.tokens == eight.tokens
    one, eight = one.top_logprobs, eight.top_logprobs
    assert [[token for token, _ in top] for top in one] == [[token for token, _ in top] for top in eight]
    np.testing.assert_allclose(one, eight, atol=1e-4)


def test_reused_cache_does_not_change_tokens(engine):
    expected = list(engine.generate(PROMPT, max_new_tokens=30, sampling=RANDOM))
    list(engine.generate(np.arange(16), max_new_tokens=150, sampling=Sampling(temperature=3.0)))
    assert list(engine.generate(PROMPT, max_new_tokens=30, sampling=RANDOM)) == expected


@pytest.mark.parametrize(
    "where", [pytest.param("default device", marks=pytest.mark.exhaustive), "third device", "mesh of 8"]
)
def test_cache_stays_in_place_and_programs_compile_once(where, spread):
    """The programs also served the tests before, whose requests had the same sizes."""
    device = jax.devices()[2 if where == "third device" else 0]
    engine = spread if where == "mesh of 8" else Engine(jax.device_put(model(), device), "xla")
    backend = engine._backend

    def pointers():
        return [
            shard.data.unsafe_buffer_pointer()
            for c in jax.tree.leaves(backend._cache)
            for shard in c.addressable_shards
        ]

    top = TOP if where == "mesh of 8" else 0
    engine.warmup(8, 8, top_logprobs=top)
    generation = engine.generate(PROMPT, max_new_tokens=8, tokens_per_dispatch=3, top_logprobs=top)
    next(generation)
    before = pointers()
    assert len(generation.result.tokens) == 8 and pointers() == before
    assert len(engine.generate(PROMPT, max_new_tokens=8, top_logprobs=top).result.tokens) == 8
    assert pointers() == before
    assert (backend._begin._cache_size(), backend._decode._cache_size()) == (1, 1)


def test_stop_tokens_end_the_decode_loop(engine):
    expected = list(engine.generate(PROMPT, max_new_tokens=30, sampling=RANDOM))
    stop = next(token for n, token in enumerate(expected) if n > 5 and token not in expected[:n])
    for tokens in (stop, [0, stop], list(range(stop, stop + 1)) * 9):
        result = engine.generate(
            PROMPT, max_new_tokens=30, sampling=RANDOM, stop_tokens=tokens, tokens_per_dispatch=1000
        ).result
        stops = {tokens} if isinstance(tokens, int) else set(tokens)
        wanted = next(n for n, token in enumerate(expected) if token in stops)
        assert result.tokens == tuple(expected[:wanted])
        assert (result.finish_reason, result.stop_reason) == ("stop", expected[wanted])
        assert sum(result.tokens_per_dispatch) == wanted + 1  # the loop itself ended there


@small.needs_library
def test_eos_token_stops_by_default():
    first = next(Engine(model(), "cpu").generate(PROMPT))
    ending = Engine(model(eos_token_id=(int(first),)), "cpu")  # backend xla would compile the model again
    result = ending.generate(PROMPT).result
    assert (result.tokens, result.finish_reason, result.stop_reason) == ((), "stop", first)
    assert len(ending.generate(PROMPT, max_new_tokens=3, stop_tokens=()).result.tokens) == 3


def test_engine_works_after_cancel_and_abandon(engine):
    expected = list(engine.generate(PROMPT, max_new_tokens=12, sampling=RANDOM))
    generation = engine.generate(PROMPT, max_new_tokens=60, sampling=RANDOM, tokens_per_dispatch=3)
    assert [next(generation) for _ in range(5)] == expected[:5]
    generation.cancel()
    assert generation.result.finish_reason == "cancelled" and generation.result.tokens == tuple(expected[:5])
    assert list(engine.generate(PROMPT, max_new_tokens=12, sampling=RANDOM)) == expected
    for token in engine.generate(
        PROMPT, max_new_tokens=60, sampling=RANDOM
    ):  # abandoned: the last reference is dropped
        assert token == expected[0]
        break
    engine.generate(PROMPT, max_new_tokens=60)
    assert list(engine.generate(PROMPT, max_new_tokens=12, sampling=RANDOM)) == expected


def test_second_generation_is_refused(engine):
    with engine.generate(PROMPT, max_new_tokens=60) as generation:
        next(generation)
        with pytest.raises(InputError, match=r"still generating.*cancel"):
            engine.generate(PROMPT)
        next(generation)  # the first one continues
    assert len(engine.generate(PROMPT, max_new_tokens=2).result.tokens) == 2


def test_generation_ends_with_the_context(engine):
    prompt = np.arange(1090) % 96
    assert len(engine.generate(prompt, max_new_tokens=50).result.tokens) == 10
    result = engine.generate(prompt[:1089]).result
    assert (len(result.tokens), result.finish_reason) == (11, "length")


def test_short_dispatches_grow(engine):
    engine.warmup(8, 200)
    chunks = engine.generate(PROMPT, max_new_tokens=200).result.tokens_per_dispatch
    assert chunks[:2] == (1, 1) and sum(chunks) == 200 and max(chunks) > 4


def test_warmup_compiles_everything(engine):
    def compiled():
        return [
            program._cache_size()
            for program in (engine._backend._absorb, engine._backend._begin, engine._backend._decode)
        ]

    engine.warmup(1030, 60)
    before = compiled()
    list(
        engine.generate(
            np.arange(1035) % 96, max_new_tokens=50, sampling=RANDOM, stop_tokens=[1, 2], tokens_per_dispatch=20
        )
    )
    assert compiled() == before


def test_16_bit_weights_become_float32_on_a_cpu(caplog):
    caplog.set_level("INFO", "laneformer")
    stored = model(dtype="bfloat16")
    engine = Engine(stored, "xla")
    assert "from bfloat16 to float32" in caplog.text
    assert all(w.dtype == jnp.float32 for w in engine.model.weights().values())
    assert engine.conditions["stored_dtype"] == "bfloat16" and engine.conditions["weights_dtype"] == "float32"
    top = next(engine.generate(PROMPT, top_logprobs=TOP)).top_logprobs
    expected = np.asarray(jax.nn.log_softmax(stored(padded(PROMPT))))[0, len(PROMPT) - 1]
    assert [token for token, _ in top] == np.argsort(-expected)[:TOP].tolist()
    np.testing.assert_allclose([logprob for _, logprob in top], np.sort(-expected)[:TOP] * -1, atol=1e-4)


def test_nan_weights_are_an_error(engine, monkeypatch):
    weights = model().weights()
    weights["norm"] = jax.device_put(np.full(weights["norm"].shape, np.nan, np.float32))
    monkeypatch.setattr(engine._backend, "model", laneformer.Laneformer(CONFIG, weights))  # the programs are the same
    with pytest.raises(CheckpointError, match="position 8 is not a number"):
        next(engine.generate(PROMPT))


@pytest.mark.parametrize(
    "prompt, settings, message",
    [
        ([], {}, "prompt is empty"),
        ([0, 96], {}, "token id 96 is outside the vocabulary of 96"),
        ([-1], {}, "token id -1 is outside"),
        ([2**40], {}, "is outside the vocabulary"),
        (np.zeros((1, 4), int), {}, "a string or a list of token ids"),
        ([1.5], {}, "a string or a list of token ids"),
        ([True], {}, "a string or a list of token ids"),
        ([0] * 1100, {}, "1100 tokens .* 1100"),
        ([0] * 5000, {}, "5000 tokens .* 1100"),
        ("text", {}, "needs a tokenizer.json"),
        ([1], {"max_new_tokens": 0}, "max_new_tokens = 0"),
        ([1], {"max_new_tokens": 2.5}, "max_new_tokens = 2.5"),
        ([1], {"tokens_per_dispatch": 0}, "tokens_per_dispatch = 0"),
        ([1], {"top_logprobs": 21}, "top_logprobs = 21: .* 0 to 20"),
        ([1], {"top_logprobs": -1}, "top_logprobs = -1"),
        ([1], {"top_logprobs": True}, "top_logprobs = True"),
        ([1], {"stop_tokens": [96]}, "stop token 96: .* 0 to 95"),
        ([1], {"stop_strings": ["x"]}, "stop strings need a tokenizer"),
        ([1], {"stop_strings": [""]}, "at least one character"),
        ([1], {"sampling": 0.5}, r"give laneformer.Sampling\("),
    ],
)
def test_bad_requests_are_refused(engine, prompt, settings, message):
    with pytest.raises(InputError, match=message):
        engine.generate(prompt, **settings)


def test_conditions_are_complete():
    engine = Engine.load(ORACLE / "case_12", "xla", dtype="bfloat16", devices=2)
    conditions = engine.conditions
    assert conditions.pop("device") and conditions.pop("parameters") == laneformer.parameter_count(engine.config)
    assert conditions == {
        "model": "case_12",
        "layout": engine.config.layout,
        "lanes": 8,
        "stored_dtype": "bfloat16",
        "weights_dtype": "float32",
        "compute_dtype": "float32",
        "kv_dtype": "float32",
        "prefix_cache": 0,
        "backend": "xla",
        "devices": 2,
        "batch_size": 1,
        "context": engine.config.max_position_embeddings,
    }


@pytest.mark.parametrize(
    ("compute", "devices"),
    [
        ("bfloat16", 1),
        pytest.param("float16", 8, marks=pytest.mark.slow),
        pytest.param("bfloat16", 8, marks=pytest.mark.exhaustive),
        pytest.param("float16", 1, marks=pytest.mark.exhaustive),
    ],
)
def test_products_have_the_compute_dtype(engine, compute, devices, tmp_path):
    """The log-probabilities match those of the model in this precision, which is not the default on a CPU."""
    laneformer.save_hf(model(), tmp_path)
    low = Engine.load(tmp_path, "xla", devices=devices, precision=Precision(compute=compute))
    assert low.precision == Precision(compute=compute)
    assert low.conditions["compute_dtype"] == low.conditions["kv_dtype"] == compute
    tokens, logprobs = map(list, zip(*next(low.generate(PROMPT, top_logprobs=20)).top_logprobs, strict=True))
    exact, rounded = (
        np.asarray(jax.nn.log_softmax(made(padded(PROMPT))))[0, len(PROMPT) - 1]
        for made in (engine.model, laneformer.load(tmp_path, precision=Precision(compute=compute)))
    )
    off, near = (np.abs(x[tokens] - np.array(logprobs)).max() for x in (exact, rounded))
    assert near < off / 2


def test_top_logprobs_match_the_raw_logits_and_compile_separate_programs(engine):
    def compiled():
        return engine._backend._begin._cache_size(), engine._backend._decode._cache_size()

    plain = engine.generate(PROMPT, max_new_tokens=20, sampling=RANDOM).result
    engine.warmup(8, 8, top_logprobs=TOP)
    with_top = compiled()
    tokens = list(engine.generate(PROMPT, max_new_tokens=20, sampling=RANDOM, top_logprobs=TOP, tokens_per_dispatch=6))
    assert tuple(tokens) == plain.tokens and plain.top_logprobs == ()
    logits = engine.model(padded([*PROMPT, *tokens]))
    wanted = np.asarray(jax.nn.log_softmax(logits))[0, len(PROMPT) - 1 :][: len(tokens)]
    for token, row in zip(tokens, wanted, strict=True):
        ids, logprobs = zip(*token.top_logprobs, strict=True)
        assert list(ids) == np.argsort(-row)[:TOP].tolist()
        np.testing.assert_allclose(logprobs, row[list(ids)], atol=1e-4)
    list(engine.generate(PROMPT, max_new_tokens=8))
    assert compiled() == with_top and min(with_top) > 1
    few = Engine(model(vocab_size=11, num_hidden_layers=1, max_position_embeddings=16), "xla")
    everything = next(few.generate([1], top_logprobs=20)).top_logprobs
    assert sorted(token for token, _ in everything) == list(range(11))


def test_top_logprobs_order_equals_by_id():
    logits = np.array([-0.0, 3, 0.0, 3, -1, 0.0, -0.0], np.float32)
    tokens, logprobs = jax.jit(top_logprobs, static_argnums=1)(logits, 6)
    assert tokens.tolist() == [1, 3, 0, 2, 5, 6]
    np.testing.assert_allclose(logprobs, logits[tokens] - np.log(np.exp(logits).sum()), atol=1e-6)


class Stub:
    """A backend that accepts every model and generates nothing."""

    def __init__(self, source):
        self.source, self.conditions = source, {"device": "none", "threads": 3}

    @classmethod
    def unavailable(cls, source):
        return None


class Busy(Stub):
    name = "cuda"

    @classmethod
    def unavailable(cls, source):
        return f"no CUDA device for {source.config.num_lanes} lanes: install one"


class Native(Stub):
    name = "cpu"


@pytest.fixture
def with_stubs(monkeypatch):
    monkeypatch.setattr(
        "laneformer.infer.engine.engine.BACKENDS", {"xla": infer.BACKENDS["xla"], "cuda": Busy, "cpu": Native}
    )


def test_backends_are_chosen_by_name(with_stubs):
    assert Engine(model(), "xla").backend == "xla"
    with pytest.raises(ConfigError, match=r"hip is not available \(not built here\): .*cpu, xla"):
        Engine(model(), "hip")
    with pytest.raises(
        ConfigError, match=r"cuda is not available \(no CUDA device for 8 lanes: install one\): .*cpu, xla"
    ):
        Engine(model(), "cuda")
    with pytest.raises(ConfigError, match="auto, cuda, hip, cpu, xla"):
        Engine(model(), "tpu")


def test_auto_takes_the_first_available_backend_and_logs_it(with_stubs, caplog):
    caplog.set_level("DEBUG", "laneformer")
    engine = Engine(model())
    assert engine.backend == "cpu" and engine.conditions["threads"] == 3
    assert caplog.record_tuples == [
        ("laneformer", 10, "backend cuda: no CUDA device for 8 lanes: install one"),
        ("laneformer", 10, "backend hip: not built here"),
        ("laneformer", 20, "backend cpu (auto)"),
    ]
    with pytest.raises(ConfigError, match=r"backend cpu .*backend xla"):
        engine.model  # noqa: B018


def test_backend_reads_its_source(with_stubs, monkeypatch):
    """A native backend packs weights directly from the files. They are read only once and never become JAX arrays."""
    monkeypatch.setattr(laneformer.Laneformer, "__init__", None)
    engine = Engine.load(ORACLE / "case_03", dtype="bfloat16", num_lanes=8)
    source = engine._backend.source
    assert (source.stored_dtype, source.precision, source.mesh) == ("bfloat16", Precision(param="bfloat16"), None)
    assert {w.dtype.name for _, w in source.weights()} == {"bfloat16"}
    assert engine.config == laneformer.checkpoint.read_config(ORACLE / "case_03")


@pytest.mark.parametrize("devices", [1, 8])
def test_model_is_a_source_of_its_weights(devices):
    made = model(
        None if devices == 1 else laneformer.make_mesh(8), vocab_size=9000, lm_head_type="lane"
    )  # a head of 9.2 MB
    source = ModelSource(made)
    assert source.model() is made
    tracemalloc.start()
    paths = [path for path, _ in source.weights()]
    kept = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert kept < 1e6, "the host must keep no copy"
    assert paths == list(made.weights())
    for path, weight in source.weights():
        np.testing.assert_array_equal(weight, made.weights()[path])


def test_more_devices_than_lanes_are_refused():
    with pytest.raises(ConfigError, match="lane = 8 must divide 4 lanes; choose 1, 2, 4"):
        Engine.load(ORACLE / "case_06", devices=8)
    with pytest.raises(CheckpointError):
        Engine.load(ORACLE / "nowhere", devices=2)


def test_backend_refuses_options_that_it_does_not_compute(monkeypatch):
    engine = Engine(model(), "xla")
    monkeypatch.setattr(XlaBackend, "sampling_options", CudaBackend.sampling_options)
    for field, value in {"presence_penalty": 1, "frequency_penalty": 1, "logit_bias": {3: 1}}.items():
        with pytest.raises(ConfigError, match=f"backend xla does not support {field}: leave it out"):
            engine.generate(PROMPT, sampling=Sampling(**{field: value}))
    every = Sampling(temperature=1, top_k=3, top_p=0.9, min_p=0.1, repetition_penalty=1.1, seed=3)
    assert len(list(engine.generate(PROMPT, sampling=every, max_new_tokens=2, stop_tokens=()))) == 2
    assert not CudaBackend.masks and not HipBackend.masks


@pytest.mark.parametrize("backend", [pytest.param("xla", marks=pytest.mark.slow), "cpu"])
def test_answers_begin_with_an_empty_recurrent_state(backend):
    """Covers padded prompts, another request in between, and a cancelled request."""
    io = np.load(MOE / "qwen3_next_2" / "io.npz")
    engine = Engine.load(MOE / "qwen3_next_2", backend, dtype="float32", num_lanes=2)
    ask = {"max_new_tokens": 12, "stop_tokens": ()}
    for cancelled in (True, False):
        assert list(engine.generate(io["greedy_prompt"], **ask)) == io["greedy_ids"].tolist()
        between = engine.generate(np.arange(100), **ask, tokens_per_dispatch=2)
        next(between)
        if cancelled:
            between.cancel()
        assert (len(between.result.tokens) < 12) == cancelled
