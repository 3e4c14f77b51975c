"""Compiles GPU kernels with clang for gfx942 and checks registers, spills and the machine code. Needs no GPU."""

import re
import shutil
import subprocess
import types
from functools import cache
from pathlib import Path

import pytest

from laneformer import Precision
from laneformer.config import ResidualStreams
from laneformer.custom_calls.gpu import compile as gpu_build
from laneformer.custom_calls.gpu.header import model_header
from laneformer.custom_calls.gpu.layout import Layout
from laneformer.custom_calls.gpu.tiling import MI300X
from laneformer.infer.engine.native import plan_of
from laneformer.recipes.models import MODELS
from tests.support.gpu_models import CASES, CODES, OF_KERNELS, header, of_compressed, of_delta_net, of_experts

pytestmark = pytest.mark.slow

needs_clang = pytest.mark.skipif(
    gpu_build.clang() is None or not all(map(shutil.which, ("ld.lld-19", "llvm-objdump-19", "llvm-readelf-19"))),
    reason="clang-19, lld-19 and llvm-19 are not installed",
)


@cache
def amd(lanes_here: int, dtype: str, folder) -> tuple[dict[str, dict[str, int]], str]:
    """Compiles the 2B for AMD. Returns the figures in the object file by kernel, and the code of laneformer_decode."""
    return amd_code(header(MI300X, lanes_here, dtype), folder / f"{lanes_here}-{dtype}.hsaco")


def amd_code(header: str, image: Path) -> tuple[dict[str, dict[str, int]], str]:
    """`amd` for any model. image: file for the image."""
    image.write_bytes(gpu_build.image(header, "gfx942", gpu_build.compiler("gfx942")))

    def output(*command: str) -> str:
        return subprocess.run([*command, str(image)], capture_output=True, text=True, check=True).stdout

    found = {}
    for kernel in output("llvm-readelf-19", "--notes").split("  - .agpr_count")[1:]:
        name = re.search(r"\.name:\s+(\w+)", kernel)[1]
        found[name] = {key: int(value) for key, value in re.findall(r"\.(\w+):\s+(\d+)$", ".agpr_count" + kernel, re.M)}
    return found, output("llvm-objdump-19", "-d", "--no-show-raw-insn", "--disassemble-symbols=laneformer_decode")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("images")


@needs_clang
@pytest.mark.exhaustive
@pytest.mark.parametrize("name", OF_KERNELS)
def test_amd_compiles_experts(name):
    model = model_header(of_experts(name, MI300X))
    assert gpu_build.image(model, "gfx942", gpu_build.compiler("gfx942")).startswith(b"\x7fELF")


@needs_clang
@pytest.mark.exhaustive
def test_amd_compiles_residual_streams():
    model = header(MI300X, 8, "float16", layout="tp", residual_streams=ResidualStreams(count=4))
    assert gpu_build.image(model, "gfx942", gpu_build.compiler("gfx942")).startswith(b"\x7fELF")


@needs_clang
@pytest.mark.exhaustive
def test_amd_delta_net_spills_as_expected(folder):
    """Many registers are spilled, as with attention alone; see docs/gpu.md."""
    kernels, _ = amd_code(model_header(of_delta_net(MI300X)), folder / "delta_net.hsaco")
    decode = kernels["laneformer_decode"]
    assert decode["vgpr_count"] <= 256 and decode["vgpr_spill_count"] <= 200


@needs_clang
@pytest.mark.parametrize(
    ("name", "changes"),
    [("latent_tiny", {}), ("delta_tiny", {}), ("v4_tiny", {"hash_layers": 1, "router_correction": True})],
)
def test_amd_small_models_spill_few_registers(name, changes, folder):
    """The models have ops that no other model has: latent attention, DeltaNet, and all ops of DeepSeek-V4 (residual
    streams, routers of roots and with a table, compressed attention with an index, products of groups).
    """
    config = MODELS[name].replace(**changes)
    precision = Precision(param="bfloat16", compute="bfloat16")
    plan = plan_of(types.SimpleNamespace(config=config, precision=precision, stored_dtype="bfloat16"))
    kernels, _ = amd_code(model_header(Layout(plan, MI300X, config.num_lanes)), folder / f"{name}.hsaco")
    decode = kernels["laneformer_decode"]
    assert decode["vgpr_count"] <= 256 and decode["vgpr_spill_count"] <= 16


