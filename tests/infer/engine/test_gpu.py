"""Backend "cuda" on emulated GPUs (tests/support/emulated.py) gives the same answers as the other backends."""

import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import laneformer
from laneformer import ConfigError, Laneformer, infer
from laneformer.custom_calls import NativeError
from laneformer.custom_calls.gpu.session import machine_of
from laneformer.custom_calls.trace import spans_needed, write_perfetto
from laneformer.errors import InputError
from laneformer.infer import Sampling
from laneformer.infer.bench.latency import weight_bytes
from laneformer.infer.engine.backend import ModelSource
from laneformer.infer.engine.gpu import CudaBackend, CudaGraphBackend, GpuBackend, HipBackend
from laneformer.infer.engine.native import plan_of
from laneformer.mesh import make_mesh, put_weight
from laneformer.quantized.rounding import round_to
from tests.support import emulated, small
from tests.support.decode_cases import COMPRESSED, DELTA_NET
from tests.support.gpu_cases import AMD, jitted, some
from tests.support.paths import MOE

pytestmark = [small.needs_library, emulated.needs_gpu]
MACHINE = emulated.SMALL
DEVICES = {} if emulated.REAL else {"machine": MACHINE, "compile_with": emulated.compile_with(MACHINE)}


@pytest.fixture(scope="module")
def model():
    """A model whose kernel the tests of sessions have compiled already."""
    config, weights = small.windowed_model()
    return Laneformer(config, {path: jax.device_put(weight) for path, weight in weights.items()})


@pytest.fixture(scope="module", autouse=True)
def available():
    with pytest.MonkeyPatch.context() as patch:
        emulated.make_available(patch)
        yield


def make_engine(model, backend="cuda", **options):
    return infer.Engine(model, backend, **options, **emulated.engine_options())


@pytest.fixture(scope="module")
def engine(model):
    return make_engine(model)


@pytest.fixture(scope="module")
def xla(model):
    return infer.Engine(model, "xla")


@pytest.mark.parametrize(
    ("length", "sampling"),
    [
        (1, Sampling()),
        (200, Sampling(temperature=0.9, top_p=0.9, repetition_penalty=1.2, seed=3)),
        pytest.param(40, Sampling(temperature=0.9, min_p=0.05, seed=4), marks=pytest.mark.slow),
    ],
    ids=["kernel", "blocks and kernel", "kernel, several tokens"],
)
def test_tokens_match_backend_xla(length, sampling, engine, xla, model):
    prompt = small.prompt_of(model.config, length)
    expected, result = (
        one.generate(prompt, max_new_tokens=12, sampling=sampling, top_logprobs=2).result for one in (xla, engine)
    )
    assert result.tokens == expected.tokens
    assert result.logprobs == pytest.approx(expected.logprobs, abs=1e-4)
    for own, other in zip(result.top_logprobs, expected.top_logprobs, strict=True):
        assert [token for token, _ in own] == [token for token, _ in other]


def test_kernel_reads_prompts_like_xla(model, engine):
    prompt = small.prompt_of(model.config, 100)
    alone = make_engine(model, absorb=False)
    answers = [one.generate(prompt, max_new_tokens=5).result.tokens for one in (alone, engine)]
    assert answers[0] == answers[1]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "length"),
    [
        (DELTA_NET["delta net"], 100),
        (COMPRESSED["compressed attention of many heads"], 100),
        pytest.param(DELTA_NET["delta net"], 333, marks=pytest.mark.exhaustive),
    ],
    ids=["delta net", "compressed attention", "delta net, 333 tokens"],
)
def test_recurrent_states_pass_from_blocks_to_the_kernel(changes, length):
    config = small.make_config(**changes)
    weights = {path: jax.device_put(weight) for path, weight in small.make_weights(config).items()}
    model, prompt = Laneformer(config, weights), small.prompt_of(config, length)
    engine, xla = make_engine(model), infer.Engine(model, "xla")
    for ids in (prompt, prompt[:7], prompt):  # each request reuses the caches of the previous one
        expected, result = (one.generate(ids, max_new_tokens=10).result for one in (xla, engine))
        assert result.tokens == expected.tokens and result.logprobs == pytest.approx(expected.logprobs, abs=1e-4)


def test_engine_works_after_close(engine, model):
    whole = list(engine.generate([1], max_new_tokens=12))
    generation = engine.generate([1], max_new_tokens=400)
    assert [next(generation) for _ in range(3)] == whole[:3]
    generation.cancel()
    assert list(engine.generate([1], max_new_tokens=12)) == whole


