"""Instructions of PTX, translated to C++ (tests/support/emulator/ptx), against the PTX ISA's definitions in Python."""

import ctypes
import math
import re
from fractions import Fraction

import numpy as np
import pytest

from tests.support import emulated, small
from tests.support.emulator import ptx

pytestmark = [small.needs_library, emulated.needs_gpu, emulated.only_emulated, pytest.mark.slow]

WORD = 2**32 - 1


def signed(v: int) -> int:
    return v - 2**32 if v >> 31 else v


def bits(v: int, first: int, length: int, sign: bool) -> int:
    first, length = first & 255, length & 255
    if length == 0:
        return 0
    filling = sign and v >> min(first + length - 1, 31) & 1
    return sum((v >> (first + i) & 1 if i < length and first + i < 32 else filling) << i for i in range(32))


def with_bits(field: int, into: int, first: int, length: int) -> int:
    first, length = first & 255, length & 255
    mask = ((1 << length) - 1) << first & WORD
    return into & ~mask | field << first & mask


def chosen_bytes(a: int, b: int, selector: int) -> int:
    found = 0
    for i in range(4):
        nibble = selector >> 4 * i & 15
        byte = (b << 32 | a) >> 8 * (nibble & 7) & 255
        found |= (255 * (byte >> 7) if nibble & 8 else byte) << 8 * i
    return found


def quotient(a: int, b: int) -> int:
    return abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)


INTEGERS = {  # a, b, c, d are operands of 32 bits without a sign; n is a small number
    "shf.l.wrap.b32 R, A, B, C": lambda a, b, c, d, n: (b << 32 | a) << (c & 31) >> 32,
    "shf.r.wrap.b32 R, A, B, C": lambda a, b, c, d, n: (b << 32 | a) >> (c & 31),
    "shf.l.clamp.b32 R, A, B, N": lambda a, b, c, d, n: (b << 32 | a) << min(n, 32) >> 32,
    "shf.r.clamp.b32 R, A, B, N": lambda a, b, c, d, n: (b << 32 | a) >> min(n, 32),
    "shl.b32 R, A, N": lambda a, b, c, d, n: a << n,
    "shr.u32 R, A, N": lambda a, b, c, d, n: a >> n,
    "shr.s32 R, A, N": lambda a, b, c, d, n: signed(a) >> n,
    "bfe.u32 R, A, N, D": lambda a, b, c, d, n: bits(a, n, d, False),
    "bfe.s32 R, A, N, D": lambda a, b, c, d, n: bits(a, n, d, True),
    "bfe.u32 R, A, 5, N": lambda a, b, c, d, n: bits(a, 5, n, False),
    "bfi.b32 R, A, B, N, 9": lambda a, b, c, d, n: with_bits(a, b, n, 9),
    "prmt.b32 R, A, B, C": lambda a, b, c, d, n: chosen_bytes(a, b, c),
    "lop3.b32 R, A, B, C, 0x96": lambda a, b, c, d, n: a ^ b ^ c,
    "lop3.b32 R, A, B, C, 0xca": lambda a, b, c, d, n: a & b | ~a & c,
    "add.s32 R, A, B": lambda a, b, c, d, n: a + b,
    "sub.s32 R, A, B": lambda a, b, c, d, n: a - b,
    "mul.lo.s32 R, A, B": lambda a, b, c, d, n: a * b,
    "mul.hi.s32 R, A, B": lambda a, b, c, d, n: signed(a) * signed(b) >> 32,
    "mul.hi.u32 R, A, B": lambda a, b, c, d, n: a * b >> 32,
    "mad.lo.s32 R, A, B, C": lambda a, b, c, d, n: a * b + c,
    "div.s32 R, A, B": lambda a, b, c, d, n: quotient(signed(a), signed(b)),
    "rem.s32 R, A, B": lambda a, b, c, d, n: signed(a) - signed(b) * quotient(signed(a), signed(b)),
    "rem.u32 R, A, B": lambda a, b, c, d, n: a % b,
    "min.s32 R, A, B": lambda a, b, c, d, n: min(signed(a), signed(b)),
    "max.u32 R, A, B": lambda a, b, c, d, n: max(a, b),
    "abs.s32 R, A": lambda a, b, c, d, n: abs(signed(a)),
    "neg.s32 R, A": lambda a, b, c, d, n: -a,
    "not.b32 R, A": lambda a, b, c, d, n: ~a,
    "clz.b32 R, N": lambda a, b, c, d, n: 32 - n.bit_length(),
    "popc.b32 R, A": lambda a, b, c, d, n: a.bit_count(),
    "brev.b32 R, A": lambda a, b, c, d, n: int(f"{a:032b}"[::-1], 2),
    "cvt.s32.s8 R, A": lambda a, b, c, d, n: (a & 255) - 2 * (a & 128),
    "cvt.u32.u16 R, A": lambda a, b, c, d, n: a & 0xFFFF,
    "mad.wide.s32 RD, A, B, 7; cvt.u32.u64 R, RD": lambda a, b, c, d, n: signed(a) * signed(b) + 7,
    "cvt.u64.u32 RD, A; cvt.u64.u32 RE, B; mov.b128 Q, {RE, RD}; mov.b128 {RE, RD}, Q; cvt.u32.u64 R, RE": (
        lambda a, b, c, d, n: b
    ),
    "mov.b64 RD, {A, B}; shr.u64 RD, RD, 40; mov.b64 {R, RF}, RD": lambda a, b, c, d, n: b >> 8,
    "setp.lt.s32 P, A, B; selp.b32 R, C, D, P": lambda a, b, c, d, n: c if signed(a) < signed(b) else d,
    "setp.hi.u32 P, A, B; selp.b32 R, C, D, P": lambda a, b, c, d, n: c if a > b else d,
    "setp.eq.s32 P, N, 3; setp.ge.or.u32 P, A, B, P; selp.b32 R, 1, 2, P": lambda a, b, c, d, n: (
        1 if a >= b or n == 3 else 2
    ),
}


