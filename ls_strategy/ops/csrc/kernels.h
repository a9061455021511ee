// The kernels of one instruction set.
#pragma once

#include "buffers.h"

namespace ls {

// Work on elements [begin, end); begin is a multiple of kScaleBlock, end too unless it is n.
template <class Numbers>
using UpdateRange = void (*)(const Numbers&, const Buffers&, int64_t begin, int64_t end);

struct Kernels {
  UpdateRange<AdamWNumbers> adamw;
  UpdateRange<LionNumbers> lion;
  UpdateRange<SGDNumbers> sgd;
  UpdateRange<AdagradNumbers> adagrad;
  // Sums of the squares of blocks [begin, end) into sums, and the number of elements that are not finite, added to count.
  void (*square_sums)(const Buffers&, int64_t begin, int64_t end, double* sums, int64_t* count);
  // Sums of the squares of blocks [begin, end) of kExactBlock elements into sums.
  void (*block_square_sums)(const Buffers&, int64_t begin, int64_t end, double* sums);
  // Sums of kSumGroup numbers each.
  void (*group_sums)(const double* numbers, int64_t n, double* sums);
};

extern const Kernels kPortable, kAVX2, kAVX512;

}  // namespace ls
