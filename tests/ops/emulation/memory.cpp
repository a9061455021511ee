// Every access of a kernel to memory: the compiler calls what is defined here instead of ThreadSanitizer (-fsanitize=thread).
// Two accesses to one element, of which one writes, race unless a barrier of both threads lies between them.
#include <algorithm>
#include <vector>

#include "device.h"

namespace emulation {
namespace {

struct Access {
  uint32_t launch, block, block_barriers, warp_barriers;
  uint16_t thread;
  bool atomic;
};

// Of an element: its last write, its last read, and the one of another thread before that.
struct History {
  Access write, read, other;
};

struct Range {
  const char *begin, *end;
  size_t element_bytes;
  bool writable;
  std::vector<History> elements;

  bool holds(const char* address) const { return begin <= address && address < end; }
};

constexpr size_t kSharedElement = 4;

std::vector<Range> buffers;
size_t found;  // the buffer of the last access
Range shared_range, arguments;
uint32_t launch;

// Whether `now` may come before what came earlier.
bool race(const Access& earlier, const Access& now, bool is_shared) {
  if (earlier.launch != now.launch || (earlier.atomic && now.atomic)) return false;
  if (earlier.block != now.block) return !is_shared;
  if (earlier.thread == now.thread || earlier.block_barriers != now.block_barriers) return false;
  return earlier.thread / kWarp != now.thread / kWarp || earlier.warp_barriers == now.warp_barriers;
}

void record(History& h, const Access& now, bool writes, bool is_shared) {
  const char* const what = is_shared ? "an element of shared memory" : "an element";
  if (race(h.write, now, is_shared)) {
    return fail("race: it %s %s that thread %u of block %u has written, with no barrier in between",
                writes ? "writes" : "reads", what, h.write.thread, h.write.block);
  }
  if (!writes) {
    if (h.read.launch != now.launch || h.read.block != now.block || h.read.thread != now.thread) h.other = h.read;
    h.read = now;
    return;
  }
  for (const Access& read : {h.read, h.other}) {
    if (race(read, now, is_shared)) {
      return fail("race: it writes %s that thread %u of block %u has read, with no barrier in between", what, read.thread,
                  read.block);
    }
  }
  h.write = now;
}

Range* buffer_of(const char* address) {
  if (found < buffers.size() && buffers[found].holds(address)) return &buffers[found];
  for (found = 0; found < buffers.size(); ++found) {
    if (buffers[found].holds(address)) return &buffers[found];
  }
  return nullptr;
}

void fail_out_of_bounds(const char* address, size_t bytes, const char* verb) {
  const Range* near = nullptr;
  for (const Range& r : buffers) {
    if (r.begin <= address && (!near || r.begin > near->begin)) near = &r;
  }
  if (!near) return fail("out of bounds: it %s %zu bytes in no buffer", verb, bytes);
  const size_t at = address - near->begin, size = near->end - near->begin;
  fail("out of bounds: it %s %zu bytes at byte %zu of a buffer of %zu bytes", verb, bytes, at, size);
}

void touch(const void* pointer, size_t bytes, bool writes, bool atomic = false) {
  const char* const address = static_cast<const char*>(pointer);
  const Thread* const thread = running();
  const char* const verb = writes ? "writes" : "reads";
  if (!thread) {
    if (buffer_of(address)) fail("it %s memory of the device", verb);
    return;
  }
  if (thread->stack <= address && address < thread->stack_end) return;
  if (reinterpret_cast<const char*>(&place) <= address && address < reinterpret_cast<const char*>(&place + 1)) return;
  if (arguments.holds(address)) return;
  const bool is_shared = shared_range.holds(address);
  Range* const range = is_shared ? &shared_range : buffer_of(address);
  if (!range || address + bytes > range->end) return fail_out_of_bounds(address, bytes, verb);
  if (!range->writable) return writes ? fail("it writes to an input") : void();
  const uint16_t number = static_cast<uint16_t>(place.thread.x);
  const Access now{launch, place.block.x, thread->block_barriers, thread->warp_barriers, number, atomic};
  const size_t offset = address - range->begin;
  for (size_t i = offset / range->element_bytes; i * range->element_bytes < offset + bytes; ++i) {
    record(range->elements[i], now, writes, is_shared);
  }
}

}  // namespace

void allow(const void* begin, size_t bytes, size_t element_bytes, bool writable) {
  const char* const from = static_cast<const char*>(begin);
  buffers.push_back({from, from + bytes, element_bytes, writable, std::vector<History>(writable ? bytes / element_bytes : 0)});
}

void allow_shared(const void* begin, size_t bytes) {
  const char* const from = static_cast<const char*>(begin);
  const size_t elements = (bytes + kSharedElement - 1) / kSharedElement;
  shared_range.begin = from;
  shared_range.end = from + bytes;
  shared_range.element_bytes = kSharedElement;
  shared_range.writable = true;
  if (shared_range.elements.size() < elements) shared_range.elements.resize(elements);
}

void allow_arguments(const void* begin, size_t bytes) {
  arguments.begin = static_cast<const char*>(begin);
  arguments.end = arguments.begin + bytes;
}

void next_launch() { ++launch; }

void check_atomic(const void* address, size_t bytes) { touch(address, bytes, true, true); }

}  // namespace emulation

using emulation::touch;

extern "C" {

// A buffer of the kernels that follow.
void emulation_allow(const void* begin, int64_t bytes, int64_t element_bytes, int writable) {
  emulation::allow(begin, bytes, element_bytes, writable != 0);
}

void emulation_end() { emulation::buffers.clear(); }

#define LS_ACCESS(bytes)                                                            \
  void __tsan_read##bytes(void* p) { touch(p, bytes, false); }                      \
  void __tsan_write##bytes(void* p) { touch(p, bytes, true); }                      \
  void __tsan_unaligned_read##bytes(const void* p) { touch(p, bytes, false); }      \
  void __tsan_unaligned_write##bytes(void* p) { touch(p, bytes, true); }            \
  void __tsan_volatile_read##bytes(void* p) { touch(p, bytes, false); }             \
  void __tsan_volatile_write##bytes(void* p) { touch(p, bytes, true); }
LS_ACCESS(1)
LS_ACCESS(2)
LS_ACCESS(4)
LS_ACCESS(8)
LS_ACCESS(16)

void __tsan_read_range(void* p, long bytes) { touch(p, bytes, false); }
void __tsan_write_range(void* p, long bytes) { touch(p, bytes, true); }

void __tsan_init() {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
void __tsan_vptr_update(void**, void*) {}
void __tsan_vptr_read(void**) {}

}  // extern "C"
