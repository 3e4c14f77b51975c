"""scripts.quantize: written folders of dense models, experts and Laneformers, read and run by this project."""

import json
import re
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from laneformer import CheckpointError, ConfigError, Laneformer, ModelConfig, infer, load, save_hf
from laneformer.checkpoint import open_checkpoint, open_plain
from laneformer.commands import convert
from laneformer.commands.quantize import main, read_rows
from laneformer.custom_calls import unavailable
from laneformer.hf.safetensors import QUANTIZED
from laneformer.quantized import Quantized
from laneformer.quantized.rounding import round_to
from tests.support import tiny
from tests.support.paths import MOE
from tests.support.small import make_weights
from tests.support.tiny_recipe import write_store

LLAMA = tiny.TESTS / "dense" / "llama2"


@pytest.fixture(scope="module")
def laneformer(tmp_path_factory) -> Path:
    """Folder of a Laneformer with 2 lanes, whose matrices are large enough to notice float32 copies of them."""
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "max_position_embeddings": 256}
    config = ModelConfig(vocab_size=128, num_attention_heads=4, num_key_value_heads=4, num_lanes=2, **sizes)
    return save_hf(Laneformer(config, jax.device_put(make_weights(config))), tmp_path_factory.mktemp("laneformer"))


def run(*arguments) -> int:
    return main([str(argument) for argument in arguments])


@pytest.mark.parametrize("kind", ["int4", "int8", "fp8", "mxfp4"])
def test_dense_folder_keeps_tensor_names(kind, tmp_path, capsys):
    """Every matrix is rounded, other tensors keep their bytes, and the number of files stays the same."""
    assert run(LLAMA, tmp_path, "--weights", kind) == 0
    report = capsys.readouterr().out
    assert "14 matrices, 69,632 weights in " in report and "q_proj.weight  " in report
    before = {name: array for file in LLAMA.glob("*.safetensors") for name, array in load_file(file).items()}
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert {*index["weight_map"].values()} == {file.name for file in LLAMA.glob("*.safetensors")}
    assert index["metadata"]["total_size"] > 0, "transformers requires it"
    rounded = {name: round_to(w, kind) for name, w in before.items() if "_proj." in name}
    folder = open_checkpoint(tmp_path)
    for path, source in folder.sources.items():
        if source.name in rounded:
            expected = source.convert_record(rounded[source.name]).dequantize()
            assert (folder.tensors[source.name].record().dequantize() == rounded[source.name].dequantize()).all()
            assert (dict(folder.weights())[path].dequantize() == expected).all()
        else:
            assert folder.tensors[source.name].values().tobytes() == before[source.name].tobytes()


@pytest.mark.parametrize(("name", "matrices"), [("qwen3_moe_1", 3 * (4 + 8 * 3)), ("qwen3_next_1", 4 * 27 + 3 * 2 + 4)])
def test_experts_keep_tensor_names(name, matrices, tmp_path, capsys):
    """Each expert is rounded separately; routers and gates with one row keep their bytes."""
    assert run(MOE / name, tmp_path, "--weights", "int8") == 0
    assert f"{matrices} matrices" in capsys.readouterr().out
    before, after = load_file(MOE / name / "model.safetensors"), open_checkpoint(tmp_path)
    weights = dict(after.weights())
    for path, source in after.sources.items():
        if path.endswith(("router", "shared_gate", "wba")):
            assert after.tensors[source.name].values().tobytes() == before[source.name].tobytes()
        elif path.endswith("feed_forward.w2"):
            rounded = np.stack([round_to(before[each], "int8").dequantize() for each in source.names])
            assert (weights[path].dequantize()[0] == rounded).all()
    ignored = json.loads((tmp_path / "config.json").read_text())["quantization_config"]["ignore"]
    assert {"lm_head", "model.layers.0.mlp.gate"} <= {*ignored}


def test_experts_in_one_tensor_are_refused(tmp_path, capsys):
    assert run(MOE / "gpt_oss_1", tmp_path / "out", "--weights", "int8") == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "has all experts" in error, error


