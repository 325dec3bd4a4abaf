// Splits float32 values into bfloat16 and what that lacks, and joins them again.

#include "low_halves.h"

#include "threads.h"

namespace {

constexpr int64_t kAtOnce = 16 * low_halves::kElements;  // that a thread takes

}  // namespace

extern "C" void zinf_split_float32(
    const uint32_t* values, uint16_t* upper, uint8_t* pages, int64_t num_elements, int32_t num_threads) {
  on_threads(num_elements, kAtOnce, num_threads, [=](int64_t first, int64_t end) {
    low_halves::split(values + first, upper + first, pages, first, end - first, num_elements);
  });
}

extern "C" void zinf_join_float32(
    const uint8_t* pages, const uint16_t* upper, uint32_t* values, int64_t num_elements, int32_t num_threads) {
  on_threads(num_elements, kAtOnce, num_threads, [=](int64_t first, int64_t end) {
    low_halves::join(pages, upper + first, values + first, first, end - first);
  });
}