def rounded_down(exact: Fraction) -> np.float32:
    near = np.float32(float(exact))
    return np.nextafter(near, np.float32(-np.inf)) if Fraction(float(near)) > exact else near


def to_integer(x: float, low: int, high: int, rounding) -> int:
    if math.isnan(x):
        return 0
    return high if x >= high else low if x <= low else rounding(x)


def number_or(x: float, y: float, choose) -> float:
    return y if math.isnan(x) else x if math.isnan(y) else choose(x, y)


FLOATS = {  # x, y, z are floats; the result is a float or an int
    "fma.rn.f32 R, A, B, C": lambda x, y, z: np.float32(float(Fraction(x) * Fraction(y) + Fraction(z))),
    "fma.rm.f32 R, A, B, C": lambda x, y, z: rounded_down(Fraction(x) * Fraction(y) + Fraction(z)),
    "min.f32 R, A, B": lambda x, y, z: np.float32(number_or(x, y, min)),
    "max.f32 R, A, B": lambda x, y, z: np.float32(number_or(x, y, max)),
    "cvt.rni.s32.f32 R, A": lambda x, y, z: to_integer(x, -(2**31), 2**31 - 1, round),
    "cvt.rzi.u32.f32 R, A": lambda x, y, z: to_integer(x, 0, 2**32 - 1, math.trunc),
    "cvt.rmi.s32.f32 R, A": lambda x, y, z: to_integer(x, -(2**31), 2**31 - 1, math.floor),
    "cvt.sat.f32.f32 R, A": lambda x, y, z: np.float32(0 if math.isnan(x) else min(max(x, 0), 1)),
    "setp.ltu.f32 P, A, B; selp.b32 R, 1, 2, P": lambda x, y, z: 1 if not x >= y else 2,
    "setp.ne.f32 P, A, B; selp.b32 R, 1, 2, P": lambda x, y, z: 1 if x < y or x > y else 2,
    "setp.neu.f32 P, A, B; selp.b32 R, 1, 2, P": lambda x, y, z: 1 if x != y else 2,
}
EXACT = ("fma.rn.f32", "fma.rm.f32")  # not tested with NaN and infinity
NAMES = {
    "RD": "%rd9",
    "RE": "%rd8",
    "RF": "%r8",
    "Q": "%rq0",
    "R": "%r9",
    "P": "%p1",
    "A": "%r0",
    "B": "%r1",
    "C": "%r2",
    "D": "%r3",
    "N": "%r4",
}