def test_int4_tensors_follow_the_format(tmp_path):
    """The fields of config.json and the tensors follow the definition of compressed-tensors."""
    assert run(LLAMA, tmp_path, "--weights", "int4", "--group", "64") == 2, "down_proj has 96 columns"
    assert run(LLAMA, tmp_path, "--weights", "int4", "--group", "32", "--overwrite") == 0
    [group] = json.loads((tmp_path / "config.json").read_text())["quantization_config"]["config_groups"].values()
    wanted = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32}
    assert group["targets"] == ["Linear"] and wanted.items() <= group["weights"].items()
    tensors = {name: array for file in tmp_path.glob("*.safetensors") for name, array in load_file(file).items()}
    name = "model.layers.0.mlp.down_proj.weight"
    packed, scales, shape = (tensors[f"{name}_{kind}"] for kind in ("packed", "scale", "shape"))
    assert (packed.dtype, packed.shape, shape.tolist(), scales.shape) == (np.int32, (64, 12), [64, 96], (64, 3))
    codes = packed.view(np.uint32)[..., None] >> np.arange(0, 32, 4, dtype=np.uint32) & 15
    weights = (codes.reshape(64, 96).astype(int) - 8) * np.repeat(scales.astype(np.float64), 32, 1)
    before = {name: array for file in LLAMA.glob("*.safetensors") for name, array in load_file(file).items()}[name]
    assert np.linalg.norm(weights - before) < 0.1 * np.linalg.norm(before)


@pytest.mark.slow
def test_backend_xla_generates_from_packed_weights(laneformer, tmp_path):
    """Tokens equal those with dequantized weights in float32. A pass unpacks one matrix at a time to float32."""
    assert run(laneformer, tmp_path, "--weights", "int4") == 0
    engine = infer.Engine.load(tmp_path, "xla")
    weights = {
        path: jnp.array(weight.dequantize(np.float32) if isinstance(weight, Quantized) else weight)
        for path, weight in open_checkpoint(tmp_path, "float32").weights()
    }
    exact = Laneformer(engine.config, weights)
    prompt = [72, 101, 108, 108, 111]
    found = [int(token) for token in engine.generate(prompt, max_new_tokens=8, stop_tokens=())]
    logits = exact(np.array([prompt + found[:-1]]))
    assert found == np.argmax(logits[0, len(prompt) - 1 :], -1).tolist()
    conditions, matrices = engine.conditions, 2 * (4 * 256 * 256 + 3 * 256 * 512)
    assert (conditions["quantized_weights"], conditions["quantized_bytes"]) == (matrices, matrices * 4.5 / 8)
    assert conditions["quantized_formats"] == ["int4 group 32"]
    model = engine.model
    step = model._forward.lower(model, jnp.array([[1]]), model.make_cache(1, 16), last_only=True).compile()
    assert step.memory_analysis().temp_size_in_bytes < 4 * matrices / 2


KINDS = [("int4", 32), ("int8", "row"), ("int8", 32), ("fp8", "block"), ("fp8", "tensor"), ("mxfp4", 32), ("nvfp4", 16)]


@pytest.mark.parametrize(("kind", "shared"), KINDS)
def test_backend_cpu_generates_as_with_exact_weights(kind, shared, tmp_path):
    """Tokens and log-probabilities equal those with the dequantized weights in float32."""
    assert run(LLAMA, tmp_path / "rounded", "--weights", kind, "--group", shared) == 0
    tensors = open_checkpoint(tmp_path / "rounded").tensors
    shutil.copytree(LLAMA, tmp_path / "exact", ignore=shutil.ignore_patterns("*.safetensors", "*.index.json"))
    plain = {name: load_file(file)[name] for file in LLAMA.glob("*.safetensors") for name in load_file(file)}
    rounded = {name: tensors[name].record() for name in plain if "_proj." in name}
    exact = {name: record.dequantize(np.float32) for name, record in rounded.items()}
    save_file(plain | exact, tmp_path / "exact" / "model.safetensors")
    engine, reference = infer.Engine.load(tmp_path / "rounded"), infer.Engine.load(tmp_path / "exact", "cpu")
    assert engine.backend == "cpu"
    assert engine.conditions["quantized_formats"] == sorted({record.name for record in rounded.values()})
    found, expected = (one.generate([1, 7, 3, 60], max_new_tokens=12, stop_tokens=()) for one in (engine, reference))
    assert list(found) == list(expected)
    np.testing.assert_allclose(found.result.logprobs, expected.result.logprobs, atol=1e-4)


