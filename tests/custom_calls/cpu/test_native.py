"""Runs the C++ tests in this folder, linked to the installed library, and to its sources compiled with sanitizers."""

import os
import platform
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from laneformer.custom_calls import build
from laneformer.custom_calls.library import instruction_sets, library
from tests.support import small

pytestmark = small.needs_library

HERE = Path(__file__).parent
PROGRAMS = sorted(path.stem for path in HERE.glob("*_test.cc"))
# Undefined behaviour without the checks of every pointer, with which compiling takes twice as long. `address` still
# detects accesses outside of memory; unaligned vectors are not detected.
UNDEFINED = "signed-integer-overflow,shift,integer-divide-by-zero,bounds,bool,enum,return,unreachable,builtin,vla-bound"
# Functions check the accesses, instead of code at each access: sources compile in half the time.
CALLS = ("--param", "asan-instrumentation-with-call-threshold=0")
SHORT = ("-fsanitize-undefined-trap-on-error",)  # less code than a message
THREADED = ("decoder_test", "exchange_test", "schedule_test")  # programs with more than one thread
ARM = ["aarch64-linux-gnu-g++", "-static"]  # static programs run without an ARM system's libraries
ARM_EMULATOR = "qemu-aarch64"


def run(
    program: str,
    sanitizer: str | None,
    link: list[str],
    work: Path,
    cxx: list[str] | None = None,
    emulator: Sequence[str] = (),
    arguments: Sequence[str] = (),
) -> str:
    """Compiles and runs one C++ test. Returns its output."""
    build.write_generated(work)
    checked = [f"-fsanitize={sanitizer}", "-g1"] if sanitizer else []
    if program == "amx_test" and not emulator:
        link = [*link, emulated_amx(work, checked)]
    command = [
        *(cxx or build.compiler()),
        "-std=c++17",
        "-O1",
        *checked,
        "-Wall",
        "-Wextra",
        "-Werror",
        f"-I{build.HERE}/cpu",
        f"-I{work}",
        str(HERE / f"{program}.cc"),
        *link,
        "-pthread",
        "-o",
        str(work / program),
    ]
    compiled = subprocess.run(command, capture_output=True, text=True, check=False)
    assert compiled.returncode == 0, compiled.stderr
    env = os.environ | {"UBSAN_OPTIONS": "halt_on_error=1:print_stacktrace=1"}
    done = subprocess.run(
        [*emulator, work / program, *arguments], capture_output=True, text=True, check=False, env=env, timeout=600
    )
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    return done.stdout


def chosen_set(names: Sequence[str]) -> str:
    """The first of these instruction sets that the machine supports."""
    return next(name for name in names if name in instruction_sets())


def table(work: Path, source: str, isa: str, *flags: str) -> str:
    """Compiles the functions of one instruction set. Returns the path of the object file."""
    target = str(work / f"{isa}.o")
    path = str(build.HERE / "cpu" / "kernels" / source)
    command = [*build.compiler(), *build.FLAGS, "-O1", *flags, f"-DLF_ISA={isa}", "-c", path, "-o", target]
    subprocess.run(command, check=True, capture_output=True)
    return target


def emulated_amx(work: Path, checked: list[str], isa: str = "amx_emulated") -> str:
    """Compiles AMX's products with emulated registers, under the name `isa` beside the library's. Returns the path of
    the object file.
    """
    fused = ["-march=x86-64-v3"] if platform.machine() == "x86_64" else []
    return table(work, "amx.cc", isa, *checked, *fused, "-DLF_EMULATE_TILES")


@pytest.mark.parametrize(
    "program",
    [
        pytest.param(program, marks=pytest.mark.slow if program in ("amx_test", "decoder_test") else ())
        for program in PROGRAMS
    ],
)
def test_installed_library_passes(program, tmp_path):
    library()  # compiles the library if necessary
    run(program, None, [str(build.find()), f"-Wl,-rpath,{build.find().parent}"], tmp_path)


