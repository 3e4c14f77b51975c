// Runs AMX's instructions on x86-64 processors without AMX: a signal handler decodes each instruction and executes it
// on the emulated registers of kernels/tile_registers.h. Linux only.
#pragma once

#include <ucontext.h>

#include <csignal>
#include <cstdint>
#include <cstring>

#define LF_EMULATE_TILES
#define LF_ISA amx_trap
#include "kernels/tile_registers.h"
#undef LF_ISA
#undef LF_EMULATE_TILES

namespace {

long trapped = 0;

// A memory operand: its base and index, and the number of bytes after the ModRM byte.
struct Operand {
  int64_t base = 0, index = 0;
  int size = 0;

  Operand(const uint8_t* modrm, bool extended_base, bool extended_index, const greg_t* registers, int64_t next) {
    static constexpr int kOrder[] = {REG_RAX, REG_RCX, REG_RDX, REG_RBX, REG_RSP, REG_RBP, REG_RSI, REG_RDI,
                                     REG_R8,  REG_R9,  REG_R10, REG_R11, REG_R12, REG_R13, REG_R14, REG_R15};
    const int mod = *modrm >> 6, rm = *modrm & 7;
    int number = rm;
    if (rm == 4) {
      const uint8_t sib = modrm[++size];
      number = sib & 7;
      const int other = (sib >> 3 & 7) | extended_index << 3;
      if (other != 4) index = registers[kOrder[other]] << (sib >> 6);
    }
    int32_t displacement = 0;
    if (mod == 1) displacement = (int8_t)modrm[++size];
    if (mod == 2 || (mod == 0 && number == 5)) std::memcpy(&displacement, modrm + size + 1, 4), size += 4;
    if (mod != 0 || number != 5) {
      base = registers[kOrder[number | extended_base << 3]];
    } else if (rm == 5) {
      base = next + size;  // relative to the instruction pointer
    }
    base += displacement;
  }
};

void run_trapped(int, siginfo_t*, void* context) {
  greg_t* const registers = ((ucontext_t*)context)->uc_mcontext.gregs;
  const uint8_t* const at = (const uint8_t*)registers[REG_RIP];
  const uint8_t* const modrm = at + 4;
  // VEX.128 encodings of 0F38 with W = 0. Prefixes are 0 (none), 2 (F3) and 3 (F2).
  const bool known = at[0] == 0xc4 && (at[1] & 0x1f) == 2 && (at[2] & 0x84) == 0;
  const int prefix = at[2] & 3, source = ~at[2] >> 3 & 15, target = *modrm >> 3 & 7,
            code = known ? at[3] << 4 | prefix : 0;
  const bool memory = *modrm >> 6 != 3;
  const Operand operand(modrm, !(at[1] & 0x20), !(at[1] & 0x40), registers, registers[REG_RIP] + 5);
  amx_trap::TileFile& tiles = amx_trap::tile_file;
  if (code == 0x490 && memory) {
    tiles.configure(*(const amx_trap::TileShapes*)operand.base);
  } else if (code == 0x490 && *modrm == 0xc0) {
    tiles.release();
  } else if (code == 0x493 && !memory) {
    tiles.zero(target);
  } else if (code == 0x4b3 && memory) {
    tiles.load(target, (const void*)operand.base, operand.index);
  } else if (code == 0x4b2 && memory) {
    tiles.store(target, (void*)operand.base, operand.index);
  } else if (code == 0x5c2 && !memory) {
    tiles.multiply(target, *modrm & 7, source);
  } else {
    std::signal(SIGILL, SIG_DFL);  // the program then ends at this instruction
    return;
  }
  registers[REG_RIP] += 5 + (memory ? operand.size : 0);
  trapped++;
}

void trap_tiles() {
  struct sigaction action{};
  action.sa_sigaction = run_trapped;
  action.sa_flags = SA_SIGINFO;
  sigaction(SIGILL, &action, nullptr);
}

long trapped_tiles() { return trapped; }

}  // namespace
