// A loop over pieces of an array on threads that end with it.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <thread>
#include <vector>

// Calls work(first, end) for ranges of ``at_once`` numbers that together are those below ``count``. Threads take the next
// range when they are done with one: a thread that gets no core holds up little.
template <typename Work>
void on_threads(int64_t count, int64_t at_once, int32_t num_threads, const Work& work) {
  std::atomic<int64_t> next{0};
  const auto run = [&] {
    for (int64_t first = next.fetch_add(at_once); first < count; first = next.fetch_add(at_once)) {
      work(first, std::min(first + at_once, count));
    }
  };
  std::vector<std::thread> others;
  const int64_t wanted = std::min<int64_t>(num_threads, (count + at_once - 1) / at_once);
  for (int64_t number = 1; number < wanted; ++number) others.emplace_back(run);
  run();
  for (std::thread& other : others) other.join();
}
