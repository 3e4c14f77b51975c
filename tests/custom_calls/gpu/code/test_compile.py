"""Compiles GPU kernels with the real compilers and checks properties of the machine code. Needs no GPU."""

import dataclasses
import re
import shutil
import subprocess
import sys
import types
from collections import Counter, deque
from functools import cache
from pathlib import Path

import pytest

from laneformer import ModelConfig, Precision
from laneformer.config import CompressedAttention, ResidualStreams
from laneformer.custom_calls.gpu import codes
from laneformer.custom_calls.gpu import compile as gpu_build
from laneformer.custom_calls.gpu.codes import Codes
from laneformer.custom_calls.gpu.formats import product_weights
from laneformer.custom_calls.gpu.header import model_header
from laneformer.custom_calls.gpu.layout import Layout
from laneformer.custom_calls.gpu.tiling import H200, MI300X
from laneformer.decoder import decoder_ops
from laneformer.infer.engine.native import plan_of
from laneformer.ops import without_kernel
from laneformer.recipes.models import LANEFORMER_2B, MODELS, PACKED, QWEN3_NEXT_20B
from tests.support.gpu_cases import mixed_plan


@cache
def nvdisasm() -> str | None:
    """Path of nvdisasm, from PATH or its wheel; None if it is not installed."""
    wheels = (path for folder in sys.path for path in Path(folder).glob("nvidia/*/bin/nvdisasm"))
    return shutil.which("nvdisasm") or next(map(str, wheels), None)


needs_nvcc = pytest.mark.skipif(gpu_build.nvcc() is None, reason="nvcc is not installed")
needs_clang = pytest.mark.skipif(
    gpu_build.clang() is None or not all(map(shutil.which, ("ld.lld-19", "llvm-objdump-19", "llvm-readelf-19"))),
    reason="clang-19, lld-19 and llvm-19 are not installed",
)
CASES = [
    pytest.param(lanes, dtype, id=f"lanes {lanes}, {dtype}", marks=() if quick else pytest.mark.exhaustive)
    for lanes, dtype, quick in (
        (8, "float16", False),
        (8, "bfloat16", False),
        (8, "bf12", True),
        (1, "float16", True),
        (1, "bfloat16", False),
        (1, "bf12", False),
    )
]
CODES = {
    "int8": Codes("int8", factors=True),
    "fp8": Codes("e4m3", "float32", 128),
    "int4": Codes("int4", "bfloat16", 32),
    "int4 zeros": Codes("int4", "float16", 128, zeros=True),
    "mxfp4": Codes("e2m1", "e8m0", 32),
    "nvfp4": Codes("e2m1", "e4m3", 16, factors=True),
}
pytestmark = pytest.mark.slow


def header(machine, lanes_here: int, dtype: str, rows=1, requests=1, drafts=False, variants=(), **changes) -> str:
    """The header model.h of the 2B. dtype: dtype of the weights, or bf12 or a name in CODES for bfloat16 with all
    products in 12 bits or quantized. rows, requests, drafts, variants: as in Layout. changes: changes of the config.
    """
    config, in_12_bits, format = LANEFORMER_2B.replace(**changes), dtype == "bf12", CODES.get(dtype)
    dtype = "bfloat16" if in_12_bits or format else dtype
    source = types.SimpleNamespace(config=config, precision=Precision(param=dtype, compute=dtype), stored_dtype=dtype)
    plan = plan_of(source)
    paths = [path for paths in product_weights(plan) for path in paths]
    quantized = dict.fromkeys(paths, format) if format else {}
    in_12_bits = paths if in_12_bits else ()
    options = {"bf12": in_12_bits, "codes": quantized, "rows": rows, "requests": requests, "drafts": drafts}
    return model_header(Layout(plan, machine, lanes_here, variants=variants, **options))


ON_EIGHT = ("deepseek_v3", "deepseek_v3_4", "kimi_k2")  # models on eight devices; others are on one


