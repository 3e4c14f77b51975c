"""The table of the forms of instructions that emit.py does not write itself: what each is in C++."""

import itertools
import re
from dataclasses import dataclass
from functools import cache

from tests.support.emulator.ptx.parse import Unsupported, width

C_TYPES = {
    f"{kind}{bits}": f"{name}{bits}_t"
    for bits in (8, 16, 32, 64)
    for kind, name in (("s", "int"), ("u", "uint"), ("b", "uint"))
}
C_TYPES |= {"b128": "uint128_t", "pred": "bool", "f32": "float", "f64": "double"}
CLASSES = {
    "int": "<s16|s32|s64|u16|u32|u64>",
    "any": "<s8|s16|s32|s64|u8|u16|u32|u64>",
    "signed": "<s16|s32|s64>",
    "unsigned": "<u16|u32|u64>",
    "bits": "<b16|b32|b64>",
    "float": "<f32|f64>",
}

# Each row: a form, the types of its operands, and C++, which is an expression that becomes the first operand, or a
# statement. In a form, <a|b> stands for either, and {int} for any of CLASSES. As types, T and D are the form's last and
# last but one; U is unsigned and of T's width; W is T of twice the width, and X is unsigned W. See Form for the others.
TABLE = """
add.{int}                                 U U U               {1} + {2}
sub.{int}                                 U U U               {1} - {2}
mul.lo.{int}                              U U U               1u * {1} * {2}
mul.wide.<s16|u16|s32|u32>                W T T               ({W}){1} * ({W}){2}
mul.hi.<s32|u32|s64|u64>                  T T T               high_product({1}, {2})
mad.lo.{int}                              U U U U             1u * {1} * {2} + {3}
mad.wide.<s16|u16|s32|u32>                W T T W             ({X})({W}){1} * ({X})({W}){2} + ({X}){3}
div.{int}                                 T T T               {1} / {2}
rem.{int}                                 T T T               {1} % {2}
min.{int}                                 T T T               {1} < {2} ? {1} : {2}
max.{int}                                 T T T               {1} > {2} ? {1} : {2}
neg.{signed}                              T U                 0 - {1}
abs.{signed}                              U T                 {1} < 0 ? 0u - ({U}){1} : ({U}){1}
and.{bits}                                T T T               {1} & {2}
or.{bits}                                 T T T               {1} | {2}
xor.{bits}                                T T T               {1} ^ {2}
not.{bits}                                T T                 ~{1}
and.pred                                  T T T               {1} & {2}
or.pred                                   T T T               {1} | {2}
xor.pred                                  T T T               {1} ^ {2}
not.pred                                  T T                 !{1}
shl.{bits}                                T T u32             shifted_left({1}, {2})
shr.{signed}                              T T u32             shifted_right({1}, {2})
shr.{unsigned}                            T T u32             shifted_right({1}, {2})
shr.{bits}                                T T u32             shifted_right({1}, {2})
shf.l.wrap.b32                            T T T u32           (uint32_t)(pair({2}, {1}) << ({3} & 31) >> 32)
shf.r.wrap.b32                            T T T u32           (uint32_t)(pair({2}, {1}) >> ({3} & 31))
shf.l.clamp.b32                           T T T u32           (uint32_t)(pair({2}, {1}) << ({3} < 32 ? {3} : 32) >> 32)
shf.r.clamp.b32                           T T T u32           (uint32_t)(pair({2}, {1}) >> ({3} < 32 ? {3} : 32))
lop3.b32                                  T T T T u32         lop3({1}, {2}, {3}, {4})
prmt.b32                                  T T T T             prmt({1}, {2}, {3})
bfe.<s32|u32|s64|u64>                     T T u32 u32         extracted({1}, {2}, {3})
bfi.<b32|b64>                             T T T u32 u32       inserted({1}, {2}, {3}, {4})
popc.<b32|b64>                            u32 T               __builtin_popcountll({1})
clz.<b32|b64>                             u32 T               leading_zeros({1})
brev.<b32|b64>                            T T                 reversed({1})
setp.<eq|ne>.{int}                        pred T T            {1} {=} {2}
setp.<eq|ne>.{bits}                       pred T T            {1} {=} {2}
setp.<lt|le|gt|ge>.{int}                  pred T T            {1} {=} {2}
setp.<lo|ls|hi|hs>.{unsigned}             pred T T            {1} {=} {2}
setp.<eq|ne>.<and|or|xor>.{int}           pred T T pred       ({1} {=} {2}) {&} {3}
setp.<eq|ne>.<and|or|xor>.{bits}          pred T T pred       ({1} {=} {2}) {&} {3}
setp.<lt|le|gt|ge>.<and|or|xor>.{int}     pred T T pred       ({1} {=} {2}) {&} {3}
selp.{int}                                T T T pred          {3} ? {1} : {2}
selp.{bits}                               T T T pred          {3} ? {1} : {2}

add<.rn|>.{float}                         T T T               {1} + {2}
sub<.rn|>.{float}                         T T T               {1} - {2}
mul<.rn|>.{float}                         T T T               {1} * {2}
div.rn.{float}                            T T T               {1} / {2}
fma.rn.{float}                            T T T T             fused({1}, {2}, {3})
fma.rm.f32                                T T T T             fused_down({1}, {2}, {3})
min.{float}                               T T T               smaller_number({1}, {2})
max.{float}                               T T T               larger_number({1}, {2})
neg.{float}                               T T                 -{1}
abs.{float}                               T T                 std::fabs({1})
sqrt.rn.{float}                           T T                 std::sqrt({1})
copysign.{float}                          T T T               std::copysign({2}, {1})
selp.{float}                              T T T pred          {3} ? {1} : {2}
testp.infinite.{float}                    pred T              std::isinf({1})
testp.finite.{float}                      pred T              std::isfinite({1})
testp.notanumber.{float}                  pred T              std::isnan({1})
setp.<eq|lt|le|gt|ge>.{float}             pred T T            {1} {=} {2}
setp.ne.{float}                           pred T T            {1} < {2} || {1} > {2}
setp.neu.{float}                          pred T T            {1} != {2}
setp.equ.{float}                          pred T T            !({1} < {2} || {1} > {2})
setp.ltu.{float}                          pred T T            !({1} >= {2})
setp.leu.{float}                          pred T T            !({1} > {2})
setp.gtu.{float}                          pred T T            !({1} <= {2})
setp.geu.{float}                          pred T T            !({1} < {2})
setp.num.{float}                          pred T T            {1} == {1} && {2} == {2}
setp.nan.{float}                          pred T T            {1} != {1} || {2} != {2}
setp.<eq|lt|le|gt|ge>.<and|or|xor>.{float}
                                          pred T T pred       ({1} {=} {2}) {&} {3}
setp.neu.<and|or|xor>.{float}             pred T T pred       ({1} != {2}) {&} {3}
setp.ltu.<and|or|xor>.{float}             pred T T pred       !({1} >= {2}) {&} {3}
setp.leu.<and|or|xor>.{float}             pred T T pred       !({1} > {2}) {&} {3}
setp.gtu.<and|or|xor>.{float}             pred T T pred       !({1} <= {2}) {&} {3}
setp.geu.<and|or|xor>.{float}             pred T T pred       !({1} < {2}) {&} {3}
setp.nan.<and|or|xor>.{float}             pred T T pred       ({1} != {1} || {2} != {2}) {&} {3}
ex2.approx.f32                            T T                 std::exp2({1})
ex2.approx.ftz.f32                        T T                 flushed(std::exp2(flushed({1})))
lg2.approx.f32                            T T                 std::log2({1})
lg2.approx.ftz.f32                        T T                 flushed(std::log2(flushed({1})))
rsqrt.approx.f32                          T T                 1 / std::sqrt({1})
rsqrt.approx.ftz.f32                      T T                 flushed(1 / std::sqrt(flushed({1})))
rcp.rn.{float}                            T T                 1 / {1}
rcp.approx.ftz.f32                        T T                 flushed(1 / flushed({1}))
<add|sub|mul>.f16x2                       b32 b32 b32         {name}_halves({1}, {2})
fma.rn.f16x2                              b32 b32 b32 b32     fma_halves({1}, {2}, {3})

cvt.{any}.{any}                           D T                 {1}
cvt.rn.{float}.{any}                      D T                 ({D}){1}
cvt.<rni|rzi|rmi|rpi>.{any}.{float}       D T                 to_integer<{D}>(rounded_{how}({1}))
cvt.<rni|rzi|rmi|rpi>.f32.f32             D T                 rounded_{how}({1})
cvt.<rni|rzi|rmi|rpi>.f64.f64             D T                 rounded_{how}({1})
cvt.sat.f32.f32                           D T                 saturated({1})
cvt.f64.f32                               D T                 {1}
cvt.rn.f32.f64                            D T                 {1}
cvt.f32.f16                               f32 b16             from_half({1})
cvt.rn.f16.f32                            b16 f32             to_half({1})
cvt.rn.f16x2.e4m3x2                       b32 b16             from_e4m3({1})
cvta<.to|>.<global|local|param|const>.u64
                                          T T                 {1}
cvta.shared.u64                           T u32               generic_of_shared({1})
cvta.to.shared.u64                        T T                 shared_of_generic({1})

bar.sync                                  #=0                 emulator::meet(emulator::self()->block);
barrier.sync                              #=0                 emulator::meet(emulator::self()->block);
bar.warp.sync                             #=-1                emulator::meet(emulator::self()->warp);
shfl.sync.bfly.b32                        T T b32 #=31 #=-1   of_lane({1}, lane() ^ {2})
shfl.sync.idx.b32                         T T b32 #=31 #=-1   of_lane({1}, {2})
redux.sync.max.u32                        T T #=-1            largest_of_warp({1})
fence.acq_rel.<gpu|sys>                   -                   __atomic_thread_fence(__ATOMIC_SEQ_CST);
membar.<gl|sys>                           -                   __atomic_thread_fence(__ATOMIC_SEQ_CST);
fence.proxy.async.shared::cta             -                   emulator::self()->num_reads = 0;
fence.mbarrier_init.release.cluster       -                   ;
griddepcontrol.<launch_dependents|wait>   -                   ;
createpolicy.fractional.L2::evict_first.b64
                                          T #=1.0              0
mbarrier.init.shared::cta.b64             [8] u32             emulator::barrier_init({0}, {1});
mbarrier.arrive.expect_tx.shared::cta.b64
                                          #=_ [8] u32         emulator::arrive({1}, {2});
mbarrier.try_wait.parity.shared::cta.b64  pred [8] u32        emulator::passed({1}, {2})
cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint
                                          [s] u64 u32 [8] b64  bulk_copy({0}, {1}, {2}, {3});
ret                                       -                   return;
exit                                      -                   return;
trap                                      -                   emulator::trap();
"""
COMPARED = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}
COMPARED |= {"lo": "<", "ls": "<=", "hi": ">", "hs": ">="}
JOINED = {"and": "&", "or": "|", "xor": "^"}


