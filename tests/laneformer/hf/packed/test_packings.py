"""Published packings of quantized weights: files from independent writers become records with exactly their weights."""

import json
import math
import re

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save_file

from laneformer import CheckpointError, ConfigError, Laneformer, custom_calls, infer, load, make_mesh, save_hf
from laneformer.checkpoint import open_checkpoint, packed_bytes
from laneformer.hf import read_hf_config
from laneformer.hf.families.llama import LLAMA
from laneformer.quantized import Quantized
from laneformer.weights import parameter_table
from tests.support import tiny
from tests.support.hf import packers

CONFIG = {
    "model_type": "llama",
    "vocab_size": 48,
    "hidden_size": 64,
    "intermediate_size": 192,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 32,
    "dtype": "bfloat16",
}
HIDDEN, COLUMNS = CONFIG["hidden_size"], CONFIG["intermediate_size"]
SHAPES = {
    **{f"model.layers.0.self_attn.{name}_proj": (HIDDEN, HIDDEN) for name in "qkvo"},
    **{f"model.layers.0.mlp.{name}_proj": (COLUMNS, HIDDEN) for name in ("gate", "up")},
    "model.layers.0.mlp.down_proj": (HIDDEN, COLUMNS),
}
PLAIN = {  # the other weights
    "model.embed_tokens.weight": (48, HIDDEN),
    "lm_head.weight": (48, HIDDEN),
    "model.norm.weight": (HIDDEN,),
    "model.layers.0.input_layernorm.weight": (HIDDEN,),
    "model.layers.0.post_attention_layernorm.weight": (HIDDEN,),
}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True, "desc_act": False}
AUTO_ROUND = {"quant_method": "auto-round", "bits": 4, "group_size": 32, "sym": True, "data_type": "int"}
INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}
BLOCKS = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}


def write(folder, pack, quantization, *, metadata=None, change=lambda tensors: None, files=()) -> dict[str, np.ndarray]:
    """Writes a folder with matrices packed by `pack(rng, shape)`. Returns name -> exact weights."""
    rng, texts = np.random.default_rng(0), {"format": "pt"}
    tensors = {name: rng.normal(0, 0.3, shape).astype(packers.BF16) for name, shape in PLAIN.items()}
    weights = {name: tensor.astype(np.float64) for name, tensor in tensors.items()}
    for module, shape in SHAPES.items():
        made = pack(rng, shape) if callable(pack) else pack[module](rng, shape)
        weights[f"{module}.weight"] = made.weights
        tensors |= {f"{module}.{suffix}": tensor for suffix, tensor in made.tensors.items()}
        texts |= {f"{module}.{suffix}": text for suffix, text in (made.metadata or {}).items()}
    change(tensors)
    folder.mkdir(exist_ok=True)
    save_file(
        {name: np.ascontiguousarray(tensor) for name, tensor in tensors.items()}, folder / "model.safetensors", texts
    )
    values = CONFIG | ({"quantization_config": quantization} if quantization else {})
    (folder / "config.json").write_text(json.dumps(values))
    for name, text in dict(files).items():
        (folder / name).write_text(json.dumps(text))
    return weights


def in_lanes(folder, weights: dict[str, np.ndarray], lanes: int) -> dict[str, np.ndarray]:
    """The weights by path, cut into lanes like those of a model that is not quantized."""
    config = read_hf_config(folder, lanes)
    sources = LLAMA.sources(config, parameter_table(config))
    return {path: source.convert(weights[source.name]) for path, source in sources.items()}


def pack(function, **options):
    return lambda rng, shape: getattr(packers, function)(rng, shape, **options)


