"""DeepSeek-V4 against a reference model and float64 NumPy: lanes, caches, generation, and files that are refused."""

import json
import shutil
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import laneformer
from laneformer import CheckpointError, ConfigError
from laneformer.decoder import decoder_ops
from laneformer.hf import config_from_hf, dimensions_from_hf
from laneformer.hf.families.deepseek_v4 import sources
from laneformer.hf.safetensors import find_tensors
from laneformer.infer import Engine, Sampling
from laneformer.ops import GpuOp, without_kernel
from laneformer.quantized import Quantized, e8m0_values
from laneformer.weights import attention_flops_per_token, kv_bytes_per_token, matmul_parameters, parameter_table
from tests.support import small, tiny
from tests.support.hf import deepseek_v4, packers
from tests.support.hf.configs import V4
from tests.support.paths import MOE

CASE = MOE / "deepseek_v4_1"


@cache
def io():
    return np.load(CASE / "io.npz")


@cache
def model(lanes: int = 1) -> laneformer.Laneformer:
    return laneformer.load(CASE, dtype="float32", num_lanes=lanes)


def values() -> dict:
    return json.loads((CASE / "config.json").read_text())


def extend(own, ids, parts, capacity=160):
    """Logits of ids [b, s], computed part by part with a cache."""
    step = jax.jit(lambda own, ids, cache: own.extend(ids, cache))
    kept, found, start = own.make_cache(len(ids), capacity), [], 0
    for part in parts:
        logits, kept = step(own, ids[:, start : start + part], kept)
        found.append(logits)
        start += part
    return jnp.concatenate(found, 1)


def routes(own, ids):
    """The experts [s, k] of the tokens in each layer. ids: [1, s]."""

    @jax.jit
    def run(own, ids):
        routings = []
        own._streams(ids, None, None, "none", routings=routings)
        return [x.chosen_lbsj[0, 0] for x in routings]

    return run(own, ids)


