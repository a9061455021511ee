// A product with a weight in 8 or 4 bits, and the CPU kernels of one instruction set. Layouts: see linear.py.
#pragma once

#include <cstdint>

namespace ls {

struct Product {
  int64_t rows, in, out;
  int64_t group;        // input features that share scale and zero; 4 bits only
  const float* x;       // (rows, in)
  const float* sums;    // (rows, in / group): of the elements of x in each group; 4 bits only
  const void* weight;   // (out, in) int8, or (out, in / 2)
  const float* scales;  // (out,), or scale and zero: (out, in / group, 2)
  float* y;             // (rows, out)
};

// Levels of 4 bits that a run of kPacked / 2 bytes holds: the first half of them in the low bits.
constexpr int kPacked = 32;

// Output features [begin, end), of all rows.
struct LinearKernels {
  void (*int8)(const Product&, int64_t begin, int64_t end);
  void (*int4)(const Product&, int64_t begin, int64_t end);
};

namespace linear {
extern const LinearKernels kPortable, kAVX2, kAVX512;
}

}  // namespace ls
