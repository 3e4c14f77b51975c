"""The figures of the benchmark for known times, its random weights, and the trace file."""

import gzip
import json
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from laneformer import ConfigError, ModelConfig, custom_calls, make_mesh, parameter_count
from laneformer.custom_calls.trace import spans_needed, write_perfetto
from laneformer.hf import config_from_hf
from laneformer.infer.bench import latency
from laneformer.infer.bench.latency import Case, Run, Speeds, packed_weight_bytes
from laneformer.infer.bench.record import weights_of
from laneformer.infer.engine.engine import Engine
from laneformer.infer.engine.sources import RandomSource, is_recipe, recipe_config, recipe_model
from laneformer.infer.engine.xla import XlaBackend
from laneformer.infer.roofline.published import DEEPSEEK_V4_FLASH
from laneformer.weights import packing_order, parameter_table
from tests.support.hf.configs import MIXTURES

CONFIG = ModelConfig(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    num_lanes=2,
    max_position_embeddings=64,
    qkv_bias=True,
)


def run_of(arrivals, counts, drawn=None) -> Run:
    tokens = tuple(range(sum(counts)))
    return Run(tokens, np.array(arrivals, float), np.array(counts), None if drawn is None else np.array(drawn, float))


@pytest.mark.parametrize("count", [1, 2, 37, 9_999, 10_000])
def test_percentiles_match_numpy(count):
    samples = np.random.default_rng(count).exponential(size=count)
    summary = latency.summary(samples)
    for p in (50, 90, 95, 99):
        assert summary[f"p{p}"] == pytest.approx(np.quantile(samples, p / 100))
    assert summary["p99.9"] == (pytest.approx(np.quantile(samples, 0.999)) if count == 10_000 else None)
    assert summary["n"] == count and summary["max"] == samples.max() and summary["min"] == samples.min()
    assert summary["mean"] == pytest.approx(samples.mean()) and summary["std"] == pytest.approx(samples.std())


def test_run_has_the_arrivals_of_dispatches():
    times = (0.5, 0.7, 0.7, 0.7, 1.5)
    result = SimpleNamespace(tokens=(5, 6, 7, 8, 9), token_times=times, tokens_per_dispatch=(1, 3, 1), drafting=None)
    run = Run.of(result, np.array([10.0, 10.1, 10.2, 10.4, 10.5]), Speeds(5e9, 3e9, 0.25))
    assert run.arrivals.tolist() == [0.5, 0.7, 1.5] and run.counts.tolist() == [1, 3, 1] and run.seconds == 1.5
    assert run.rate == pytest.approx(4 / 1.0)
    assert run.gaps == pytest.approx([0.1, 0.1, 0.2, 0.1])  # by the kernel's clock, which has a different zero


def test_grouped_tokens_have_no_gaps():
    assert run_of([0.1, 0.2, 0.4], [1, 2, 1]).gaps is None
    assert run_of([0.1, 0.2, 0.4], [1, 1, 1]).gaps == pytest.approx([0.1, 0.2])


def test_quantized_weights_count_their_own_bytes():
    """Quantized weights count the bytes of their records, not those of the dtype of the other weights."""
    whole = packed_weight_bytes(CONFIG, "float32", {})
    facts = {"quantized_weights": 100, "quantized_bytes": 56, "quantized_formats": ["int4 group 32"]}
    assert packed_weight_bytes(CONFIG, "float32", facts) == whole - 400 + 56
    assert weights_of(facts | {"weights_dtype": "float32"}) == "int4 group 32, float32"
    assert weights_of({"weights_dtype": "bfloat16", "bf12_weights": 3}) == "bf12"


class FakeEngine:
    """Records its calls, and generates a token per second."""

    config, conditions = CONFIG, {"weights_dtype": "float32", "kv_dtype": "float32"}

    def __init__(self, backend: str, log: list, session=None):
        self.backend, self.session, self._log = backend, session, log

    def warmup(self, prompt_tokens, max_new_tokens):
        self._log.append(f"{self.backend} warms up")
        return 3.0

    def generate(self, prompt, *, max_new_tokens, stop_tokens, **_):
        assert stop_tokens == () and len(prompt) == 4
        self._log.append(f"{self.backend} runs")
        times = tuple(float(n + 1) for n in range(max_new_tokens))
        ones = (1,) * len(times)
        result = SimpleNamespace(tokens=ones, token_times=times, tokens_per_dispatch=ones, drafting=None)
        return SimpleNamespace(result=result)