@pytest.mark.parametrize("lanes", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_logits_equal_the_reference(lanes):
    """150 positions exceed the window of 16 and one entry of 128, and make 37 entries, of which 8 are chosen."""
    assert tiny.difference(model(lanes)(io()["input_ids"]), io()["logits"]) < 1e-4


@pytest.mark.slow
def test_routes_and_logits_equal_float64():
    ids = io()["input_ids"][:1]
    logits, chosen = deepseek_v4.Model(values(), load_file(CASE / "model.safetensors"))(ids[0])
    assert tiny.difference(model()(io()["input_ids"])[0], logits) < 1e-4  # the program of the test before this one
    for a, b in zip(routes(model(), ids), chosen, strict=True):
        np.testing.assert_array_equal(np.sort(a), np.sort(b))


@pytest.mark.slow
@pytest.mark.parametrize(
    "parts", [(7, 136, 7), (1,) * 150, pytest.param((7, 120, 3, 1, 19), marks=pytest.mark.exhaustive)]
)
def test_any_split_of_a_prompt_gives_the_same_logits(parts):
    ids = io()["input_ids"]
    assert tiny.difference(extend(model(), ids, parts), io()["logits"]) < 1e-4


@pytest.mark.slow
def test_padding_changes_nothing_that_is_kept():
    ids, kept, found, start = io()["input_ids"], model().make_cache(2, 160), [], 0
    step = jax.jit(lambda own, ids, kept, count: own.extend(ids, kept, count=count))
    for count in (13, 16, 9, 5, 16):
        padded = np.full((2, 16), 3)
        padded[:, :count] = ids[:, start : start + count]
        logits, kept = step(model(), padded, kept, np.int32(count))
        found.append(logits[:, :count])
        start += count
    assert tiny.difference(jnp.concatenate(found, 1), io()["logits"][:, :start]) < 1e-4


@pytest.mark.slow
def test_lanes_on_a_mesh_equal_the_reference():
    own = laneformer.load(CASE, dtype="float32", num_lanes=2, mesh=laneformer.make_mesh(2, lane=2))
    assert tiny.difference(extend(own, io()["input_ids"], (75, 75)), io()["logits"]) < 1e-4


@pytest.mark.slow
def test_engine_generates_the_reference_tokens():
    """The prompt has 136 tokens. A second request reuses the cache."""
    engine, prompt = Engine(model(), backend="xla"), io()["greedy_prompt"].tolist()
    for count in (12, 4):
        found = [*engine.generate(prompt, max_new_tokens=count, sampling=Sampling(temperature=0))]
        assert found == io()["greedy_ids"][:count].tolist()


VARIANT = {
    **{"num_attention_heads": 8, "o_groups": 4, "head_dim": 16, "num_hidden_layers": 3, "hc_mult": 2},
    **{"compress_ratios": [4, 128, 0], "num_hash_layers": 2, "sliding_window": 5, "index_n_heads": 4},
    **{"index_topk": 3, "hc_sinkhorn_iters": 4, "swiglu_limit": 0.05, "rope_scaling": None, "n_routed_experts": 6},
}


@pytest.fixture(scope="module")
def variant(tmp_path_factory):
    """A folder with random weights of other sizes."""
    folder = tmp_path_factory.mktemp("variant")
    given = values() | VARIANT
    (folder / "config.json").write_text(json.dumps(given))
    config, random = config_from_hf(given), np.random.default_rng(5)
    tensors = {}
    for source in sources(config, parameter_table(config)).values():
        shape = source.shape[1:] if source.experts else source.shape
        for name in source.names:
            if source.integers:
                tensors[name] = np.argsort(random.random((shape[0], given["n_routed_experts"])), -1)[:, : shape[1]]
            else:
                scale = 1.0 if len(shape) == 1 else shape[-1] ** -0.5
                tensors[name] = np.float32(random.normal(size=shape) * scale)
    save_file({name: np.ascontiguousarray(w) for name, w in tensors.items()}, folder / "model.safetensors")
    return folder


@pytest.mark.slow
def test_other_sizes_equal_float64(variant):
    """More heads and groups, two streams, a limit that clamps, all ratios, no rope scaling; four lanes, and a cache."""
    ids = np.random.default_rng(6).integers(0, 256, (1, 140))
    logits, chosen = deepseek_v4.Model(values() | VARIANT, load_file(variant / "model.safetensors"))(ids[0])
    own = laneformer.load(variant, num_lanes=4)
    assert tiny.difference(own(ids)[0], logits) < 2e-4
    assert tiny.difference(extend(own, ids, (70, 70))[0], logits) < 2e-4
    for a, b in zip(routes(own, ids), chosen, strict=True):
        np.testing.assert_array_equal(np.sort(a), np.sort(b))


def test_saved_model_is_read_again_unchanged(tmp_path):
    """In two lanes, every bit is kept. Integers and float32 weights keep their dtype, even if 16 bits are requested."""
    first = laneformer.load(CASE, num_lanes=2)
    again = laneformer.load(laneformer.save_hf(first, tmp_path), dtype="bfloat16")
    assert again.config == first.config
    for path, weight in first.weights().items():
        assert weight.dtype == again.weights()[path].dtype, path
        np.testing.assert_array_equal(weight, again.weights()[path], err_msg=path)
    assert first.weights()["layers.0.feed_forward.by_token"].dtype == "int32"
    assert first.weights()["layers.1.attention_streams.mix"].dtype == "float32"


@pytest.mark.slow
def test_fresh_weights_give_finite_logits():
    own = laneformer.Laneformer.init(config_from_hf(values()))
    assert np.isfinite(own(io()["input_ids"])).all()
    table = own.weights()["layers.0.feed_forward.by_token"]
    assert table.min() == 0 and table.max() == 7 and all(len(set(row)) == 3 for row in table[:20].tolist())


def test_weights_per_token_equal_the_dimensions():
    """At published sizes. Dimensions do not count the matrices that mix the streams."""
    published = V4 | {"quantization_config": None}
    config = config_from_hf(published)
    mixing = sum(w.size for path, w in parameter_table(config).items() if path.endswith("streams.mix"))
    found = sum(part.read for part in dimensions_from_hf(published).parts)
    assert matmul_parameters(config) - mixing == found


def test_state_bytes_equal_those_by_hand():
    """Bytes that a token writes, and reads after 99 earlier positions: two per value, four in compressors' tails."""
    ring, tails = 4 * 32 * (1 + 15), 2 * (7 * 128 + 7 * 64) + 127 * 64
    entries = 2 * (32 * (0.25 + 8) + 16 * (0.25 + 24)) + round(32 * (1 / 128 + 0))
    assert kv_bytes_per_token(config_from_hf(values()), 99, 2) == 2 * (ring + entries) + 4 * 2 * tails


def test_flops_of_attention_equal_those_by_hand():
    """100 tokens attend on average to 14.8 of the newest 16 positions, and to entries over 50.5 positions: 8 chosen
    ones of four positions, or all of 128 positions. There are four heads of 32 channels, and 16 of 16 in the index.
    """
    keys, index = 4 * 14.8 + 2 * 8 + 50.5 / 128, 2 * 50.5 / 4
    found = attention_flops_per_token(config_from_hf(values()), 100)
    assert found == pytest.approx(4 * 4 * 32 * keys + 2 * 16 * 16 * index)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"compress_ratios": [0, 4, 128]}, "compress_ratios = [0, 4, 128] must have a number for each of the 4 layers"),
        ({"compress_ratios": [0, 4, 64, 4]}, "compress_ratios[2] = 64"),
        ({"compress_ratios": 4}, "compress_ratios = 4 must be a list"),
        ({"scoring_func": "sigmoid"}, "scoring_func = 'sigmoid'"),
        ({"topk_method": "greedy"}, "topk_method = 'greedy'"),
        ({"num_key_value_heads": 2}, "num_key_value_heads = 2"),
        ({"attention_bias": True}, "attention_bias = True"),
        ({"o_groups": 3}, "compressed_attention.o_groups = 3 must divide num_attention_heads = 4"),
        ({"qk_rope_head_dim": 64}, "compressed_attention.qk_rope_head_dim = 64"),
        ({"hc_mult": 0}, "hc_mult = 0"),
        ({"hc_sinkhorn_iters": 0}, "hc_sinkhorn_iters = 0"),
        ({"num_hash_layers": 5}, "hash_layers = 5"),
        ({"index_topk": "8"}, "index_topk = '8'"),
    ],
)
def test_unknown_configs_are_refused(changes, words):
    with pytest.raises(ConfigError) as caught:
        config_from_hf(values() | changes)
    assert words in str(caught.value) and "\n" not in str(caught.value)


