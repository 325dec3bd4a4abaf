// AdamW over a chunk in one pass: 14 bytes read and 14 written per element, no intermediate buffers.
#include "bfloat16.cuh"

struct Update {
    float shrink;         // 1 - lr * weight_decay
    float mean_weight;    // 1 - beta1
    float beta2;
    float square_weight;  // 1 - beta2
    float root_correction;  // sqrt(1 - beta2^step)
    float eps;
    float negative_step_size;  // -lr / (1 - beta1^step)
};

__device__ inline float update_one(float gradient, float& mean, float& square, float master, const Update& update) {
    mean = mean + update.mean_weight * (gradient - mean);
    square = square * update.beta2 + update.square_weight * gradient * gradient;
    float denominator = sqrtf(square) / update.root_correction + update.eps;
    return master * update.shrink + update.negative_step_size * (mean / denominator);
}

// factors: gradients are multiplied by each in order: the clipping factor, and 1 / loss scale.
extern "C" __global__ void __launch_bounds__(256) zinf_fused_adamw(
    float* __restrict__ master, float* __restrict__ mean, float* __restrict__ square,
    const unsigned short* __restrict__ gradient, unsigned short* __restrict__ compute,
    const float* __restrict__ factors, long long num_elements, float shrink, float mean_weight, float beta2,
    float square_weight, float root_correction, float eps, float negative_step_size) {
    const Update update = {shrink, mean_weight, beta2, square_weight, root_correction, eps, negative_step_size};
    const float factor = factors[0] * factors[1];
    const long long stride = static_cast<long long>(gridDim.x) * blockDim.x;
    const long long first = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x;
    const long long num_vectors = num_elements / 4;
    for (long long index = first; index < num_vectors; index += stride) {
        Floats masters = reinterpret_cast<Floats*>(master)[index];
        Floats means = reinterpret_cast<Floats*>(mean)[index];
        Floats squares = reinterpret_cast<Floats*>(square)[index];
        const Halves gradients = reinterpret_cast<const Halves*>(gradient)[index];
        Halves computes;
        for (int lane = 0; lane < 4; ++lane) {
            float widened = widen(gradients.at[lane]) * factor;
            masters.at[lane] = update_one(widened, means.at[lane], squares.at[lane], masters.at[lane], update);
            computes.at[lane] = narrow(masters.at[lane]);
        }
        reinterpret_cast<Floats*>(master)[index] = masters;
        reinterpret_cast<Floats*>(mean)[index] = means;
        reinterpret_cast<Floats*>(square)[index] = squares;
        reinterpret_cast<Halves*>(compute)[index] = computes;
    }
    for (long long index = 4 * num_vectors + first; index < num_elements; index += stride) {
        float widened = widen(gradient[index]) * factor;
        master[index] = update_one(widened, mean[index], square[index], master[index], update);
        compute[index] = narrow(master[index]);
    }
}
