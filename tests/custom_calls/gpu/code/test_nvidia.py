"""Compiles GPU kernels with nvcc and checks registers, spills and the machine code. Needs no GPU."""

import dataclasses
import re
import shutil
import subprocess
import sys
from collections import Counter, deque
from functools import cache
from pathlib import Path

import pytest

from laneformer.config import ResidualStreams
from laneformer.custom_calls.gpu import codes
from laneformer.custom_calls.gpu import compile as gpu_build
from laneformer.custom_calls.gpu.header import model_header
from laneformer.custom_calls.gpu.layout import Layout
from laneformer.custom_calls.gpu.tiling import H200
from laneformer.recipes.models import PACKED
from tests.support.gpu_cases import mixed_plan
from tests.support.gpu_models import CASES, CODES, OF_KERNELS, header, of_compressed, of_delta_net, of_experts

pytestmark = pytest.mark.slow


@cache
def nvdisasm() -> str | None:
    """Path of nvdisasm, from PATH or its wheel; None if it is not installed."""
    wheels = (path for folder in sys.path for path in Path(folder).glob("nvidia/*/bin/nvdisasm"))
    return shutil.which("nvdisasm") or next(map(str, wheels), None)


needs_nvcc = pytest.mark.skipif(gpu_build.nvcc() is None, reason="nvcc is not installed")


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


@needs_nvcc
@pytest.mark.exhaustive
@pytest.mark.parametrize("name", OF_KERNELS)
def test_nvidia_compiles_experts_with_one_launch_per_op(name):
    step = figures(model_header(of_experts(name)), gpu_build.STEPS)["laneformer_step"]
    assert step["registers"] <= 255 and step["stack"] <= 192


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


@needs_nvcc
@pytest.mark.parametrize("source", [gpu_build.PERSISTENT, pytest.param(gpu_build.STEPS, marks=pytest.mark.exhaustive)])
def test_nvidia_compiles_layers_of_several_kinds(source):
    kernels = figures(model_header(Layout(mixed_plan(weight_dtype="float16", cache_dtype="float16"), H200, 3)), source)
    assert all(kernel["registers"] <= 255 and kernel["stores"] == 0 for kernel in kernels.values())