def test_graph_backends_give_the_same_tokens(engine, model):
    graph = make_engine(model, "cuda-graph")
    prompt = small.prompt_of(model.config, 20)
    answers = [
        one.generate(prompt, max_new_tokens=8, sampling=Sampling(temperature=0.9, seed=3)).result
        for one in (engine, graph)
    ]
    assert answers[0].tokens == answers[1].tokens and answers[0].logprobs == answers[1].logprobs
    expected = {"backend": "cuda-graph", "launch": "one kernel per op, under a CUDA graph"}
    expected["launches_per_token"] = 5 * model.config.num_hidden_layers + 3
    assert (
        expected.items() <= graph.conditions.items() and engine.conditions["launch"] == "one kernel for a whole answer"
    )


def test_drafts_change_no_answer(engine, model):
    drafting, prompt = make_engine(model, speculation=9), [*range(20), *range(12)]
    sampling = Sampling(temperature=1.0, top_k=20, top_p=0.9, repetition_penalty=1.2, seed=5)
    assert drafting.conditions["speculation"] == 3 and engine.conditions["speculation"] == 0
    expected = engine.generate(prompt, max_new_tokens=20, sampling=sampling).result
    for options in ({}, {"draft_max": 1}, {"prediction": expected.tokens}):
        generation = drafting.generate(prompt, max_new_tokens=20, sampling=sampling, **options)
        assert generation.result.tokens == expected.tokens
    assert generation.result.drafting.predicted_accepted > 0
    with pytest.raises(InputError, match="cannot force an answer"):
        engine.generate(prompt, max_new_tokens=3, forced=[1, 2])
    assert drafting.generate(prompt, max_new_tokens=3, forced=[1, 2]).result.tokens[:2] == (1, 2)


@pytest.mark.slow
def test_weights_in_12_bits_give_the_same_answer(tmp_path, caplog):
    """The folder is in either format. One product of layer 0 has too many exceptions for 12 bits."""
    config = small.make_config(hidden_size=80, ff=300, head_dim=16, heads=4, lanes=3, num_hidden_layers=2)
    weights = {path: jax.device_put(weight) for path, weight in small.make_weights(config, "bfloat16").items()}
    powers = jnp.exp2(jnp.arange(-60, 60, dtype=jnp.float32))
    wide = weights["layers.0.feed_forward.w2"]
    weights["layers.0.feed_forward.w2"] = jnp.resize(powers, wide.shape).astype(wide.dtype)
    laneformer.save_hf(Laneformer(config, weights), tmp_path, weights="bf12")
    engines = [make_engine(Laneformer(config, weights)), make_engine(Laneformer(config, weights), weights="bf12")]
    options = DEVICES if emulated.REAL else DEVICES | {"driver": emulated.driver()}
    with caplog.at_level("INFO", "laneformer"):
        engines.append(infer.Engine.load(tmp_path, "cuda", weights="bf12", absorb=False, **options))
    assert "matrices stay bfloat16: over 0.001 of their weights are exceptions" in caplog.text
    prompt = small.prompt_of(config, 7)
    answers = [
        engine.generate(prompt, max_new_tokens=8, sampling=Sampling(temperature=1.0, seed=3)).result
        for engine in engines
    ]
    assert len({(*answer.tokens, *answer.logprobs) for answer in answers}) == 1
    plain, packed, folder = (engine.conditions for engine in engines)
    assert "bf12_weights" not in plain and packed["bf12_weights"] == folder["bf12_weights"] > 0
    saved = packed["bf12_weights"] / 2 - 4 * packed["bf12_exceptions"]
    assert weight_bytes(engines[0]) - weight_bytes(engines[1]) == saved > 0


def test_other_dtypes_in_12_bits_are_refused(model):
    with pytest.raises(ConfigError, match="--weights bf12 needs bfloat16 weights, got float32"):
        make_engine(model, weights="bf12")


