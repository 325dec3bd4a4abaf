// Float32 values as bfloat16 and what that lacks, in pages. ``storage/low_halves.py`` has the format and the same in torch,
// bit for bit.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

namespace low_halves {

constexpr int64_t kPage = 4096;            // bytes
constexpr int64_t kWord = 64;              // elements whose bits are one word
constexpr int64_t kElements = 30 * kWord;  // of a page: 16 bits of each, then a bit of each
constexpr int64_t kBits = 2 * kElements;   // where the bits begin, in bytes
constexpr uint16_t kTie = 0x8000;          // the lower half of a value in the middle between two bfloat16
constexpr uint16_t kQuiet = 0x7fc0;        // a NaN in bfloat16

using Bits = uint32_t __attribute__((may_alias));  // of a float

inline bool is_nan(uint32_t bits) { return (bits & 0x7fffffff) > 0x7f800000; }
inline bool is_nan16(uint16_t bits) { return (bits & 0x7fff) > 0x7f80; }

// What one element takes that is a tie, or not a number.
inline bool split_rare(uint32_t bits, uint16_t* upper) {
  const uint16_t high = bits >> 16;
  if (!is_nan(bits)) return (high & 1) && static_cast<uint16_t>(bits) == kTie;
  const bool has_no_upper_bits = (high & 0x7f) == 0;  // the same in bfloat16 would be infinite
  *upper = has_no_upper_bits ? high | kQuiet : high;
  return has_no_upper_bits;
}

inline uint16_t join_rare(uint16_t upper, uint16_t low, bool bit) {
  if (is_nan16(upper)) return bit ? upper & 0xff80 : upper;
  return upper - (low > kTie || (low == kTie && bit));
}

inline void split_word(const Bits* values, uint16_t* upper, uint16_t* low, uint64_t* bits, int64_t count) {
  uint32_t num_rare = 0;
  for (int64_t i = 0; i < count; ++i) {
    low[i] = static_cast<uint16_t>(values[i]);
    num_rare += (low[i] == kTie) | is_nan(values[i]);
  }
  uint64_t word = 0;
  for (int64_t i = 0; num_rare && i < count; ++i) {
    if (low[i] == kTie || is_nan(values[i])) word |= static_cast<uint64_t>(split_rare(values[i], upper + i)) << i;
  }
  std::memcpy(bits, &word, sizeof word);
}

inline void join_word(Bits* values, const uint16_t* upper, const uint16_t* low, const uint64_t* bits, int64_t count) {
  uint32_t num_rare = 0;
  for (int64_t i = 0; i < count; ++i) {
    const uint32_t high = upper[i] - (low[i] > kTie);
    values[i] = (high << 16) | low[i];
    num_rare += is_nan16(upper[i]);
  }
  uint64_t word;
  std::memcpy(&word, bits, sizeof word);
  for (int64_t i = 0; (num_rare || word) && i < count; ++i) {
    values[i] = (static_cast<uint32_t>(join_rare(upper[i], low[i], word >> i & 1)) << 16) | low[i];
  }
}

// Element ``at``, a multiple of 64, and ``count - 1`` behind it: ``values`` and ``upper`` begin with it, and ``pages`` with
// element 0 of ``num_elements``. What no element uses of a page is zero.
inline void split(const Bits* values, uint16_t* upper, uint8_t* pages, int64_t at, int64_t count,
                  int64_t num_elements) {
  for (int64_t i = 0; i < count; i += kWord) {
    const int64_t within = (at + i) % kElements;
    uint8_t* page = pages + (at + i) / kElements * kPage;
    const int64_t here = std::min(kWord, count - i);
    split_word(values + i, upper + i, reinterpret_cast<uint16_t*>(page + 2 * within),
               reinterpret_cast<uint64_t*>(page + kBits + within / 8), here);
    if (at + i + here == num_elements) {
      std::memset(page + 2 * (within + here), 0, 2 * (kElements - within - here));
      std::memset(page + kBits + (within / kWord + 1) * 8, 0, kPage - kBits - (within / kWord + 1) * 8);
    } else if (within + kWord == kElements) {
      std::memset(page + kBits + kElements / 8, 0, kPage - kBits - kElements / 8);
    }
  }
}

inline void join(const uint8_t* pages, const uint16_t* upper, Bits* values, int64_t at, int64_t count) {
  for (int64_t i = 0; i < count; i += kWord) {
    const int64_t within = (at + i) % kElements;
    const uint8_t* page = pages + (at + i) / kElements * kPage;
    join_word(values + i, upper + i, reinterpret_cast<const uint16_t*>(page + 2 * within),
              reinterpret_cast<const uint64_t*>(page + kBits + within / 8), std::min(kWord, count - i));
  }
}

}  // namespace low_halves
