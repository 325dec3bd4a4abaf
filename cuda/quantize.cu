// Block-wise int8: in every block of 2048 values the largest magnitude maps to 127. 4 bytes become 1, plus a scale per block.

constexpr int kBlock = 2048;
constexpr unsigned kInfinity = 0x7f800000u, kNoNumber = 0x7fc00000u;  // NVRTC has no INFINITY and NAN

// scales: the step between two codes. A block with a value that is not finite has scale NaN and codes 0, so that all of it
// dequantizes to NaN.
extern "C" __global__ void __launch_bounds__(256) zinf_quantize(
    const float* __restrict__ values, signed char* __restrict__ codes, float* __restrict__ scales,
    long long num_elements) {
    __shared__ float largest[256];
    for (long long block = blockIdx.x; block * kBlock < num_elements; block += gridDim.x) {
        const long long begin = block * kBlock;
        const long long end = begin + kBlock < num_elements ? begin + kBlock : num_elements;
        float most = 0;
        for (long long index = begin + threadIdx.x; index < end; index += blockDim.x) {
            float magnitude = isfinite(values[index]) ? fabsf(values[index]) : __uint_as_float(kInfinity);
            most = fmaxf(most, magnitude);
        }
        largest[threadIdx.x] = most;
        for (unsigned half = blockDim.x / 2; half > 0; half /= 2) {
            __syncthreads();
            if (threadIdx.x < half) largest[threadIdx.x] = fmaxf(largest[threadIdx.x], largest[threadIdx.x + half]);
        }
        __syncthreads();
        const bool is_finite = isfinite(largest[0]);
        const float scale = is_finite ? largest[0] / 127.0f : __uint_as_float(kNoNumber);
        if (threadIdx.x == 0) scales[block] = scale;
        for (long long index = begin + threadIdx.x; index < end; index += blockDim.x) {
            // A block of values so small that their scale underflows to 0 dequantizes to 0.
            float code = is_finite && scale > 0 ? rintf(values[index] / scale) : 0;
            codes[index] = static_cast<signed char>(fminf(127, fmaxf(-127, code)));
        }
        __syncthreads();  // before the next block overwrites what other threads still read
    }
}

extern "C" __global__ void __launch_bounds__(256) zinf_dequantize(
    const signed char* __restrict__ codes, const float* __restrict__ scales, float* __restrict__ values,
    long long num_elements) {
    const long long stride = static_cast<long long>(gridDim.x) * blockDim.x;
    const long long first = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x;
    for (long long index = first; index < num_elements; index += stride) {
        values[index] = codes[index] * scales[index / kBlock];
    }
}
