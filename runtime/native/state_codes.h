// Pages of codes of optimizer state: decoded to float32, and encoded again. ``storage/state_codes.py`` has the format and the
// same in torch, bit for bit.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

#if defined(__AVX512F__)
#include <immintrin.h>
#endif

namespace state_codes {

constexpr int64_t kPage = 4096;                       // bytes
constexpr int64_t kBlock = 256;                       // elements that share a scale
constexpr int64_t kBlocks = 15;                       // of a page of int8
constexpr int64_t kInt8Elements = kBlocks * kBlock;   // of a page; then come scales, then a byte for each block
constexpr int64_t kBfloat16Elements = kPage / 2;      // of a page

inline uint32_t bits_of(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

// What values from -1 to 1 are rounded to. Mirrored by ctypes in state_codes.py.
constexpr int kDropped = 14;  // bits of a float that do not count
struct Map {
  float values[256];                    // ascending
  uint8_t codes[1 << (32 - kDropped)];  // by the upper bits of a float
};

// Fills ``codes`` by the upper bits of values over ``by``, none of which is larger.
inline void encode_scaled(const float* values, int64_t count, float by, const Map& map, uint8_t* codes) {
  int64_t start = 0;
#if defined(__AVX512F__)
  // A gather reads four bytes from each code on. The map goes on behind that of 1 and -1, which is the last one here.
  for (const __m512 divisor = _mm512_set1_ps(by); start + 16 <= count; start += 16) {
    const __m512 scaled = _mm512_div_ps(_mm512_loadu_ps(values + start), divisor);
    const __m512i upper = _mm512_srli_epi32(_mm512_castps_si512(scaled), kDropped);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(codes + start),
                     _mm512_cvtepi32_epi8(_mm512_i32gather_epi32(upper, map.codes, 1)));
  }
#endif
  uint32_t upper[kBlock];
  for (int64_t i = start; i < count; ++i) upper[i] = bits_of(values[i] / by) >> kDropped;
  for (int64_t i = start; i < count; ++i) codes[i] = map.codes[upper[i]];
}

// Scaled by the element of largest magnitude, with its sign: it is stored exactly, and values that were decoded are
// encoded to the same codes again. Of two such elements, the first one.
inline void encode_block(const float* values, int64_t count, const Map* maps, uint8_t* codes, float* scale, uint8_t* which) {
  // Bits of the largest positive and negative value: those of magnitudes are in the order of the values, negative ones above.
  int32_t positive = 0;
  uint32_t most = 0;
  for (int64_t i = 0; i < count; ++i) {
    positive = std::max(positive, static_cast<int32_t>(bits_of(values[i])));
    most = std::max(most, bits_of(values[i]));
  }
  const uint32_t above = static_cast<uint32_t>(positive), below = most > 0x80000000 ? most & 0x7fffffff : 0;
  const uint32_t largest = std::max(above, below);
  const bool is_finite = largest < 0x7f800000;
  *which = most > 0x80000000 && is_finite ? 0 : 1;
  *scale = is_finite ? 0.0f : std::numeric_limits<float>::quiet_NaN();
  const Map& map = maps[*which];
  if (!is_finite || largest == 0) {
    std::memset(codes, map.codes[0], kBlock);
    return;
  }
  uint32_t extreme = above > below ? largest : largest | 0x80000000;
  if (above == below) {
    int64_t first = 0;
    while ((bits_of(values[first]) & 0x7fffffff) != largest) ++first;
    extreme = bits_of(values[first]);
  }
  std::memcpy(scale, &extreme, sizeof extreme);
  encode_scaled(values, count, *scale, map, codes);
  std::memset(codes + count, map.codes[0], kBlock - count);
}

// A mix of all bits of a number and of a seed.
inline uint32_t draw(uint32_t number, uint32_t seed) {
  uint32_t mixed = number * 0x9E3779B1u ^ seed;
  mixed = (mixed ^ (mixed >> 16)) * 0x85EBCA6Bu;
  mixed = (mixed ^ (mixed >> 13)) * 0xC2B2AE35u;
  return mixed ^ (mixed >> 16);
}

// The functions below are for the ``count`` elements of one page.

inline void decode_int8(const uint8_t* page, float* out, int64_t count, const Map* maps) {
  float scales[kBlocks];
  std::memcpy(scales, page + kInt8Elements, sizeof scales);
  for (int64_t block = 0; block * kBlock < count; ++block) {
    const float* map = maps[page[kInt8Elements + sizeof scales + block] & 1].values;
    const float scale = scales[block];
    const int64_t stop = std::min(count, (block + 1) * kBlock);
    int64_t i = block * kBlock;
#if defined(__AVX512F__)
    for (; i + 16 <= stop; i += 16) {
      const __m512i codes = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(page + i)));
      _mm512_storeu_ps(out + i, _mm512_mul_ps(_mm512_i32gather_ps(codes, map, sizeof *map), _mm512_set1_ps(scale)));
    }
#endif
    for (; i < stop; ++i) out[i] = map[page[i]] * scale;
  }
}

inline void encode_int8(const float* in, uint8_t* page, int64_t count, const Map* maps) {
  std::memset(page + kInt8Elements, 0, kPage - kInt8Elements);
  for (int64_t block = 0; block < kBlocks; ++block) {
    const int64_t first = block * kBlock;
    float scale = 0.0f;
    uint8_t which = 1;
    encode_block(in + std::min(first, count), std::clamp<int64_t>(count - first, 0, kBlock), maps, page + first, &scale,
                 &which);
    std::memcpy(page + kInt8Elements + block * sizeof scale, &scale, sizeof scale);
    page[kInt8Elements + kBlocks * sizeof scale + block] = which;
  }
}

inline void decode_bfloat16(const uint8_t* page, float* out, int64_t count) {
  const uint16_t* upper = reinterpret_cast<const uint16_t*>(page);
  for (int64_t i = 0; i < count; ++i) {
    const uint32_t bits = static_cast<uint32_t>(upper[i]) << 16;
    std::memcpy(&out[i], &bits, sizeof bits);
  }
}

// Rounded up as often as the bits that are dropped say. A value that bfloat16 has stays as it is. ``first`` is the number of
// the first element in its parameter.
inline void encode_bfloat16(const float* in, uint8_t* page, int64_t count, int64_t first, uint32_t seed,
                            const float* drawn_from) {
  uint16_t* upper = reinterpret_cast<uint16_t*>(page);
  for (int64_t i = 0; i < count; ++i) {
    const uint32_t bits = bits_of(in[i]);
    const uint32_t changing = drawn_from ? bits_of(drawn_from[i]) * 0xC2B2AE3Du : 0;
    const uint32_t random = draw(static_cast<uint32_t>(first + i) + changing, seed) & 0xffff;
    const bool is_finite = (bits & 0x7f800000) != 0x7f800000;
    const uint32_t quiet = (bits & 0x7fffff) ? 0x40 : 0;  // NaN stays NaN
    upper[i] = static_cast<uint16_t>(is_finite ? (bits + random) >> 16 : bits >> 16 | quiet);
  }
  std::memset(upper + count, 0, (kBfloat16Elements - count) * sizeof(uint16_t));
}

}  // namespace state_codes
