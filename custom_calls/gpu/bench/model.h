// Replaces the file that custom_calls/gpu/header.py writes, with the constants that stream.h needs. The build of
// micro.cu chooses them.
#pragma once

#include "numbers.h"

#ifndef LF_WARPS
#define LF_WARPS 8
#endif
#ifndef LF_SLOT_LINES
#define LF_SLOT_LINES 8
#endif
#ifndef LF_SLOTS
#define LF_SLOTS 6
#endif

namespace laneformer {
namespace gpu {

constexpr int kWarps = LF_WARPS, kSlotLines = LF_SLOT_LINES, kSlots = LF_SLOTS;
constexpr int kPassTags = 64, kPassRows = 1, kRequests = 1, kLaneWords = 0;
constexpr int kCtas = 1, kClaimsAt = 0, kSpares = 0, kLanesHere = 1,
              kStagedFloats = 0;  // of records of failures, which benchmarks do not make
constexpr bool kListed = true;
constexpr int kLayerLines = 16384 / LF_WARPS, kHeadLines = 0;  // 8 MiB for a CTA with any number of warps

}  // namespace gpu
}  // namespace laneformer
