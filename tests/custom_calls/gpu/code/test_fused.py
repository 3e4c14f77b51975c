"""Multiply-adds: the source alone decides what is fused, so all compilers and both launch forms give the same bits.
Needs no GPU.
"""

import re
import subprocess
import types
from collections import Counter
from pathlib import Path

import pytest

from laneformer import Precision
from laneformer.custom_calls.gpu import compile as gpu_build
from laneformer.custom_calls.gpu.codes import Codes
from laneformer.custom_calls.gpu.formats import product_weights
from laneformer.custom_calls.gpu.header import model_header
from laneformer.custom_calls.gpu.layout import Layout
from laneformer.custom_calls.gpu.tiling import H200, MI300X
from laneformer.infer.engine.native import plan_of
from laneformer.recipes.models import LANEFORMER_2B, MODELS

pytestmark = pytest.mark.slow
needs_nvcc = pytest.mark.skipif(gpu_build.nvcc() is None, reason="nvcc is not installed")
needs_clang = pytest.mark.skipif(gpu_build.clang() is None, reason="clang-19 is not installed")

CODES = {
    "int8": Codes("int8", factors=True),
    "fp8": Codes("e4m3", "float32", 128),
    "int4 zeros": Codes("int4", "float16", 128, zeros=True),
    "nvfp4": Codes("e2m1", "e4m3", 16, factors=True),
}
# Together they have all ops: latent attention, DeltaNet, experts, residual streams, compressed attention with an index.
SMALL = {
    "delta_tiny": MODELS["delta_tiny"],
    "latent_tiny": MODELS["latent_tiny"],
    "v4_tiny": MODELS["v4_tiny"].replace(hash_layers=1, router_correction=True),
}
KERNELS = [
    pytest.param(name, source, marks=() if (name, source) == ("delta_tiny", "steps.cu") else pytest.mark.exhaustive)
    for name in ("2b", *CODES, *SMALL)
    for source in ("decode.cu", "steps.cu")
]


def header(name: str, machine=H200) -> str:
    """The header model.h of a small model, or of the 2B in bfloat16 or with products of CODES."""
    config = SMALL.get(name, LANEFORMER_2B)
    precision = Precision(param="bfloat16", compute="bfloat16")
    plan = plan_of(types.SimpleNamespace(config=config, precision=precision, stored_dtype="bfloat16"))
    paths = [path for paths in product_weights(plan) for path in paths]
    codes = dict.fromkeys(paths, CODES[name]) if name in CODES else {}
    return model_header(Layout(plan, machine, config.num_lanes, codes=codes))


def ptx(name: str, source: str, fuses: bool = False, changes: tuple[tuple[str, str], ...] = ()) -> str:
    """The PTX of a kernel, with lines of the source. fuses: lets nvcc fuse what it can. changes: of text in port.h."""

    def compile_with(folder: Path, out: Path, architecture: str) -> None:
        port = (folder / "port.h").read_text()
        for before, after in changes:
            assert port.count(before) == 1, before
            port = port.replace(before, after)
        (folder / "port.h").write_text(port)
        flags = [flag for flag in gpu_build.NVIDIA_FLAGS if not (fuses and flag == "--fmad=false")]
        target = ("-gencode=arch=compute_90a,code=compute_90a", str(folder / gpu_build.KERNEL), "-o", str(out))
        gpu_build._run([gpu_build.nvcc(), "-ptx", "-lineinfo", "-O3", *flags, *target])

    return gpu_build.image(header(name), "sm_90a", compile_with, source).decode()


def fused_by_line(text: str) -> Counter:
    """How many float32 multiply-adds each line of the source has; a key is (file, line)."""
    files = {number: Path(path).name for number, path in re.findall(r'\.file\s+(\d+) "([^"]+)"', text)}
    found, place = Counter(), None
    for line in text.splitlines():
        if at := re.match(r"\s*\.loc\s+(\d+) (\d+)", line):
            place = files[at[1]], int(at[2])
        elif re.search(r"\bfma\.r[nm]\S*\.f32", line):
            found[place] += 1
    return found


@needs_nvcc
@pytest.mark.parametrize(("name", "source"), KERNELS)
def test_nvidia_fuses_what_the_source_names(name, source):
    """Without the source's `fma`, and without exp and log of nvcc's library, no multiply-add is left. All additions and
    multiplications state their rounding, so ptxas fuses none. And the source names every one that is worth it.
    """
    text = ptx(name, source)
    assert sum(fused_by_line(text).values()) > 100
    assert not re.findall(r"\b(?:add|sub|mul)(?:\.ftz)?(?:\.sat)?\.f(?:32|64)\b", text)
    unfused = ptx(
        name,
        source,
        changes=(("__fmaf_rn(a, b, c)", "a * b + c"), ("return expf(v)", "return v"), ("return logf(v)", "return v")),
    )
    assert not fused_by_line(unfused)

    # What nvcc could still fuse: the last multiplication of an exponential, and a mean that the eps of a norm follows.
    more = fused_by_line(ptx(name, source, fuses=True)) - fused_by_line(text)
    lines = {place: _line(*place) for place in more}
    assert {place: line for place, line in lines.items() if not re.search(r"\bexp(_of)?\(|rsqrt_of\(", line)} == {}


def _line(file: str, number: int) -> str:
    """A line of a kernel's sources."""
    (path,) = (path for path in gpu_build.kernel_sources(gpu_build.PERSISTENT) if path.name == file)
    return path.read_text().splitlines()[number - 1].strip()


@needs_clang
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.exhaustive if name != "delta_tiny" else ()) for name in ("2b", *SMALL)],
)
def test_amd_fuses_what_the_source_names(name):
    """Clang may contract nothing, also not in its back end: no operation of its code has the flag."""

    def compile_with(folder: Path, out: Path, architecture: str) -> None:
        target = (f"--offload-arch={architecture}", "-emit-llvm", "-S", str(folder / gpu_build.KERNEL), "-o", str(out))
        subprocess.run([gpu_build.clang(), *gpu_build.HIP_FLAGS, *target], check=True)

    code = gpu_build.image(header(name, MI300X), "gfx942", compile_with).decode()
    assert len(re.findall(r"call .*@llvm\.fma\.", code)) > 100
    assert not re.findall(r"\b(?:fast|contract)\b.* (?:float|double)\b|@llvm\.fmuladd", code)