@pytest.mark.slow
def test_quantized_weights_match_backend_xla(model, tmp_path):
    """Weights are quantized before, when they are packed, or in a folder. One prompt is read by XLA."""
    config, paths = model.config, plan_of(ModelSource(model)).matrices
    records = {
        path: round_to(np.asarray(weight), "int4", search=False) if path in paths else weight
        for path, weight in model.weights().items()
    }
    quantized = Laneformer(config, {path: put_weight(weight, P(), None) for path, weight in records.items()})
    engines = [infer.Engine(quantized, "xla"), make_engine(quantized), make_engine(model, weights="int4")]
    for length in (3, 100):
        xla, packed, rounded = (
            engine.generate(small.prompt_of(config, length), max_new_tokens=8).result for engine in engines
        )
        assert packed.tokens == rounded.tokens == xla.tokens and packed.logprobs == rounded.logprobs
        assert packed.logprobs == pytest.approx(xla.logprobs, abs=1e-4)
    laneformer.save_hf(quantized, tmp_path)
    options = DEVICES if emulated.REAL else DEVICES | {"driver": emulated.driver()}
    folder = infer.Engine.load(tmp_path, "cuda", absorb=False, **options)
    results = [one.generate([1, 2, 3], max_new_tokens=8).result for one in (engines[1], folder)]
    assert results[0].tokens == results[1].tokens and results[0].logprobs == results[1].logprobs
    facts = [engine.conditions for engine in (*engines, folder)]
    assert len({one["quantized_weights"] for one in facts}) == 1
    assert facts[0]["quantized_formats"] == facts[1]["quantized_formats"] == ["int4 row"]
    with pytest.raises(ConfigError, match=r"--weights int8: weight \S+ is quantized already"):
        make_engine(quantized, weights="int8")
    path = next(path for path in sorted(paths) if path.endswith("wo"))
    order = jnp.arange(records[path].columns, dtype=jnp.int32)[::-1]
    records[path] = dataclasses.replace(records[path], order=np.asarray(order))
    sorted_columns = Laneformer(config, {path: put_weight(weight, P(), None) for path, weight in records.items()})
    message = rf"weight {path} .* has reordered columns, .*: use backend xla, or add --weights bfloat16"
    with pytest.raises(ConfigError, match=message):
        make_engine(sorted_columns)


MIXTURES = [  # folder, lanes, devices
    ("mixtral", 1, 1),
    ("mixtral", 4, 2),
    ("qwen3_moe_1", 8, 4),
    ("qwen3_moe_2", 1, 1),
    ("qwen3_moe_2", 4, 1),
    ("qwen3_moe_mixed", 2, 1),
    ("gpt_oss_1", 1, 1),
    ("gpt_oss_1", 8, 2),
    ("gpt_oss_2", 2, 1),
    ("gpt_oss_2", 8, 8),
    ("deepseek_v3_1", 1, 1),
    ("deepseek_v3_1", 4, 2),
    ("deepseek_v3_2", 2, 1),
    ("kimi_1", 1, 1),
    ("kimi_1", 4, 4),
    ("kimi_2", 2, 1),
    ("qwen3_next_1", 1, 1),
    ("qwen3_next_1", 2, 2),
    ("qwen3_next_2", 1, 1),
    ("qwen3_next_2", 2, 2),
    ("deepseek_v4_1", 1, 1),
    ("deepseek_v4_1", 2, 2),
]
QUICK_MIXTURES = {("gpt_oss_2", 2, 1)}
SLOW_MIXTURES = {("kimi_1", 1, 1), ("qwen3_moe_mixed", 2, 1), ("qwen3_next_2", 2, 2), ("deepseek_v4_1", 1, 1)}


@emulated.only_emulated
@pytest.mark.parametrize(("case", "lanes", "devices"), some(MIXTURES, QUICK_MIXTURES, SLOW_MIXTURES))
def test_mixtures_of_experts_match_their_references(case, lanes, devices):
    check_mixture(case, lanes, devices)


@emulated.only_emulated
@pytest.mark.exhaustive
def test_two_formats_in_a_product_work_with_warps_of_64():
    """The product with two formats is that of DeltaNet's projections."""
    check_mixture("qwen3_next_2", 1, 1, machine=AMD, compile_with=emulated.compile_with(AMD))


def check_mixture(case, lanes, devices, **options):
    """Compares the logits of some positions, and greedy tokens. FP8, MXFP4 and INT4 weights keep their formats."""
    io = np.load(MOE / case / "io.npz")
    options = DEVICES | {"driver": emulated.driver(), "absorb": False, "dtype": "float32"} | options
    options["speculation"] = 3 * (case in ("gpt_oss_2", "qwen3_next_1"))  # up to four rows, also of the prompt
    engine = infer.Engine.load(MOE / case, "cuda", num_lanes=lanes, devices=devices, **options)
    assert list(engine.generate(io["greedy_prompt"], max_new_tokens=12, stop_tokens=())) == io["greedy_ids"].tolist()
    formats = {"gpt_oss_2": "mxfp4", "kimi_1": "int4", "kimi_2": "int4"}
    formats |= dict.fromkeys(("qwen3_moe_2", "deepseek_v3_2", "qwen3_next_2"), "fp8")
    assert formats.get(case, "None") in str(engine.conditions.get("quantized_formats"))
    ids, config, mesh = io["input_ids"][0][:24], engine.config, make_mesh(lanes, lane=devices) if devices > 1 else None
    call, state = jitted(engine.session, mesh, room=8, logits=True), small.make_state(config, len(ids), "float32", mesh)
    for first in range(0, len(ids), 8):
        now = ids[first : first + 8]
        inputs = small.make_inputs(now, 1, start=first, room=8)
        outputs, state = call(inputs, state._replace(seen=np.zeros(config.vocab_size, np.uint8)))
        assert np.abs(outputs.logits[0] - io["logits"][0, first + len(now) - 1]).max() < 1e-3


