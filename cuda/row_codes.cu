// Frozen weights as rows of int8, decoded to float32 or bfloat16. ``runtime/storage/row_codes.py`` has the format and the same in
// torch, bit for bit. A row is decoded by the threads of one block.

using Byte = unsigned char;

constexpr int kOutlier = 4 + 2;  // bytes: its column, and its value in bfloat16
constexpr unsigned kSign = 0x80000000u, kInfinity = 0x7f800000u, kNoNumber = 0x7fc00000u;
constexpr unsigned kLeastScale = 0x0d800000u;  // 2**-100: rows of smaller elements are zero
constexpr int kLargestCode = 127;

__device__ inline unsigned read_bits(const Byte* at) {
    return at[0] | at[1] << 8 | at[2] << 16 | static_cast<unsigned>(at[3]) << 24;
}

__device__ inline void write(float value, float* to) { *to = value + 0.0f; }  // no negative zeros

// To the nearest, ties to even.
__device__ inline void write(float value, unsigned short* to) {
    const unsigned bits = __float_as_uint(value), rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    const unsigned half = (bits & ~kSign) > kInfinity ? kNoNumber >> 16 : rounded;
    *to = static_cast<unsigned short>(half == kSign >> 16 ? 0 : half);
}

template <class Value>
__device__ inline void decode_rows(
    const Byte* rows, Value* values, long long num_rows, long long columns, long long num_outliers, long long row_nbytes) {
    for (long long number = blockIdx.x; number < num_rows; number += gridDim.x) {
        const Byte* row = rows + number * row_nbytes;
        const Byte* codes = row + 4 + kOutlier * num_outliers;
        Value* to = values + number * columns;
        const unsigned bits = read_bits(row);
        const float largest = __uint_as_float(bits);
        const bool is_number = (bits & ~kSign) <= kInfinity;
        const float scale = largest < __uint_as_float(kLeastScale) ? 0.0f : largest / kLargestCode;
        for (long long i = threadIdx.x; i < columns; i += blockDim.x) {
            const int code = static_cast<signed char>(codes[i]);
            const float value = code == kLargestCode ? largest : code == -kLargestCode ? -largest : code * scale;
            write(is_number ? value : __uint_as_float(kNoNumber), to + i);
        }
        __syncthreads();  // the outliers have codes, too
        for (long long i = threadIdx.x; i < num_outliers && is_number; i += blockDim.x) {
            const unsigned column = read_bits(row + 4 + 4 * i);
            const Byte* half = row + 4 + 4 * num_outliers + 2 * i;
            const float value = __uint_as_float(half[0] << 16 | static_cast<unsigned>(half[1]) << 24);
            if (column < columns) write(value, to + column);
        }
    }
}

extern "C" __global__ void __launch_bounds__(256) zinf_decode_rows_float32(
    const Byte* __restrict__ rows, float* __restrict__ values, long long num_rows, long long columns, long long num_outliers,
    long long row_nbytes) {
    decode_rows(rows, values, num_rows, columns, num_outliers, row_nbytes);
}

extern "C" __global__ void __launch_bounds__(256) zinf_decode_rows_bfloat16(
    const Byte* __restrict__ rows, unsigned short* __restrict__ values, long long num_rows, long long columns,
    long long num_outliers, long long row_nbytes) {
    decode_rows(rows, values, num_rows, columns, num_outliers, row_nbytes);
}
