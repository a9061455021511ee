// What the kernels use of CUDA's runtime.
#pragma once

#include <cmath>

#include "device.h"

#define __global__
#define __device__
#define __forceinline__ inline
#define __launch_bounds__(threads)

#define threadIdx (emulation::place.thread)
#define blockIdx (emulation::place.block)
#define blockDim (emulation::place.threads)
#define gridDim (emulation::place.blocks)

struct alignas(16) uint4 {
  uint32_t x, y, z, w;
};

// --- the host's ---------------------------------------------------------------------------------------------------------

typedef void* cudaStream_t;
enum cudaError_t { cudaSuccess };
enum cudaMemcpyKind { cudaMemcpyDeviceToHost };

inline cudaError_t cudaGetLastError() { return cudaSuccess; }
inline const char* cudaGetErrorString(cudaError_t) { return "none"; }
inline cudaError_t cudaStreamSynchronize(cudaStream_t) { return cudaSuccess; }
cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind, cudaStream_t);

// --- numbers ------------------------------------------------------------------------------------------------------------

template <class To, class From>
inline To same_bits(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &from, sizeof to);
  return to;
}

inline uint32_t __float_as_uint(float x) { return same_bits<uint32_t>(x); }
inline float __uint_as_float(uint32_t x) { return same_bits<float>(x); }
inline float __fsqrt_rn(float x) { return std::sqrt(x); }
inline float __fdiv_rn(float x, float y) { return x / y; }
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline unsigned max(unsigned x, unsigned y) { return x > y ? x : y; }

// --- threads ------------------------------------------------------------------------------------------------------------

inline void __syncthreads() { emulation::meet(emulation::Meeting::kThreads, 0xFFFFFFFFu, 0, 0); }
inline void __syncwarp() { emulation::meet(emulation::Meeting::kWarp, 0xFFFFFFFFu, 0, 0); }

template <class T>
inline T __shfl_down_sync(unsigned mask, T value, unsigned delta) {
  return emulation::meet_with(emulation::Meeting::kDown, mask, value, delta);
}
template <class T>
inline T __shfl_up_sync(unsigned mask, T value, unsigned delta) {
  return emulation::meet_with(emulation::Meeting::kUp, mask, value, delta);
}
template <class T>
inline T __shfl_xor_sync(unsigned mask, T value, unsigned lanes) {
  return emulation::meet_with(emulation::Meeting::kXor, mask, value, lanes);
}
template <class T>
inline unsigned __match_any_sync(unsigned mask, T value) {
  return static_cast<unsigned>(emulation::meet(emulation::Meeting::kMatch, mask, static_cast<uint64_t>(value), 0));
}
inline unsigned __reduce_max_sync(unsigned mask, unsigned value) {
  return emulation::meet_with(emulation::Meeting::kMax, mask, value, 0);
}
inline int __reduce_add_sync(unsigned mask, int value) { return emulation::meet_with(emulation::Meeting::kAdd, mask, value, 0); }

inline void atomicAdd(int* to, int value) { emulation::add(to, value); }
inline void atomicAdd(double* to, double value) { emulation::add(to, value); }