def of_experts(name: str, machine=H200, rows: int = 1) -> Layout:
    """The layout of a published mixture of experts in its published formats, on one device, or one of eight."""
    model, format = PACKED[name], {"mxfp4": CODES["mxfp4"], "fp8": Codes("e4m3", "bfloat16", 128)}
    config = model.config.replace(num_lanes=8) if name in ON_EIGHT else model.config
    precision = Precision(param="bfloat16", compute="bfloat16")
    plan = plan_of(types.SimpleNamespace(config=config, precision=precision, stored_dtype="bfloat16"))
    packed = {
        path: format[kind]
        for paths in product_weights(plan)
        for path in paths
        if (kind := model.formats.get(path.split(".", 2)[-1]))
    }
    return Layout(plan, machine, 1, codes=packed, rows=rows)


def of_delta_net(machine=H200) -> Layout:
    """The layout of Qwen3-Next's layers in bfloat16 on one device, with an MLP instead of experts."""
    experts = ("num_experts", "num_experts_per_tok", "moe_intermediate_size", "shared_expert_intermediate_size")
    config = QWEN3_NEXT_20B.replace(**dict.fromkeys(experts), shared_expert_gate=False)
    precision = Precision(param="bfloat16", compute="bfloat16")
    plan = plan_of(types.SimpleNamespace(config=config, precision=precision, stored_dtype="bfloat16"))
    return Layout(plan, machine, 1)


def of_compressed(machine=H200, rows: int = 1) -> Layout:
    """The layout of layers with DeepSeek-V4-Flash's sizes in bfloat16 on one device, with one stream and MLPs."""
    sizes = {"q_lora_rank": 1024, "qk_rope_head_dim": 64, "o_groups": 8, "o_lora_rank": 1024}
    config = ModelConfig(
        vocab_size=129_280,
        hidden_size=4096,
        head_dim=512,
        num_hidden_layers=6,
        num_attention_heads=64,
        num_key_value_heads=1,
        num_lanes=1,
        intermediate_size=12_288,
        max_position_embeddings=8192,
        layout="tp",
        compressed_attention=CompressedAttention(ratios=(0, 0, 4, 128, 4, 128), window=128, **sizes),
    )
    precision = Precision(param="bfloat16", compute="bfloat16")
    plan = plan_of(types.SimpleNamespace(config=config, precision=precision, stored_dtype="bfloat16"))
    return Layout(plan, machine, 1, rows=rows)


@cache
def nvidia(lanes_here: int, dtype: str, source: str = gpu_build.PERSISTENT) -> dict[str, dict[str, int]]:
    return figures(header(H200, lanes_here, dtype), source)


def figures(header: str, source: str, image: Path | None = None) -> dict[str, dict[str, int]]:
    """Compiles a kernel and returns the figures that ptxas reports: stack, stores and loads of spills in bytes, and
    registers, by kernel. image: file for the image.
    """
    reports = []

    def compile_with(folder, out, architecture):
        command = [
            gpu_build.nvcc(),
            "-cubin",
            "-O3",
            *gpu_build.NVIDIA_FLAGS,
            "-Xptxas",
            "-v",
            "-gencode=arch=compute_90a,code=sm_90a",
            str(folder / gpu_build.KERNEL),
            "-o",
            str(out),
        ]
        reports.append(gpu_build._run(command))

    made = gpu_build.image(header, "sm_90a", compile_with, source)
    assert made.startswith(b"\x7fELF")
    if image:
        image.write_bytes(made)
    assert "warning" not in reports[0]
    found = {}
    for part in reports[0].split("Compiling entry function '")[1:]:
        numbers = re.search(
            r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads.*?Used (\d+) reg", part, re.S
        )
        found[part.split("'")[0]] = dict(
            zip(("stack", "stores", "loads", "registers"), map(int, numbers.groups()), strict=True)
        )
    return found


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


@needs_nvcc
@pytest.mark.parametrize(("lanes_here", "dtype"), CASES)
def test_nvidia_spills_no_registers(lanes_here, dtype):
    kernels = nvidia(lanes_here, dtype)
    decode, read = kernels["laneformer_decode"], kernels["laneformer_read"]
    for kernel in (decode, read):
        assert kernel["registers"] <= 255 and (kernel["stack"], kernel["stores"], kernel["loads"]) == (0, 0, 0)