def test_engines_take_turns_between_measurements_of_the_machine(monkeypatch):
    log, speeds, passes = [], iter(range(100)), iter([9, 1, 2, 3, 4, 8, 6, 7, 5, 5] * 2)
    session = SimpleNamespace(
        read_pass=lambda: next(passes), drawn=lambda first, count: SimpleNamespace(times=2.0 * np.arange(count))
    )
    engines = [FakeEngine("a", log), FakeEngine("b", log, session)]
    monkeypatch.setattr(custom_calls, "unavailable", lambda: None)
    monkeypatch.setattr(custom_calls, "default_threads", lambda: 2)
    monkeypatch.setattr(
        custom_calls, "read_bandwidth", lambda size, threads: log.append("reads") or float(next(speeds))
    )
    peaks = iter(range(100))
    monkeypatch.setattr(custom_calls, "arithmetic_peak", lambda count, threads: float(next(peaks)))
    case = Case(prompt_tokens=4, output_tokens=6, runs=2, warmup_runs=1)
    a, b = latency.measure(engines, case, lambda line: None)
    reads = ["reads"] * latency.PASSES
    turn = [*reads, "a runs", *reads, *reads, "b runs", *reads]
    assert log == ["a warms up"] * 2 + ["b warms up"] * 2 + ["a runs", "b runs"] + turn * 2
    for name in ("bandwidth", "multiply_adds"):  # medians of five measurements before and of five after
        assert [getattr(run.speeds, name) for run in a.runs] == [(2 + 7) / 2, (22 + 27) / 2]
        assert [getattr(run.speeds, name) for run in b.runs] == [(12 + 17) / 2, (32 + 37) / 2]
    assert [run.speeds.read_pass for run in b.runs] == [(3 + 6) / 2] * 2 and a.runs[0].speeds.read_pass is None
    assert a.runs[0].gaps.tolist() == [1.0] * 5 and b.runs[0].gaps.tolist() == [2.0] * 5
    assert (a.first_request, len(a.load_after)) == (3.0, 3)


def test_missing_library_gives_a_reason(monkeypatch):
    def fails():
        raise custom_calls.NativeError("compiling failed")

    monkeypatch.setattr(custom_calls, "unavailable", lambda: None)
    monkeypatch.setattr(custom_calls, "default_threads", fails)
    machine = latency.Machine(FakeEngine("xla", []), 100)
    assert machine.unavailable == "compiling failed" and machine.speeds() == (None, None, None)
    monkeypatch.setattr(custom_calls, "unavailable", lambda: "no compiler here")
    assert latency.Machine(FakeEngine("xla", []), 100).unavailable == "no compiler here"


@pytest.mark.parametrize("largest", [1, 5])
def test_peak_is_the_fastest_stretch(largest):
    random = np.random.default_rng(0)
    counts = np.concatenate([[1], random.integers(1, largest + 1, 60)])
    arrivals = np.cumsum(random.exponential(size=61))
    so_far, window = np.cumsum(counts), 20
    found = []
    for j in range(61):
        later = [k for k in range(j, 61) if so_far[k] - so_far[j] >= window]
        if later:
            tokens = so_far[later[0]] - so_far[j]
            found.append((tokens / (arrivals[later[0]] - arrivals[j]), tokens))
    assert latency.peak(arrivals, counts, window) == pytest.approx(max(found))
    assert latency.peak(arrivals, counts, int(so_far[-1])) is None  # the time of the first token is not decoding
    assert latency.peak(arrivals, counts, int(so_far[-1]) - 1) is not None


def test_first_difference_is_the_smallest_index():
    a = [SimpleNamespace(tokens=(1, 2, 3, 4)), SimpleNamespace(tokens=(5, 6, 7, 8))]
    b = [SimpleNamespace(tokens=(1, 2, 3, 9)), SimpleNamespace(tokens=(5, 0, 7, 8))]
    assert (
        latency.first_difference(a, a) is None
        and latency.first_difference(a, b) == 1
        and latency.first_difference(a[:1], b[:1]) == 3
    )


def test_bytes_per_token_are_weights_and_mean_cache():
    config = CONFIG.replace(qkv_bias=False, sliding_window=8, sliding_window_n_layers=1)
    engine = Engine(RandomSource(config, "float16"), "xla")
    case = Case(prompt_tokens=4, output_tokens=11, runs=1, warmup_runs=0)
    d, f, v, kv, size = 32, 48, 64, 16, 4  # backend xla holds weights and cache in float32 on a CPU
    layer = 2 * d * d + 2 * d * kv + 3 * d * f + 2 * d
    assert latency.weight_bytes(engine) == size * (3 * layer + d + v * d + d)
    full = [2 * kv * size * (earlier + 1) for earlier in range(4, 14)]  # the prefill draws the first token
    sliding = [2 * kv * size * (min(earlier, 7) + 1) for earlier in range(4, 14)]
    assert latency.kv_bytes(engine, case) == pytest.approx(np.mean(2 * np.array(full) + np.array(sliding)))
    assert latency.mean_context(case) == np.mean(range(4, 14))


