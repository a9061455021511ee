// Routing on a GPU. A warp takes a row, four neighbouring elements per lane at a time; nothing is added atomically, so that the
// order of additions is that of permute.py.
#include "scalar.cuh"

#include "routing.h"

namespace ls {

constexpr int kThreads = 256;
constexpr int kWarp = 32;
constexpr int kStep = kWarp * kVector;  // elements that a warp takes at a time
static_assert(kDotLanes == kStep, "a lane of a dot product is an element of a lane of a warp");

LS_INLINE int64_t warp_index() { return (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x) / kWarp; }

// --- permute, combine, dot ----------------------------------------------------------------------------------------------

// Rows as whole numbers T, `width` of them each.
template <class T>
__global__ void __launch_bounds__(kThreads) copy_rows_kernel(const Rows r, int64_t width) {
  const int64_t p = warp_index();
  if (p >= r.pairs) return;
  assert(0 <= r.order[p] && r.order[p] < r.tokens * r.choices);
  const T* from = static_cast<const T*>(r.by_token) + r.order[p] / r.choices * width;
  T* to = static_cast<T*>(r.out) + p * width;
  for (int64_t i = threadIdx.x % kWarp; i < width; i += kWarp) to[i] = from[i];
}

LS_INLINE const void* row(const void* rows, int64_t i, const Rows& r) {
  return static_cast<const char*>(rows) + i * r.width * (r.format == kFP32 ? 4 : 2);
}

template <bool kWide>
__global__ void __launch_bounds__(kThreads) scale_rows_kernel(const Rows r) {
  const int64_t p = warp_index();
  if (p >= r.pairs) return;
  const int64_t pair = r.order[p];
  assert(0 <= pair && pair < r.tokens * r.choices);
  const float weight = r.weights[pair];
  const void* from = row(r.by_token, pair / r.choices, r);
  void* to = const_cast<void*>(row(r.out, p, r));
  for (int64_t i = threadIdx.x % kWarp * kVector; i < r.width; i += kStep) {
    Vector<float> x = load4<kWide>(from, r.format, i, r.width);
#pragma unroll
    for (int c = 0; c < kVector; ++c) x.x[c] = x.x[c] * weight;
    store4<kWide>(to, r.format, i, r.width, x);
  }
}

__global__ void __launch_bounds__(kThreads) forget_kernel(const Rows r, int64_t* position) {
  const int64_t pair = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (pair < r.tokens * r.choices) position[pair] = -1;
}

__global__ void __launch_bounds__(kThreads) invert_kernel(const Rows r, int64_t* position) {
  const int64_t p = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (p >= r.pairs) return;
  assert(0 <= r.order[p] && r.order[p] < r.tokens * r.choices);
  position[r.order[p]] = p;
}

template <bool kWide>
__global__ void __launch_bounds__(kThreads) combine_kernel(const Rows r) {
  const int64_t token = warp_index();
  if (token >= r.tokens) return;
  const int64_t* position = r.position + token * r.choices;
  void* to = const_cast<void*>(row(r.out, token, r));
  for (int64_t i = threadIdx.x % kWarp * kVector; i < r.width; i += kStep) {
    Vector<float> sum{};
    for (int64_t j = 0; j < r.choices; ++j) {
      if (position[j] < 0) continue;
      const float weight = r.weights ? r.weights[token * r.choices + j] : 1.0f;
      const Vector<float> y = load4<kWide>(row(r.by_pair, position[j], r), r.format, i, r.width);
#pragma unroll
      for (int c = 0; c < kVector; ++c) sum.x[c] = sum.x[c] + weight * y.x[c];
    }
    store4<kWide>(to, r.format, i, r.width, sum);
  }
}

template <bool kWide>
__global__ void __launch_bounds__(kThreads) dot_kernel(const Rows r) {
  const int64_t p = warp_index();
  if (p >= r.pairs) return;  // the whole warp
  const int64_t pair = r.order[p];
  assert(0 <= pair && pair < r.tokens * r.choices);
  const void *a = row(r.by_token, pair / r.choices, r), *b = row(r.by_pair, p, r);
  Vector<float> sum{};
  for (int64_t i = threadIdx.x % kWarp * kVector; i < r.width; i += kStep) {
    const Vector<float> x = load4<kWide>(a, r.format, i, r.width), y = load4<kWide>(b, r.format, i, r.width);
#pragma unroll
    for (int c = 0; c < kVector; ++c) sum.x[c] = sum.x[c] + x.x[c] * y.x[c];
  }
#pragma unroll
  for (int width = kWarp / 2; width > 0; width /= 2) {
#pragma unroll
    for (int c = 0; c < kVector; ++c) sum.x[c] = sum.x[c] + __shfl_down_sync(0xFFFFFFFFu, sum.x[c], width);
  }
  const float first = sum.x[0] + sum.x[2], second = sum.x[1] + sum.x[3];
  if (threadIdx.x % kWarp == 0) static_cast<float*>(r.out)[pair] = first + second;
}

// --- sort by expert -----------------------------------------------------------------------------------------------------

constexpr int kTile = 512;  // pairs of a warp

// Numbers of the experts of a tile's pairs: places[expert * tiles + tile]. One warp per block.
__global__ void __launch_bounds__(kWarp) tile_counts_kernel(const int64_t* of, const bool* kept, int64_t pairs, int64_t experts,
                                                            int64_t* places) {
  extern __shared__ int counts[];
  for (int64_t e = threadIdx.x; e < experts; e += kWarp) counts[e] = 0;
  __syncwarp();
  const int64_t start = static_cast<int64_t>(blockIdx.x) * kTile;
  for (int64_t i = start + threadIdx.x; i < start + kTile && i < pairs; i += kWarp) {
    if (kept && !kept[i]) continue;
    assert(0 <= of[i] && of[i] < experts);
    atomicAdd(&counts[of[i]], 1);  // whole numbers: their order is of no effect
  }
  __syncwarp();
  for (int64_t e = threadIdx.x; e < experts; e += kWarp) places[e * gridDim.x + blockIdx.x] = counts[e];
}

// Each number becomes the sum of all before it. One block; `counts` are the sums of each expert's tiles.
__global__ void __launch_bounds__(1024) places_kernel(int64_t* places, int64_t tiles, int64_t experts, int64_t* counts) {
  __shared__ int64_t sums[1024 / kWarp];
  __shared__ int64_t carried;
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  if (threadIdx.x == 0) carried = 0;
  __syncthreads();
  const int64_t n = tiles * experts;
  for (int64_t start = 0; start < n; start += blockDim.x) {
    const int64_t i = start + threadIdx.x;
    const int64_t own = i < n ? places[i] : 0;
    int64_t sum = own;  // of the lanes up to this one
#pragma unroll
    for (int step = 1; step < kWarp; step *= 2) {
      const int64_t before = __shfl_up_sync(0xFFFFFFFFu, sum, step);
      if (lane >= step) sum += before;
    }
    if (lane == kWarp - 1) sums[warp] = sum;
    __syncthreads();
    if (warp == 0) {
      int64_t of_warps = sums[lane];
#pragma unroll
      for (int step = 1; step < kWarp; step *= 2) {
        const int64_t before = __shfl_up_sync(0xFFFFFFFFu, of_warps, step);
        if (lane >= step) of_warps += before;
      }
      sums[lane] = of_warps;
    }
    __syncthreads();
    const int64_t through = carried + (warp ? sums[warp - 1] : 0) + sum;
    if (i < n) places[i] = through - own;
    __syncthreads();  // all have read what the last thread now overwrites
    if (threadIdx.x == blockDim.x - 1) carried = through;
    __syncthreads();
  }
  for (int64_t e = threadIdx.x; e < experts; e += blockDim.x) {
    counts[e] = (e + 1 < experts ? places[(e + 1) * tiles] : carried) - places[e * tiles];
  }
}

// Writes the pairs of a tile to their places, one warp's worth after the other: the order within an expert is kept.
__global__ void __launch_bounds__(kWarp) place_kernel(const int64_t* of, const bool* kept, int64_t pairs, int64_t experts,
                                                      const int64_t* places, int64_t* order) {
  extern __shared__ int taken[];
  for (int64_t e = threadIdx.x; e < experts; e += kWarp) taken[e] = 0;
  __syncwarp();
  const int64_t start = static_cast<int64_t>(blockIdx.x) * kTile;
  for (int64_t first = start; first < start + kTile && first < pairs; first += kWarp) {
    const int64_t i = first + threadIdx.x;
    const bool takes = i < pairs && (!kept || kept[i]);
    const int expert = takes ? static_cast<int>(of[i]) : -1;
    const unsigned int same = __match_any_sync(0xFFFFFFFFu, expert);
    const int before = __popc(same & ((1u << threadIdx.x) - 1));
    if (takes) order[places[static_cast<int64_t>(expert) * gridDim.x + blockIdx.x] + taken[expert] + before] = i;
    __syncwarp();
    if (takes && before == 0) taken[expert] += __popc(same);
    __syncwarp();
  }
}

// --- top k --------------------------------------------------------------------------------------------------------------

// As keys_of in routing_kernels.cpp.
LS_INLINE int32_t key_of(float x) {
  const int32_t b = static_cast<int32_t>(bits(x + 0.0f));
  return x != x ? 0x7FFFFFFF : b ^ static_cast<int32_t>(static_cast<uint32_t>(b >> 31) >> 1);
}

// Below that of all ones, with which the search begins.
constexpr uint32_t kLastIndex = 0xFFFFFFFE;

// A warp per row finds the best score after the one it found last, k times.
__global__ void __launch_bounds__(kThreads) topk_kernel(const Scores t) {
  const int64_t row = warp_index();
  if (row >= t.rows) return;  // the whole warp
  const int lane = threadIdx.x % kWarp;
  const float* from = t.scores + row * t.experts;
  // Key and complement of the index as one number: the larger key is better, then the lower index.
  uint64_t last = ~uint64_t{0};
  for (int64_t j = 0; j < t.k; ++j) {
    uint64_t best = 0;
    for (int64_t e = lane; e < t.experts; e += kWarp) {
      const uint32_t key = static_cast<uint32_t>(key_of(from[e])) ^ 0x80000000u;
      const uint64_t rank = static_cast<uint64_t>(key) << 32 | (kLastIndex - static_cast<uint32_t>(e));
      if (rank < last && rank > best) best = rank;
    }
#pragma unroll
    for (int step = kWarp / 2; step > 0; step /= 2) {
      const uint64_t other = __shfl_xor_sync(0xFFFFFFFFu, best, step);
      best = other > best ? other : best;
    }
    last = best;
    if (lane == 0) t.indices[row * t.k + j] = kLastIndex - static_cast<uint32_t>(best);
  }
}

}  // namespace ls
