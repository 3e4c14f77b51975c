"""The PTX that nvcc makes of the kernel, translated for the emulator (tests/support/emulator/ptx).

All tests with emulated devices also run on PTX, marked exhaustive (conftest.py); CI runs two of the small models here.
Other tests show what PTX finds and the kernel's source compiled for the host does not, and that the translator knows
all that nvcc makes of large models.
"""

import subprocess
import sys
import types

import numpy as np
import pytest

from laneformer import Precision
from laneformer.custom_calls.gpu import compile as gpu_build
from laneformer.custom_calls.gpu.codes import Codes
from laneformer.custom_calls.gpu.formats import product_weights
from laneformer.custom_calls.gpu.header import model_header
from laneformer.custom_calls.gpu.layout import Layout
from laneformer.custom_calls.gpu.tiling import H200
from laneformer.infer.engine.native import plan_of
from laneformer.recipes.models import MODELS, PACKED
from tests.support import emulated, small
from tests.support.decode_cases import LAYOUTS
from tests.support.emulator import port_functions, ptx
from tests.support.emulator.compare_kernels import CASES, difference
from tests.support.gpu_cases import WAYS, some

pytestmark = [small.needs_library, emulated.only_emulated, emulated.needs_nvcc, pytest.mark.slow]


@pytest.fixture
def on_ptx(monkeypatch):
    monkeypatch.setenv("EMULATOR_CODE", "ptx")


FOUR_BITS = {"hidden_size": 64, "head_dim": 16, "ff": 32, "num_hidden_layers": 2}
EXPERTS = {"num_experts": 5, "hidden_size": 64, "moe_intermediate_size": 64}
SMALL_MODELS = {  # config, weights, other options
    "bf12": ({"layout": "dtp(1)", "lanes": 3, "hidden_size": 48, "num_hidden_layers": 2}, "bf12", {}),
    "int4 by tensor cores, one launch per op": (FOUR_BITS | {"layout": "ladder"}, "int4", {"launch": "graph"}),
    "drafts": ({"layout": "dtp(1)", "lanes": 3}, "float32", {"rows": 3}),
    "experts, delta net": (CASES["delta net"] | EXPERTS, "mxfp4", {}),
    "latent attention": (CASES["latent attention"], "bfloat16", {}),
    "compressed attention, streams": (CASES["compressed attention, several streams"], "float32", {}),
}
IN_CI = ("bf12", "int4 by tensor cores, one launch per op")


@pytest.mark.parametrize("name", some(SMALL_MODELS, IN_CI))
def test_small_models_match_the_cpu_kernel(name, on_ptx):
    changes, weights, options = SMALL_MODELS[name]
    assert difference(small.make_config(**changes), weights, **options) < 1e-5


def drawn_model(seed: int) -> tuple:
    """Random sizes, a layout, options of attention or experts, weights and options of the session."""
    rng = np.random.default_rng(seed)
    layout, lanes = LAYOUTS[rng.integers(len(LAYOUTS))]
    changes = {
        "layout": layout,
        "lanes": lanes,
        "head_dim": 2 * int(rng.integers(1, 20)),
        "ff": int(rng.integers(1, 90)),
    }
    changes |= {"hidden_size": int(rng.integers(1, 130)), "vocab_size": int(rng.integers(24, 300))}
    changes |= {"kv_heads": int(rng.integers(1, 4)), "num_hidden_layers": int(rng.integers(1, 5))}
    changes["heads"] = changes["kv_heads"] * int(rng.integers(1, 4))
    changes |= [{}, {"qkv_bias": True}, {"qk_norm": True}, {"attention_gate": True}, {"attention_sinks": True}][
        seed % 5
    ]
    weights = ["float32", "bfloat16", "float16", "bf12", *WAYS][rng.integers(4 + len(WAYS))]
    options = [{}, {"launch": "graph"}, {"launch": "overlapping graph"}, {"rows": 2}, {"rows": 4}][rng.integers(5)]
    return changes, weights, options


@pytest.mark.exhaustive
@pytest.mark.parametrize("seed", range(20))
def test_random_models_match_the_cpu_kernel(seed, on_ptx):
    changes, weights, options = drawn_model(seed)
    # Seed 5, FP8 in rows of 16, differs by 2.7e-5, on the emulated source as on PTX.
    assert difference(small.make_config(**changes), weights, **options) < 5e-5


# ---- what PTX shows

