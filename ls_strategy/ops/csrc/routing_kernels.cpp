// The CPU kernels of routing, compiled once per instruction set like kernels.cpp, whose rule holds here too: no inline function
// of the standard library. Each product and each sum is rounded by itself.
#include "lanes.h"
#include "routing.h"

namespace ls {
namespace {

LS_INLINE int64_t bytes_of(Format format) { return format == kFP32 ? 4 : 2; }
LS_INLINE const char* row(const void* rows, int64_t i, const Rows& r) {
  return static_cast<const char*>(rows) + i * r.width * bytes_of(r.format);
}

template <Format kFormat>
LS_INLINE F load_lanes(const void* from, int64_t i) {
  return load(from, kFormat, i);
}
template <Format kFormat>
LS_INLINE void store_lanes(void* to, int64_t i, F x) {
  if (kFormat == kFP32) {
    store_as(static_cast<float*>(to) + i, x);
  } else {
    store_as(static_cast<uint16_t*>(to) + i, kFormat == kBF16 ? to_bf16(x) : to_fp16(x));
  }
}

// The last elements of a row, fewer than a register holds; the others are zero, or not written.
template <Format kFormat>
LS_INLINE F load_tail(const void* from, int64_t i, int64_t n) {
  constexpr int kBytes = kFormat == kFP32 ? 4 : 2;
  alignas(64) char raw[kBytes * kLanes] = {};
  __builtin_memcpy(raw, static_cast<const char*>(from) + i * kBytes, (n - i) * kBytes);
  return load_lanes<kFormat>(raw, 0);
}
template <Format kFormat>
LS_INLINE void store_tail(void* to, int64_t i, int64_t n, F x) {
  constexpr int kBytes = kFormat == kFP32 ? 4 : 2;
  alignas(64) char raw[kBytes * kLanes];
  store_lanes<kFormat>(raw, 0, x);
  __builtin_memcpy(static_cast<char*>(to) + i * kBytes, raw, (n - i) * kBytes);
}

// --- permute ------------------------------------------------------------------------------------------------------------

template <Format kFormat>
LS_INLINE void scale_row(const void* from, void* to, float weight, int64_t n) {
  const F w = splat<F>(weight);
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) store_lanes<kFormat>(to, i, load_lanes<kFormat>(from, i) * w);
  if (i < n) store_tail<kFormat>(to, i, n, load_tail<kFormat>(from, i, n) * w);
}

// As registers: the library's memcpy takes longer for rows of a few KB.
LS_INLINE void copy_row(const char* from, char* to, int64_t bytes) {
  int64_t i = 0;
  for (; i + static_cast<int64_t>(sizeof(U)) <= bytes; i += sizeof(U)) store_as(to + i, load_as<U>(from + i));
  if (i < bytes) __builtin_memcpy(to + i, from + i, bytes - i);
}

template <Format kFormat>
void permute_as(const Rows& rows, int64_t begin, int64_t end) {
  const Rows r = rows;
  const int64_t bytes = r.width * bytes_of(kFormat);
  char* to = static_cast<char*>(r.out) + begin * bytes;
  for (int64_t p = begin; p < end; ++p, to += bytes) {
    const char* from = row(r.by_token, r.order[p] / r.choices, r);
    if (r.weights) {
      scale_row<kFormat>(from, to, r.weights[r.order[p]], r.width);
    } else {
      copy_row(from, to, bytes);
    }
  }
}

// --- combine ------------------------------------------------------------------------------------------------------------

// Columns [i, i + kCount * kLanes) of one token, in registers over all choices; the last register may be a tail.
template <Format kFormat, int kCount, bool kTail>
LS_INLINE void combine_columns(const Rows& r, int64_t token, int64_t i) {
  F sum[kCount] = {};
  for (int64_t j = token * r.choices; j < (token + 1) * r.choices; ++j) {
    if (r.position[j] < 0) continue;
    const char* from = row(r.by_pair, r.position[j], r);
    const F w = splat<F>(r.weights ? r.weights[j] : 1.0f);  // a product with one is exact
    for (int c = 0; c < kCount; ++c) {
      const int64_t at = i + c * kLanes;
      sum[c] += w * (kTail ? load_tail<kFormat>(from, at, r.width) : load_lanes<kFormat>(from, at));
    }
  }
  char* to = static_cast<char*>(r.out) + token * r.width * bytes_of(kFormat);
  for (int c = 0; c < kCount; ++c) {
    const int64_t at = i + c * kLanes;
    kTail ? store_tail<kFormat>(to, at, r.width, sum[c]) : store_lanes<kFormat>(to, at, sum[c]);
  }
}

template <Format kFormat>
void combine_as(const Rows& rows, int64_t begin, int64_t end) {
  const Rows r = rows;
  constexpr int kCount = 8;
  for (int64_t token = begin; token < end; ++token) {
    int64_t i = 0;
    for (; i + kCount * kLanes <= r.width; i += kCount * kLanes) combine_columns<kFormat, kCount, false>(r, token, i);
    for (; i + kLanes <= r.width; i += kLanes) combine_columns<kFormat, 1, false>(r, token, i);
    if (i < r.width) combine_columns<kFormat, 1, true>(r, token, i);
  }
}

// --- dot ----------------------------------------------------------------------------------------------------------------

constexpr int kDotRegisters = kDotLanes / kLanes;

LS_INLINE float fold(F* lanes) {
  for (int width = kDotRegisters / 2; width > 0; width /= 2) {
    for (int c = 0; c < width; ++c) lanes[c] = lanes[c] + lanes[c + width];
  }
  float x[kLanes];
  __builtin_memcpy(x, lanes, sizeof x);
  for (int width = kLanes / 2; width > 0; width /= 2) {
    for (int i = 0; i < width; ++i) x[i] = x[i] + x[i + width];
  }
  return x[0];
}

template <Format kFormat>
LS_INLINE float dot_row(const void* a, const void* b, int64_t n) {
  F lanes[kDotRegisters] = {};
  int64_t i = 0;
  for (; i + kDotLanes <= n; i += kDotLanes) {
    for (int c = 0; c < kDotRegisters; ++c) {
      lanes[c] += load_lanes<kFormat>(a, i + c * kLanes) * load_lanes<kFormat>(b, i + c * kLanes);
    }
  }
  if (i == n) return fold(lanes);
  F sums[kDotRegisters];  // in memory, since a register has no variable number
  __builtin_memcpy(sums, lanes, sizeof sums);
  for (int c = 0; i < n; ++c, i += kLanes) {
    const bool whole = i + kLanes <= n;
    const F x = whole ? load_lanes<kFormat>(a, i) : load_tail<kFormat>(a, i, n);
    const F y = whole ? load_lanes<kFormat>(b, i) : load_tail<kFormat>(b, i, n);
    sums[c] += x * y;
  }
  return fold(sums);
}

template <Format kFormat>
void dot_as(const Rows& rows, int64_t begin, int64_t end) {
  const Rows r = rows;
  float* out = static_cast<float*>(r.out);
  for (int64_t p = begin; p < end; ++p) {
    const int64_t pair = r.order[p];
    out[pair] = dot_row<kFormat>(row(r.by_token, pair / r.choices, r), row(r.by_pair, p, r), r.width);
  }
}

template <void (*fp32)(const Rows&, int64_t, int64_t), void (*bf16)(const Rows&, int64_t, int64_t),
          void (*fp16)(const Rows&, int64_t, int64_t)>
void by_format(const Rows& r, int64_t begin, int64_t end) {
  (r.format == kFP32 ? fp32 : r.format == kBF16 ? bf16 : fp16)(r, begin, end);
}

// --- top k --------------------------------------------------------------------------------------------------------------

// Whole numbers in the order of scores: a NaN above all, as torch has it, the two zeros equal.
LS_INLINE I keys_of(F x) {
  const I b = (I)(x + splat<F>(0.0f));
  const I key = b ^ ((I)((U)(b >> 31) >> 1));
  return x != x ? (I)splat(0x7FFFFFFFu) : key;
}

constexpr int32_t kNone = -0x7FFFFFFF - 1;  // below every key

LS_INLINE I of_all(int32_t x) { return (I)splat(static_cast<uint32_t>(x)); }
LS_INLINE I larger(I a, I b) { return a > b ? a : b; }

LS_INLINE int32_t largest(I lanes) {
#if defined(__AVX512F__)
  return _mm512_reduce_max_epi32((__m512i)lanes);
#else
  int32_t x[kLanes];
  __builtin_memcpy(x, &lanes, sizeof x);
  for (int width = kLanes / 2; width > 0; width /= 2) {
    for (int i = 0; i < width; ++i) x[i] = x[i] > x[i + width] ? x[i] : x[i + width];
  }
  return x[0];
#endif
}

// Keys of one row, filled up to whole registers. Within memory, a register may be read past the end of the row.
LS_INLINE void fill(int32_t* keys, const float* from, int64_t experts, const float* end_of_memory) {
  for (int64_t i = 0; i < experts; i += kLanes) {
    const F x = from + i + kLanes <= end_of_memory ? load_as<F>(from + i) : load_tail<kFP32>(from, i, experts);
    const I inside = (I)iota() < of_all(static_cast<int32_t>(experts - i < kLanes ? experts - i : kLanes));
    store_as(keys + i, inside ? keys_of(x) : of_all(kNone));
  }
}

// Index of the largest key but that at `taken`; among equals the lowest. Every lane keeps the first of its largest.
LS_INLINE int64_t first_largest(const int32_t* keys, int64_t experts, int64_t taken) {
  const I none = of_all(kNone), other = of_all(static_cast<int32_t>(taken));
  I best = none, at = (I)iota(), index = at;
  for (int64_t i = 0; i < experts; i += kLanes, index += kLanes) {
    const I key = index == other ? none : load_as<I>(keys + i);
    at = key > best ? index : at;
    best = larger(key, best);
  }
  return -static_cast<int64_t>(largest(best == of_all(largest(best)) ? -at : none));
}

void topk(const Scores& scores, int32_t* keys, int64_t begin, int64_t end) {
  const Scores t = scores;
  for (int64_t s = begin; s < end; ++s) {
    fill(keys, t.scores + s * t.experts, t.experts, t.scores + t.rows * t.experts);
    int64_t taken = -1;
    for (int64_t j = 0; j < t.k; ++j) {
      const int64_t best = first_largest(keys, t.experts, taken);
      t.indices[s * t.k + j] = best;
      // Written one round late: a register read right after a part of it was written waits for the write.
      if (j) keys[taken] = kNone;
      taken = best;
    }
  }
}

}  // namespace

const RoutingKernels routing::LS_KERNELS = {
    by_format<permute_as<kFP32>, permute_as<kBF16>, permute_as<kFP16>>,
    by_format<combine_as<kFP32>, combine_as<kBF16>, combine_as<kFP16>>,
    by_format<dot_as<kFP32>, dot_as<kBF16>, dot_as<kFP16>>,
    topk,
};

}  // namespace ls
