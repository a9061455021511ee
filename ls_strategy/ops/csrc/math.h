// The arithmetic of one element, once for all devices: fp32, each operation rounded by itself (-ffp-contract=off for g++,
// --fmad=false for NVRTC). `N` is a number, or one per lane of a register (lanes.h); what a condition on registers chooses is
// computed on both sides. reference.py and moments.py define the same in torch, operation by operation.
#pragma once

#include "buffers.h"

namespace ls {
namespace {

// Loshchilov & Hutter, arXiv:1711.05101, algorithm 2.
template <class N>
struct AdamW {
  using Numbers = AdamWNumbers;
  static constexpr bool kFirst = true, kSecond = true;
  N decay, l2, weight1, rest1, beta2, weight2, root2, eps, rate;
  bool has_l2, near;

  LS_INLINE explicit AdamW(const Numbers& s)
      : decay(splat<N>(s.decay)),
        l2(splat<N>(s.l2)),
        weight1(splat<N>(s.weight1)),
        rest1(splat<N>(s.rest1)),
        beta2(splat<N>(s.beta2)),
        weight2(splat<N>(s.weight2)),
        root2(splat<N>(s.root2)),
        eps(splat<N>(s.eps)),
        rate(splat<N>(s.rate)),
        has_l2(s.l2 != 0),
        near(s.weight1 < 0.5f) {}

  LS_INLINE void operator()(N& p, N g, N& m, N& v) const {
    p = p * decay;
    if (has_l2) g = g + p * l2;
    m = near ? m + (g - m) * weight1 : g - (g - m) * rest1;
    v = v * beta2 + (g * weight2) * g;
    p = p + (m * rate) / (root(v) / root2 + eps);
  }
};

// Chen et al., arXiv:2302.06675, algorithm 2.
template <class N>
struct Lion {
  using Numbers = LionNumbers;
  static constexpr bool kFirst = true, kSecond = false;
  N decay, beta1, weight1, beta2, weight2, rate;

  LS_INLINE explicit Lion(const Numbers& s)
      : decay(splat<N>(s.decay)),
        beta1(splat<N>(s.beta1)),
        weight1(splat<N>(s.weight1)),
        beta2(splat<N>(s.beta2)),
        weight2(splat<N>(s.weight2)),
        rate(splat<N>(s.rate)) {}

  LS_INLINE void operator()(N& p, N g, N& m, N&) const {
    const N zero = splat<N>(0.0f);
    p = p * decay;
    const N direction = m * beta1 + g * weight1;
    const N step = direction > zero ? rate : direction < zero ? -rate : zero * rate;
    p = p + step;
    m = m * beta2 + g * weight2;
  }
};

template <class N, bool kMomentum>
struct SGD {
  using Numbers = SGDNumbers;
  static constexpr bool kFirst = kMomentum, kSecond = false;
  N l2, momentum, weight, rate;
  bool has_l2, nesterov, first;

  LS_INLINE explicit SGD(const Numbers& s)
      : l2(splat<N>(s.l2)),
        momentum(splat<N>(s.momentum)),
        weight(splat<N>(s.weight)),
        rate(splat<N>(s.rate)),
        has_l2(s.l2 != 0),
        nesterov(s.nesterov),
        first(s.first) {}

  LS_INLINE void operator()(N& p, N g, N& m, N&) const {
    if (has_l2) g = g + p * l2;
    if (kMomentum) {
      m = first ? g : m * momentum + g * weight;
      g = nesterov ? g + m * momentum : m;
    }
    p = p + g * rate;
  }
};
template <class N>
using PlainSGD = SGD<N, false>;
template <class N>
using MomentumSGD = SGD<N, true>;

// Duchi, Hazan & Singer, JMLR 12 (2011).
template <class N>
struct Adagrad {
  using Numbers = AdagradNumbers;
  static constexpr bool kFirst = false, kSecond = true;
  N l2, eps, rate;
  bool has_l2;

  LS_INLINE explicit Adagrad(const Numbers& s)
      : l2(splat<N>(s.l2)), eps(splat<N>(s.eps)), rate(splat<N>(s.rate)), has_l2(s.l2 != 0) {}