@dataclass(frozen=True)
class Form:
    operands: tuple[str, ...]
    """For each operand its type in PTX; "#=N" if it must be N; "[N]" for N bytes at an address in shared memory; or
    "[s]" for such an address itself.
    """
    code: str
    """C++ in which {0}, {1}, ... stand for the operands."""


@cache
def forms() -> dict[str, Form]:
    """The table's rows by their full names."""
    found = {}
    for row in filter(None, TABLE.replace("\n  ", "  ").splitlines()):
        pattern, operands, code = re.split(r"\s{2,}", row, maxsplit=2)
        for name in spellings(pattern):
            assert name not in found, name
            found[name] = of_row(name, operands.split(), code)
    return found


def spellings(pattern: str) -> list[str]:
    """All names that a pattern of the table stands for."""
    for name, alternatives in CLASSES.items():
        pattern = pattern.replace(f"{{{name}}}", alternatives)
    parts = [part.split("|") for part in re.split(r"[<>]", pattern)]
    return ["".join(chosen) for chosen in itertools.product(*parts)]


def of_row(name: str, operands: list[str], code: str) -> Form:
    mnemonic, *modifiers = name.split(".")
    last, before = (modifiers or [""])[-1], modifiers[-2] if len(modifiers) > 1 else ""
    types = {"T": last, "D": before}
    if last in C_TYPES and last[0] in "sub":
        types |= {"U": f"u{width(last)}", "W": f"{last[0]}{2 * width(last)}", "X": f"u{2 * width(last)}"}
    words = {key: C_TYPES.get(one, "") for key, one in types.items()}
    words["="] = COMPARED.get((modifiers or [""])[0], "")
    words["&"] = JOINED.get(before, "")
    words |= {"name": mnemonic, "how": (modifiers or [""])[0]}
    code = re.sub(r"\{(\D\w*)\}", lambda found: words[found[1]], code)
    return Form(tuple(types.get(one, one) for one in operands if one != "-"), code)


def form(name: str) -> Form:
    """What an instruction with this mnemonic and these modifiers does. Raises Unsupported."""
    if name not in forms():
        raise Unsupported(f"instruction {name}")
    return forms()[name]
