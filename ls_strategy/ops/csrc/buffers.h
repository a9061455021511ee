// What a kernel is given: numbers of an update, already rounded to fp32, and raw memory.
#pragma once

#if defined(__CUDACC_RTC__)  // NVRTC, which has no headers
using int32_t = int;
using int64_t = long long;
using uint8_t = unsigned char;
using uint16_t = unsigned short;
using uint32_t = unsigned int;
using uint64_t = unsigned long long;
#else
#include <cstdint>
#endif

namespace ls {

enum Format : int { kFP32, kBF16, kFP16, kInt8 };

struct AdamWNumbers {
  float decay, l2, weight1, rest1, beta2, weight2, root2, eps, rate;
};
struct LionNumbers {
  float decay, beta1, weight1, beta2, weight2, rate;
};
struct SGDNumbers {
  float l2, momentum, weight, rate;
  bool nesterov, first;
};
struct AdagradNumbers {
  float l2, eps, rate;
};

// Elements of an 8-bit moment that share a scale.
constexpr int kScaleBlock = 256;

struct Buffers {
  int64_t n;
  float* param;  // null if the masters are split: see high
  void* first;  // first moment; null where the rule has none, as all that follows
  float* first_scales;
  void* second;  // second moment
  float* second_scales;
  const void* grad;
  void* out;
  const float* clip;
  float unscale;
  uint32_t seed, offset;
  Format moment_format, grad_format, out_format;
  void* high;  // on CPUs, masters as bf16 and what completes it, see split_master.py; null otherwise, as the next two
  void* low;
  uint8_t* ties;  // null with masters of 24 bits
};

// Order of additions of sum_of_squares: see norm.py.
constexpr int kSumBlock = 4096;
constexpr int kSumGroup = 256;
constexpr int kSumLanes = 32;
// Of block_square_sums: see exact_norm.py.
constexpr int kExactBlock = 256;

}  // namespace ls
