// Float32 values as bfloat16 and what that lacks, in pages. ``storage/low_halves.py`` has the format and the same in torch,
// bit for bit.

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <thread>
#include <vector>

namespace {

constexpr int64_t kPage = 4096;               // bytes
constexpr int64_t kWord = 64;                 // elements whose bits are one word
constexpr int64_t kElements = 30 * kWord;     // of a page: 16 bits of each, then a bit of each
constexpr int64_t kBits = 2 * kElements;      // where the bits begin, in bytes
constexpr int64_t kPagesAtOnce = 16;          // that a thread takes
constexpr uint16_t kTie = 0x8000;             // the lower half of a value in the middle between two bfloat16
constexpr uint16_t kQuiet = 0x7fc0;           // a NaN in bfloat16

bool is_nan(uint32_t bits) { return (bits & 0x7fffffff) > 0x7f800000; }
bool is_nan16(uint16_t bits) { return (bits & 0x7fff) > 0x7f80; }

// What one element takes that is a tie, or not a number.
bool split_rare(uint32_t bits, uint16_t* upper) {
  const uint16_t high = bits >> 16;
  if (!is_nan(bits)) return (high & 1) && static_cast<uint16_t>(bits) == kTie;
  const bool has_no_upper_bits = (high & 0x7f) == 0;  // the same in bfloat16 would be infinite
  *upper = has_no_upper_bits ? high | kQuiet : high;
  return has_no_upper_bits;
}

uint16_t join_rare(uint16_t upper, uint16_t low, bool bit) {
  if (is_nan16(upper)) return bit ? upper & 0xff80 : upper;
  return upper - (low > kTie || (low == kTie && bit));
}

void split_word(const uint32_t* values, uint16_t* upper, uint16_t* low, uint64_t* bits, int64_t count) {
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

void join_word(uint32_t* values, const uint16_t* upper, const uint16_t* low, const uint64_t* bits, int64_t count) {
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

// Threads take the next pages when they are done with some: a thread that gets no core holds up little.
template <typename Work>
void for_words(int64_t num_elements, int32_t num_threads, const Work& work) {
  const int64_t num_pages = (num_elements + kElements - 1) / kElements;
  std::atomic<int64_t> next{0};
  const auto run = [&] {
    for (int64_t page = next.fetch_add(kPagesAtOnce); page < num_pages; page = next.fetch_add(kPagesAtOnce)) {
      const int64_t first = page * kElements;
      const int64_t end = std::min(std::min(page + kPagesAtOnce, num_pages) * kElements, num_elements);
      for (int64_t at = first; at < end; at += kWord) {
        const int64_t within = at % kElements;
        const int64_t start = at / kElements * kPage;
        work(at, start + 2 * within, start + kBits + within / 8, std::min(kWord, end - at));
      }
    }
  };
  std::vector<std::thread> others;
  const int64_t wanted = std::min<int64_t>(num_threads, (num_pages + kPagesAtOnce - 1) / kPagesAtOnce);
  for (int64_t count = 1; count < wanted; ++count) others.emplace_back(run);
  run();
  for (std::thread& other : others) other.join();
}

}  // namespace

extern "C" void zinf_split_float32(
    const uint32_t* values, uint16_t* upper, uint8_t* pages, int64_t num_elements, int32_t num_threads) {
  const int64_t num_pages = (num_elements + kElements - 1) / kElements;
  if (num_elements % kElements) std::memset(pages + (num_pages - 1) * kPage, 0, kPage);
  for_words(num_elements, num_threads, [&](int64_t at, int64_t low, int64_t bits, int64_t count) {
    split_word(values + at, upper + at, reinterpret_cast<uint16_t*>(pages + low),
               reinterpret_cast<uint64_t*>(pages + bits), count);
  });
  for (int64_t page = 0; page < num_elements / kElements; ++page) {
    std::memset(pages + page * kPage + kBits + kElements / 8, 0, kPage - kBits - kElements / 8);
  }
}

extern "C" void zinf_join_float32(
    const uint8_t* pages, const uint16_t* upper, uint32_t* values, int64_t num_elements, int32_t num_threads) {
  for_words(num_elements, num_threads, [&](int64_t at, int64_t low, int64_t bits, int64_t count) {
    join_word(values + at, upper + at, reinterpret_cast<const uint16_t*>(pages + low),
              reinterpret_cast<const uint64_t*>(pages + bits), count);
  });
}
