"""The machine code of the products: no sum is kept in memory while weights are read."""

import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from laneformer.custom_calls import build
from laneformer.custom_calls.library import library
from tests.support import small

PREFETCH = re.compile(r"prefetch|prfm")  # only loops over weights have one
MULTIPLY = re.compile(r"v?fmadd|v?mulps|vdpbf16ps|tdpbf16ps|fmla|fmul")
# A store into the stack frame. In AT&T syntax the target is last; on ARM the instruction starts with st.
STORE = re.compile(r"(?!v?cmp|test)\S+\s+.*, *-?(0x)?[0-9a-f]*\(%[re][sb]p[^)]*\)$|st\w*\s.*\[(sp|x29)")
VECTOR = re.compile(r"%[xyz]mm\d+,")
SOFTWARE = re.compile(r"portable::.*(F16Line|_bf12)")  # these conversions need more registers than SSE has
# With weights of 8 and 4 bits, only VNNI has enough registers for the digits; a single tile needs more addresses.
DIGITS = re.compile(r"^(?!.*avx512_vnni::.*>, 2, (true|false)>\().*::(Digits|Eights)\b")
CLANG = re.compile(r"avx2::.*_bf12")  # clang keeps two vectors more than there are registers
# The source of the products of each instruction set.
X86 = {name: source for source in ("kernels.cc", "amx.cc") for name in build.PER_SET[source][1]}


def functions(text: str) -> Iterator[tuple[str, list[tuple[int, str]]]]:
    """The name and the instructions (address, text) of each function in the output of objdump."""
    for part in re.split(r"\n\n", text):
        head, *lines = part.strip().splitlines()
        if name := re.match(r"[0-9a-f]+ <(.*)>:$", head):
            found = (re.match(r"\s*([0-9a-f]+):\s+(\S.*)$", line) for line in lines)
            yield name[1], [(int(line[1], 16), line[2].strip()) for line in found if line]


def loops(lines: list[tuple[int, str]]) -> Iterator[list[str]]:
    """The instructions of each innermost loop over weights."""
    places = {address: place for place, (address, _) in enumerate(lines)}
    jumps = ((place, re.match(r"(?:j\w+|b\.?\w*|cbn?z\s+\w+,|tbn?z\s.*,)\s+([0-9a-f]+)\b", text))
             for place, (_, text) in enumerate(lines))  # fmt: skip
    spans = [(places[int(to[1], 16)], place) for place, to in jumps if to and places.get(int(to[1], 16), place) < place]
    bodies = {span: [text for _, text in lines[span[0] : span[1] + 1]] for span in spans}
    found = [span for span, body in bodies.items() if any(map(PREFETCH.match, body)) and any(map(MULTIPLY.match, body))]
    for first, last in found:
        if not any((first, last) != other and first <= other[0] and other[1] <= last for other in found):
            yield bodies[first, last]


def weight_loops(path: Path, objdump: str = "objdump") -> Iterator[tuple[str, list[str]]]:
    """The loops over weights in an object file or library, each with the name of its function."""
    done = subprocess.run([objdump, "-d", "--no-show-raw-insn", "-C", path], capture_output=True, text=True, check=True)
    for name, lines in functions(done.stdout):
        if re.search(r"::multiply(_one|_few|_few_bf12|_units|_lines|_tiles)?<", name):
            for loop in loops(lines):
                yield name, loop


def check(path: Path, sets, objdump: str = "objdump", known: re.Pattern | None = None) -> None:
    """Checks that no loop over weights stores a sum. sets: instruction sets whose loops must be found. known: functions
    that may store vectors.
    """
    found_loops = [
        (name, loop) for name, loop in weight_loops(path, objdump) if not (SOFTWARE.search(name) or DIGITS.search(name))
    ]
    for name in sets:
        if name == "amx":
            check_tile_registers([loop for function, loop in found_loops if "amx::" in function])
            continue
        lines = {"Bf16Line", "F32Line", *(["Bf16DotLine"] if name == "avx512_bf16" else [])}
        packed = [function for function, _ in found_loops if f"{name}::" in function and "_bf12" in function]
        assert packed or name == "portable", f"no loop over weights in 12 bits was found for {name}"
        found = {
            line
            for function, _ in found_loops
            if f"{name}::" in function
            for line in lines
            if f"::{line}, " in function
        }
        assert found == lines, f"no loop over weights was found for {lines - found} of {name}"
    spilled = [f"{name}: {text}" for name, loop in found_loops for text in loop if STORE.match(text)]
    # Exceptions, and the scales and streams of 8 and 4 bits, need addresses, which may be spilled.
    spilled = [line for line in spilled if not re.search("_bf12|::Digits|::Eights", line) or VECTOR.search(line)]
    spilled = [line for line in spilled if known is None or not known.search(line)]
    assert not spilled, "\n".join(spilled)


def check_tile_registers(loops: list[list[str]]) -> None:
    """Checks the loops of AMX's products: exact and rounded vectors, one and two registers of positions and weights."""
    products = [sum(text.startswith("tdpbf16ps") for text in loop) for loop in loops]
    assert sorted(filter(None, products)) == [1, 2, 2, 3, 4, 6, 6, 12]
    assert 0 in products  # one position
    for loop, count in zip(loops, products, strict=True):
        assert not count or not any(text.startswith(("tilestored", "ldtilecfg")) for text in loop)


@small.needs_library
def test_no_sum_is_stored_between_weights():
    if shutil.which("objdump") is None:
        pytest.skip("objdump is not installed (Debian: apt install binutils)")
    library()  # compiles the library if necessary
    check(build.find(), [name for name in X86 if name in build.instruction_sets()])


def test_stores_into_the_frame_are_recognized():
    stored = ("vmovaps %ymm0,0x20(%rsp)", "vmovups %zmm1,-0x40(%rbp)", "incq   0x8(%rsp)", "str q0, [sp, #16]")
    others = ("vmovaps 0x20(%rsp),%ymm0", "vmovups %ymm1,0x20(%rdi)", "prefetcht0 0x8(%rsp)", "ldr q0, [sp]")
    assert all(STORE.match(text) for text in stored[:2] + stored[3:])
    assert not any(STORE.match(text) for text in others)


@pytest.mark.parametrize(
    ("cxx", "objdump", "sets"),
    [
        pytest.param(cxx, objdump, sets, marks=getattr(pytest.mark, mark))
        for cxx, objdump, sets, mark in (
            ("g++", "objdump", X86, "exhaustive"),  # as the library was compiled
            ("clang++", "objdump", X86, "exhaustive"),
            ("clang++-14", "objdump", X86, "exhaustive"),
            ("clang++-19", "objdump", X86, "exhaustive"),
            ("clang++-19", "objdump", {"avx512_bf16": "kernels.cc"}, "slow"),
            ("aarch64-linux-gnu-g++", "aarch64-linux-gnu-objdump", {"portable": "kernels.cc"}, "slow"),
        )
    ],
)
def test_every_compiler_keeps_sums_in_registers(tmp_path, cxx, objdump, sets):
    for program in (cxx, objdump):
        if shutil.which(program) is None:
            pytest.skip(f"{program} is not installed")
    for name, source in sets.items():
        target = tmp_path / f"{name}.o"
        flags = build.INSTRUCTIONS["x86_64"][name] if objdump == "objdump" else ()
        path = build.HERE / "cpu" / "kernels" / source
        command = [cxx, *build.FLAGS, *flags, f"-DLF_ISA={name}", "-c", str(path), "-o", str(target)]
        subprocess.run(command, check=True, capture_output=True)
        check(target, [name], objdump, CLANG if "clang" in cxx else None)