def test_prompts_depend_on_seed_and_run():
    case = Case(prompt_tokens=50, output_tokens=2, runs=1, warmup_runs=0)
    first = case.prompt(0, 64)
    assert first.min() >= 0 and first.max() < 64 and len(first) == 50
    assert (first == case.prompt(0, 64)).all() and (first != case.prompt(1, 64)).any()


def test_random_weights_are_scaled_like_initial_ones():
    source = RandomSource(CONFIG, "bfloat16")
    table, arrays = parameter_table(CONFIG), dict(source.weights())
    assert list(arrays) == packing_order(CONFIG) and arrays.keys() == table.keys()
    for path, parameter in table.items():
        array = arrays[path].astype(np.float32)
        assert arrays[path].shape == parameter.shape and arrays[path].dtype == jnp.bfloat16
        if parameter.initial in ("ones", "zeros"):
            assert (array == (parameter.initial == "ones")).all()
        else:
            deviation = 0.02 / np.sqrt(6) if parameter.initial == "output" else 0.02
            assert array.std() == pytest.approx(deviation, rel=0.1) and abs(array.mean()) < deviation / 5
            rows = array.reshape(-1, array.shape[-1])
            assert len(np.unique(rows, axis=0)) == len(rows)
    assert (arrays["layers.0.feed_forward.w1"] != arrays["layers.1.feed_forward.w1"]).any()


def test_random_weights_are_made_one_at_a_time():
    far_too_large = CONFIG.replace(intermediate_size=2**24, num_hidden_layers=256)  # 1.6 TB
    path, array = next(RandomSource(far_too_large).weights())
    assert path == "tok_embeddings" and array.shape == (64, 32)


EXPERTS_ALONE = CONFIG.replace(
    num_experts=4, num_experts_per_tok=1, moe_intermediate_size=128, hidden_size=256, num_hidden_layers=1, layout="tp"
)


@pytest.mark.parametrize("kind", ["mxfp4", "fp8"])
def test_random_records_have_the_deviation_of_random_weights(kind):
    """Random records have the deviation of other random weights, to a power of 2. The bytes that one token reads count
    their format.
    """
    source = RandomSource(EXPERTS_ALONE, formats={"feed_forward.w1": kind, "feed_forward.w2": kind})
    assert source.quantized == ("layers.0.feed_forward.w1", "layers.0.feed_forward.w2")
    weights = dict(source.weights())
    records = [weights[path] for path in source.quantized]
    for record, deviation in zip(records, (0.02, 0.02 / np.sqrt(2)), strict=True):
        assert record.kind == kind and record.problem() is None
        assert 0.7 < record.dequantize().std() / deviation < 1.4
    facts = XlaBackend(source).conditions
    assert sum(record.nbytes for record in records) == 4 * facts["quantized_bytes"]
    assert sum(np.prod(record.shape) for record in records) == 4 * facts["quantized_weights"]


def test_published_mixtures_match_their_config_json():
    gpt = config_from_hf(MIXTURES["gpt_oss"])
    ours = recipe_config("gpt_oss_120b")
    assert gpt == ours.replace(eos_token_id=gpt.eos_token_id)
    qwen = config_from_hf(MIXTURES["qwen3_moe"] | {"norm_topk_prob": True, "rope_theta": 1e6})
    ours = recipe_config("qwen3_30b_a3b")
    same = {name: getattr(qwen, name) for name in ("bos_token_id", "eos_token_id", "max_position_embeddings")}
    assert qwen == ours.replace(**same)
    qwen = config_from_hf(MIXTURES["qwen3_next"] | {"rope_theta": 1e7})
    ours = recipe_config("qwen3_next_80b")
    assert qwen == ours.replace(**{name: getattr(qwen, name) for name in same})
    assert parameter_count(ours) == 79_674_391_296  # the parameters of the published files, without their draft head
    # The published files have 13.8 GB.
    total, experts = parameter_count(recipe_config("gpt_oss_20b")), 24 * 32 * 3 * 2880 * 2880
    assert round((2 * (total - experts) + experts * 4.25 / 8) / 1e9, 1) == 13.8
    assert set(recipe_model("gpt_oss_20b").formats.values()) == {"mxfp4"} and not recipe_model("stdlib").formats


