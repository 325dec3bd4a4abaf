// Optimizer state in pages of codes: decoded to float32, and encoded again. ``runtime/storage/state_codes.py`` has the format
// and the same in torch, bit for bit. Pages may begin at any byte: they are read and written 4 or 8 bytes at once where they can.

using Byte = unsigned char;

constexpr int kPage = 4096;                              // bytes
constexpr int kBlock = 256;                              // elements that share a scale
constexpr int kBlocks = 15;                              // of a page of int8
constexpr int kInt8Elements = kBlocks * kBlock;          // of a page
constexpr int kScales = kInt8Elements;                   // offset in a page
constexpr int kMaps = kScales + 4 * kBlocks;             // offset in a page
constexpr int kBfloat16Elements = kPage / 2;             // of a page
constexpr int kDropped = 14;                             // bits of an element over its scale that do not count
constexpr int kCodes = 1 << (32 - kDropped);             // by the others
constexpr int kGroup = 4;                                // elements that are read and written at once
constexpr int kLanes = 16;                               // that share a block, each with every 16th group of it
constexpr int kLanesOfPage = kLanes * kBlocks;           // one for a thread, where there are as many
constexpr unsigned kInfinity = 0x7f800000u, kNoNumber = 0x7fc00000u, kSign = 0x80000000u;

struct alignas(16) Floats {
    float at[kGroup];
};

struct alignas(8) Halves {
    unsigned short at[kGroup];
};

struct alignas(4) Bytes {
    Byte at[kGroup];
};

__device__ inline bool is_aligned(const void* pointer, unsigned nbytes) {
    return reinterpret_cast<unsigned long long>(pointer) % nbytes == 0;
}

// Reads ``count`` elements of a group; the others are 0.
__device__ inline Floats read_floats(const float* from, long long count, bool aligned) {
    if (count >= kGroup && aligned) return *reinterpret_cast<const Floats*>(from);
    Floats read = {};
    for (int i = 0; i < kGroup && i < count; ++i) read.at[i] = from[i];
    return read;
}

__device__ inline void write_floats(float* to, const Floats& values, long long count, bool aligned) {
    if (count >= kGroup && aligned) {
        *reinterpret_cast<Floats*>(to) = values;
        return;
    }
    for (int i = 0; i < kGroup && i < count; ++i) to[i] = values.at[i];
}

// maps: 256 values to which codes with negative ones are rounded, and then as many without.
extern "C" __global__ void __launch_bounds__(256) zinf_decode_int8(
    const Byte* __restrict__ pages, float* __restrict__ values, long long num_elements, const float* __restrict__ maps) {
    __shared__ float cached[512];
    for (unsigned i = threadIdx.x; i < 512; i += blockDim.x) cached[i] = maps[i];
    __syncthreads();
    const bool reads_groups = is_aligned(pages, sizeof(Bytes)), writes_groups = is_aligned(values, sizeof(Floats));
    for (long long number = blockIdx.x; number * kInt8Elements < num_elements; number += gridDim.x) {
        const Byte* page = pages + number * kPage;
        const long long left = num_elements - number * kInt8Elements;
        for (unsigned lane = threadIdx.x; lane < kLanesOfPage; lane += blockDim.x) {
            const int block = lane / kLanes;
            const Byte* at = page + kScales + 4 * block;
            const float scale = __uint_as_float(at[0] | at[1] << 8 | at[2] << 16 | static_cast<unsigned>(at[3]) << 24);
            const bool is_number = (__float_as_uint(scale) & ~kSign) <= kInfinity;  // a product of NaN has other bits here
            const float* map = cached + 256 * (page[kMaps + block] & 1);
            const int end = (block + 1) * kBlock;
            for (int i = block * kBlock + lane % kLanes * kGroup; i < end && i < left; i += kLanes * kGroup) {
                Bytes codes;
                if (reads_groups) {
                    codes = *reinterpret_cast<const Bytes*>(page + i);
                } else {
                    for (int j = 0; j < kGroup; ++j) codes.at[j] = page[i + j];
                }
                Floats decoded;
                for (int j = 0; j < kGroup; ++j) decoded.at[j] = is_number ? map[codes.at[j]] * scale : scale;
                write_floats(values + number * kInt8Elements + i, decoded, left - i, writes_groups);
            }
        }
    }
}

