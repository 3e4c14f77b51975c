"""The engine on its CPU backend, the native decode kernel: tokens match the references and the XLA backend; streaming,
ends, errors.
"""

import itertools
import signal
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import laneformer
from laneformer import custom_calls
from laneformer.custom_calls.cpu import session
from laneformer.errors import CheckpointError, ConfigError, InputError
from laneformer.infer import Engine, Sampling
from laneformer.infer.bench.latency import weight_bytes
from laneformer.infer.engine import cpu
from laneformer.infer.engine.backend import CheckpointSource, ModelSource, Request
from laneformer.infer.engine.cpu import CpuBackend
from laneformer.infer.engine.native import RoundedSource, plan_of
from laneformer.infer.sampling import sample
from laneformer.precision import Precision
from laneformer.quantized import Quantized
from tests.support import small
from tests.support.engine_cases import ADJUSTED, CASES, CONFIG, PROMPT, RANDOM, large_arrays, model
from tests.support.paths import DENSE, MOE, ORACLE
from tests.support.plan_interpreter import interpreter

pytestmark = pytest.mark.skipif(custom_calls.unavailable() is not None, reason=str(custom_calls.unavailable()))


@pytest.fixture(scope="module")
def engine():
    return Engine(model(), "cpu")


@pytest.fixture(scope="module")
def reference():
    return Engine(model(), "xla")


@pytest.fixture
def few_programs():
    with large_arrays():
        yield


@pytest.mark.parametrize(("case", "devices"), list(zip(CASES, itertools.cycle([1, 8]))))
def test_greedy_tokens_match_the_reference_models(case, devices):
    lanes = 8 if case in ("case_03", "case_12") else 4
    data = np.load(ORACLE / case / "io.npz")
    engine = Engine.load(ORACLE / case, "cpu", devices=min(devices, lanes))
    assert list(engine.generate(data["greedy_prompt"], max_new_tokens=12)) == data["greedy_ids"].tolist()
    assert engine.conditions["devices"] == min(devices, lanes) and engine.conditions["threads"] >= 1


@pytest.mark.parametrize("case", ["case_03", "case_12"])
def test_weights_in_twelve_bits_give_the_same_answer(case, tmp_path):
    """The reference models with weights converted to bfloat16. Bytes per token count the bytes that are read."""
    laneformer.save_hf(laneformer.load(ORACLE / case, "bfloat16"), tmp_path, weights="bf12")
    answers, engines = [], {}
    for weights in ("bfloat16", "bf12", None):
        folder = ORACLE / case if weights else tmp_path
        engine = engines[weights] = Engine.load(folder, "cpu", dtype="bfloat16", weights=weights)
        result = engine.generate(PROMPT, max_new_tokens=20, sampling=Sampling(temperature=1.0, seed=3)).result
        answers.append((result.tokens, result.logprobs))
    assert answers[0] == answers[1] == answers[2]
    packed = engines["bf12"].conditions
    assert engines[None].conditions["bf12_weights"] == packed["bf12_weights"], "a folder in 12 bits stays so"
    saved = packed["bf12_weights"] / 2 - 4 * packed["bf12_exceptions"]
    assert weight_bytes(engines["bfloat16"]) - weight_bytes(engines["bf12"]) == saved > 0
    assert "bf12_weights" not in engines["bfloat16"].conditions


def test_changed_file_in_use_is_an_error(tmp_path):
    """Its pages are mapped: truncating it would end the process, and overwriting it change answers."""
    laneformer.save_hf(laneformer.load(ORACLE / "case_03", "bfloat16"), tmp_path, weights="bf12")
    file = tmp_path / "model.safetensors"
    engine = Engine.load(tmp_path)
    tokens = [*engine.generate([1, 2], max_new_tokens=3)]
    (tmp_path / "new").write_bytes(b"")
    content = file.read_bytes()
    (tmp_path / "new").replace(file)  # replaced, not changed
    assert [*engine.generate([1, 2], max_new_tokens=3)] == tokens
    file.write_bytes(content)
    engine = Engine.load(tmp_path)
    file.touch()
    with pytest.raises(CheckpointError, match=r"model\.safetensors was changed while it was in use"):
        [*engine.generate([1, 2], max_new_tokens=3)]