def test_other_layouts_and_unfit_lanes_are_refused():
    config = config_from_hf(values())
    with pytest.raises(ConfigError, match="residual_streams requires layout 'tp', got 'ladder'"):
        config.replace(layout="ladder")
    with pytest.raises(ConfigError, match=r"num_lanes = 4 does not divide compressed_attention.o_groups = 2"):
        config.replace(num_lanes=4)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: t.pop("layers.1.attn.compressor.ape"), "lacks tensor(s) layers.1.attn.compressor.ape"),
        (lambda t: t.update({"layers.4.norm": t["norm.weight"]}), "has unknown tensor(s) layers.4.norm"),
        (
            lambda t: t.update({"layers.0.ffn.gate.tid2eid": np.ones((256, 3), np.float32)}),
            "tensor layers.0.ffn.gate.tid2eid has dtype F32; convert it to one of I32, I64",
        ),
        (
            lambda t: t.update({"layers.2.attn.wkv.weight": t["layers.2.attn.wq_a.weight"]}),
            "layers.2.attn.wkv.weight has shape [48, 64], but config.json gives [32, 64]",
        ),
    ],
)
def test_damaged_files_are_refused(tmp_path, change, words):
    folder = tmp_path / "model"
    shutil.copytree(CASE, folder)
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(CheckpointError) as caught:
        laneformer.load(folder)
    assert words in str(caught.value) and "\n" not in str(caught.value)


# ---- packed as published: experts in FP4, the other matrices in FP8

FP8 = ("attn.wq_a", "attn.wq_b", "attn.wkv", "attn.wo_a", "attn.wo_b", "indexer.wq_b", "shared_experts.w")
QUANTIZATION = V4["quantization_config"] | {"activation_scheme": "dynamic", "fmt": "e4m3", "scale_fmt": "ue8m0"}


def packing_of(name: str):
    """The packer of the tensor with this name; None if it is not packed."""
    if ".ffn.experts." in name:
        return packers.deepseek_fp4
    return packers.deepseek_fp8 if any(f".{part}" in name for part in FP8) else None


def write_packed(folder, change=lambda tensors: None, pack=packing_of, **fields) -> dict[str, np.ndarray]:
    """Writes the case with packed tensors. Returns name -> exact weights."""
    tensors = load_file(CASE / "model.safetensors")
    weights, written = dict(tensors), {}
    for name, w in tensors.items():
        module = name.removesuffix(".weight")
        if rounded := pack(name):
            made = rounded(w.astype(np.float64))
            weights[name] = made.weights
            written |= {f"{module}.{suffix}": tensor for suffix, tensor in made.tensors.items()}
        else:
            written[name] = w
    change(written)
    folder.mkdir(exist_ok=True)
    save_file({name: np.ascontiguousarray(w) for name, w in written.items()}, folder / "model.safetensors")
    given = values() | {"quantization_config": QUANTIZATION, "expert_dtype": "fp4"} | fields
    (folder / "config.json").write_text(json.dumps(given))
    return weights