// codes: those with negative ones by the upper bits of a float, and then as many without. A page is encoded by the threads of
// a block together: each finds the largest element of its lane, and then of the lanes that share a block of elements.
extern "C" __global__ void __launch_bounds__(256) zinf_encode_int8(
    const float* __restrict__ values, Byte* __restrict__ pages, long long num_elements, const Byte* __restrict__ codes) {
    __shared__ unsigned long long largest[kLanesOfPage];  // of a lane: its magnitude, and behind it how early it comes
    __shared__ unsigned most[kLanesOfPage];               // bits: those of negative elements are above the others
    const bool reads_groups = is_aligned(values, sizeof(Floats)), writes_groups = is_aligned(pages, sizeof(Bytes));
    for (long long number = blockIdx.x; number * kInt8Elements < num_elements; number += gridDim.x) {
        Byte* page = pages + number * kPage;
        const float* in = values + number * kInt8Elements;
        const long long left = num_elements - number * kInt8Elements;
        for (unsigned lane = threadIdx.x; lane < kLanesOfPage; lane += blockDim.x) {
            const int first = lane / kLanes * kBlock;
            unsigned long long lanes_largest = 0;
            unsigned lanes_most = 0;
            for (int i = lane % kLanes * kGroup; i < kBlock && first + i < left; i += kLanes * kGroup) {
                const Floats group = read_floats(in + first + i, left - first - i, reads_groups);
                for (int j = 0; j < kGroup && first + i + j < left; ++j) {
                    const unsigned bits = __float_as_uint(group.at[j]);
                    const unsigned long long magnitude = bits & ~kSign;
                    const unsigned long long found = magnitude << 8 | (kBlock - 1 - i - j);
                    if (found > lanes_largest) lanes_largest = found;
                    if (bits > lanes_most) lanes_most = bits;
                }
            }
            largest[lane] = lanes_largest;
            most[lane] = lanes_most;
        }
        __syncthreads();
        for (unsigned lane = threadIdx.x; lane < kLanesOfPage; lane += blockDim.x) {
            const int block = lane / kLanes, first = block * kBlock;
            unsigned long long found = 0;
            unsigned blocks_most = 0;
            for (int other = block * kLanes; other < (block + 1) * kLanes; ++other) {
                if (largest[other] > found) found = largest[other];
                if (most[other] > blocks_most) blocks_most = most[other];
            }
            const unsigned magnitude = static_cast<unsigned>(found >> 8);
            const bool is_finite = magnitude < kInfinity, is_zero = !is_finite || magnitude == 0;
            const unsigned which = blocks_most > kSign && is_finite ? 0 : 1;
            const float by = is_zero ? 1.0f : in[first + kBlock - 1 - static_cast<int>(found & (kBlock - 1))];
            const Byte* map = codes + which * kCodes;
            for (int i = lane % kLanes * kGroup; i < kBlock; i += kLanes * kGroup) {
                Bytes made;
                const Floats group = read_floats(in + first + i, left - first - i, reads_groups);
                for (int j = 0; j < kGroup; ++j) {
                    const unsigned upper = __float_as_uint(group.at[j] / by) >> kDropped;
                    made.at[j] = map[is_zero || first + i + j >= left ? 0 : upper];
                }
                if (writes_groups) {
                    *reinterpret_cast<Bytes*>(page + first + i) = made;
                } else {
                    for (int j = 0; j < kGroup; ++j) page[first + i + j] = made.at[j];
                }
            }
            if (lane % kLanes == 0) {
                const unsigned scale = !is_finite ? kNoNumber : is_zero ? 0 : __float_as_uint(by);
                for (int i = 0; i < 4; ++i) page[kScales + 4 * block + i] = static_cast<Byte>(scale >> 8 * i);
                page[kMaps + block] = static_cast<Byte>(which);
            }
        }
        for (unsigned i = kMaps + kBlocks + threadIdx.x; i < kPage; i += blockDim.x) page[i] = 0;
        __syncthreads();  // before the next page overwrites what other threads still read
    }
}