@pytest.mark.parametrize(("dtype", "weights", "words"), [
    ("float32", "bf12", "--weights bf12 needs bfloat16 weights, got float32: add --dtype bfloat16"),
    ("bfloat16", "int3", "weights must be bfloat16, bf12, int4, .*, got int3"),
])  # fmt: skip
def test_unfit_weight_formats_are_refused(dtype, weights, words):
    with pytest.raises(ConfigError, match=words):
        Engine.load(ORACLE / "case_03", "cpu", dtype=dtype, weights=weights)


@pytest.mark.parametrize(("least", "gain", "dtype", "chosen"), [
    (0, 1.2, "bfloat16", True), (0, 1.0, "bfloat16", False), (1 << 40, 1.2, "bfloat16", False),
    (0, 1.2, "float32", False),
])  # fmt: skip
def test_large_models_have_the_faster_format_by_default(monkeypatch, least, gain, dtype, chosen):
    monkeypatch.setattr(cpu, "LARGE", least)
    monkeypatch.setattr(session, "bf12_gain", lambda instructions, threads: gain)
    monkeypatch.setattr(session, "amx_gain", lambda over, threads: 0.0)
    engine = Engine.load(ORACLE / "case_03", "cpu", dtype=dtype)
    assert (engine.session.bf12_weights.weights > 0) == chosen


@pytest.mark.parametrize(("least", "gain", "dtype", "chosen"), [
    (0, 1.0, "bfloat16", True), (0, 0.9, "bfloat16", False), (1 << 40, 1.0, "bfloat16", False),
    (0, 1.0, "float32", False),
])  # fmt: skip
def test_large_models_use_amx_if_decoding_is_not_slower(monkeypatch, least, gain, dtype, chosen):
    """Simulates a machine with AMX on any machine."""

    class Opened(Exception):
        pass

    def opened(plan, *, instructions, **others):
        raise Opened(instructions)

    monkeypatch.setattr(cpu, "LARGE", least)
    monkeypatch.setattr(session, "instruction_sets", lambda: ["avx512_bf16", "portable", "amx"])
    monkeypatch.setattr(session, "amx_gain", lambda over, threads: gain)
    monkeypatch.setattr(cpu, "Session", opened)
    with pytest.raises(Opened) as error:
        Engine.load(ORACLE / "case_03", "cpu", dtype=dtype, weights="bfloat16")
    assert (error.value.args == ("amx",)) == chosen


@pytest.fixture
def drafting(monkeypatch):
    """An engine that assumes equal times for passes of any number of rows."""
    speculate = custom_calls.Session.speculate
    monkeypatch.setattr(custom_calls.Session, "speculate", lambda self, most: speculate(self, most, [1.0] * 16))
    return Engine(model(), "cpu", speculation=None)


def test_prediction_is_drafted_from_without_changing_the_answer(drafting, engine):
    def ask(of, **more):
        return of.generate(PROMPT, max_new_tokens=40, sampling=Sampling(1.0, seed=5), stop_tokens=(), **more).result

    plain = ask(engine)
    assert plain.drafting.drafted == 0 and plain.tokens_per_pass == 1 and drafting.conditions["speculation"] == 15
    for prediction in ((), plain.tokens, np.array(plain.tokens), [*plain.tokens[:20], *plain.tokens[:5]] * 1000):
        result = ask(drafting, prediction=prediction)
        assert (result.tokens, result.logprobs) == (plain.tokens, plain.logprobs)
        counts = result.drafting
        assert (counts.predicted_accepted > 10) == (len(prediction) > 0), counts
        assert counts.predicted >= counts.predicted_accepted <= sum(counts.accepted)
        assert result.tokens_per_pass == 39 / counts.passes
    assert counts.predicted > counts.predicted_accepted, "the end of the prediction is wrong"
    for most in (0, 1, 3):
        result = ask(drafting, prediction=plain.tokens, draft_max=most)
        assert result.tokens == plain.tokens and (most == 0) == (result.drafting.drafted == 0)
        assert max(n for n, count in enumerate(result.drafting.rows) if count) == most
    assert ask(drafting, prediction=plain.tokens, draft_max=99).tokens == plain.tokens
    assert ask(engine, prediction=plain.tokens).drafting.drafted == 0, "this engine must draft nothing"