@pytest.mark.slow
@emulated.only_emulated
def test_prompt_of_experts_read_by_xla_matches_backend_xla():
    """XLA reads the prompt in one block, and the kernel continues with its cache."""
    options = DEVICES | {"driver": emulated.driver()}
    engines = (
        infer.Engine.load(MOE / "gpt_oss_2", name, num_lanes=2, dtype="float32", **given)
        for name, given in (("xla", {}), ("cuda", options))
    )
    prompt = np.load(MOE / "gpt_oss_2" / "io.npz")["input_ids"].reshape(-1)[:70]
    xla, cuda = (engine.generate(prompt, max_new_tokens=8, stop_tokens=()).result for engine in engines)
    assert cuda.tokens == xla.tokens and cuda.logprobs == pytest.approx(xla.logprobs, abs=1e-4)


def test_auto_skips_graph_backends(model, monkeypatch):
    for backend in (CudaBackend, infer.BACKENDS["cpu"]):
        monkeypatch.setattr(
            backend, "unavailable", classmethod(lambda cls, source: None if cls is CudaGraphBackend else "no")
        )
    assert infer.Engine(model).backend == "xla"


def test_conditions_and_trace_are_reported(engine, tmp_path, model):
    conditions = engine.conditions
    layout = engine.session.layout
    assert [conditions[name] for name in ("backend", "threads_per_cta", "ctas")] == [
        "cuda",
        layout.threads,
        layout.grid,
    ]
    engine.session.trace(spans_needed(model.config.num_hidden_layers, 1, 3))
    list(engine.generate([1], max_new_tokens=3))
    count = write_perfetto(tmp_path / "trace.json", engine.session)
    engine.session.trace(0)
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert count == sum(event["ph"] == "X" for event in events) > 0
    run = {event["name"] for event in events if event["ph"] == "X"}
    assert run == {"embed", "merge", "final", "head", "sample", "qkv", "attend", "out", "gate_up", "down"}
    assert engine.session.read_pass() >= 0  # here it is the difference of two short times


def test_engine_works_after_a_device_error(engine, monkeypatch):
    before = list(engine.generate([1], max_new_tokens=5))
    with monkeypatch.context() as patch:
        patch.setattr(
            "laneformer.infer.engine.native.power_of_two", lambda n: 1
        )  # makes a cache that is too small for the call
        patch.setattr("laneformer.infer.engine.native.SMALLEST_CACHE", 1)
        with pytest.raises(NativeError, match="do not fit the cache"):
            list(engine.generate([1], max_new_tokens=5))
    assert list(engine.generate([1], max_new_tokens=5)) == before


@emulated.only_emulated
def test_unavailable_backends_give_the_reason(model):
    assert "needs AMD GPUs" in HipBackend.unavailable(ModelSource(model))
    with pytest.raises(ConfigError, match="driver cannot be loaded"):
        infer.Engine(model, "cuda", **DEVICES, driver=Path("/nowhere/libcuda.so.1"))
    unavailable = GpuBackend.unavailable.__func__
    assert unavailable(CudaBackend, ModelSource(model)) == "it needs NVIDIA GPUs, but JAX's devices are cpu"
    source = ModelSource(model)
    client = SimpleNamespace(platform_version="cuda 13000")
    device = SimpleNamespace(
        platform="gpu", client=client, device_kind="NVIDIA A100", compute_capability="8.0", process_index=0
    )
    source.mesh = SimpleNamespace(devices=np.array([device]))
    assert (
        unavailable(CudaBackend, source)
        == "NVIDIA A100 has compute capability 8.0, but the kernel is written for 9.0 (H100 and H200)"
    )
    device.compute_capability, device.core_count = "9.0", 114
    assert unavailable(CudaBackend, source) is None
    assert machine_of("cuda", device).ctas == 114 and machine_of("cuda", SimpleNamespace(core_count=132)).ctas == 128