def entry(name: str, rows) -> str:
    """PTX of a kernel that reads five words and writes the result of each row."""
    lines = ["ld.param.b64 %rd0, [given];", "ld.param.b64 %rd1, [found];"]
    lines += [f"ld.global.b32 %r{i}, [%rd0+{4 * i}];" for i in range(5)]
    for number, row in enumerate(rows):
        words = re.sub(r"([,;{}])", r" \1 ", row).split()
        lines.append(f"{' '.join(NAMES.get(word, word) for word in words)};")
        lines.append(f"st.global.b32 [%rd1+{4 * number}], %r9;")
    registers = ".reg .pred %p<2>; .reg .b32 %r<10>; .reg .b64 %rd<10>; .reg .b128 %rq<1>;"
    return f".visible .entry {name}(.param .b64 given, .param .b64 found)\n{{ {registers} {' '.join(lines)} ret; }}\n"


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """A function of "integers" or "floats" and five words that returns the results of all rows, uint32."""
    folder, tables = tmp_path_factory.mktemp("rows"), {"integers": INTEGERS, "floats": FLOATS}
    code = ptx.translate("".join(entry(name, rows) for name, rows in tables.items()))
    for name in tables:
        code += f'extern "C" void {name}(char* in, char* out) {{ {name}_((char*)&in, (char*)&out); }}\n'
    kernel = 'extern "C" const emulator::Kernel laneformer_kernel;\nconst emulator::Kernel laneformer_kernel = {};\n'
    (folder / "rows.cc").write_text(f'#include "runtime.h"\n{code}{kernel}')
    library = folder / "rows.so"
    emulated.compile_cc(*emulated.PTX_FLAGS, "rows.cc", emulated.emulator(), library, work=folder)
    functions = ctypes.CDLL(str(library))

    def call(name: str, words) -> np.ndarray:
        given, found = np.array(words, np.uint32), np.zeros(len(tables[name]), np.uint32)
        getattr(functions, name)(ctypes.c_void_p(given.ctypes.data), ctypes.c_void_p(found.ctypes.data))
        return found

    return call


def test_integers_follow_the_isa(results):
    rng = np.random.default_rng(0)
    special = [1, 2, 31, 0x7FFFFFFF, 0x80000001, 0xFFFFFFFE]
    for _ in range(300):
        a, b, c, d = (int(rng.choice([*special, *rng.integers(1, 2**32, 6)])) for _ in range(4))
        n = int(rng.integers(0, 45))
        found = results("integers", [a, b, c, d, n])
        for (row, wanted), value in zip(INTEGERS.items(), found, strict=True):
            assert value == wanted(a, b, c, d, n) & WORD, (row, a, b, c, d, n)


def test_floats_follow_the_isa(results):
    rng = np.random.default_rng(1)
    special = [0.0, -0.0, 0.5, 1.5, -2.5, 3e9, -3e9, 5e9, math.inf, -math.inf, math.nan, 1e-40]
    for _ in range(300):
        x, y, z = (np.float32(rng.choice([*special, *rng.standard_normal(12)])) for _ in range(3))
        found = results("floats", [*np.array([x, y, z, 0], np.float32).view(np.uint32), 0])
        for (row, wanted), value in zip(FLOATS.items(), found, strict=True):
            if row.startswith(EXACT) and not np.isfinite([x, y, z]).all():
                continue
            expected = wanted(*map(float, (x, y, z)))
            if isinstance(expected, np.float32):
                number = np.uint32(value).view(np.float32)
                assert number == expected or (np.isnan(number) and np.isnan(expected)), (row, x, y, z)
            else:
                assert value == expected & WORD, (row, x, y, z)