@pytest.mark.parametrize("sampling", [RANDOM, ADJUSTED], ids=["plain", "adjusted"])
def test_drafts_change_no_bit_under_penalties(drafting, engine, sampling):
    """The penalties of each row of a pass count the drafts before it."""
    expected = engine.generate(PROMPT, max_new_tokens=60, sampling=sampling).result
    wrong = [(token + 1) % 96 if n % 7 == 6 else token for n, token in enumerate(expected.tokens)]
    for prediction in (expected.tokens, wrong):
        generation = drafting.generate(PROMPT, max_new_tokens=60, sampling=sampling, prediction=prediction)
        drafted, result = [token.drafted for token in generation], generation.result
        assert (result.tokens, result.logprobs) == (expected.tokens, expected.logprobs)
        assert result.drafting.predicted_accepted > 10
        assert sum(drafted) == sum(result.drafting.accepted) and not drafted[0] and not drafted[-1]


@pytest.mark.parametrize(("more", "words"), [
    ({"prediction": "text"}, "a prediction in text needs a tokenizer"),
    ({"prediction": [1.5]}, "must be a string or a list of token ids, got float64"),
    ({"prediction": [[1]]}, r"must be a string or a list of token ids, got int64 \[1, 1\]"),
    ({"prediction": [CONFIG.vocab_size]}, "vocab"), ({"prediction": [-1]}, "-1"),
    ({"draft_max": -1}, "draft_max = -1"), ({"draft_max": True}, "draft_max = True"),
])  # fmt: skip
def test_wrong_predictions_are_refused(engine, more, words):
    with pytest.raises(InputError, match=words):
        engine.generate(PROMPT, **more)


def test_backends_without_drafts_accept_only_the_default():
    assert "speculation" not in Engine(model(), "xla", speculation=None).conditions
    with pytest.raises(ConfigError, match="speculation = 3: backend xla has no such option"):
        Engine(model(), "xla", speculation=3)


def _elsewhere():
    """Models and devices on both backends. The cases of backend xla are slow tests, because the tests of the model
    cover its cache.
    """
    for name, lanes, devices in (
        *(("exaone4", 4, 1), ("exaone4", 4, 4), ("olmo2", 1, 1), ("smollm3_nope", 2, 2)),
        *(("gemma2", 2, 2), ("gemma3", 1, 1)),
    ):
        yield name, lanes, devices, "cpu"
        rare = pytest.mark.exhaustive if (name, devices) == ("exaone4", 1) else pytest.mark.slow
        yield pytest.param(name, lanes, devices, "xla", marks=rare)


@pytest.mark.parametrize(("name", "lanes", "devices", "backend"), list(_elsewhere()))
def test_greedy_tokens_match_models_with_other_norms_and_rotations(name, lanes, devices, backend):
    """Norms of the modules' outputs, summed over the lanes; a norm over all heads; layers without rotation, or with
    their own; softcaps.
    """
    data = np.load(DENSE / name / "io.npz")
    engine = Engine.load(DENSE / name, backend, num_lanes=lanes, devices=devices)
    answer = engine.generate(data["greedy_prompt"], max_new_tokens=12, stop_tokens=())
    assert list(answer) == data["greedy_ids"].tolist()


SAMPLINGS = st.builds(
    Sampling,
    temperature=st.sampled_from([0.0, 0.3, 1.0, 2.5]),
    top_k=st.sampled_from([0, 1, 2, 17, 96, 5000]),
    top_p=st.sampled_from([1.0, 0.9, 0.5, 0.01]),
    min_p=st.sampled_from([0.0, 0.02, 0.5, 1.0]),
    repetition_penalty=st.sampled_from([1.0, 0.7, 1.4]),
    seed=st.integers(0, 2**64 - 1),
    presence_penalty=st.sampled_from([0.0, 2.0, -0.5]),
    frequency_penalty=st.sampled_from([0.0, 1.0, -0.2]),
    logit_bias=st.sampled_from([(), {7: 4.0, 9: -100.0}]),
    top_n_sigma=st.sampled_from([0.0, 0.0, 0.7, 1.9]),
)


