// What a call needs: the struct Request, which custom_calls/ops_header.py writes into request_structs.h from
// custom_calls/request.py, and what decodes its words (RequestWriter of custom_calls/words.py).
#pragma once

#include <cstdint>
#include <optional>
#include <tuple>
#include <vector>

namespace laneformer {

#include "request_structs.h"

// Decodes a request from an array of `room` words, of which the first one says how many are used. Throws
// std::runtime_error if the words are damaged.
Request decode_request(const int32_t* words, int64_t room);

}  // namespace laneformer
