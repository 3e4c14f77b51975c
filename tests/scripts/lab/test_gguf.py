"""GGUF files: contents according to an independent reader, and logits of llama.cpp if it is installed."""

import dataclasses
import json
import math
import os
import shutil
import struct
import subprocess
from collections import Counter
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

import laneformer
from laneformer.commands.lab.peers import gguf_file, gguf_model
from laneformer.commands.lab.peers.environments import installed
from laneformer.commands.lab.peers.protocol import Shape, Task
from laneformer.config import ModelConfig
from laneformer.hf.folder import HfFolder
from laneformer.quantized.rounding import relative_error, round_to
from laneformer.recipes.models import (
    DEEPSEEK_V3,
    EXPERTS,
    GPT_OSS_20B,
    KIMI_K2_LATENTS,
    MODELS,
    MOONLIGHT_16B,
    QWEN3_NEXT_12,
)
from laneformer.weights import parameter_count
from tests.support.hf.gguf_weights import GgufWeights
from tests.support.paths import MOE

DENSE = ModelConfig(
    vocab_size=50,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    norm_eps=1e-5,
)
MIXTURE = GPT_OSS_20B.replace(
    vocab_size=50,
    hidden_size=64,
    moe_intermediate_size=96,
    num_hidden_layers=2,
    swa_layers=(0,),
    num_experts=8,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    num_experts_per_tok=2,
    sliding_window=4,
    eos_token_id=(),
)
MXFP4 = dict.fromkeys(EXPERTS, "mxfp4")

BITS = {"int8": 8.5, "int4": 4.5, "mxfp4": 4.25, "nvfp4": 4.5}  # per weight, with scales
HALVES = ("codes", np.uint8, 16)  # two codes of 4 bits per byte
# Number of a tensor type -> dtype of a block, and the function that decodes blocks to weights, after ggml-common.h.
BLOCKS = {
    0: (np.dtype([("of", "<f4", 1)]), lambda b: b["of"]),
    30: (np.dtype([("of", "<u2", 1)]), lambda b: (b["of"].astype(np.uint32) << 16).view(np.float32)),
    8: (np.dtype([("scale", "<f2"), ("codes", "i1", 32)]), lambda b: b["scale"][:, None] * b["codes"].astype("f4")),
    2: (np.dtype([("scale", "<f2"), HALVES]), lambda b: b["scale"][:, None] * (in_order(b["codes"]).astype("f4") - 8)),
    39: (
        np.dtype([("exponent", "u1"), HALVES]),
        lambda b: np.ldexp(e2m1(b["codes"]), b["exponent"].astype(int)[:, None] - 127),
    ),
    40: (
        np.dtype([("scales", ml_dtypes.float8_e4m3fn, (4, 1)), ("codes", "u1", (4, 8))]),
        lambda b: (b["scales"].astype("f4") * e2m1(b["codes"])).reshape(-1, 64),
    ),
}


def in_order(halves):
    return np.concatenate([halves & 15, halves >> 4], -1)


def e2m1(halves):
    return in_order(halves).view(ml_dtypes.float4_e2m1fn).astype("f4")


