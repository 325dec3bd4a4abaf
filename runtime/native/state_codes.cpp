// Optimizer state in pages of codes: decoded to float32, and encoded again.

#include <algorithm>
#include <cstdint>

#include "state_codes.h"
#include "threads.h"

namespace {

constexpr int64_t kPagesAtOnce = 16;  // that a thread takes

// Calls work(page, first element, number of elements) for the pages of so many elements.
template <typename Work>
void for_pages(uint8_t* pages, int64_t num_elements, int64_t page_elements, int32_t num_threads, const Work& work) {
  const int64_t num_pages = (num_elements + page_elements - 1) / page_elements;
  on_threads(num_pages, kPagesAtOnce, num_threads, [&](int64_t first, int64_t end) {
    for (int64_t number = first; number < end; ++number) {
      const int64_t start = number * page_elements;
      work(pages + number * state_codes::kPage, start, std::min(num_elements - start, page_elements));
    }
  });
}

}  // namespace

extern "C" void zinf_decode_int8(uint8_t* pages, float* values, int64_t num_elements, const state_codes::Map* maps,
                                 int32_t num_threads) {
  for_pages(pages, num_elements, state_codes::kInt8Elements, num_threads, [=](uint8_t* page, int64_t start, int64_t count) {
    state_codes::decode_int8(page, values + start, count, maps);
  });
}

extern "C" void zinf_encode_int8(const float* values, uint8_t* pages, int64_t num_elements, const state_codes::Map* maps,
                                 int32_t num_threads) {
  for_pages(pages, num_elements, state_codes::kInt8Elements, num_threads, [=](uint8_t* page, int64_t start, int64_t count) {
    state_codes::encode_int8(values + start, page, count, maps);
  });
}

extern "C" void zinf_decode_bfloat16(uint8_t* pages, float* values, int64_t num_elements, int32_t num_threads) {
  for_pages(pages, num_elements, state_codes::kBfloat16Elements, num_threads,
            [=](uint8_t* page, int64_t start, int64_t count) { state_codes::decode_bfloat16(page, values + start, count); });
}

extern "C" void zinf_encode_bfloat16(const float* values, uint8_t* pages, int64_t num_elements, int64_t first,
                                     uint32_t seed, const float* drawn_from, int32_t num_threads) {
  for_pages(pages, num_elements, state_codes::kBfloat16Elements, num_threads,
            [=](uint8_t* page, int64_t start, int64_t count) {
              state_codes::encode_bfloat16(values + start, page, count, first + start, seed,
                                           drawn_from ? drawn_from + start : nullptr);
            });
}
