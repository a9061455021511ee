// Kernels with one mistake each, and one without: what the emulation must find, and what it must not.
constexpr int kThreads = 64;

struct alignas(16) Four {
  float x[4];
};

// Sums of all 64 numbers, over shared memory and over the lanes of a warp.
__global__ void sum_kernel(const float* from, float* to, bool block_barrier, bool warp_barrier) {
  __shared__ float warps[2];
  __shared__ float lanes[kThreads];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  lanes[threadIdx.x] = from[threadIdx.x];
  if (warp_barrier) __syncwarp();
  float x = lanes[warp * 32 + (lane ^ 1)];
  for (int width = 16; width > 0; width /= 2) x += __shfl_xor_sync(0xFFFFFFFFu, x, width);
  if (lane == 0) warps[warp] = x;
  if (block_barrier) __syncthreads();
  if (threadIdx.x == kThreads - 1) *to = warps[0] + warps[1];
}

__global__ void divergent_barrier_kernel() {
  if (threadIdx.x < 32) __syncthreads();
}

__global__ void divergent_lanes_kernel(float* to) {
  const float x = threadIdx.x % 32 == 31 ? 0.0f : __shfl_down_sync(0xFFFFFFFFu, 1.0f, 1);
  to[threadIdx.x] = x;
}

__global__ void two_meetings_kernel(float* to) {
  to[threadIdx.x] = threadIdx.x % 2 ? __shfl_down_sync(0xFFFFFFFFu, 1.0f, 1) : __shfl_xor_sync(0xFFFFFFFFu, 1.0f, 1);
}

__global__ void copy_kernel(const float* from, float* to, int from_shift, int to_shift) {
  if (threadIdx.x >= kThreads / 4) return;
  const Four x = *reinterpret_cast<const Four*>(from + from_shift + 4 * threadIdx.x);
  *reinterpret_cast<Four*>(to + to_shift + 4 * threadIdx.x) = x;
}

__global__ void same_element_kernel(float* to) {
  if (threadIdx.x == 0) to[0] = 1.0f;
}

__global__ void count_kernel(float* to, bool atomic) {
  int* const count = reinterpret_cast<int*>(to);
  if (atomic) {
    atomicAdd(count, 1);
  } else {
    *count += 1;
  }
}

__global__ void assert_kernel() { assert(threadIdx.x < 40); }