@settings(max_examples=40)
@given(sampling=SAMPLINGS, prompt=st.lists(st.integers(0, 95), min_size=1, max_size=12))
def test_tokens_match_backend_xla(engine, reference, sampling, prompt):
    expected = reference.generate(prompt, max_new_tokens=12, sampling=sampling, top_logprobs=3).result
    result = engine.generate(prompt, max_new_tokens=12, sampling=sampling, top_logprobs=3).result
    if result.tokens != expected.tokens:  # top-p may keep or drop a set of tokens within rounding of p
        n = next(n for n, (a, b) in enumerate(zip(result.tokens, expected.tokens, strict=True)) if a != b)
        assume(not near_a_threshold(reference, prompt, expected.tokens[:n], sampling))
    assert result.tokens == expected.tokens
    np.testing.assert_allclose(result.logprobs, expected.logprobs, atol=1e-4)
    for ours, theirs in zip(result.top_logprobs, expected.top_logprobs, strict=True):
        assert [token for token, _ in ours] == [token for token, _ in theirs]
        np.testing.assert_allclose([p for _, p in ours], [p for _, p in theirs], atol=1e-4)


def near_a_threshold(reference, prompt, answer, sampling) -> bool:
    """Whether logits that differ only by rounding change the token that the definition draws after this answer."""
    ids, vocab = [*prompt, *answer], CONFIG.vocab_size
    adjust = sampling.adjustments(vocab)
    added = None if adjust is None else adjust.of(jnp.bincount(jnp.array(answer, jnp.int32), length=vocab))
    padded = np.zeros((1, 32), np.int32)
    padded[0, : len(ids)] = ids
    logits = np.asarray(reference.model(padded))[0, len(ids) - 1]
    seen = np.isin(np.arange(CONFIG.vocab_size), ids)
    drawn = set()
    for seed in range(40):
        noise = np.random.default_rng(seed).normal(scale=1e-5, size=logits.shape).astype(np.float32)
        drawn.add(int(sample(jnp.asarray(logits + noise), seen, np.int32(len(ids)), sampling.parameters(), added)[0]))
    return len(drawn) > 1


@pytest.mark.slow
def test_long_texts_and_windows_follow_the_definition(engine):
    """The definition is the model without a cache, whose logits for the whole text draw each token."""
    draw = jax.jit(sample)
    for n in (17, 513, 1090):
        prompt = np.random.default_rng(n).integers(0, 96, n)
        result = engine.generate(prompt, max_new_tokens=10, sampling=RANDOM).result
        text = np.zeros((1, 1100), np.int32)
        text[0, : n + 10] = [*prompt, *result.tokens]
        logits = np.asarray(model()(text))[0]
        for place, token, logprob in zip(range(n, n + 10), result.tokens, result.logprobs, strict=True):
            seen = np.isin(np.arange(CONFIG.vocab_size), text[0, :place])
            expected = draw(logits[place - 1], seen, np.int32(place), RANDOM.parameters())
            assert token == expected[0] and abs(logprob - expected[1]) < 1e-4


def test_tokens_are_equal_on_any_threads_devices_exchange_and_instructions(engine):
    expected = engine.generate(PROMPT, max_new_tokens=40, sampling=RANDOM).result
    source = ModelSource(model())
    for options in ({"threads": 1}, {"threads": 3}, {"one_thread_per_lane": True}, {"threads": 2, "chaos_us": 200}):
        result = Engine(source, "cpu", **options).generate(PROMPT, max_new_tokens=40, sampling=RANDOM).result
        assert (result.tokens, result.logprobs) == (expected.tokens, expected.logprobs), options  # equal in every bit
    spread = Engine(model(laneformer.make_mesh(8)), "cpu").generate(PROMPT, max_new_tokens=40, sampling=RANDOM).result
    assert (spread.tokens, spread.logprobs) == (expected.tokens, expected.logprobs)
    for name in custom_calls.instruction_sets():
        result = Engine(source, "cpu", instructions=name).generate(PROMPT, max_new_tokens=40, sampling=RANDOM).result
        assert result.tokens == expected.tokens
        np.testing.assert_allclose(result.logprobs, expected.logprobs, atol=1e-4)