@needs_nvcc
@pytest.mark.parametrize(
    ("lanes_here", "dtype"),
    [(8, "float16"), *(pytest.param(*case, marks=pytest.mark.exhaustive) for case in ((1, "float16"), (8, "bf12")))],
)
def test_nvidia_spills_no_registers_in_steps(lanes_here, dtype):
    step = nvidia(lanes_here, dtype, gpu_build.STEPS)["laneformer_step"]
    assert step["registers"] <= 255 and (step["stack"], step["stores"], step["loads"]) == (0, 0, 0)


@needs_nvcc
@pytest.mark.parametrize(
    ("variant", "most"),
    [
        ("triples", 72),
        pytest.param("out-of-line", 0, marks=pytest.mark.exhaustive),
        pytest.param("spare-writer", 0, marks=pytest.mark.exhaustive),
    ],
)
def test_nvidia_variants_spill_few_registers(variant, most):
    """most: bytes of spills of a thread."""
    decode = figures(header(H200, 1, "bfloat16", variants=(variant,)), gpu_build.PERSISTENT)["laneformer_decode"]
    assert decode["registers"] <= 255 and max(decode["stack"], decode["stores"], decode["loads"]) <= most


@needs_nvcc
@pytest.mark.skipif(nvdisasm() is None, reason="nvdisasm is not installed (pip install nvidia-cuda-nvdisasm)")
def test_nvidia_weights_in_12_bits_take_few_instructions(folder):
    """Eight weights take six byte permutations, two of them for the table, and three quarters of the loads."""
    loops = {}
    for dtype in ("bfloat16", "bf12"):
        image = folder / f"{dtype}.cubin"
        image.write_bytes(gpu_build.image(header(H200, 8, dtype), "sm_90a"))
        loops[dtype] = weight_loops(image)
    for counts in loops["bf12"]:
        assert counts["PRMT"] * 8 == counts["FFMA"] * 6 and counts["LDS.128"] * 16 == counts["FFMA"] * 3
        assert counts.total() < 8.5 * counts["FFMA"], "with the code for exceptions and for the ring's end"
    assert len(loops["bf12"]) == 5 and not any(counts["PRMT"] for counts in loops["bfloat16"])


@needs_nvcc
@pytest.mark.parametrize(
    ("rows", "requests", "drafts", "loads"),
    [
        pytest.param(2, 1, True, 500, marks=pytest.mark.exhaustive),
        (2, 2, False, 500),
        pytest.param(3, 2, True, 800, marks=pytest.mark.exhaustive),
    ],
)
def test_nvidia_requests_spill_few_registers(rows, requests, drafts, loads):
    """Two requests in a call spill hardly more than two rows of one request, and with drafts than three rows."""
    one = header(H200, 8, "float16", rows=rows, requests=requests, drafts=drafts)
    decode = figures(one, gpu_build.PERSISTENT)["laneformer_decode"]
    assert decode["registers"] <= 255 and decode["loads"] <= loads


class Code:
    """The instructions of the decode kernel, and its loops."""

    def __init__(self, image: Path):
        code = subprocess.run([nvdisasm(), "-c", image], capture_output=True, text=True, check=True).stdout
        labels, self.lines = {}, []
        for line in code[code.index(".text.laneformer_decode:") :].splitlines():
            if label := re.match(r"(\.L_x_\d+):", line):
                labels[label[1]] = len(self.lines)
            elif found := re.match(r"\s+/\*[0-9a-f]+\*/\s+(.*?) ?;", line):
                self.lines.append(found[1])
        jumps = ((number, re.search(r"\bBRA\b.*`\((\.L_x_\d+)\)", line)) for number, line in enumerate(self.lines))
        self.targets = {number: labels[jump[1]] for number, jump in jumps if jump and jump[1] in labels}

    def name(self, number: int) -> str:
        return re.match(r"(?:@!?U?P\w+ )?(LDS\.128|\w+)", self.lines[number])[1]

    def loops(self) -> list[tuple[int, int]]:
        return [(target, number) for number, target in self.targets.items() if target < number]

    def counts(self, numbers) -> Counter:
        return Counter(map(self.name, numbers))

    def shortest_path(self, first: int, last: int) -> list[int]:
        """Numbers of the instructions on the shortest path through a loop: no copy is issued, no wait, no end of the
        ring.
        """
        before, reached = {first: None}, deque([first])
        while reached and last not in before:
            number = reached.popleft()
            line, following = self.lines[number], []
            if not re.match(r"(BRA|EXIT)(?!.*\bU?P\d, )(?!\.DIV)", line):
                following.append(number + 1)
            if number in self.targets:
                following.append(self.targets[number])
            for other in following:
                if other not in before:
                    before[other] = number
                    reached.append(other)
        path = [last]
        while path[-1] != first:
            path.append(before[path[-1]])
        return path