@pytest.fixture(scope="module")
def packed(tmp_path_factory):
    """A packed folder, and the first sequence's float64 logits with exactly the folder's weights."""
    folder = tmp_path_factory.mktemp("packed")
    weights = write_packed(folder)
    logits, _ = deepseek_v4.Model(values(), weights)(io()["input_ids"][0])
    return folder, logits


@pytest.mark.slow
@pytest.mark.parametrize("lanes", [1, pytest.param(2, marks=pytest.mark.exhaustive)])
def test_published_packing_is_read_exactly(packed, lanes):
    folder, logits = packed
    own = laneformer.load(folder, num_lanes=lanes)
    assert tiny.difference(extend(own, io()["input_ids"][:1], (75, 75))[0], logits) < 1e-4
    rounding = tiny.difference(io()["logits"][0], logits)
    assert rounding > 1e-2, "the packed weights differ from those of the case"
    kinds = {path: weight.kind if isinstance(weight, Quantized) else None for path, weight in own.weights().items()}
    experts = {path for path, kind in kinds.items() if kind == "mxfp4"}
    assert experts == {f"layers.{n}.feed_forward.{w}" for n in range(4) for w in ("w1", "w2", "w3")}
    blocks = {path.split(".", 2)[2] for path, kind in kinds.items() if kind == "fp8"}
    attention = {f"attention.{name}" for name in ("wq_a", "wq_b", "wkv", "wo_a", "wo_b", "indexer.wq")}
    assert blocks == attention | {f"feed_forward.shared.{w}" for w in ("w1", "w2", "w3")}


@small.needs_library
@pytest.mark.parametrize("lanes", [1, 2])
def test_packed_model_on_backend_cpu_equals_float64(packed, lanes):
    """The weights stay packed. The prompt is read in two calls."""
    folder, logits = packed
    engine, ids = Engine.load(folder, "cpu", num_lanes=lanes, threads=2), io()["input_ids"][0]
    assert {name.split()[0] for name in engine.conditions["quantized_formats"]} == {"fp8", "mxfp4"}
    call, state = small.jitted(engine.session, room=150, logits=True), small.make_state(engine.config, 160)
    for start, end in ((0, 101), (101, 150)):
        outputs, state = call(small.make_inputs(ids[start:end], 1, start=start, room=150), state)
        assert np.abs(outputs.logits[0] - logits[end - 1]).max() < 1e-3


@small.needs_library
def test_table_with_unknown_experts_is_refused(tmp_path):
    tensors = load_file(CASE / "model.safetensors")
    tensors["layers.0.ffn.gate.tid2eid"][7, 2] = 8
    save_file(tensors, tmp_path / "model.safetensors")
    shutil.copy(CASE / "config.json", tmp_path)
    with pytest.raises(CheckpointError, match=r"by_token has expert 8 at \[7, 2\], .* 0 to 7: copy"):
        Engine.load(tmp_path, "cpu")


@pytest.mark.parametrize("lanes", [1, 2])
def test_packed_weights_are_read_again_unchanged(packed, tmp_path, lanes):
    first = laneformer.load(packed[0], num_lanes=lanes)
    again = laneformer.load(laneformer.save_hf(first, tmp_path)).weights()
    for path, weight in first.weights().items():
        arrays, others = (w.arrays if isinstance(w, Quantized) else {"all": w} for w in (weight, again[path]))
        assert arrays.keys() == others.keys(), path
        for name, array in arrays.items():
            assert array.dtype == others[name].dtype, path
            np.testing.assert_array_equal(array, others[name], err_msg=path)


def test_scales_keep_their_bits(packed):
    """The scales are powers of two, from the smallest to the largest of E8M0."""
    bits = find_tensors(packed[0])[0]["layers.1.attn.indexer.wq_b.scale"].values()
    record = laneformer.load(packed[0]).weights()["layers.1.attention.indexer.wq"]
    np.testing.assert_array_equal(np.asarray(record.scales, np.float64), 2.0 ** (bits.astype(float) - 127))
    assert bits.shape == (2, 1) and np.all(bits > 0)
    codes = np.arange(255, dtype=np.uint8)
    found = e8m0_values(codes).astype(packers.BF16).astype(np.float64)
    np.testing.assert_array_equal(found, 2.0 ** (codes.astype(float) - 127))
    assert np.isnan(e8m0_values(np.array([255], np.uint8)))


