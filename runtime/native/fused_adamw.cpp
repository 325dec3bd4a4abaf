// Adam and AdamW over one chunk, in one pass over memory: bit for bit what torch.optim computes on float32.
//
// Every expression rounds where a kernel of ATen rounds, so contraction is off and each fused multiply-add is written out.
// torch's op-by-op path takes square roots from a vector library where it has one, which are not correctly rounded; its
// fused kernel uses the processor's, and rounds another product in what its vectors leave over.
//
// The chunk goes through the first-level cache in blocks: join the master copy where it is split, widen the gradient, update
// the moments, take roots, update the master copy, round it to the compute copy, split it. Moments in codes are decoded and
// encoded around that, a page at a time.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "low_halves.h"
#include "state_codes.h"
#include "threads.h"

extern "C" {

// vmsSqrt and MKL_Set_Num_Threads_Local of MKL.
using VectorRoot = void (*)(int32_t count, const float* values, float* roots, int64_t mode);
using SetLocalThreads = int32_t (*)(int32_t count);

enum Decay : int32_t { kNoDecay = 0, kAddToGradient = 1, kShrinkParameter = 2 };
enum Codes : int32_t { kNoCodes = 0, kInt8 = 1, kBfloat16 = 2 };
constexpr int kMoments = 3;

// Mirrored by ctypes in fused_adamw.py.
struct Update {
  float* master;           // or null, with low_halves
  uint8_t* low_halves;     // pages of what the compute copy lacks of the master copy, or null
  float* mean;             // exp_avg
  float* square;           // exp_avg_sq
  float* max_square;       // max_exp_avg_sq, or null without amsgrad
  const void* gradient;    // float32 or bfloat16
  uint16_t* compute;       // bfloat16, or null
  uint8_t* pages[kMoments];  // of mean, square and max_square, or null; with codes, in the place of those
  const state_codes::Map* maps;  // of int8
  VectorRoot vector_root;  // or null: correctly rounded roots
  SetLocalThreads set_local_threads;
  int64_t num_elements;
  int64_t first;      // with codes: the number of the first element in its parameter
  float decay;        // weight_decay, or the factor 1 - lr * weight_decay
  float mean_weight;  // 1 - beta1
  float beta2;
  float square_weight;       // 1 - beta2
  float root_correction;     // sqrt(1 - beta2 ** step)
  float eps;
  float negative_step_size;  // -lr / (1 - beta1 ** step)
  int32_t decay_mode;
  int32_t gradient_is_bfloat16;
  int32_t maximize;
  int32_t as_fused;  // round as torch's fused kernel does
  int32_t num_threads;
  int32_t codes;
  int32_t is_zeroed;         // with codes: moments are zero before the update, whatever pages hold
  uint32_t seeds[kMoments];  // of bfloat16
};
}

namespace {

constexpr int64_t kBlock = 960;          // elements; seven arrays of float32 are 27 KiB of a first-level cache
constexpr int64_t kPiece = 64 * kBlock;  // what a thread takes at once
constexpr int64_t kFusedVector = 8;      // floats in a vector of torch's fused kernel, which it builds for AVX2 at most
static_assert(low_halves::kElements % kBlock == 0 && kBlock % low_halves::kWord == 0);
constexpr int64_t kRootMode = 0x140102;  // VML_HA | VML_FTZDAZ_OFF | VML_ERRMODE_IGNORE, as ATen calls it

inline float multiply_add(float a, float b, float c) {
#if defined(__FMA__) || defined(__ARM_FEATURE_FMA)
  return __builtin_fmaf(a, b, c);
#else
  return a * b + c;
#endif
}

void widen(const uint16_t* narrow, float* __restrict wide, int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    const uint32_t bits = static_cast<uint32_t>(narrow[i]) << 16;
    std::memcpy(&wide[i], &bits, sizeof bits);
  }
}

// To nearest, ties to even; NaN as ATen writes it.
void round_to_bfloat16(const float* wide, uint16_t* __restrict narrow, int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    uint32_t bits;
    std::memcpy(&bits, &wide[i], sizeof bits);
    const uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    narrow[i] = static_cast<uint16_t>(wide[i] != wide[i] ? 0xffff : rounded);
  }
}

// The functions below take ``u`` by value: no store to an array can then change it.

template <bool kFusedTail>
void update_moments(const Update u, const float* gradient, const float* master, float* __restrict mean,
                    float* __restrict square, int64_t count) {
  const bool is_near = std::fabs(u.mean_weight) < 0.5f;  // torch.lerp starts from the nearer end
  const float mean_weight = is_near ? u.mean_weight : u.mean_weight - 1.0f;
  const float sign = u.maximize ? -1.0f : 1.0f;
  const bool adds_decay = u.decay_mode == kAddToGradient;
  for (int64_t i = 0; i < count; ++i) {
    float g = gradient[i] * sign;
    if (adds_decay) g = multiply_add(master[i], u.decay, g);
    mean[i] = multiply_add(mean_weight, g - mean[i], is_near ? mean[i] : g);
    if constexpr (kFusedTail) {
      square[i] = multiply_add(square[i], u.beta2, u.square_weight * g * g);
    } else {
      square[i] = multiply_add(u.square_weight * g, g, square[i] * u.beta2);
    }
  }
}