COMPRESSED, FLOAT8 = packers.compressed, {"num_bits": 8, "type": "float"}
PACKINGS = {
    "fp8 blocks": (pack("float_quantized", strategy="block", suffix="weight_scale_inv"), BLOCKS, "fp8"),
    "fp8 tensor": (pack("float_quantized", strategy="tensor", flat=True), {"quant_method": "fp8"}, "fp8 tensor"),
    "fbgemm_fp8": (pack("float_quantized", strategy="channel"), {"quant_method": "fbgemm_fp8"}, "fp8 row"),
    "w4a16": (pack("pack_quantized"), COMPRESSED("pack-quantized", **INT4), "int4 group 32"),
    "w4a16 asymmetric": (
        pack("pack_quantized", symmetric=False),
        COMPRESSED("pack-quantized", **INT4 | {"symmetric": False}),
        "int4 group 32, zero points",
    ),
    "w4a16 channel": (
        pack("pack_quantized", group=None),
        COMPRESSED("pack-quantized", num_bits=4, type="int", strategy="channel"),
        "int4 row",
    ),
    "w8a16": (
        pack("pack_quantized", bits=8, group=64),
        COMPRESSED("pack-quantized", **INT4 | {"num_bits": 8, "group_size": 64}),
        "int8 group 64",
    ),
    "w8a16 asymmetric": (
        pack("pack_quantized", bits=8, symmetric=False),
        COMPRESSED("pack-quantized", **INT4 | {"num_bits": 8, "symmetric": False}),
        "int8 group 32, zero points",
    ),
    "w4a16 actorder": (
        pack("pack_quantized", order=True),
        COMPRESSED("pack-quantized", **INT4 | {"actorder": "group"}),
        "int4 group 32",
    ),
    "FP8-dynamic": (
        pack("float_quantized", strategy="channel"),
        COMPRESSED("float-quantized", **FLOAT8, strategy="channel"),
        "fp8 row",
    ),
    "FP8": (
        pack("float_quantized", strategy="tensor", flat=True),
        COMPRESSED("naive-quantized", **FLOAT8, strategy="tensor"),
        "fp8 tensor",
    ),
    "FP8-block": (
        pack("float_quantized", strategy="block"),
        COMPRESSED("float-quantized", **FLOAT8, strategy="block", block_structure=[128, 128]),
        "fp8",
    ),
    "w8a8": (
        pack("int_quantized"),
        COMPRESSED("int-quantized", num_bits=8, type="int", strategy="channel"),
        "int8 row",
    ),
    "mxfp4": (
        pack("float4"),
        COMPRESSED("mxfp4-pack-quantized", num_bits=4, type="float", strategy="group", group_size=32),
        "mxfp4 group 32",
    ),
    "nvfp4": (
        pack("float4", nvfp4=True),
        COMPRESSED("nvfp4-pack-quantized", num_bits=4, type="float", strategy="tensor_group", group_size=16),
        "nvfp4 group 16",
    ),
    "gptq v1": (pack("gptq"), GPTQ, "int4 group 32"),
    "gptq v1 asymmetric": (pack("gptq", symmetric=False), GPTQ | {"sym": False}, "int4 group 32, zero points"),
    "gptq v2": (
        pack("gptq", symmetric=False, version=2),
        GPTQ | {"checkpoint_format": "gptq_v2", "sym": False},
        "int4 group 32, zero points",
    ),
    "gptq of 8 bits": (
        pack("gptq", bits=8, symmetric=False),
        GPTQ | {"bits": 8, "sym": False},
        "int8 group 32, zero points",
    ),
    "gptq of version 2 with the label of version 1": (pack("gptq", version=2), GPTQ, "int4 group 32"),
    "gptq of version 1 with the label of version 2": (
        pack("gptq"),
        GPTQ | {"checkpoint_format": "gptq_v2"},
        "int4 group 32",
    ),
    "gptq of 8 bits with the label of version 1": (
        pack("gptq", bits=8, version=2),
        GPTQ | {"bits": 8},
        "int8 group 32",
    ),
    "auto-round": (pack("gptq", symmetric=False, version=2), AUTO_ROUND | {"sym": False}, "int4 group 32, zero points"),
    "auto-round as gptq": (
        pack("gptq", symmetric=False),
        AUTO_ROUND | {"sym": False, "packing_format": "auto_round:auto_gptq"},
        "int4 group 32, zero points",
    ),
    "auto-round as awq": (
        pack("awq"),
        AUTO_ROUND | {"sym": False, "packing_format": "auto_round:auto_awq"},
        "int4 group 32, zero points",
    ),
    "modelopt NVFP4": (
        pack("float4", nvfp4=True, modelopt=True),
        {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"]},
        "nvfp4 group 16",
    ),
    "modelopt FP8": (
        pack("float_quantized", strategy="tensor", flat=True),
        {"quant_method": "modelopt", "quant_algo": "FP8", "kv_cache_quant_algo": "FP8"},
        "fp8 tensor",
    ),
    "w4a16 with unpacked zero points": (
        pack("pack_quantized", symmetric=False, unpacked=True),
        COMPRESSED("pack-quantized", **INT4 | {"symmetric": False}),
        "int4 group 32, zero points",
    ),
    "w8a16 with unpacked zero points": (
        pack("pack_quantized", bits=8, symmetric=False, unpacked=True),
        COMPRESSED("pack-quantized", **INT4 | {"num_bits": 8, "symmetric": False}),
        "int8 group 32, zero points",
    ),
    "gptq whole column": (pack("gptq", group=None), GPTQ | {"group_size": -1}, "int4 row"),
    "gptq desc_act": (pack("gptq", order=True), GPTQ | {"desc_act": True}, "int4 group 32"),
    "awq": (
        pack("awq"),
        {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"},
        "int4 group 32, zero points",
    ),
    "torchao row": (pack("torchao", strategy="channel"), {"quant_method": "torchao", "quant_type": {}}, "fp8 row"),
    "torchao tensor": (pack("torchao", strategy="tensor"), {"quant_method": "torchao"}, "fp8 tensor"),
}


@pytest.mark.parametrize("name", PACKINGS)
def test_packings_become_exact_records(name, tmp_path):
    """Also when cut into lanes, and when saved and loaded again."""
    function, quantization, expected = PACKINGS[name]
    weights = write(tmp_path / "a", function, quantization)
    ordered = "order" in name or "desc_act" in name
    for lanes in (1,) if ordered else (1, 4):
        found = dict(open_checkpoint(tmp_path / "a", num_lanes=lanes).weights())
        for path, wanted in in_lanes(tmp_path / "a", weights, lanes).items():
            weight = found[path]
            if path.rpartition(".")[2] in ("wq", "wk", "wv", "wo", "w1", "w2", "w3"):
                assert isinstance(weight, Quantized) and weight.problem() is None, path
                assert weight.name.startswith(expected.split(",")[0].split(" group")[0].split(" row")[0]), weight.name
                assert (weight.zero_points is not None) == ("zero" in expected)
                assert (weight.order is not None) == ordered
                assert (weight.dequantize() == wanted).all() and weight.shape == wanted.shape, path
        if lanes == 1:  # more lanes cut some groups
            records = {path: weight for path, weight in found.items() if isinstance(weight, Quantized)}
            sizes = {path: in_records(weight, "group" in expected) for path, weight in records.items()}
            assert published(tmp_path / "a") == pytest.approx(sizes)
    model = load(tmp_path / "a", num_lanes=lanes)
    save_hf(model, tmp_path / "b")
    again = load(tmp_path / "b").weights()
    for path, weight in model.weights().items():
        assert same(weight, again[path]), path


def published(folder) -> dict[str, float]:
    """Path -> bytes per weight of each packed matrix, according to the folder's config.json alone."""
    return packed_bytes(folder, json.loads((folder / "config.json").read_text()), read_hf_config(folder))


def in_records(weight: Quantized, groups: bool) -> float:
    """Bytes per weight of a record: codes and, with `groups` of columns, scales of at most 16 bits and zero points."""
    zeros = 0 if weight.zero_points is None else weight.format.bits / 8
    scales = weight.scales.size * (min(weight.scales.itemsize, 2) + zeros) if groups else 0
    return (weight.codes.nbytes + scales) / math.prod(weight.shape)


def same(one, other) -> bool:
    """Whether two weights are equal bit for bit."""
    if not isinstance(one, Quantized):
        return np.asarray(one).tobytes() == np.asarray(other).tobytes()
    facts = [(each.kind, each.group, each.columns, each.arrays.keys()) for each in (one, other)]
    return facts[0] == facts[1] and all(same(array, other.arrays[name]) for name, array in one.arrays.items())


def mixed(order: bool) -> tuple[dict, dict]:
    """A model with every kind of packing, each in its own matrix: packers by module, and the quantization_config."""
    parts = {
        "self_attn.q": ("w4a16 actorder" if order else "w4a16"),
        "self_attn.k": "w8a16 asymmetric",
        "self_attn.v": "w4a16 asymmetric",
        "self_attn.o": "FP8-block",
        "mlp.gate": "mxfp4",
        "mlp.up": "nvfp4",
        "mlp.down": "FP8",
    }
    modules = {f"model.layers.0.{part}_proj": PACKINGS[name] for part, name in parts.items()}
    groups = {}
    for module, (_, quantization, _) in modules.items():
        [group] = quantization["config_groups"].values()
        targets = [f"re:{re.escape(module)}$"] if ".self_attn." in module else [module]
        groups[module] = group | {"targets": targets, "format": quantization["format"]}
    config = {
        "quant_method": "compressed-tensors",
        "format": "mixed-precision",
        "config_groups": groups,
        "ignore": ["lm_head"],
    }
    return {module: function for module, (function, _, _) in modules.items()}, config


@pytest.mark.parametrize("lanes", [1, 4])
def test_backends_compute_with_the_exact_weights(lanes, tmp_path):
    """Against a model of float32 weights. Backend xla: a whole text on one device, or cached steps with four lanes on
    four devices. Backend cpu: an answer, with the matrices of a product in several formats and orders of columns.
    """
    write(tmp_path, *mixed(order=lanes == 1))
    mesh = make_mesh(lanes) if lanes > 1 else None
    model = load(tmp_path, "float32", num_lanes=lanes, mesh=mesh)
    assert {weight.kind for weight in model.weights().values() if isinstance(weight, Quantized)} == {
        *("int4", "int8", "fp8", "mxfp4", "nvfp4")
    }
    exact = {
        path: jnp.asarray(weight.dequantize(np.float32) if isinstance(weight, Quantized) else weight)
        for path, weight in open_checkpoint(tmp_path, "float32", num_lanes=lanes).weights()
    }
    plain = Laneformer(model.config, exact)
    ids = tiny.token_ids(48, (1, 13))
    found = model(ids) if mesh is None else tiny.in_pieces(model, ids, (1,) * 13)
    assert tiny.difference(found, plain(ids)) < 2e-6
    if custom_calls.unavailable() is None:
        engine = infer.Engine.load(tmp_path, "cpu", num_lanes=lanes)
        answer = engine.generate(ids[0, :5], max_new_tokens=8, stop_tokens=())
        tokens = list(answer)
        logits = np.float64(plain(np.array([[*ids[0, :5], *tokens]], np.int32)))[0, 4:12]
        logprobs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        assert np.abs(logprobs[np.arange(8), tokens] - np.array(answer.result.logprobs)).max() < 1e-4


Q, DOWN = "model.layers.0.self_attn.q_proj", "model.layers.0.mlp.down_proj"
NAN = np.uint8(0x7F).view(packers.E4M3)


def put(name: str, place, value):
    """Changes a value of a tensor."""

    def change(tensors):
        tensors[name] = tensors[name].copy()
        tensors[name][place] = value

    return change


def replaced(name: str, by):
    """Changes a tensor; None removes it."""

    def change(tensors):
        tensor = tensors.pop(name)
        if by is not None:
            tensors[name] = by(tensor)

    return change


DAMAGE = {  # packing, change, expected in the error
    "no scale": ("fp8 blocks", replaced(f"{Q}.weight_scale_inv", None), rf"{Q}.weight_scale_inv.* is missing"),
    "a cut block": (
        "fp8 blocks",
        replaced(f"{DOWN}.weight_scale_inv", lambda s: s[:, :1]),
        r"shape \[1, 1\].*\[1, 2\]",
    ),
    "NaN as code": ("fp8 blocks", put(f"{Q}.weight", (3, 5), NAN), rf"{Q}.weight is damaged: code 0x7f at \[3, 5\]"),
    "NaN as scale": ("fp8 blocks", put(f"{Q}.weight_scale_inv", (0, 0), np.nan), r"scale nan at \[0, 0\]"),
    "NaN as E8M0": ("mxfp4", put(f"{Q}.weight_scale", (2, 1), 255), r"scale 255 at \[2, 1\]"),
    "NaN as E4M3 scale": ("nvfp4", put(f"{Q}.weight_scale", (2, 1), NAN), r"scale 127 at \[2, 1\]"),
    "global scale 0": ("nvfp4", put(f"{Q}.weight_global_scale", 0, 0), r"global scale 0.0 must"),
    "no global scale": ("nvfp4", replaced(f"{Q}.weight_global_scale", None), r"weight_global_scale is missing"),
    "wrong dtype": ("mxfp4", replaced(f"{Q}.weight_scale", lambda s: s.view(np.int8)), r"dtype I8.* U8 or F8_E8M0"),
    "no shape": ("w4a16", replaced(f"{Q}.weight_shape", None), r"weight_shape is missing"),
    "wrong shape": ("w4a16", put(f"{Q}.weight_shape", 1, 72), r"weight_packed has shape \[64, 8\].*\[64, 72\]"),
    "another shape": ("w4a16", put(f"{Q}.weight_shape", 1, 63), r"weight has shape \[64, 63\].*\[64, 64\]"),
    "infinite scale": ("w4a16", put(f"{Q}.weight_scale", (1, 1), np.inf), r"scale inf at \[1, 1\]"),
    "no zero points": ("gptq v1", replaced(f"{Q}.qzeros", None), r"qzeros is missing"),
    "short zero points": ("gptq v1", replaced(f"{Q}.qzeros", lambda z: z[:1]), r"qzeros has shape \[1, 8\].*\[2, 8\]"),
    "short scales": ("awq", replaced(f"{Q}.scales", lambda s: s[:, :32]), r"scales has shape \[2, 32\].*\[2, 64\]"),
    "a group that is not there": ("gptq desc_act", put(f"{Q}.g_idx", 0, 2), r"q_proj.weight has groups from 0 to 2"),
    "uneven groups": (
        *("gptq desc_act", replaced(f"{Q}.g_idx", lambda g: np.sort(g) * (np.arange(64) > 40))),
        r"q_proj.weight .*different numbers of columns; add --weights bfloat16",
    ),
    "no weight": ("awq", replaced(f"{Q}.qweight", None), r"qweight is missing"),
    "an unknown tensor": (
        "awq",
        lambda tensors: tensors.update({f"{Q}.g": np.zeros(1, np.int32)}),
        r"unknown.* g\b|q_proj.g",
    ),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damaged_packings_are_refused_in_one_line(name, tmp_path):
    packing, change, expected = DAMAGE[name]
    function, quantization, _ = PACKINGS[packing]
    write(tmp_path, function, quantization, change=change)
    with pytest.raises(CheckpointError, match=expected) as caught:
        list(open_checkpoint(tmp_path).weights())
    assert str(tmp_path) in str(caught.value) and "\n" not in str(caught.value)


REFUSED = {  # quantization_config for GPTQ's tensors, expected in the error
    "another method": (
        {"quant_method": "bitsandbytes"},
        r"weight is in quant_method 'bitsandbytes', which cannot be read",
    ),
    "another version": (GPTQ | {"checkpoint_format": "marlin"}, r"weight is in gptq's checkpoint_format marlin"),
    "bits": (GPTQ | {"bits": 3}, r"gptq of 3 bits, which cannot be read"),
    "gemv": ({"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemv"}, r"awq's version gemv"),
    "2:4": (COMPRESSED("marlin-24", **INT4), r"weight is in marlin-24"),
    "group_size": (GPTQ | {"group_size": 0}, r"config.json: group_size = 0 must be a whole number"),
    "no object": ([], r"config.json: quantization_config = \[\] must be an object"),
    "block": (BLOCKS | {"weight_block_size": [128]}, r"weight_block_size = \[128\] must be two whole numbers"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_unknown_quantization_is_refused_in_one_line(name, tmp_path):
    quantization, expected = REFUSED[name]
    write(tmp_path, pack("gptq"), GPTQ)
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | {"quantization_config": quantization}))
    with pytest.raises((CheckpointError, ConfigError), match=expected) as caught:
        open_checkpoint(tmp_path)
    assert "\n" not in str(caught.value)


def test_another_class_of_torchao_is_refused(tmp_path):
    kind = {"weight": json.dumps({"_type": "Int4Tensor"})}

    def int4(rng, shape):
        made = packers.torchao(rng, shape, "channel")
        return packers.Matrix(made.weights, made.tensors, kind)

    write(tmp_path, int4, {"quant_method": "torchao"})
    with pytest.raises(CheckpointError, match=r"_proj.weight is torchao's Int4Tensor"):
        open_checkpoint(tmp_path)


def test_rounding_to_bfloat16_must_be_requested(tmp_path):
    """It also opens what cannot stay packed: ordered columns in several lanes, and groups of unequal sizes."""
    uneven = replaced(f"{Q}.g_idx", lambda g: np.sort(g) * (np.arange(64) > 40))
    write(tmp_path, *PACKINGS["gptq desc_act"][:2], change=uneven)
    with pytest.raises(CheckpointError, match=r"(q|o)_proj.weight \(int4.*; add --weights bfloat16"):
        load(tmp_path, num_lanes=2)
    weights = write(tmp_path, *PACKINGS["gptq desc_act"][:2])
    found = load(tmp_path, num_lanes=2, weights="bfloat16")
    for path, wanted in in_lanes(tmp_path, weights, 2).items():
        assert (np.asarray(found.weights()[path]) == wanted.astype(np.float32).astype(packers.BF16)).all(), path


IGNORED = {  # quantization_config that leaves q_proj and o_proj in 16 bits
    "names": COMPRESSED("pack-quantized", ("lm_head", Q, Q.replace("q_proj", "o_proj")), **INT4),
    "an expression": COMPRESSED("pack-quantized", ("re:.*self_attn.[qo]_proj$",), **INT4),
    "parts of names": COMPRESSED("pack-quantized", ("q_proj", "self_attn.o_proj"), **INT4),
    "nothing, but the files have 16 bits": COMPRESSED("pack-quantized", (), **INT4),
}


@pytest.mark.parametrize("name", IGNORED)
def test_ignored_modules_are_not_quantized(name, tmp_path):
    def left(rng, shape):
        weights = rng.normal(0, 0.1, shape).astype(packers.BF16)
        return packers.Matrix(weights.astype(np.float64), {"weight": weights})

    function = {module: left if module[-6] in "qo" else pack("pack_quantized") for module in SHAPES}
    write(tmp_path, function, IGNORED[name])
    kinds = {path.rpartition(".")[2]: type(weight) is Quantized for path, weight in open_checkpoint(tmp_path).weights()}
    assert {path for path, quantized in kinds.items() if quantized} == {"wk", "wv", "w1", "w2", "w3"}


def test_older_settings_and_extra_tensors_are_accepted(tmp_path):
    """Settings in separate files, scales of activations, biases of zeros from GPTQ's tools, and modules with their own
    settings.
    """
    function = {module: pack("gptq", bits=8 if "q_proj" in module else 4) for module in SHAPES}

    def more(tensors):
        tensors |= {f"{Q}.bias": np.zeros(64, np.float16), f"{Q}.input_scale": np.ones(1, np.float32)}

    settings = {"bits": 4, "group_size": 32, "desc_act": False, "dynamic": {r"+:.*\.q_proj": {"bits": 8}}}
    weights = write(tmp_path, function, None, change=more, files={"quantize_config.json": settings})
    found = dict(open_checkpoint(tmp_path).weights())
    assert (found["layers.0.attention.wq"].kind, found["layers.0.attention.wk"].kind) == ("int8", "int4")
    for path, wanted in in_lanes(tmp_path, weights, 1).items():
        if isinstance(found[path], Quantized):
            assert (found[path].dequantize() == wanted).all()
    old = {"w_bit": 4, "q_group_size": 32, "zero_point": True, "version": "GEMM"}
    other = tmp_path / "awq"
    write(other, pack("awq"), None, files={"quant_config.json": old})
    assert len(open_checkpoint(other).quantized) == 7


@pytest.mark.parametrize(
    "suffix", ["activation_scale", "kv_scale", "prob_scale", "k_global_scale", "v_scale", "input_scale", "output_amax"]
)
def test_scales_of_activations_are_not_needed(tmp_path, suffix):
    def more(tensors):
        tensors |= {f"{Q}.{suffix}": np.ones((), np.float32)}

    write(tmp_path, *PACKINGS["fp8 tensor"][:2], change=more)
    assert len(open_checkpoint(tmp_path).quantized) == 7


def test_auto_round_has_settings_of_its_own_for_modules(tmp_path):
    plain = pack("gptq")
    function = {module: plain if "k_proj" not in module else pack("gptq", bits=8) for module in SHAPES}
    function[Q] = lambda rng, shape: packers.Matrix(w := rng.normal(size=shape).astype(packers.BF16), {"weight": w})
    own = {"model.layers.0.self_attn.k_proj": {"bits": 8}, Q: {"bits": 16, "data_type": "float"}}
    write(tmp_path, function, AUTO_ROUND | {"packing_format": "auto_round:gptq", "extra_config": own})
    found = dict(open_checkpoint(tmp_path).weights())
    assert found["layers.0.attention.wk"].kind == "int8" and found["layers.0.attention.wv"].kind == "int4"
    assert isinstance(found["layers.0.attention.wq"], np.ndarray)


@pytest.mark.parametrize("mixed", [False, True])
def test_modelopt_describes_a_folder_in_its_own_file(tmp_path, mixed):
    """An algorithm for all modules except some, or one for each module."""
    function = dict.fromkeys(SHAPES, pack("float4", nvfp4=True, modelopt=True))
    function[Q] = lambda rng, shape: packers.Matrix(w := rng.normal(size=shape).astype(packers.BF16), {"weight": w})
    settings = {"quant_algo": "NVFP4", "group_size": 16, "exclude_modules": ["lm_head", "*.q_proj*"]}
    if mixed:
        each = {module: {"quant_algo": "NVFP4", "group_size": 16} for module in SHAPES if module != Q}
        settings = {"quant_algo": "MIXED_PRECISION", "quantized_layers": each}
    weights = write(tmp_path, function, None, files={"hf_quant_config.json": {"quantization": settings}})
    found = dict(open_checkpoint(tmp_path).weights())
    assert isinstance(found["layers.0.attention.wq"], np.ndarray) and len(open_checkpoint(tmp_path).quantized) == 6
    for path, wanted in in_lanes(tmp_path, weights, 1).items():
        if isinstance(found[path], Quantized):
            assert (found[path].dequantize() == wanted).all()
