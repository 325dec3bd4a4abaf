// Converts a float32 gradient to bfloat16, and computes its squared norm (for clipping) and whether it is finite (for loss
// scaling), in one pass: 4 bytes read, 2 written per element.
#include "bfloat16.cuh"

// partials: one sum of squares per thread block; adding them up in order gives the same bits every time.
// is_not_finite: must be 0 before the launch; 1 after it if any element is infinite or NaN.
extern "C" __global__ void __launch_bounds__(256) zinf_pack_gradient(
    const float* __restrict__ gradient, unsigned short* __restrict__ packed, double* __restrict__ partials,
    int* __restrict__ is_not_finite, long long num_elements) {
    const long long stride = static_cast<long long>(gridDim.x) * blockDim.x;
    const long long first = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x;
    const long long num_vectors = num_elements / 4;
    double squares = 0;
    for (long long index = first; index < num_vectors; index += stride) {
        const Floats gradients = reinterpret_cast<const Floats*>(gradient)[index];
        Halves packs;
        for (int lane = 0; lane < 4; ++lane) {
            packs.at[lane] = narrow(gradients.at[lane]);
            squares += static_cast<double>(gradients.at[lane]) * gradients.at[lane];
        }
        reinterpret_cast<Halves*>(packed)[index] = packs;
    }
    for (long long index = 4 * num_vectors + first; index < num_elements; index += stride) {
        packed[index] = narrow(gradient[index]);
        squares += static_cast<double>(gradient[index]) * gradient[index];
    }
    __shared__ double sums[256];
    sums[threadIdx.x] = squares;
    for (unsigned half = blockDim.x / 2; half > 0; half /= 2) {
        __syncthreads();
        if (threadIdx.x < half) sums[threadIdx.x] += sums[threadIdx.x + half];
    }
    if (threadIdx.x == 0) {
        partials[blockIdx.x] = sums[0];
        // Squares of float32 do not overflow a double: their sum is finite if and only if all of them are.
        if (!isfinite(sums[0])) atomicOr(is_not_finite, 1);
    }
}