def weight_loops(image: Path, multiply_adds: int = 96, loads: int = 18) -> list[Counter]:
    """Counts of the instructions of each innermost loop over four steps of a product: loops with this number of
    multiply-adds and at least this number of loads of 16 bytes. Each line's load appears twice, because the line may be
    at the ring's end.
    """
    code = Code(image)
    counts = [code.counts(range(a, b + 1)) for a, b in code.loops()]
    return [one for one in counts if one["FFMA"] == multiply_adds and one["LDS.128"] >= loads]


@needs_nvcc
@pytest.mark.skipif(nvdisasm() is None, reason="nvdisasm is not installed (pip install nvidia-cuda-nvdisasm)")
@pytest.mark.parametrize("rows", [2, *(pytest.param(n, marks=pytest.mark.exhaustive) for n in (1, 4))])
def test_nvidia_loops_of_several_rows_are_short(rows, folder):
    """In loops over 96 weights of a thread, each further row adds few instructions beyond its multiply-adds. With up to
    two rows no register is spilled there. Passes of one row have the same loops in every kernel.
    """
    image = folder / f"rows-{rows}.cubin"
    decode = figures(header(H200, 8, "float16", rows=rows), gpu_build.PERSISTENT, image)["laneformer_decode"]
    assert decode["registers"] <= 255 and decode["loads"] <= {1: 0, 2: 400, 4: 3000}[rows]
    code, paths = Code(image), {1: [], rows: []}
    for first, last in code.loops():
        inside = code.counts(range(first, last + 1))
        of = inside["FFMA"] // 96
        if of not in paths or inside["FFMA"] % 96 or inside["LDS.128"] < 6 or last - first > 1200:
            continue
        paths[of].append(len(code.shortest_path(first, last)))
        assert rows == 4 or inside["LDL"] == inside["STL"] == 0
    assert len(paths[1]) >= 4 and max(paths[1]) < 270
    assert len(paths[rows]) >= 4 and max(paths[rows]) < 170 + 130 * rows


@needs_nvcc
@pytest.mark.skipif(nvdisasm() is None, reason="nvdisasm is not installed (pip install nvidia-cuda-nvdisasm)")
@pytest.mark.parametrize(
    ("name", "loads", "wanted"),
    [
        ("int8", 12, {"PRMT": 96, "FADD": 96, "F2FP": 0}),
        pytest.param("fp8", 14, {"PRMT": 0, "HADD2": 96, "F2FP": 48}, marks=pytest.mark.exhaustive),
    ],
)
def test_nvidia_loops_of_quantized_weights_are_short(name, loads, wanted, folder):
    """Loops over 96 weights have the expected instructions that make floats, and one more multiply-add for each scale.
    A few registers that are kept over all passes may be spilled.
    """
    image = folder / f"{name}.cubin"
    decode = figures(header(H200, 8, name), gpu_build.PERSISTENT, image)["laneformer_decode"]
    assert decode["registers"] <= 255 and decode["stack"] <= 16 and decode["loads"] <= 16
    loops = weight_loops(image, 96 if CODES[name].scale is None else 108, loads)
    assert len(loops) >= 4
    for counts in loops:
        found = {key: counts[key] for key in wanted}
        assert all(0 <= found[key] - count <= 16 for key, count in wanted.items()), found
        assert counts["LDL"] == counts["STL"] == 0
        assert counts.total() < 13 * counts["FFMA"], "with the code for the ring's end, twice"