@pytest.mark.exhaustive
def test_installed_library_passes_in_every_way(tmp_path):
    library()
    link = [str(build.find()), f"-Wl,-rpath,{build.find().parent}"]
    run("decoder_test", None, link, tmp_path, arguments=["all"])


@pytest.mark.slow
@pytest.mark.parametrize(("sanitizer", "programs", "sets"), [
    pytest.param(f"address,{UNDEFINED}", PROGRAMS, ("avx512", "avx2", "portable"), id="address,undefined"),
    pytest.param("thread", THREADED, ("portable",), id="thread"),
])  # fmt: skip
def test_sanitizers_find_no_error(sanitizer, programs, sets, tmp_path):
    """All programs are in one test, because the shared objects take long to compile. The kernels are checked for the
    first of `sets` that the machine supports: the longest vectors, or the portable set. Of the longest vectors,
    `address` checks the code for bf16 dot products, with the instruction replaced by arithmetic. The library also needs
    the portable set. Its kernels are then checked, too, and its quantized products are those of the other set.
    """
    flags, chosen = build.instruction_sets(), chosen_set(sets)
    compiled = {name: flags[name] for name in (chosen, "amx") if name in flags}
    if "amx" in compiled:
        compiled["amx"] = (*compiled["amx"], "-fno-sanitize=all")
    cxx = build.compiler()
    if "address" in sanitizer and "g++" in cxx[0]:
        cxx = [*cxx, *CALLS]
        compiled[chosen] = (*compiled[chosen], *SHORT)
    if chosen != "portable":
        compiled[chosen] = (*compiled[chosen], "-DLF_DOT")
    objects = build.compile_objects(cxx, tmp_path, sanitizer, api=False, sets=compiled)
    if chosen != "portable":
        checked = (f"-fsanitize={sanitizer}", *cxx[1:], *(SHORT if "g++" in cxx[0] else ()))
        objects.append(table(tmp_path, "kernels.cc", "portable", *checked))
        objects.append(f"-Wl,--defsym=laneformer_quantized_portable=laneformer_quantized_{chosen}")
    for program in programs:
        run(program, sanitizer, objects, tmp_path)


@pytest.mark.slow
def test_emulated_instructions_pass(tmp_path):
    """The code of bf16 dot products and of AMX runs with the instructions replaced by arithmetic, on any machine; the
    test of sanitizers does so for longer vectors. Whole models run with AMX's code. The emulated kernels replace those
    of the library.
    """
    flags = build.instruction_sets()
    objects = [table(tmp_path, "kernels.cc", "portable", "-DLF_DOT")]
    if "amx" in flags:
        objects.append(emulated_amx(tmp_path, [], "amx"))
    link = [*objects, str(build.find()), f"-Wl,-rpath,{build.find().parent}"]
    printed = run("kernels_test", None, link, tmp_path)
    assert "portable" in printed and ("amx" in printed) == ("amx" in flags)
    run("decoder_test", None, link, tmp_path, arguments=["instructions"])
    for program in ("kernels_test", "decoder_test"):
        listed = subprocess.run(["nm", "-D", "--defined-only", tmp_path / program], capture_output=True, check=True)
        names = [f"laneformer_kernels_{name}" for name in ("portable", *({"amx"} & flags.keys()))]
        assert all(name in listed.stdout.decode() for name in names), "the library uses its own kernels"


@pytest.mark.skipif(not (shutil.which(ARM[0]) and shutil.which(ARM_EMULATOR)), reason=f"no {ARM[0]} and {ARM_EMULATOR}")
@pytest.mark.parametrize(
    "program",
    [
        pytest.param(name, marks=pytest.mark.slow if name == "exchange_test" else pytest.mark.exhaustive)
        for name in PROGRAMS
    ],
)
def test_arm_code_passes(program, tmp_path):
    """64-bit ARM code with NEON vectors runs in an emulator, which keeps x86's order of memory accesses."""
    objects = build.compile_objects(ARM, tmp_path, api=False, sets={"portable": ("-O1",)})
    printed = run(program, None, objects, tmp_path, ARM, [ARM_EMULATOR])
    assert program != "kernels_test" or printed == "portable\n"