# Changes of port.h's CUDA part: old, new, and what the run must report, or "" if it only gives other numbers.
CHANGES = {
    "operands of inline assembly swapped": ("sub.f16x2 %0, %1, %2;", "sub.f16x2 %0, %2, %1;", ""),
    "16 bytes too few announced": ('"r"(bytes)\n               :', '"r"(bytes - 16)\n               :', "announced"),
    "registers of a fragment swapped": ('"r"(a[0]), "r"(a[1]), "r"(a[2])', '"r"(a[1]), "r"(a[0]), "r"(a[2])', ""),
    "a bulk copy that is not aligned": (
        '"r"(shared_address(to)),',
        '"r"(shared_address(to) + 8),',
        "aligned to 16 bytes",
    ),
    "no fence between reads and a copy": (
        'asm volatile("fence.proxy.async.shared::cta;" ::: "memory");',
        "",
        "overwrite",
    ),
    "a read past the end of shared memory": (
        "load_vec(const void* p) {\n  const uint4 v = *(const uint4*)p;",
        "load_vec(const void* p) {\n  const uint4 v = ((const uint4*)p)[2048];",
        "outside shared memory",
    ),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_wrong_cuda_part_is_found(name, tmp_path, on_ptx):
    old, new, report = CHANGES[name]
    failure, found = port_functions.run(port_functions.compiled(tmp_path, [(old, new)]), tmp_path)
    if report:
        assert report in failure
    else:
        assert not failure and not np.array_equal(found, port_functions.CASE.expected)


def test_the_source_does_not_show_it(tmp_path, monkeypatch):
    monkeypatch.setenv("EMULATOR_CODE", "port")
    library = port_functions.compiled(tmp_path, [change[:2] for change in CHANGES.values()])
    failure, found = port_functions.run(library, tmp_path)
    assert not failure
    np.testing.assert_array_equal(found, port_functions.CASE.expected)


RUN_CHANGED = """
import os, sys
os.environ["JAX_PLATFORMS"] = "cpu"
from laneformer.custom_calls.gpu import codes
from tests.support import emulated, small
from tests.support.emulator import port_functions
from tests.support.emulator.compare_kernels import difference
unchanged = emulated.ptx_of
def ptx_of(folder):
    file = folder / "port.h"
    file.write_text(port_functions.changed(file.read_text(), [sys.argv[1:]]))
    return unchanged(folder)
emulated.ptx_of = ptx_of
if "a[0]" in sys.argv[1]:  # tensor cores, which the model is too small for
    codes.INSTRUCTIONS = dict.fromkeys(codes.INSTRUCTIONS, (1e6, 0))
config = small.make_config(layout="dtp(1)", hidden_size=64, head_dim=16, ff=32)
found = difference(config, "int4 zeros")
assert found < 1e-5, "other numbers"
"""


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", CHANGES)
def test_a_wrong_cuda_part_is_found_in_a_model(name, on_ptx, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))  # the library is not that of the sources
    old, new, report = CHANGES[name]
    command = [sys.executable, "-c", RUN_CHANGED, old, new]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode != 0 and (report or "AssertionError") in done.stderr, done.stderr


# ---- the translator


@pytest.mark.parametrize(
    "statement",
    [
        "frobnicate.u32 %r1, %r1",
        "add.sat.s32 %r1, %r1, %r1",
        "add.rz.f32 %r1, %r1, %r1",
        "mul.ftz.f32 %r1, %r1, %r1",
        "ld.global.v3.u32 {%r1, %r1, %r1}, [%rd1]",
        "ld.acquire.gpu.u32 %r1, [%rd1]",
        "st.shared::cluster.u32 [%r1], %r1",
        "shfl.sync.up.b32 %r1, %r1, 1, 0, -1",
        "shfl.sync.bfly.b32 %r1, %r1, 1, 15, -1",
        "bar.sync 1",
        "bar.warp.sync 65535",
        "atom.global.cas.b32 %r1, [%rd1], 1, 2",
        "fence.proxy.async.global",
        "mbarrier.arrive.shared::cta.b64 _, [%r1]",
        "mma.sync.aligned.m16n8k16.row.col.s32.u8.u8.s32 {%r1, %r1, %r1, %r1}, {%r1, %r1}, {%r1}, {%r1, %r1, %r1, %r1}",
        "add.s32 %r1, %r1",
        "mov.u32 %r1, %warpid",
        "mov.u32 %r1, unknown+",
    ],
)
def test_unknown_forms_are_refused(statement):
    text = ".visible .entry laneformer_read(.param .b64 p)\n{{\n.reg .b32 %r<2>;\n.reg .b64 %rd<2>;\n{};\nret;\n}}\n"
    assert "r1_ = (uint32_t)" in ptx.translate(text.format("add.s32 %r1, %r1, 1"))
    with pytest.raises(ptx.Unsupported, match=statement.split()[0].split(".")[0]):
        ptx.translate(text.format(statement))


def layout_of(name: str) -> Layout:
    """The layout of a published model in its published formats on one of eight H200."""
    model = PACKED.get(name)
    config = (model.config if model else MODELS[name]).replace(num_lanes=8)
    source = types.SimpleNamespace(config=config, precision=Precision("bfloat16", "bfloat16"), stored_dtype="bfloat16")
    plan, formats = plan_of(source), model.formats if model else {}
    codes = {"mxfp4": Codes("e2m1", "e8m0", 32), "fp8": Codes("e4m3", "bfloat16", 128)}
    paths = (path for group in product_weights(plan) for path in group)
    packed = {path: codes[kind] for path in paths if (kind := formats.get(path.split(".", 2)[-1]))}
    return Layout(plan, H200, 1, codes=packed)


RECIPES = ("laneformer_2b", "gpt_oss_20b", "qwen3_next_20b", "deepseek_v3", "deepseek_v4_8")


@pytest.mark.parametrize(
    ("name", "kernel"),
    some(
        [(name, kernel) for name in RECIPES for kernel in (gpu_build.PERSISTENT, gpu_build.STEPS)],
        {("laneformer_2b", gpu_build.PERSISTENT)},
    ),
)
def test_every_instruction_of_large_models_is_known(name, kernel):
    def compile_with(folder, out, architecture):
        out.write_text(ptx.translate(emulated.ptx_of(folder)))

    code = gpu_build.image(model_header(layout_of(name)), "sm_90a", compile_with, kernel).decode()
    assert "emulator::arrive(" in code and "bulk_copy(" in code