@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float16", marks=pytest.mark.slow)])
def test_16_bit_weights_match_float32(dtype):
    stored = model(dtype=dtype)  # products are float32 on a CPU
    exact = Engine(stored, "cpu")
    assert (
        exact.conditions["weights_dtype"] == dtype
        and exact.conditions["compute_dtype"] == exact.conditions["kv_dtype"] == "float32"
    )
    exactly = exact.generate(PROMPT, max_new_tokens=20).result
    text = np.array([[*PROMPT, *exactly.tokens]])
    expected = log_softmax(stored(text))
    assert expected.argmax(-1)[7:].tolist() == text[0, 8:].tolist()
    np.testing.assert_allclose(exactly.logprobs, logprobs_of(text, expected), atol=1e-4)

    rounded = model(dtype=dtype, precision=Precision(param=dtype, compute=dtype))
    engine = Engine(rounded, "cpu")
    assert engine.conditions["compute_dtype"] == engine.conditions["kv_dtype"] == dtype
    result = engine.generate(PROMPT, max_new_tokens=20).result
    text = np.array([[*PROMPT, *result.tokens]])
    logprobs = logprobs_of(text, log_softmax(rounded(text)))
    np.testing.assert_allclose(result.logprobs, logprobs, atol=0.15 if dtype == "bfloat16" else 0.02)
    assert (
        np.abs(np.array(result.logprobs) - exactly.logprobs).max() > 1e-4 or result.tokens != exactly.tokens
    )  # bfloat16 products do round


def log_softmax(logits) -> np.ndarray:
    """Log-probabilities of the token after each position, float64 [s - 1, vocab]."""
    z = np.asarray(logits[0])[:-1].astype(np.float64)
    z -= z.max(-1, keepdims=True)
    return z - np.log(np.exp(z).sum(-1, keepdims=True))


def logprobs_of(text, logprobs) -> np.ndarray:
    """The log-probabilities of the text's tokens after PROMPT."""
    return np.take_along_axis(logprobs, text[0, 1:, None], 1)[7:, 0]


def test_dispatches_stop_tokens_and_context_end_are_respected(engine):
    expected = list(engine.generate(PROMPT, max_new_tokens=30, sampling=RANDOM))
    for chunk in (1, 3, 7, 1000):
        generation = engine.generate(PROMPT, max_new_tokens=30, sampling=RANDOM, tokens_per_dispatch=chunk)
        assert list(generation) == expected
        sizes = generation.result.tokens_per_dispatch
        assert sizes[0] == 1 and set(sizes[1:-1]) <= {chunk} and sum(sizes) == 30
    stop = next(token for n, token in enumerate(expected) if n > 5 and token not in expected[:n])
    for stops in ([stop], [95, 94, stop], [stop] * 9):
        result = engine.generate(PROMPT, max_new_tokens=30, sampling=RANDOM, stop_tokens=stops).result
        ended = next(n for n, token in enumerate(expected) if token in stops)
        assert (result.tokens, result.finish_reason) == (tuple(expected[:ended]), "stop")
        assert sum(result.tokens_per_dispatch) == ended + 1  # the kernel itself ended there
    assert len(engine.generate(np.arange(1090) % 96, max_new_tokens=50).result.tokens) == 10
    assert engine.generate([5], max_new_tokens=1).result.finish_reason == "length"


def test_engine_works_after_cancel_and_abandon(engine):
    expected = list(engine.generate(PROMPT, max_new_tokens=12, sampling=RANDOM))
    generation = engine.generate(PROMPT, sampling=RANDOM)
    assert [next(generation) for _ in range(5)] == expected[:5]
    generation.cancel()
    assert generation.result.finish_reason == "cancelled" and generation.result.tokens == tuple(expected[:5])
    assert list(engine.generate(PROMPT, max_new_tokens=12, sampling=RANDOM)) == expected
    for token in engine.generate(PROMPT, sampling=RANDOM):  # abandoned
        assert token == expected[0]
        break
    engine.generate(PROMPT)
    assert list(engine.generate(PROMPT, max_new_tokens=12, sampling=RANDOM)) == expected


def test_cancel_after_the_kernel_ended_returns_early(monkeypatch):
    slow = Engine(ModelSource(model()), "cpu", chaos_us=300)
    slow.warmup(1, 400)
    monkeypatch.setattr(CpuBackend, "patience", 100.0)
    began = time.perf_counter()
    assert len(slow.generate([1], max_new_tokens=5).result.tokens) == 5
    generation = slow.generate([1], max_new_tokens=400)
    next(generation)
    threading.Timer(0.1, generation.cancel).start()
    assert generation.result.finish_reason == "cancelled"
    assert time.perf_counter() - began < 50
    with slow.generate([1], max_new_tokens=400, tokens_per_dispatch=1) as generation:
        assert len([*itertools.islice(generation, 60)]) == 60, "single tokens arrive at once"
    assert time.perf_counter() - began < 50