def test_experts_in_fp8_are_read(tmp_path):
    """The base model has experts in FP8 with float32 scales."""

    def wide(tensors):
        for name in [name for name in tensors if name.endswith(".scale")]:
            tensors[name] = tensors[name].astype(np.float32)

    fp8 = lambda name: packers.deepseek_fp8 if packing_of(name) else None  # noqa: E731
    weights = write_packed(tmp_path, wide, fp8, expert_dtype="fp8")
    records = laneformer.load(tmp_path).weights()
    found = records["layers.2.feed_forward.w1"].on_host()
    assert found.kind == "fp8" and found.scales.dtype == np.float32
    np.testing.assert_array_equal(found.dequantize()[0, 3], weights["layers.2.ffn.experts.3.w1.weight"])


def test_packed_weights_can_be_widened(packed):
    own = laneformer.load(packed[0], weights="bfloat16")
    assert not any(isinstance(weight, Quantized) for weight in own.weights().values())


W1, WKV = "layers.1.ffn.experts.2.w1", "layers.1.attn.wkv"


@pytest.mark.parametrize(
    ("change", "fields", "words"),
    [
        (lambda t: t.pop(f"{W1}.scale"), {}, f"tensor {W1}.scale is missing"),
        (lambda t: t.pop(f"{WKV}.scale"), {}, f"tensor {WKV}.weight_scale_inv/weight_scale/scale is missing"),
        (
            lambda t: t.update({f"{W1}.scale": t[f"{W1}.scale"][:, :1]}),
            {},
            f"tensor {W1}.scale has shape [32, 1], but this packing needs [32, 2]",
        ),
        (
            lambda t: t.update({f"{WKV}.scale": t["layers.1.attn.indexer.wq_b.scale"]}),
            {},
            f"tensor {WKV}.scale has shape [2, 1], but this packing needs [1, 1]",
        ),
        (
            lambda t: t.update({f"{W1}.weight": t[f"{W1}.weight"].astype(np.int32)}),
            {},
            f"tensor {W1}.weight has dtype I32, but this packing needs I8 or U8",
        ),
        (
            lambda t: t[f"{WKV}.scale"].view(np.uint8).fill(255),
            {},
            f"tensor {WKV}.weight is damaged: scale nan at [0, 0] is not a finite number",
        ),
        (
            lambda t: t.update(
                {f"layers.1.ffn.gate.{s}": x for s, x in packers.deepseek_fp8(np.ones((8, 64))).tensors.items()}
            ),
            {},
            "tensor layers.1.ffn.gate.weight is quantized, which layers.1.feed_forward.router of DeepSeek V4 cannot be",
        ),
        (lambda t: None, {"expert_dtype": "fp8"}, "weight has dtype I8, but this packing needs F8_E4M3"),
        (lambda t: None, {"expert_dtype": "fp6"}, "unknown expert_dtype 'fp6'; choose fp4, fp8"),
        (
            lambda t: None,
            {"quantization_config": QUANTIZATION | {"weight_block_size": [64, 64]}},
            "quantization_config.weight_block_size = [64, 64] of DeepSeek V4 must be [128, 128]",
        ),
        (
            lambda t: None,
            {"quantization_config": QUANTIZATION | {"quant_method": "gptq"}},
            "quantization_config.quant_method = 'gptq' of DeepSeek V4 is not supported; supported are fp8",
        ),
        (
            lambda t: None,
            {"quantization_config": QUANTIZATION | {"fmt": "e5m2"}},
            "quantization_config.fmt = 'e5m2' of DeepSeek V4 is not supported; supported are e4m3",
        ),
    ],
)
def test_unfit_packed_files_are_refused(tmp_path, change, fields, words):
    write_packed(tmp_path, change, **fields)
    with pytest.raises((CheckpointError, ConfigError)) as caught:
        laneformer.load(tmp_path)
    assert words in str(caught.value) and "\n" not in str(caught.value)


def test_decode_kernels_have_all_ops():
    ops = decoder_ops(config_from_hf(values()))
    assert without_kernel(ops) is None and without_kernel(ops, GpuOp) is None