def test_quantized_weights_are_dequantized_or_kept(laneformer, tmp_path):
    assert run(laneformer, tmp_path, "--weights", "int8") == 0
    with pytest.raises(ConfigError, match=r"--weights int4: weight \S+ is quantized already"):
        infer.Engine.load(tmp_path, "cpu", weights="int4")
    for backend in ("cpu", "xla"):
        engine = infer.Engine.load(tmp_path, backend, weights="bfloat16")
        assert "quantized_formats" not in engine.conditions


def test_comparison_reports_losses_of_both_models(tmp_path, capsys):
    """The loss before rounding equals that from the logits; rounding to 8 bits changes little."""
    data = write_store(tmp_path / "data")
    assert run(LLAMA, tmp_path / "out", "--weights", "int8", "--data", data, "--rows", "2") == 0
    last = capsys.readouterr().out.splitlines()[-1]
    found = re.search(r"126 tokens of .*: loss ([\d.]+) -> ([\d.]+) .*the same in ([\d.]+) %$", last)
    before, after, same = map(float, found.groups())
    ids = read_rows(data, open_checkpoint(LLAMA).config, 2)
    logits = np.asarray(load(LLAMA)(ids[:, :-1]), np.float64)
    losses = np.log(np.exp(logits).sum(-1)) - np.take_along_axis(logits, ids[:, 1:, None], -1)[..., 0]
    assert before == pytest.approx(losses.mean(), abs=1e-4) and after == pytest.approx(before, abs=0.02) and same > 90


WRONG = {
    "missing folder": (
        ("missing",),
        r"missing has no config.json; write a Hugging Face folder with python -m scripts.con",
    ),
    "rows": (("--rows", "0"), "--rows must be at least 1, got 0"),
    "group": (("--group", "block"), r"tensor model.layers.0.*: --group block: int4 has scales per 32, 64, 128"),
    "group is not a number": (("--group", "x"), r"--group x: int4 has scales per 32, 64, 128"),
}


@pytest.mark.parametrize("name", WRONG)
def test_bad_options_are_one_line(name, tmp_path, capsys):
    arguments, expected = WRONG[name]
    model = tmp_path / arguments[0] if name == "missing folder" else LLAMA
    rest = () if name == "missing folder" else arguments
    assert run(model, tmp_path / "out", "--weights", "int4", *rest) == 2
    error = capsys.readouterr().err
    assert re.search(expected, error) and error.count("\n") == 1