def test_prefill_is_cancelled_from_another_thread():
    slow = Engine(ModelSource(model()), "cpu", chaos_us=3000)
    generation = slow.generate(np.arange(1000) % 96, max_new_tokens=90)
    threading.Timer(0.2, generation.cancel).start()
    began = time.perf_counter()
    assert generation.result.finish_reason == "cancelled" and generation.result.tokens == ()
    assert time.perf_counter() - began < 20
    assert len(slow.generate([1], max_new_tokens=2).result.tokens) == 2


def test_control_c_ends_a_generation():
    slow = Engine(ModelSource(model()), "cpu", chaos_us=20000)
    generation = slow.generate([1, 2, 3], stop_tokens=())
    with pytest.raises(KeyboardInterrupt):
        next(generation)
        threading.Timer(0.3, signal.pthread_kill, (threading.main_thread().ident, signal.SIGINT)).start()
        list(generation)
    assert generation.result.finish_reason == "cancelled" and len(generation.result.tokens) < 1000
    assert len(slow.generate([1], max_new_tokens=2).result.tokens) == 2


def test_more_threads_than_cores_log_a_warning(caplog):
    cores = custom_calls.default_threads()
    for threads, lines in ((None, 0), (cores, 0), (cores + 1, 1)):
        caplog.clear()
        CpuBackend(ModelSource(model()), threads=threads)
        assert [f"{cores + 1} threads on {cores} core" in r.getMessage() for r in caplog.records] == [True] * lines


def test_reused_cache_does_not_change_tokens(engine):
    expected = list(engine.generate(PROMPT, max_new_tokens=30, sampling=RANDOM))
    list(engine.generate(np.arange(90), max_new_tokens=100, sampling=Sampling(temperature=3.0)))
    assert list(engine.generate(PROMPT, max_new_tokens=30, sampling=RANDOM)) == expected


def test_cache_stays_in_place_and_programs_compile_once():
    def pointers():
        return [
            shard.data.unsafe_buffer_pointer()
            for kept in backend._prefixes._kept
            for c in jax.tree.leaves(kept.caches.layers)
            for shard in c.addressable_shards
        ]

    for mesh in (None, laneformer.make_mesh(8)):
        backend = Engine(model(mesh), "cpu")._backend
        list(backend.start(request()))
        before = pointers()
        list(backend.start(request(sampling=RANDOM)))
        assert pointers() == before and backend._runs[0]._cache_size() == 1


def request(**changes):
    return Request(
        **{"prompt": np.array(PROMPT, np.int32), "limit": 8, "sampling": Sampling(), "stop_tokens": (), **changes}
    )


def test_nan_weights_are_an_error():
    weights = model().weights()
    damaged = weights | {"norm": weights["norm"].at[1].set(jnp.nan)}
    with pytest.raises(CheckpointError, match=r"weight norm has nan at \[1\]"):
        Engine(laneformer.Laneformer(CONFIG, damaged), "cpu")
    weights["norm"] = jnp.full_like(weights["norm"], 3e38)  # the weights are finite, but their products are not
    for sampling in (Sampling(), RANDOM):
        with pytest.raises(CheckpointError, match="position 8 is not a number"):
            next(Engine(laneformer.Laneformer(CONFIG, weights), "cpu").generate(PROMPT, sampling=sampling))


def test_unsupported_options_are_refused():
    with pytest.raises(ConfigError, match=r"cpu is not available .*it adds in float32.*use backend xla"):
        Engine(model(precision=Precision(stream="bfloat16")), "cpu")
    assert Engine(model(precision=Precision(stream="bfloat16"))).backend == "xla"
    assert Engine(model()).backend == "cpu"
    with pytest.raises(ConfigError, match="cannot run the instructions sse9"):
        CpuBackend(ModelSource(model()), instructions="sse9")


