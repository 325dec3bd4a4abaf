// Frozen weights as rows of int8: decoded to float32 or bfloat16, and encoded. ``storage/row_codes.py`` has the format and the
// same in torch, bit for bit.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <limits>
#include <utility>
#include <vector>

#include "threads.h"

namespace {

constexpr int64_t kLanes = 16;           // sums that are taken side by side, in an order that does not depend on the machine
constexpr int64_t kRowsAtOnce = 8;       // that a thread takes
constexpr uint32_t kNoColumn = 0xffffffff;
constexpr float kLeastScale = 0x1p-100f;  // rows of smaller elements are zero
constexpr float kLargest = 127.0f;

uint32_t bits_of(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

float float_of(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

// To the nearest, ties to even; NaN stays one.
inline uint16_t half_of(float value) {
  const uint32_t bits = bits_of(value);
  const uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  return static_cast<uint16_t>((bits & 0x7fffffff) > 0x7f800000 ? 0x7fc0 : rounded);
}

inline float widen(uint16_t half) { return float_of(static_cast<uint32_t>(half) << 16); }

inline float load(float value) { return value; }
inline float load(uint16_t half) { return widen(half); }
inline void store(float value, float* out) { *out = value + 0.0f; }  // no negative zeros
inline void store(float value, uint16_t* out) {
  const uint16_t half = half_of(value);
  *out = half == 0x8000 ? 0 : half;
}

inline float decode_one(int8_t code, float largest, float scale) {
  const float product = static_cast<float>(code) * scale;
  return code == 127 ? largest : code == -127 ? -largest : product;
}

float scale_of(float largest) { return largest < kLeastScale ? 0.0f : largest / kLargest; }

// Where the parts of an encoded row begin.
struct Row {
  uint8_t* largest;   // float32: of the elements that have codes, the magnitude of the largest
  uint8_t* columns;   // uint32, ascending
  uint8_t* halves;    // what these have in bfloat16
  uint8_t* codes;
  Row(const uint8_t* row, int64_t num_outliers)
      : largest(const_cast<uint8_t*>(row)),
        columns(largest + sizeof(float)),
        halves(columns + num_outliers * sizeof(uint32_t)),
        codes(halves + num_outliers * sizeof(uint16_t)) {}
};

template <typename T>
void decode_row(const uint8_t* row, T* out, int64_t columns, int64_t num_outliers) {
  const Row from(row, num_outliers);
  float largest;
  std::memcpy(&largest, from.largest, sizeof largest);
  if (std::isnan(largest)) {
    for (int64_t i = 0; i < columns; ++i) store(float_of(0x7fc00000), out + i);
    return;
  }
  const float scale = scale_of(largest);
  const int8_t* codes = reinterpret_cast<const int8_t*>(from.codes);
  for (int64_t i = 0; i < columns; ++i) store(decode_one(codes[i], largest, scale), out + i);
  for (int64_t i = 0; i < num_outliers; ++i) {
    uint32_t column;
    uint16_t half;
    std::memcpy(&column, from.columns + i * sizeof column, sizeof column);
    std::memcpy(&half, from.halves + i * sizeof half, sizeof half);
    if (column < columns) store(widen(half), out + column);
  }
}

// Of each thread, while it encodes.
struct Scratch {
  std::vector<float> values, magnitudes, sorted;
  std::vector<std::pair<float, float>> top;  // of the elements that can be outliers and the next: magnitudes, and of values
};

inline int8_t code_of(float value, float scale) {
  return scale == 0.0f ? 0 : static_cast<int8_t>(std::nearbyint(value / scale));
}

inline float decoded_as(float value, const float*) { return value; }
inline float decoded_as(float value, const uint16_t*) { return widen(half_of(value)); }

// The magnitude of the largest element that is no outlier, where those with magnitudes above ``bound`` are. That has an
// element of the top, and rounding to 16 bits changes no order.
float largest_within(const Scratch& scratch, float bound) {
  float largest = 0.0f;
  for (const auto& [magnitude, value] : scratch.top) largest = std::max(largest, magnitude > bound ? 0.0f : value);
  return largest;
}

template <typename T>
bool is_kept(const Scratch& scratch, float bound, const T* kind) {
  const float largest = largest_within(scratch, bound), scale = scale_of(largest);
  for (size_t i = 0; i < scratch.values.size(); ++i) {
    const float value = scratch.values[i];
    const float back = scratch.magnitudes[i] > bound
                           ? widen(half_of(value))
                           : decoded_as(decode_one(code_of(value, scale), largest, scale), kind);
    if (back != value) return false;
  }
  return true;
}

template <typename T>
void encode_row(const T* in, uint8_t* row, int64_t columns, int64_t num_outliers, int64_t row_nbytes, double threshold,
                Scratch& scratch) {
  const Row to(row, num_outliers);
  std::memset(row, 0, row_nbytes);
  for (int64_t i = 0; i < num_outliers; ++i) std::memcpy(to.columns + i * sizeof kNoColumn, &kNoColumn, sizeof kNoColumn);
  scratch.values.resize(columns);
  scratch.magnitudes.resize(columns);
  uint32_t most = 0;
  for (int64_t i = 0; i < columns; ++i) {
    const float value = scratch.values[i] = load(in[i]);
    const float magnitude = scratch.magnitudes[i] = std::fabs(widen(half_of(value)));
    most = std::max(most, bits_of(magnitude));
  }
  if (most >= 0x7f800000) {  // an element is not finite, or not in bfloat16
    const float nan = std::numeric_limits<float>::quiet_NaN();
    std::memcpy(to.largest, &nan, sizeof nan);
    return;
  }
  scratch.sorted.resize(num_outliers + 1);
  std::partial_sort_copy(scratch.magnitudes.begin(), scratch.magnitudes.end(), scratch.sorted.begin(), scratch.sorted.end(),
                         std::greater<float>());
  const std::vector<float>& sorted = scratch.sorted;
  scratch.top.clear();
  for (int64_t i = 0; i < columns; ++i) {
    const float magnitude = scratch.magnitudes[i];
    if (magnitude >= sorted[num_outliers]) scratch.top.emplace_back(magnitude, std::fabs(scratch.values[i]));
  }
  double sums[kLanes] = {}, sum = 0.0;  // of the squares of what can be no outlier
  for (int64_t i = 0; i < columns; ++i) {
    const double value = scratch.magnitudes[i] > sorted[num_outliers] ? 0.0 : scratch.values[i];
    sums[i % kLanes] += value * value;
  }
  for (double lane : sums) sum += lane;
  int64_t chosen = -1, by_rule = 0;
  for (int64_t count = 0; count <= num_outliers && chosen < 0; ++count) {
    if (count > 0 && sorted[count - 1] == sorted[count]) continue;  // which of equals would be outliers is left open
    if (is_kept(scratch, sorted[count], in)) chosen = count;
    const double last = count == 0 ? 0.0 : sorted[count - 1];
    if (count > 0 && last * last * static_cast<double>(columns) >= threshold * threshold * sum) by_rule = count;
  }
  const float bound = sorted[chosen < 0 ? by_rule : chosen];
  const float largest = largest_within(scratch, bound), scale = scale_of(largest);
  std::memcpy(to.largest, &largest, sizeof largest);
  int8_t* codes = reinterpret_cast<int8_t*>(to.codes);
  int64_t outlier = 0;
  for (int64_t i = 0; i < columns; ++i) {
    if (scratch.magnitudes[i] > bound) {
      const uint32_t column = static_cast<uint32_t>(i);
      const uint16_t half = half_of(scratch.values[i]);
      std::memcpy(to.columns + outlier * sizeof column, &column, sizeof column);
      std::memcpy(to.halves + outlier * sizeof half, &half, sizeof half);
      ++outlier;
    } else {
      codes[i] = code_of(scratch.values[i], scale);
    }
  }
}

template <typename T>
void encode_rows(const T* values, uint8_t* rows, int64_t num_rows, int64_t columns, int64_t num_outliers,
                 int64_t row_nbytes, double threshold, int32_t num_threads) {
  on_threads(num_rows, kRowsAtOnce, num_threads, [=](int64_t first, int64_t end) {
    Scratch scratch;
    for (int64_t row = first; row < end; ++row) {
      encode_row(values + row * columns, rows + row * row_nbytes, columns, num_outliers, row_nbytes, threshold, scratch);
    }
  });
}

template <typename T>
void decode_rows(const uint8_t* rows, T* values, int64_t num_rows, int64_t columns, int64_t num_outliers,
                 int64_t row_nbytes, int32_t num_threads) {
  on_threads(num_rows, kRowsAtOnce, num_threads, [=](int64_t first, int64_t end) {
    for (int64_t row = first; row < end; ++row) {
      decode_row(rows + row * row_nbytes, values + row * columns, columns, num_outliers);
    }
  });
}

}  // namespace

extern "C" void zinf_decode_rows_float32(const uint8_t* rows, float* values, int64_t num_rows, int64_t columns,
                                         int64_t num_outliers, int64_t row_nbytes, int32_t num_threads) {
  decode_rows(rows, values, num_rows, columns, num_outliers, row_nbytes, num_threads);
}

extern "C" void zinf_decode_rows_bfloat16(const uint8_t* rows, uint16_t* values, int64_t num_rows, int64_t columns,
                                          int64_t num_outliers, int64_t row_nbytes, int32_t num_threads) {
  decode_rows(rows, values, num_rows, columns, num_outliers, row_nbytes, num_threads);
}

extern "C" void zinf_encode_rows_float32(const float* values, uint8_t* rows, int64_t num_rows, int64_t columns,
                                         int64_t num_outliers, int64_t row_nbytes, double threshold, int32_t num_threads) {
  encode_rows(values, rows, num_rows, columns, num_outliers, row_nbytes, threshold, num_threads);
}

extern "C" void zinf_encode_rows_bfloat16(const uint16_t* values, uint8_t* rows, int64_t num_rows, int64_t columns,
                                          int64_t num_outliers, int64_t row_nbytes, double threshold,
                                          int32_t num_threads) {
  encode_rows(values, rows, num_rows, columns, num_outliers, row_nbytes, threshold, num_threads);
}