@pytest.fixture(scope="module")
def deepseek_v4(tmp_path_factory) -> Path:
    """Folder of a DeepSeek V4 with ranks enlarged to multiples of 32, so that groups of 32 divide the columns."""
    folder = tmp_path_factory.mktemp("deepseek_v4")
    tensors = load_file(MOE / "deepseek_v4_1" / "model.safetensors")
    for name, w in tensors.items():
        match name.removesuffix(".weight").split("attn.")[-1]:
            case "wq_a" | "q_norm":
                tensors[name] = np.pad(w, [(0, 16), *[(0, 0)] * (w.ndim - 1)], "wrap")
            case "wq_b" | "indexer.wq_b":
                tensors[name] = np.pad(w, [(0, 0), (0, 16)], "wrap")
            case "wo_a":
                tensors[name] = np.pad(w.reshape(2, 24, -1), [(0, 0), (0, 8), (0, 0)], "wrap").reshape(64, -1)
            case "wo_b":
                tensors[name] = np.pad(w.reshape(-1, 2, 24), [(0, 0), (0, 0), (0, 8)], "wrap").reshape(-1, 64)
    save_file(tensors, folder / "model.safetensors")
    values = json.loads((MOE / "deepseek_v4_1" / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(values | {"q_lora_rank": 64, "o_lora_rank": 32}))
    return folder


SLOW = [pytest.param(kind, marks=pytest.mark.slow) for kind in ("int8", "fp8", "mxfp4")]


@pytest.mark.parametrize("kind", ["int4", *SLOW])
def test_deepseek_v4_generates_from_rounded_weights(deepseek_v4, kind, tmp_path):
    """Backend cpu generates the tokens of the dequantized weights in float32.

    Tensors that the published files store in 16 or 32 bits, and the tables of experts, keep their bytes.
    """
    assert run(deepseek_v4, tmp_path / "rounded", "--weights", kind) == 0
    before, after = load_file(deepseek_v4 / "model.safetensors"), open_checkpoint(tmp_path / "rounded")
    exact, kept = {}, set()
    for source in after.sources.values():
        stored = after.tensors[source.name]
        for name, tensor in zip(source.names, getattr(stored, "parts", [stored]), strict=True):
            if tensor.dtype == QUANTIZED:
                exact[name] = tensor.record().dequantize(np.float32)
                np.testing.assert_array_equal(exact[name], round_to(before[name], kind).dequantize(np.float32))
            else:
                kept.add(name)
                assert tensor.values().tobytes() == before[name].tobytes(), name
    rounded = {name.split(".", 2)[2] for name in exact if name.startswith("layers.1.") and ".experts." not in name}
    attention = ("wq_a", "wq_b", "wkv", "wo_a", "wo_b", "indexer.wq_b")
    shared = {f"ffn.shared_experts.w{n}.weight" for n in (1, 2, 3)}
    assert rounded == {f"attn.{name}.weight" for name in attention} | shared
    assert sum(".experts." in name for name in exact) == 4 * 8 * 3 and "layers.0.ffn.gate.tid2eid" in kept
    if unavailable() is not None:
        pytest.skip(str(unavailable()))
    (tmp_path / "exact").mkdir()
    shutil.copy(deepseek_v4 / "config.json", tmp_path / "exact")
    wide = {name: w if w.dtype.kind == "i" else w.astype(np.float32) for name, w in (before | exact).items()}
    save_file(wide, tmp_path / "exact" / "model.safetensors")
    prompt = np.load(MOE / "deepseek_v4_1" / "io.npz")["greedy_prompt"].tolist()
    engines = [infer.Engine.load(tmp_path / name, "cpu") for name in ("rounded", "exact")]
    found, expected = (engine.generate(prompt, max_new_tokens=6, stop_tokens=()) for engine in engines)
    assert list(found) == list(expected)
    np.testing.assert_allclose(found.result.logprobs, expected.result.logprobs, atol=1e-4)


def test_quantized_model_is_not_rounded_again(tmp_path, capsys):
    assert run(LLAMA, tmp_path / "a", "--weights", "int8") == 0
    assert run(tmp_path / "a", tmp_path / "b", "--weights", "int4") == 2
    assert "is quantized already" in capsys.readouterr().err
    with pytest.raises(CheckpointError, match=r"a has quantized weights: .* --dtype bfloat16 --weights bfloat16"):
        open_plain(tmp_path / "a")
    assert convert.main([str(tmp_path / name) for name in "ac"] + ["--dtype", "bfloat16", "--weights", "bfloat16"]) == 0
    assert open_plain(tmp_path / "c").dtype == "bfloat16"
    assert convert.main([str(tmp_path / name) for name in "ad"]) == 0
    kept = dict(open_checkpoint(tmp_path / "d").weights())
    assert sum(isinstance(weight, Quantized) for weight in kept.values()) == 14
    assert run(LLAMA, tmp_path / "a", "--weights", "int8") == 2
    assert "--overwrite" in capsys.readouterr().err