// Keeps NaN, as torch.maximum does.
void raise_maxima(float* __restrict maxima, const float* values, int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    maxima[i] = maxima[i] > values[i] || maxima[i] != maxima[i] ? maxima[i] : values[i];
  }
}

void take_roots(const Update& u, const float* values, float* __restrict roots, int64_t count) {
  if (u.vector_root) return u.vector_root(static_cast<int32_t>(count), values, roots, kRootMode);
  for (int64_t i = 0; i < count; ++i) roots[i] = std::sqrt(values[i]);
}

void update_master(const Update u, float* __restrict master, const float* mean, const float* roots, int64_t count) {
  const float shrink = u.decay_mode == kShrinkParameter ? u.decay : 1.0f;
  for (int64_t i = 0; i < count; ++i) {
    master[i] = master[i] * shrink + u.negative_step_size * mean[i] / (roots[i] / u.root_correction + u.eps);
  }
}

// Updates elements ``start`` to ``stop``. If these are not null, ``moments`` are decoded ones of these elements, and the
// master copy is also written to ``masters``.
void update_range(const Update& u, int64_t start, int64_t stop, float* const* moments, float* masters) {
  float wide[kBlock], roots[kBlock], joined[kBlock];
  const int64_t tail = u.as_fused ? u.num_elements / kFusedVector * kFusedVector : u.num_elements;
  for (int64_t block = start; block < stop; block += kBlock) {
    const int64_t count = std::min(stop - block, kBlock);
    const float* gradient = static_cast<const float*>(u.gradient) + block;
    if (u.gradient_is_bfloat16) {
      widen(static_cast<const uint16_t*>(u.gradient) + block, wide, count);
      gradient = wide;
    }
    float* master = u.low_halves ? joined : u.master + block;
    auto* bits = reinterpret_cast<low_halves::Bits*>(master);
    if (u.low_halves) low_halves::join(u.low_halves, u.compute + block, bits, block, count);
    float* mean = moments ? moments[0] + (block - start) : u.mean + block;
    float* square = moments ? moments[1] + (block - start) : u.square + block;
    float* max_square = moments ? moments[2] : u.max_square;
    if (max_square) max_square += moments ? block - start : block;
    const int64_t body = std::min(tail - block, count);
    update_moments<false>(u, gradient, master, mean, square, body);
    update_moments<true>(u, gradient + body, master + body, mean + body, square + body, count - body);
    if (max_square) raise_maxima(max_square, square, count);
    take_roots(u, max_square ? max_square : square, roots, count);
    update_master(u, master, mean, roots, count);
    if (masters) std::memcpy(masters + (block - start), master, count * sizeof(float));
    if (u.compute) round_to_bfloat16(master, u.compute + block, count);
    if (u.low_halves) low_halves::split(bits, u.compute + block, u.low_halves, block, count, u.num_elements);
  }
}

void update_page(const Update& u, int64_t number) {
  float values[kMoments][state_codes::kInt8Elements], joined[state_codes::kInt8Elements];
  float* moments[kMoments];
  const int64_t elements = u.codes == kInt8 ? state_codes::kInt8Elements : state_codes::kBfloat16Elements;
  const int64_t start = number * elements, count = std::min(u.num_elements - start, elements);
  for (int moment = 0; moment < kMoments; ++moment) {
    moments[moment] = u.pages[moment] ? values[moment] : nullptr;
    if (!u.pages[moment]) continue;
    const uint8_t* page = u.pages[moment] + number * state_codes::kPage;
    if (u.is_zeroed) {
      std::fill_n(values[moment], count, 0.0f);
    } else if (u.codes == kInt8) {
      state_codes::decode_int8(page, values[moment], count, u.maps);
    } else {
      state_codes::decode_bfloat16(page, values[moment], count);
    }
  }
  update_range(u, start, start + count, moments, u.low_halves && u.codes == kBfloat16 ? joined : nullptr);
  const float* master = u.low_halves ? joined : u.master + start;
  for (int moment = 0; moment < kMoments; ++moment) {
    if (!u.pages[moment]) continue;
    uint8_t* page = u.pages[moment] + number * state_codes::kPage;
    if (u.codes == kInt8) {
      state_codes::encode_int8(values[moment], page, count, u.maps);
    } else {
      state_codes::encode_bfloat16(values[moment], page, count, u.first + start, u.seeds[moment], master);
    }
  }
}

}  // namespace

extern "C" void zinf_update_adam(const Update* update) {
  const int64_t page = update->codes == kInt8 ? state_codes::kInt8Elements : state_codes::kBfloat16Elements;
  const int64_t unit = update->codes == kNoCodes ? 1 : page;
  on_threads((update->num_elements + unit - 1) / unit, kPiece / unit, update->num_threads, [=](int64_t first, int64_t end) {
    // Without this MKL would start threads of its own in each of ours.
    const int32_t outer = update->vector_root ? update->set_local_threads(1) : 0;
    if (update->codes == kNoCodes) {
      update_range(*update, first, end, nullptr, nullptr);
    } else {
      for (int64_t number = first; number < end; ++number) update_page(*update, number);
    }
    if (update->vector_root) update->set_local_threads(outer);
  });
}