@needs_nvcc
@pytest.mark.skipif(nvdisasm() is None, reason="nvdisasm is not installed (pip install nvidia-cuda-nvdisasm)")
@pytest.mark.parametrize("by_tensor", [True, pytest.param(False, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize(
    ("name", "sums", "matrices"),  # weights of a thread in a sum over blocks, and matrix products for that sum
    [
        ("mxfp4", 16, 2),
        pytest.param("int4", 16, 1, marks=pytest.mark.exhaustive),
        pytest.param("int4 zeros", 16, 2, marks=pytest.mark.exhaustive),
        pytest.param("nvfp4", 8, 2, marks=pytest.mark.exhaustive),
    ],
)
def test_nvidia_weights_of_4_bits_take_the_assumed_instructions(name, sums, matrices, by_tensor, folder, monkeypatch):
    """In loops over at least 96 weights of a thread, at most the instructions per weight that the layout assumes."""
    image, format = folder / f"{name}-{by_tensor}.cubin", dataclasses.replace(CODES[name], by_tensor=by_tensor)
    assumed = format.instructions
    if not by_tensor:
        monkeypatch.setattr(codes, "INSTRUCTIONS", dict.fromkeys(codes.INSTRUCTIONS, (0, 1e6)))
    decode = figures(header(H200, 8, name), gpu_build.PERSISTENT, image)["laneformer_decode"]
    assert decode["registers"] <= 255 and decode["stack"] <= 32 and decode["loads"] <= 32
    code, checked = Code(image), 0
    for first, last in code.loops():
        inside = code.counts(range(first, last + 1))
        weights = inside["IMMA"] * sums // matrices if by_tensor else 96 * (inside["HADD2"] >= 96)
        if 96 <= weights <= 192 and last - first < 2000:  # a loop with inner loops is longer
            assert inside["LDL"] == inside["STL"] == 0
            assert len(code.shortest_path(first, last)) <= assumed * weights
            checked += 1
    assert checked >= 4


@needs_nvcc
@pytest.mark.skipif(nvdisasm() is None, reason="nvdisasm is not installed (pip install nvidia-cuda-nvdisasm)")
@pytest.mark.parametrize(
    ("name", "rows"),
    [
        ("gpt_oss_20b", 1),
        *(
            pytest.param(*each, marks=pytest.mark.exhaustive)
            for each in (("gpt_oss_20b", 2), ("gpt_oss_120b", 1), ("qwen3_30b_a3b", 1), ("moonlight_16b", 1))
        ),
    ],
)
def test_nvidia_loops_of_experts_are_short(name, rows, folder):
    """Values that are kept over all passes may be spilled, as with an MLP instead of experts. With 4 bits, the loops
    over experts have no spilled register, and at most the instructions that the layout assumes. The rows of a pass are
    computed one after the other by the loops of one row, with a few spilled registers.
    """
    layout, image = of_experts(name, rows=rows), folder / f"{name}-{rows}.cubin"
    assert (layout.memory.ahead_slots, layout.memory.slots) == {1: (3, 5), 2: (2, 4)}[rows]
    decode = figures(model_header(layout), gpu_build.PERSISTENT, image)["laneformer_decode"]
    assert decode["registers"] <= 255 and decode["stack"] <= 256 * rows and decode["loads"] <= {1: 640, 2: 1600}[rows]
    code = Code(image)
    loops = [(a, b) for a, b in code.loops() if code.counts(range(a, b + 1))["IMMA"] == 12 and b - a < 1000]
    assert len(loops) == 2 * rows * ("mxfp4" in PACKED[name].formats.values())
    for first, last in loops:
        inside = code.counts(range(first, last + 1))
        assert inside["LDL"] + inside["STL"] <= 14 * (rows > 1)
        assert len(code.shortest_path(first, last)) < 96 * 2.3 + 14 * (rows > 1)


OF_KERNELS = [name for name, model in PACKED.items() if without_kernel(decoder_ops(model.config)) is None]


@needs_nvcc
@pytest.mark.exhaustive
@pytest.mark.parametrize("name", OF_KERNELS)
def test_nvidia_compiles_experts_with_one_launch_per_op(name):
    step = figures(model_header(of_experts(name)), gpu_build.STEPS)["laneformer_step"]
    assert step["registers"] <= 255 and step["stack"] <= 192


@needs_clang
@pytest.mark.exhaustive
@pytest.mark.parametrize("name", OF_KERNELS)
def test_amd_compiles_experts(name):
    model = model_header(of_experts(name, MI300X))
    assert gpu_build.image(model, "gfx942", gpu_build.compiler("gfx942")).startswith(b"\x7fELF")


@needs_nvcc
@pytest.mark.parametrize("source", [gpu_build.PERSISTENT, pytest.param(gpu_build.STEPS, marks=pytest.mark.exhaustive)])
def test_nvidia_delta_net_spills_few_registers(source):
    """Other layers have gated attention with heads of 256 channels. Values kept over all passes may be spilled."""
    kernels = figures(model_header(of_delta_net()), source)
    decode = kernels["laneformer_decode" if source == gpu_build.PERSISTENT else "laneformer_step"]
    assert decode["registers"] <= 255 and decode["stack"] <= 256 and decode["loads"] <= 800


@needs_nvcc
@pytest.mark.parametrize("source", [gpu_build.PERSISTENT, pytest.param(gpu_build.STEPS, marks=pytest.mark.exhaustive)])
def test_nvidia_residual_streams_gate_and_gelu_spill_no_registers(source):
    """Four residual streams spill no registers, as one stream does not."""
    changes = {"residual_streams": ResidualStreams(count=4), "attention_gate": True, "hidden_act": "gelu"}
    kernels = figures(header(H200, 8, "float16", layout="tp", **changes), source)
    decode = kernels["laneformer_decode" if source == gpu_build.PERSISTENT else "laneformer_step"]
    assert decode["registers"] <= 255 and (decode["stack"], decode["stores"], decode["loads"]) == (0, 0, 0)


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


@needs_nvcc
@pytest.mark.skipif(nvdisasm() is None, reason="nvdisasm is not installed (pip install nvidia-cuda-nvdisasm)")
def test_nvidia_loops_of_compressed_attention_spill_nothing(folder):
    """Values kept over all passes may be spilled, but nothing in loops over 96 or 128 weights, or over keys."""
    image = folder / "compressed.cubin"
    decode = figures(model_header(of_compressed()), gpu_build.PERSISTENT, image)["laneformer_decode"]
    assert decode["registers"] <= 255 and decode["stack"] <= 128 and decode["loads"] <= 300
    code = Code(image)
    counts = [code.counts(range(first, last + 1)) for first, last in code.loops() if last - first < 1000]
    hot = [one for one in counts if one["FFMA"] in (96, 128, 130)]
    assert len(hot) >= 15 and not any(one["LDL"] + one["STL"] for one in hot)


@needs_nvcc
@pytest.mark.exhaustive
def test_nvidia_steps_of_compressed_attention_spill_few_registers():
    step = figures(model_header(of_compressed()), gpu_build.STEPS)["laneformer_step"]
    assert step["registers"] <= 255 and step["stack"] <= 384 and step["loads"] <= 2400


@needs_clang
@pytest.mark.exhaustive
def test_amd_compressed_attention_spills_few_registers(folder):
    kernels, code = amd_code(model_header(of_compressed(MI300X)), folder / "compressed.hsaco")
    decode = kernels["laneformer_decode"]
    assert decode["vgpr_count"] <= 256 and decode["vgpr_spill_count"] <= 64
    assert not any("scratch_" in line for loop in hot_loops(code) for line in loop)


@needs_nvcc
@pytest.mark.parametrize("source", [gpu_build.PERSISTENT, pytest.param(gpu_build.STEPS, marks=pytest.mark.exhaustive)])
def test_nvidia_compiles_layers_of_several_kinds(source):
    kernels = figures(model_header(Layout(mixed_plan(weight_dtype="float16", cache_dtype="float16"), H200, 3)), source)
    assert all(kernel["registers"] <= 255 and kernel["stores"] == 0 for kernel in kernels.values())


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