class Reader:
    """Reads the parts of GGUF version 3 that these tests need, after the specification."""

    def __init__(self, path):
        self.data, self.at, self.bytes = path.read_bytes(), 0, Counter()
        assert self.take("<4sI") == (b"GGUF", 3)
        tensors, fields = self.take("<QQ")
        self.fields = {self.text(): self.value() for _ in range(fields)}
        infos = [(self.text(), self.take(f"<{self.take('<I')[0]}Q"), *self.take("<IQ")) for _ in range(tensors)]
        begin = -(-self.at // self.fields["general.alignment"]) * self.fields["general.alignment"]
        self.tensors = {}
        for name, sizes, kind, offset in infos:
            assert offset % self.fields["general.alignment"] == 0
            block, decode = BLOCKS[kind]
            count = math.prod(sizes) // decode(np.zeros(1, block)).size
            stored = np.frombuffer(self.data, block, count, begin + offset)
            self.tensors[name] = decode(stored).reshape(sizes[::-1])
            self.bytes[kind] += stored.nbytes
            self.end = begin + offset + stored.nbytes

    def take(self, form):
        found = struct.unpack_from(form, self.data, self.at)
        self.at += struct.calcsize(form)
        return found

    def text(self):
        (size,) = self.take("<Q")
        self.at += size
        return self.data[self.at - size : self.at].decode()

    def value(self):
        (kind,) = self.take("<I")
        if kind == 9:
            kind, count = self.take("<IQ")
            return [self.one(kind) for _ in range(count)]
        return self.one(kind)

    def one(self, kind):
        return self.text() if kind == 8 else self.take({4: "<I", 6: "<f", 7: "<?"}[kind])[0]


def write(folder, config, type=gguf_file.BF16, formats=None, values=None):
    listed = gguf_model.tensors(config, type, formats)
    gguf_file.write(folder / "m.gguf", gguf_model.fields(config, type), listed, values)
    return Reader(folder / "m.gguf"), listed


@pytest.mark.parametrize("tied, kind", [(False, ""), (True, "int4"), *((False, kind) for kind in gguf_file.QUANTIZED)])
def test_file_has_a_dense_llama(tmp_path, tied, kind):
    stored, width = gguf_model.type_of(kind), 64 if kind else 40
    config = DENSE.replace(hidden_size=width, tie_word_embeddings=tied)
    read, listed = write(tmp_path, config, stored)
    matrices = 2 * width * (2 * 64 + 2 * 32 + 3 * 128) + (0 if tied else 50 * width)
    assert read.bytes[stored.number] == (matrices * BITS[kind] // 8 if kind else 2 * (matrices + 50 * width))
    counted = gguf_model.facts(config, listed).get("quantized_bytes", 0)
    assert counted == (read.bytes[stored.number] if kind else 0)
    assert gguf_model.activations(listed) == ("8 bits (Q8_0)" if kind else "bfloat16")
    assert {
        name: read.fields[f"llama.{name}"] for name in ("embedding_length", "block_count", "attention.head_count_kv")
    } == {"embedding_length": width, "block_count": 2, "attention.head_count_kv": 2}
    assert read.fields["general.architecture"] == "llama" and read.fields["llama.vocab_size"] == 50
    assert read.fields["llama.attention.layer_norm_rms_epsilon"] == pytest.approx(1e-5)
    assert ("output.weight" in read.tensors) != tied and len(read.tensors) == 2 * 9 + (2 if tied else 3)
    assert read.tensors["blk.1.ffn_down.weight"].shape == (width, 128)
    assert read.tensors["blk.0.attn_k.weight"].shape == (32, width)
    assert (read.tensors["blk.0.attn_norm.weight"] == 1).all()
    matrices = [t for t in read.tensors.values() if t.ndim == 2]
    assert all(0.015 < m.std() < 0.025 and len(np.unique(m[:, :8], axis=0)) == len(m) for m in matrices)
    starts = {m.tobytes()[:64] for m in matrices}
    assert len(starts) == len(matrices), "no two matrices are equal"
    assert read.end <= len(read.data) < read.end + 32


def test_file_has_experts_in_mxfp4(tmp_path):
    read, listed = write(tmp_path, MIXTURE, formats=MXFP4)
    hidden, columns, experts = 64, 96, 8
    rows = {"attn_q": 64, "attn_k": 32, "attn_v": 32, "attn_output": hidden}
    assert layer(read, 1) == {
        **{f"{name}.weight": (count, 64) for name, count in rows.items()},
        **{f"{name}.bias": (count,) for name, count in rows.items()},
        **{f"{name}.weight": (hidden,) for name in ("attn_norm", "post_attention_norm")},
        **{"attn_sinks.weight": (4,), "ffn_gate_inp.weight": (experts, hidden), "ffn_gate_inp.bias": (experts,)},
        **{f"ffn_{name}_exps.weight": (experts, columns, hidden) for name in ("gate", "up")},
        **{f"ffn_{name}_exps.bias": (experts, columns) for name in ("gate", "up")},
        **{"ffn_down_exps.weight": (experts, hidden, columns), "ffn_down_exps.bias": (experts, hidden)},
    }
    assert read.bytes[39] == 2 * 3 * experts * hidden * columns * 4.25 / 8
    assert gguf_model.facts(MIXTURE, listed)["quantized_bytes"] == read.bytes[39] * 2 / 8, "a token uses two of eight"
    assert gguf_model.activations(listed) == "bfloat16; 8 bits (Q8_0) for mxfp4"
    assert read.bytes[30] == 2 * (2 * hidden * (2 * 64 + 2 * 32) + 2 * 50 * hidden)
    found = {name: read.fields[f"gpt-oss.{name}"] for name in ("expert_count", "expert_used_count")}
    assert found == {"expert_count": 8, "expert_used_count": 2}
    assert read.fields["gpt-oss.attention.sliding_window"] == 4
    assert read.fields["gpt-oss.expert_feed_forward_length"] == columns
    assert 0.015 < read.tensors["blk.0.ffn_up_exps.weight"].std() < 0.025


def layer(read, number):
    prefix = f"blk.{number}."
    return {name.removeprefix(prefix): t.shape for name, t in read.tensors.items() if name.startswith(prefix)}


def check_weights(read, listed, weights):
    for tensor in listed:  # weights of the folder are bfloat16, so the file has their exact values
        np.testing.assert_array_equal(read.tensors[tensor.name], weights(tensor))


def experts(count, columns, shared, width):
    """Shapes of the router, the routed experts and the shared expert of a layer, by name."""
    return {
        "ffn_gate_inp.weight": (count, width),
        **{f"ffn_{name}_exps.weight": (count, columns, width) for name in ("gate", "up")},
        "ffn_down_exps.weight": (count, width, columns),
        **{f"ffn_{name}_shexp.weight": (shared, width) for name in ("gate", "up")},
        "ffn_down_shexp.weight": (width, shared),
    }


def test_file_has_delta_nets_and_gated_attention(tmp_path):
    config = HfFolder(MOE / "qwen3_next_1").config
    weights = GgufWeights(MOE / "qwen3_next_1", config)
    read, listed = write(tmp_path, config, values=weights)
    both = {
        **experts(8, 48, 32, 64),
        **{f"{name}.weight": (64,) for name in ("attn_norm", "post_attention_norm", "ffn_gate_inp_shexp")},
    }
    assert layer(read, 2) == both | {
        "attn_qkv.weight": (128, 64),
        "attn_gate.weight": (64, 64),
        "ssm_conv1d.weight": (128, 4),
        "ssm_ba.weight": (8, 64),
        "ssm_dt.bias": (4,),
        "ssm_a": (4,),
        "ssm_norm.weight": (16,),
        "ssm_out.weight": (64, 64),
    }
    assert layer(read, 3) == both | {
        "attn_q.weight": (256, 64),
        **{f"attn_{name}.weight": (64, 64) for name in "kv"},
        **{f"attn_{name}_norm.weight": (32,) for name in "qk"},
        "attn_output.weight": (64, 128),
    }
    check_weights(read, listed, weights)
    found = {name.split(".", 1)[1]: value for name, value in read.fields.items() if name.startswith("qwen3next.")}
    assert found["attention.recurrent_layers"] == [True, True, True, False] and found["rope.dimension_count"] == 8
    sizes = {"conv_kernel": 4, "state_size": 16, "group_count": 2, "time_step_rank": 4, "inner_size": 64}
    assert {name: found[f"ssm.{name}"] for name in sizes} == sizes
    assert found["expert_shared_feed_forward_length"] == 32


def test_file_has_absorbed_latent_attention(tmp_path):
    config = HfFolder(MOE / "deepseek_v3_1").config
    weights = GgufWeights(MOE / "deepseek_v3_1", config)
    read, listed = write(tmp_path, config, values=weights)
    both = {
        **{f"{name}.weight": (64,) for name in ("attn_norm", "ffn_norm")},
        "attn_q_a.weight": (48, 64),
        "attn_q_a_norm.weight": (48,),
        "attn_q_b.weight": (96, 48),
        "attn_kv_a_mqa.weight": (40, 64),
        "attn_kv_a_norm.weight": (32,),
        "attn_k_b.weight": (4, 32, 16),
        "attn_v_b.weight": (4, 24, 32),
        "attn_output.weight": (64, 96),
    }
    dense = {"ffn_gate.weight": (96, 64), "ffn_up.weight": (96, 64), "ffn_down.weight": (64, 96)}
    assert layer(read, 0) == both | dense
    assert layer(read, 1) == both | experts(8, 48, 48, 64) | {"exp_probs_b.bias": (8,)}
    check_weights(read, listed, weights)
    found = {name.split(".", 1)[1]: value for name, value in read.fields.items() if name.startswith("deepseek2.")}
    wanted = {
        "attention.q_lora_rank": 48,
        "attention.kv_lora_rank": 32,
        "attention.head_count_kv": 1,
        "attention.key_length": 40,
        "attention.value_length": 32,
        "attention.key_length_mla": 24,
        "attention.value_length_mla": 24,
        "leading_dense_block_count": 1,
        "expert_shared_count": 1,
        "expert_group_count": 4,
        "expert_group_used_count": 2,
        "expert_gating_func": 2,
        "expert_weights_norm": True,
        "rope.scaling.type": "yarn",
        "rope.scaling.original_context_length": 64,
    }
    assert {name: found[name] for name in wanted} == wanted
    assert found["expert_weights_scale"] == 2.5 and found["rope.scaling.factor"] == 40


@pytest.mark.parametrize(
    "config", [QWEN3_NEXT_12, DEEPSEEK_V3, KIMI_K2_LATENTS, MOONLIGHT_16B, GPT_OSS_20B, MODELS["laneformer_2b"]]
)
def test_file_has_as_many_weights_as_the_model(config):
    assert sum(math.prod(tensor.sizes) for tensor in gguf_model.tensors(config)) == parameter_count(config)
    assert gguf_model.from_json(json.loads(json.dumps(dataclasses.asdict(config)))) == config


def test_model_file_is_written_once(tmp_path):
    task = task_of(tmp_path, DENSE, "bfloat16")
    path, _, _ = gguf_model.model_file(task)
    path.write_bytes(b"kept")
    assert gguf_model.model_file(task)[0] == path and path.read_bytes() == b"kept"
    other = gguf_model.model_file(task_of(tmp_path, DENSE.replace(rope_theta=7.0), "bfloat16"))[0]
    assert other != path and not list(tmp_path.glob("*.part"))


def task_of(folder, config, weights):
    shape = Shape(64, 2, 4, 2, 16, 128, 50, False, 1e-5, 1e4)
    return Task("none", shape, 128, 2, str(folder), weights=weights, model=dataclasses.asdict(config))


# Saves the logits of llama.cpp for rows of ids: those after the whole prompt, then token by token. With float32
# weights, products are exact: the cache is float32, without flash attention.
LOGITS = """
import sys
import llama_cpp, numpy as np
from laneformer.commands.lab.peers.llama_cpp import LlamaCpp
from laneformer.commands.lab.peers.protocol import Task
default = llama_cpp.llama_context_default_params
def exact():
    found = default()
    found.type_k = found.type_v = llama_cpp.GGML_TYPE_F32
    found.flash_attn_type = llama_cpp.LLAMA_FLASH_ATTN_TYPE_DISABLED
    return found
task, prompt, found = Task.read(sys.argv[1]), int(sys.argv[4]), []
if task.weights == "F32":
    llama_cpp.llama_context_default_params = exact
model = LlamaCpp(task)
def logits():
    return np.ctypeslib.as_array(llama_cpp.llama_get_logits_ith(model._context, -1), (model._vocab,)).copy()
def decoded():
    assert len(model.decode(10, 4)) == 4
    return logits()
assert (decoded() == decoded()).all(), "both runs start from the same cache"
for row in np.load(sys.argv[2]).tolist():
    model._absorb(row[:prompt])
    for n in range(prompt, len(row) + 1):
        found.append(logits())
        if n < len(row):
            model._compute([row[n]])
np.save(sys.argv[3], found)
"""


def rounded_ramp(folder, copy):
    """The model with the ends of YaRN's ramp rounded to whole dimensions, as llama.cpp rounds them for every model."""
    shutil.copytree(folder, copy)
    values = json.loads((copy / "config.json").read_text())
    values["rope_scaling"]["truncate"] = True
    (copy / "config.json").write_text(json.dumps(values))
    return laneformer.load(copy, "float32")


@pytest.mark.slow
@pytest.mark.parametrize("weights, most", [("F32", 2e-5), ("bfloat16", 0.15)])
@pytest.mark.parametrize("name", ["qwen3_next_1", "deepseek_v3_1", "gpt_oss_1"])
def test_llama_cpp_computes_the_published_model(tmp_path, name, weights, most):
    """LANEFORMER_PEERS names the folder of scripts.bench_peers.

    With bfloat16 weights llama.cpp rounds activations, which occasionally changes the chosen experts.
    """
    folder = os.environ.get("LANEFORMER_PEERS")
    python = folder and installed(Path(folder), "llama.cpp")
    if not python:
        pytest.skip("LANEFORMER_PEERS names no folder of scripts.bench_peers with llama.cpp")
    config, io = HfFolder(MOE / name).config, np.load(MOE / name / "io.npz")
    task = task_of(tmp_path, config, weights)
    gguf_model.model_file(task, GgufWeights(MOE / name, config))
    ids, out, prompt = tmp_path / "ids.npy", tmp_path / "logits.npy", 40
    np.save(ids, io["input_ids"])
    environment = os.environ | {"PYTHONPATH": str(MOE.parents[1])}
    command = [python, "-c", LOGITS, task.text(), str(ids), str(out), str(prompt)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    wanted, found = io["logits"], np.load(out)
    if (scaling := config.rope_scaling) and not scaling.truncate:
        wanted = np.asarray(rounded_ramp(MOE / name, tmp_path / "rounded")(io["input_ids"]))
    wanted = wanted[:, prompt - 1 :].reshape(-1, config.vocab_size)
    assert np.linalg.norm(found - wanted) < most * np.linalg.norm(wanted)
    same = (found.argmax(-1) == wanted.argmax(-1)).mean()
    assert same == 1 if weights == "F32" else same > 0.9


@pytest.mark.parametrize("kind", gguf_file.QUANTIZED)
def test_blocks_decode_to_the_weights(kind):
    stored, weights = gguf_file.QUANTIZED[kind], np.random.default_rng(3).normal(0, 0.02, (500, 64)).astype(np.float32)
    block, decode = BLOCKS[stored.number]
    found = decode(stored.pack(weights.reshape(-1, stored.weights)).view(block)[:, 0]).reshape(weights.shape)
    error = np.linalg.norm(found - weights) / np.linalg.norm(weights)  # round_to chooses better scales for some kinds
    assert error < 1.3 * relative_error(weights, round_to(weights, kind, 32 if kind == "int8" else None))


def test_rows_of_partial_blocks_raise(tmp_path):
    config = DENSE.replace(hidden_size=40, tie_word_embeddings=True)
    with pytest.raises(
        ValueError, match=r"attn_q.weight has rows of 40 weights, but Q4_0 has blocks of 32; choose another"
    ):
        write(tmp_path, config, gguf_file.QUANTIZED["int4"])