@needs_clang
@pytest.mark.exhaustive
def test_amd_compressed_attention_spills_few_registers(folder):
    kernels, code = amd_code(model_header(of_compressed(MI300X)), folder / "compressed.hsaco")
    decode = kernels["laneformer_decode"]
    assert decode["vgpr_count"] <= 256 and decode["vgpr_spill_count"] <= 64
    assert not any("scratch_" in line for loop in hot_loops(code) for line in loop)


@needs_clang
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.exhaustive if name != "mxfp4" else ()) for name in CODES]
)
def test_amd_loops_of_quantized_weights_spill_nothing(name, folder):
    kernels, code = amd(8, name, folder)
    decode = kernels["laneformer_decode"]
    assert decode["vgpr_count"] <= 256 and decode["vgpr_spill_count"] <= 64
    assert not any("scratch_" in line for loop in hot_loops(code) for line in loop)
    assert (code.count("v_cvt_pk_f32_fp8") >= 480) == (CODES[name].code == "e4m3")


@needs_clang
def test_amd_compiles_steps():
    assert gpu_build.image(
        header(MI300X, 8, "float16"), "gfx942", gpu_build.compiler("gfx942"), gpu_build.STEPS
    ).startswith(b"\x7fELF")


@needs_clang
@pytest.mark.parametrize(("lanes_here", "dtype"), CASES)
def test_amd_spills_few_registers(lanes_here, dtype, folder):
    """Two waves share a SIMD with 512 registers. The spilled values are kept over the loop of all passes."""
    kernels, code = amd(lanes_here, dtype, folder)
    decode, read = kernels["laneformer_decode"], kernels["laneformer_read"]
    assert (
        decode["vgpr_count"] <= 256 and decode["vgpr_spill_count"] <= 64 and decode["private_segment_fixed_size"] <= 256
    )
    assert (read["vgpr_spill_count"], read["sgpr_spill_count"], read["private_segment_fixed_size"]) == (0, 0, 0)
    assert decode["wavefront_size"] == 64
    assert len(re.findall(r"scratch_(?:load|store)", code)) < 100


@needs_clang
@pytest.mark.parametrize(("lanes_here", "dtype"), CASES)
def test_amd_loads_and_exchanges_with_the_right_instructions(lanes_here, dtype, folder):
    _, code = amd(lanes_here, dtype, folder)
    assert (code.count("v_perm_b32") > 200) == (dtype == "bf12")
    lines = code.splitlines()
    weights = [line for line in lines if re.search(r"\bglobal_load_dwordx4\b.*\bnt\b", line)]
    assert len(weights) >= (24 if dtype == "bf12" else 30), "weights are loaded 16 bytes at a time and bypass the cache"
    assert len(re.findall(r"\bflat_load_dwordx[24]\b", code)) <= (6 if dtype == "bf12" else 4), (
        "all pointers except the call's settings are known to be global"
    )
    assert re.search(r"\bds_read", code) and re.search(r"\bds_write", code)
    words = [line for line in lines if re.search(r"\bglobal_(load|store)_dwordx2\b.*\bsc0 sc1\b", line)]
    assert (
        len([line for line in words if "store" in line]) >= 5 and len([line for line in words if "load" in line]) >= 5
    ), "exchanged words are accessed with system scope"
    assert not re.search(r"\bflat_(load|store)_dwordx2\b.*\bsc0 sc1\b", code)


@needs_clang
def test_amd_writes_back_no_cache_between_weights(folder):
    """buffer_wbl2 writes back a whole cache, which is allowed for a packet or an error, but not within a product. (With
    one lane on a device, the products are too short for loops.)
    """
    _, code = amd(8, "float16", folder)
    assert "buffer_wbl2" in code
    loops = hot_loops(code)
    assert loops, "no loop that reads weights was found"
    assert not any("buffer_wbl2" in line for loop in loops for line in loop)
    assert not any("scratch_" in line for loop in loops for line in loop)


def hot_loops(code: str) -> list[list[str]]:
    """The lines of each innermost loop that reads weights, from the target of a backward branch to the branch."""
    addressed = [(int(m[1], 16), line) for line in code.splitlines() if (m := re.search(r"// ([0-9A-F]{12}):", line))]
    base = addressed[0][0]
    back = []
    for address, line in addressed:
        target = re.search(r"s_c?branch\S* .*<laneformer_decode\+0x([0-9a-f]+)>", line)
        if target and base + int(target[1], 16) < address:
            back.append((base + int(target[1], 16), address))
    inner = [(a, b) for a, b in back if not any(a <= c and d <= b and (a, b) != (c, d) for c, d in back)]
    found = [[line for address, line in addressed if a <= address <= b] for a, b in inner]
    return [loop for loop in found if any("global_load_dwordx4" in line and " nt" in line for line in loop)]
