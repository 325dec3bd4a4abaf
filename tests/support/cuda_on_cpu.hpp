// Enough of CUDA to run a kernel on a CPU: a CPU thread per CUDA thread, one block after the other. Slow and exact.
#pragma once
#include <barrier>
#include <cstring>
#include <thread>
#include <vector>

#define __device__
#define __global__
#define __launch_bounds__(threads)
#define __restrict__
#define __shared__ static

struct Index {
    unsigned x;
};

inline thread_local Index threadIdx, blockIdx;
inline Index blockDim, gridDim;
inline std::barrier<>* threads_of_block;

inline void __syncthreads() { threads_of_block->arrive_and_wait(); }

inline float __uint_as_float(unsigned bits) {
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

inline unsigned __float_as_uint(float value) {
    unsigned bits;
    std::memcpy(&bits, &value, sizeof bits);
    return bits;
}

template <class Kernel, class... Arguments>
void launch(unsigned num_blocks, unsigned num_threads, Kernel kernel, Arguments... arguments) {
    gridDim.x = num_blocks;
    blockDim.x = num_threads;
    for (unsigned block = 0; block < num_blocks; ++block) {
        std::barrier<> barrier(num_threads);
        threads_of_block = &barrier;
        std::vector<std::thread> threads;
        for (unsigned thread = 0; thread < num_threads; ++thread) {
            threads.emplace_back([=] {
                threadIdx.x = thread;
                blockIdx.x = block;
                kernel(arguments...);
            });
        }
        for (std::thread& thread : threads) thread.join();
    }
}
