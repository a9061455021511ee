// Tiles of weights in 4 and 8 bits, and the CPU kernels of one instruction set. Layout: see quantized.py.
#pragma once

#include "buffers.h"

namespace ls {

constexpr int kTile = 512;       // elements
constexpr int kBlock = 64;       // elements with a common scale
constexpr int kPackedRun = 32;   // levels of 4 bits that are packed together: the first half of them in the low bits
constexpr int kScaleBytes = kTile / kBlock * 2;

enum LevelFormat : int { kNF4, kLevels4, kLevels8 };

struct Levels {
  float value[16];  // of the numbers of 4 bits
};

struct Tiles {
  int64_t count;
  const uint8_t* packed;
  void* out;
  Format format;  // of out
  LevelFormat form;
  Levels levels;
};

constexpr int64_t kTileBytes4 = kScaleBytes + kTile / 2, kTileBytes8 = kScaleBytes + kTile;

// What becomes tiles.
struct Values {
  int64_t count;  // of tiles
  const void* values;
  uint8_t* packed;
  double* changes;  // per tile: sum of the squares of what rounding changes; null: not wanted
  Format format;    // of values
  LevelFormat form;
  Levels levels;
  float borders[15];  // between the levels of kNF4; a number on one becomes the lower level
};

// Tiles [begin, end).
struct QuantizedKernels {
  void (*dequantize)(const Tiles&, int64_t begin, int64_t end);
  void (*quantize)(const Values&, int64_t begin, int64_t end);
};

namespace quantized {
extern const QuantizedKernels kPortable, kAVX2, kAVX512;
}

}  // namespace ls
