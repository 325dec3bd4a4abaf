// bfloat16 as its 16 bits, rounded to nearest, ties to even, like torch. Needs no CUDA header.
#pragma once

struct alignas(16) Floats {  // read and written as one 16-byte access
    float at[4];
};

struct alignas(8) Halves {
    unsigned short at[4];
};

__device__ inline float widen(unsigned short bits) { return __uint_as_float(static_cast<unsigned>(bits) << 16); }

__device__ inline unsigned short narrow(float value) {
    unsigned bits = __float_as_uint(value);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return 0x7fc0;  // every NaN becomes torch's canonical NaN
    return static_cast<unsigned short>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}
