// What a kernel of routing is given, and the CPU kernels of one instruction set. A pair is a token and one of its choices of an
// expert; its number is token * choices + choice.
#pragma once

#include "buffers.h"

namespace ls {

struct Rows {
  int64_t tokens, choices, pairs, width;
  const int64_t* order;     // (pairs,): numbers of the pairs that are kept, in the order of their rows
  const int64_t* position;  // (tokens, choices): the row of a pair, -1 where it is dropped; for combine
  const float* weights;     // (tokens, choices), null for ones
  const void* by_token;     // (tokens, width)
  const void* by_pair;      // (pairs, width)
  void* out;
  Format format;  // of the rows
};

struct Scores {
  int64_t rows, experts, k;
  const float* scores;  // (rows, experts)
  int64_t* indices;     // (rows, k)
};

// Of the widest register.
constexpr int kMostLanes = 16;

// Order of additions of a dot product: see permute.py.
constexpr int kDotLanes = 128;

// Rows [begin, end): of pairs for permute and dot, of tokens for combine; rows of scores for topk, whose memory for
// keys holds a row, filled up to kMostLanes.
struct RoutingKernels {
  void (*permute)(const Rows&, int64_t begin, int64_t end);
  void (*combine)(const Rows&, int64_t begin, int64_t end);
  void (*dot)(const Rows&, int64_t begin, int64_t end);
  void (*topk)(const Scores&, int32_t* keys, int64_t begin, int64_t end);
};

namespace routing {
extern const RoutingKernels kPortable, kAVX2, kAVX512;
}

}  // namespace ls
