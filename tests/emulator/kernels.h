// The words of CUDA's language that copies.cu uses, for a C++ compiler, and launches that run a kernel's threads in turn.
#pragma once
#include <cstdint>

#define __global__
#define __device__ static inline
#define __grid_constant__
namespace {
struct Index {
  unsigned x, y;
};
thread_local Index blockIdx, threadIdx, blockDim, gridDim;
struct alignas(16) uint4 {
  unsigned x, y, z, w;
};
#include "../../src/graphdispatch/backends/copies.cu"

template <class Kernel, class Argument>
void run(Kernel kernel, const Argument& argument, unsigned columns, unsigned rows, unsigned threads) {
  gridDim = {columns, rows};
  blockDim = {threads, 1};
  for (unsigned block = 0; block < columns * rows; ++block) {
    blockIdx = {block % columns, block / columns};
    for (threadIdx = {0, 0}; threadIdx.x < threads; ++threadIdx.x) kernel(argument);
  }
}
}  // namespace