extern "C" __global__ void __launch_bounds__(256) zinf_decode_bfloat16(
    const Byte* __restrict__ pages, float* __restrict__ values, long long num_elements) {
    const bool reads_groups = is_aligned(pages, sizeof(Halves)), writes_groups = is_aligned(values, sizeof(Floats));
    const long long stride = static_cast<long long>(gridDim.x) * blockDim.x;
    const long long first = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x;
    for (long long i = kGroup * first; i < num_elements; i += kGroup * stride) {
        Floats decoded;
        if (reads_groups) {
            const Halves halves = *reinterpret_cast<const Halves*>(pages + 2 * i);
            for (int j = 0; j < kGroup; ++j) decoded.at[j] = __uint_as_float(static_cast<unsigned>(halves.at[j]) << 16);
        } else {
            for (int j = 0; j < kGroup; ++j) {
                const Byte* at = pages + 2 * (i + j);
                decoded.at[j] = __uint_as_float(at[0] << 16 | static_cast<unsigned>(at[1]) << 24);
            }
        }
        write_floats(values + i, decoded, num_elements - i, writes_groups);
    }
}

// A mix of all bits of a number and of a seed.
__device__ inline unsigned draw(unsigned number, unsigned seed) {
    unsigned mixed = number * 0x9E3779B1u ^ seed;
    mixed = (mixed ^ (mixed >> 16)) * 0x85EBCA6Bu;
    mixed = (mixed ^ (mixed >> 13)) * 0xC2B2AE35u;
    return mixed ^ (mixed >> 16);
}

// Rounded up as often as the bits that are dropped say. A value that bfloat16 has stays as it is.
// begin: the number of the first element in its parameter. drawn_from: makes the random bits others, or null.
extern "C" __global__ void __launch_bounds__(256) zinf_encode_bfloat16(
    const float* __restrict__ values, Byte* __restrict__ pages, long long num_elements, long long begin, unsigned seed,
    const float* __restrict__ drawn_from) {
    const bool reads_groups = is_aligned(values, sizeof(Floats)), writes_groups = is_aligned(pages, sizeof(Halves));
    const bool draws_groups = is_aligned(drawn_from, sizeof(Floats));
    const long long num_padded = (num_elements + kBfloat16Elements - 1) / kBfloat16Elements * kBfloat16Elements;
    const long long stride = static_cast<long long>(gridDim.x) * blockDim.x;
    const long long first = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x;
    for (long long i = kGroup * first; i < num_padded; i += kGroup * stride) {
        const Floats group = read_floats(values + i, num_elements - i, reads_groups);
        Floats others = {};
        if (drawn_from) others = read_floats(drawn_from + i, num_elements - i, draws_groups);
        Halves made;
        for (int j = 0; j < kGroup; ++j) {
            const unsigned bits = __float_as_uint(group.at[j]);
            const unsigned changing = __float_as_uint(others.at[j]) * 0xC2B2AE3Du;
            const unsigned random = draw(static_cast<unsigned>(begin + i + j) + changing, seed) & 0xffffu;
            const bool is_finite = (bits & kInfinity) != kInfinity;
            const unsigned quiet = (bits & 0x7fffffu) ? 0x40u : 0u;  // NaN stays NaN
            const unsigned upper = is_finite ? (bits + random) >> 16 : bits >> 16 | quiet;
            made.at[j] = i + j < num_elements ? static_cast<unsigned short>(upper) : 0;
        }
        if (writes_groups) {
            *reinterpret_cast<Halves*>(pages + 2 * i) = made;
        } else {
            for (int j = 0; j < kGroup; ++j) {
                pages[2 * (i + j)] = static_cast<Byte>(made.at[j]);
                pages[2 * (i + j) + 1] = static_cast<Byte>(made.at[j] >> 8);
            }
        }
    }
}