@pytest.mark.parametrize(
    ("case", "lanes", "options"),
    [
        ("mixtral", 1, {"threads": 1}),
        ("mixtral", 4, {"threads": 3}),
        ("qwen3_moe_1", 2, {}),
        ("qwen3_moe_1", 4, {"dtype": "bfloat16", "weights": "bf12"}),
        ("qwen3_moe_2", 1, {}),
        ("qwen3_moe_2", 2, {"threads": 3}),
        ("qwen3_moe_mixed", 1, {}),
        ("gpt_oss_1", 1, {}),
        ("gpt_oss_1", 8, {"threads": 3}),
        ("gpt_oss_2", 2, {"threads": 1}),
        ("gpt_oss_2", 8, {}),
        ("deepseek_v3_1", 1, {}),
        ("deepseek_v3_1", 4, {"threads": 3}),
        ("deepseek_v3_2", 1, {"threads": 3}),
        ("deepseek_v3_2", 2, {}),
        ("kimi_1", 4, {}),
        ("kimi_2", 1, {}),
        ("kimi_2", 2, {"threads": 3}),
        ("qwen3_next_1", 1, {}),
        ("qwen3_next_1", 2, {"threads": 3}),
        ("qwen3_next_2", 1, {"threads": 3}),
        ("qwen3_next_2", 4, {}),
        ("deepseek_v4_1", 1, {}),
        ("deepseek_v4_1", 2, {"threads": 3}),
    ],
)
def test_mixtures_of_experts_match_their_references(case, lanes, options):
    """Compares the logits of every position, one at a time and all at once, and greedy tokens. FP8, MXFP4 and INT4
    weights keep their formats.
    """
    io, dtype = np.load(MOE / case / "io.npz"), options.get("dtype", "float32")
    engine = Engine.load(MOE / case, "cpu", num_lanes=lanes, **{"dtype": dtype} | options)
    assert list(engine.generate(io["greedy_prompt"], max_new_tokens=12, stop_tokens=())) == io["greedy_ids"].tolist()
    formats = {"gpt_oss_2": "mxfp4", "kimi_1": "int4", "kimi_2": "int4"}
    formats |= dict.fromkeys(("qwen3_moe_2", "deepseek_v3_2", "qwen3_next_2"), "fp8")
    assert formats.get(case, "None") in str(engine.conditions.get("quantized_formats"))
    ids, config = io["input_ids"][0], engine.config
    call = small.jitted(engine.session, room=len(ids), logits=True)
    found, state = [], small.make_state(config, 160)
    for position, token in enumerate(ids):
        inputs = small.make_inputs([token], 1, start=position, room=len(ids))
        outputs, state = call(inputs, state._replace(seen=np.zeros(config.vocab_size, np.uint8)))
        found.append(np.asarray(outputs.logits[0]))
    # In recurrent layers, torch's float32 is within 2.5e-4 of float64.
    assert np.abs(found - io["logits"][0]).max() < (5e-4 if "next" in case else 1e-4)
    whole, after = call(small.make_inputs(ids, 1), small.make_state(config, 160))
    assert small.same([found[-1], state.layers], [whole.logits[0], after.layers])


@pytest.mark.usefixtures("few_programs")
def test_kept_and_drafted_latents_change_no_bit():
    """Answers after kept prefixes (also those of cancelled requests) and with drafts have the bits of an engine without
    either.
    """
    folder, text = MOE / "deepseek_v3_1", np.load(MOE / "deepseek_v3_1" / "io.npz")["input_ids"][0]
    options = {"dtype": "float32", "num_lanes": 2}
    ours = Engine.load(folder, "cpu", prefix_cache=2, speculation=5, **options)
    alone = Engine.load(folder, "cpu", prefix_cache=0, **options)
    prompts = [np.resize(text, 90), np.resize(text, 70), np.append(np.resize(text, 60), text[3]), np.resize(text, 90)]
    for prompt, cached in zip(prompts, (0, 69, 60, 60), strict=True):
        ask = {"max_new_tokens": 24, "stop_tokens": ()}
        cancelled = ours.generate(prompt, **ask, tokens_per_dispatch=2)
        next(cancelled)
        cancelled.cancel()
        assert cancelled.result.cached_tokens == cached
        expected, result = (engine.generate(prompt, **ask).result for engine in (alone, ours))
        assert (result.tokens, result.logprobs) == (expected.tokens, expected.logprobs)
        assert result.cached_tokens == len(prompt) - 1 and expected.cached_tokens == 0