  LS_INLINE void operator()(N& p, N g, N&, N& v) const {
    if (has_l2) g = g + p * l2;
    v = v + g * g;
    p = p + (g * rate) / (root(v) + eps);
  }
};

// Bits that belong to numbers N. Not deduced from an argument, which may be narrower: shifts would lose its upper bits.
template <class N>
using Bits = typename BitsOf<N>::type;

// --- split masters -----------------------------------------------------------------------------------------------------

constexpr uint32_t kMiddle = 0x8000;

// `tied` is 1 where a number in the middle of two bf16 numbers was rounded up.
template <class N>
LS_INLINE N join_master(Bits<N> high, Bits<N> low, Bits<N> tied) {
  return number((high - ((low + tied + (kMiddle - 1)) >> 16)) << 16 | low);
}

// --- storage of moments ------------------------------------------------------------------------------------------------

constexpr uint32_t kWeyl = 0x9E3779B9;

// Finaliser of MurmurHash3; `x` is seed + index * kWeyl.
template <class N>
LS_INLINE Bits<N> random_bits(Bits<N> x) {
  x ^= x >> 16;
  x *= 0x85EBCA6Bu;
  x ^= x >> 13;
  x *= 0xC2B2AE35u;
  x ^= x >> 16;
  return x;
}

// The first moment takes the low half, the second one the high half.
template <bool kSigned, class N>
LS_INLINE Bits<N> rounding_of(Bits<N> random) {
  return kSigned ? random & 0xFFFFu : random >> 16;
}

// Stochastic rounding to bf16, which is the upper half of the result.
template <class N>
LS_INLINE Bits<N> stochastic_bf16(N x, Bits<N> rounding) {
  const Bits<N> b = bits(x);
  return x != x ? (b & 0u) + 0x7FC00000u : b + rounding;
}

// Codes and the upper halves of fp32 numbers in units of the scale: all that a code holds is there. `S` is a signed integer, or
// one of 16 bits per lane. Signed comparisons: AVX2 has no others, and nothing but a sign reaches 2**15.
template <bool kSigned>
struct Code {
  static constexpr int kDropped = kSigned ? 4 : 3;
  static constexpr int kTop = kSigned ? 127 : 255;
  static constexpr int kBase = (0x3F80 >> kDropped) - kTop;

  // Of a first moment, or of the root of a second one: the number in units of the scale, whose upper half is rounded.
  template <class N>
  LS_INLINE static Bits<N> round(N x, N inverse_scale, Bits<N> random) {
    return bits(x * inverse_scale) + (rounding_of<kSigned, N>(random) << kDropped);
  }

  // From the upper halves of `round` and of the number itself.
  template <class S>
  LS_INLINE static S encode(S rounded, S own) {
    const S zero = rounded & 0, one = zero + 1, top = zero + kTop;
    S c = ((rounded & 0x7FFF) >> kDropped) - kBase;
    c = c > zero ? c : zero;
    c = c > top ? top : c;
    if (kSigned) return c > zero ? c + (rounded >> 8 & 0x80) : zero;
    // A positive second moment never becomes zero: the next step of its element would explode. A root has no sign, and is
    // far above the numbers whose upper half is zero.
    const S least = own > one ? one : own;
    return c > least ? c : least;
  }

  // The upper half of the number in units of the scale.
  template <class S>
  LS_INLINE static S decode(S code) {
    const S zero = code & 0, magnitude = kSigned ? code & kTop : code;
    const S number = magnitude == zero ? zero : (magnitude + kBase) << kDropped;
    return kSigned ? number | (code & 0x80) << 8 : number;
  }
};

// Scale of a block from the bit pattern of its largest magnitude: the smallest power of two that is not smaller.
LS_INLINE uint32_t scale_bits(uint32_t largest) {
  if (largest == 0) return 0;
  const uint32_t power = (largest + 0x7FFFFFu) & 0x7F800000u;
  return power < 0x00800000u ? 0x00800000u : power > 0x7F000000u ? 0x7F000000u : power;
}

constexpr uint32_t kInfinityBits = 0x7F800000u;
constexpr uint32_t kNaNBits = 0x7FC00000u;

}  // namespace
}  // namespace ls