def test_deepseek_v4_matches_its_config_json():
    scaling = {"type": "yarn", "factor": 16, "original_max_position_embeddings": 65_536}
    flash, ours = config_from_hf(DEEPSEEK_V4_FLASH | {"rope_scaling": scaling}), recipe_config("deepseek_v4_flash")
    assert flash == ours.replace(bos_token_id=flash.bos_token_id, eos_token_id=flash.eos_token_id)


@pytest.mark.parametrize("devices", [1, 2])
def test_random_model_has_the_random_weights(devices):
    source = RandomSource(CONFIG, "float32", mesh=None if devices == 1 else make_mesh(2, lane=devices))
    model = source.model()
    for path, array in source.weights():
        np.testing.assert_array_equal(model.weights()[path], array)
    assert source.precision.param == "float32" and len(model.tok_embeddings[...].devices()) == devices


@pytest.mark.parametrize("kind", ["mxfp4", "fp8"])
def test_model_made_on_an_accelerator_has_the_same_weights(kind, monkeypatch):
    source = RandomSource(EXPERTS_ALONE, formats={"feed_forward.w1": kind})
    monkeypatch.setattr("laneformer.infer.engine.sources.on_host", lambda: False)
    monkeypatch.setattr("laneformer.infer.engine.sources.model_of", None)  # which sends weights that the host made
    model = source.model()
    for path, weight in source.weights():
        own = model.weights()[path]
        for one, other in ((own.arrays, weight.arrays),) if path in source.quantized else (({"": own}, {"": weight}),):
            assert one.keys() == other.keys()
            for name, array in other.items():
                assert isinstance(one[name], jax.Array) and one[name].dtype == array.dtype
                np.testing.assert_array_equal(one[name], array)


def test_recipes_are_found_by_name_and_file(tmp_path):
    assert recipe_config("stdlib").num_lanes == 8
    assert (
        recipe_config("tiny").max_position_embeddings > recipe_config("stdlib").max_position_embeddings
    )  # the model after its last phase
    assert (
        is_recipe("stdlib")
        and is_recipe("some/file.py:mine")
        and not is_recipe("runs/stdlib")
        and not is_recipe(str(tmp_path))
    )
    own = tmp_path / "own.py"
    own.write_text(
        "from laneformer.recipes.models import STDLIB\nmodel = lambda: STDLIB.replace(layout='tp')\nnumber = 3\n"
    )
    assert recipe_config(f"{own}:model") == recipe_config("stdlib").replace(layout="tp")
    with pytest.raises(ConfigError, match="returns a int"):
        recipe_config(f"{own}:number")
    with pytest.raises(ConfigError, match=r"--checkpoint nothing .*stdlib, tiny"):
        recipe_config("nothing")


@pytest.mark.parametrize("name", ["trace.json", "trace.json.gz"])
def test_trace_has_a_row_per_worker_and_a_span_per_op(tmp_path, name):
    kind = np.dtype([("op", "i4"), ("layer", "i4"), ("begin_ns", "i8"), ("end_ns", "i8")])
    op = custom_calls.Session.ops.index
    first = np.array([(op("embed"), 0, 10_000, 10_500), (op("qkv"), 2, 10_500, 12_750)], kind)
    second = np.array([(op("exchange"), 1, 9_000, 9_250), (op("sample"), 3, 20_000, 21_000)], kind)
    session = SimpleNamespace(
        ops=custom_calls.Session.ops, worker="worker", spans=lambda: iter([(0, first), (1, second), (2, first[:0])])
    )
    assert write_perfetto(tmp_path / name, session, "a model") == 4
    read = gzip.decompress if name.endswith(".gz") else bytes
    events = json.loads(read((tmp_path / name).read_bytes()))["traceEvents"]
    names = [event for event in events if event["ph"] == "M"]
    assert [e["args"]["name"] for e in names if e["name"] == "thread_name"] == ["worker 0", "worker 1", "worker 2"]
    assert [e["args"]["name"] for e in names if e["name"] == "process_name"] == ["a model"]
    spans = [(e["name"], e["tid"], e["ts"], e["dur"], e.get("args")) for e in events if e["ph"] == "X"]
    assert spans == [
        ("embed", 0, 1.0, 0.5, None),
        ("qkv", 0, 1.5, 2.25, {"layer": 2}),
        ("exchange", 1, 0.0, 0.25, {"layer": 1}),
        ("sample", 1, 11.0, 1.0, None),
    ]
    assert {e["pid"] for e in events} == {1}


def test_spans_needed_grow_with_the_work():
    assert spans_needed(2, 5, 3) >= 8 * 2 * len(custom_calls.Session.ops)