@pytest.mark.parametrize(("case", "lanes"), [("qwen3_next_1", 2), ("qwen3_next_2", 1)])
def test_gated_delta_net_matches_logits_and_routes_of_float64(case, lanes):
    """Reads a prompt in calls of 5 tokens. The routes of float64 are stored with the reference."""
    io = np.load(MOE / case / "io.npz")
    source = CheckpointSource(MOE / case, "float32", num_lanes=lanes)
    backend = CpuBackend(source, threads=3)
    parts = {
        name: part.dequantize(np.float32) if isinstance(part, Quantized) else part
        for path, weight in source.weights()
        for name, part in backend.session.plan.parts(path, weight).items()
    }
    ids, float64 = io["input_ids"][0], interpreter(backend.session.plan, parts)
    expected = float64.logits(ids)
    found = [np.sort(chosen, -1) for chosen in float64.routes[::lanes]]
    np.testing.assert_array_equal(found, np.sort(io["router_indices_row0"], -1))
    call = small.jitted(backend.session, room=len(ids), logits=True)
    state = small.make_state(source.config, 128)
    for start in range(0, len(ids), 5):
        inputs = small.make_inputs(ids[start : start + 5], 1, start=start, room=len(ids))
        outputs, state = call(inputs, state._replace(seen=np.zeros(source.config.vocab_size, np.uint8)))
        last = min(start + 5, len(ids)) - 1
        assert np.abs(outputs.logits[0] - expected[last]).max() < 2.5e-4


@pytest.mark.usefixtures("few_programs")
@pytest.mark.parametrize("case", ["qwen3_next_1", "deepseek_v4_1"])
def test_kept_and_drafted_recurrent_states_change_no_bit(case):
    """The turns of a conversation, some cancelled, have the bits of prompts computed from their first token."""
    folder, text = MOE / case, np.load(MOE / case / "io.npz")["input_ids"].reshape(-1)
    options = {"dtype": "float32", "num_lanes": 2}
    ours = Engine.load(folder, "cpu", prefix_cache=2, speculation=15, **options)
    alone = Engine.load(folder, "cpu", prefix_cache=0, **options)
    ask, prompt, cached = {"max_new_tokens": 40, "stop_tokens": ()}, np.resize(text, 75), 0
    for turn in range(6):
        generation = ours.generate(prompt, **ask, tokens_per_dispatch=2)
        if turn in (1, 3, 4):
            for _ in range(turn):
                next(generation)
            generation.cancel()
        result, expected = generation.result, alone.generate(prompt, **ask).result
        count = len(result.tokens)
        assert (result.tokens, result.logprobs) == (expected.tokens[:count], expected.logprobs[:count])
        # A state cannot go back: if a cancelled answer had drawn more tokens than it yielded, nothing is kept.
        known = (0, cached, cached + 1) if turn in (2, 4, 5) else (cached,)
        assert result.cached_tokens in known and expected.cached_tokens == 0
        shorter = ours.generate(prompt[:50], **ask).result
        assert shorter.cached_tokens == 0 and shorter.tokens == alone.generate(prompt[:50], **ask).result.tokens
        cached = len(prompt) + count - 1
        prompt = np.concatenate([prompt, result.tokens, np.resize(text[turn:], 3 + 7 * turn)])


@pytest.mark.slow
@pytest.mark.parametrize("weights", ["int4", pytest.param("int8", marks=pytest.mark.exhaustive)])
def test_rounded_experts_match_backend_xla(weights):
    folder = MOE / "qwen3_moe_1"
    prompt, source = np.load(folder / "io.npz")["greedy_prompt"], ModelSource(laneformer.load(folder))
    rounded = RoundedSource(source, plan_of(source), weights)
    engines = (Engine(rounded, "xla"), Engine(rounded, "cpu"), Engine(source, "cpu", weights=weights))
    expected, *found = (engine.generate(prompt, max_new_tokens=12, stop_tokens=()).result for engine in engines)
    for result in found:
        assert result.tokens == expected.tokens
        np.testing.assert_allclose(result.logprobs, expected.logprobs, atol=1e-4)
