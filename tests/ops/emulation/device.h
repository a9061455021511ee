// A GPU for kernels that the host compiler compiles: the threads of a block are fibers, which run one at a time. Whatever
// CUDA leaves undefined is an error: the launch ends, and `error` in device.cpp holds the first message.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <tuple>

namespace emulation {

constexpr unsigned kWarp = 32;

struct Index {
  unsigned x, y, z;
};

// Of the running thread.
struct Place {
  Index thread, block, threads, blocks;
};
extern Place place;

// Ends the running thread and the launch; on the host, only the message is kept.
void fail(const char* format, ...) __attribute__((format(printf, 1, 2)));

enum class Meeting { kThreads, kWarp, kDown, kUp, kXor, kMax, kAdd, kMatch };

// Waits for the other threads of the warp, or of the block; returns what this lane gets.
uint64_t meet(Meeting, unsigned mask, uint64_t value, unsigned argument);

template <class T>
T meet_with(Meeting meeting, unsigned mask, T value, unsigned argument) {
  static_assert(sizeof(T) <= 8);
  uint64_t raw = 0;
  std::memcpy(&raw, &value, sizeof(T));
  raw = meet(meeting, mask, raw, argument);
  std::memcpy(&value, &raw, sizeof(T));
  return value;
}

// Shared memory of the running block; a variable is known by its line, and line 0 is the memory that the launch asks for.
void* shared_memory(int line, size_t bytes);
template <class T>
T& shared(int line) {
  return *static_cast<T*>(shared_memory(line, sizeof(T)));
}

void add(int* to, int value);
void add(double* to, double value);

// kernel<<<blocks, threads, shared, stream>>>(arguments) becomes kernel->*Launch(blocks, threads, shared, stream)(arguments).
struct Launch {
  int64_t blocks, threads;
  size_t shared_bytes;
  const char* file;
  int line;

  Launch(int64_t blocks, int64_t threads, size_t shared_bytes, const void* stream, const char* file = __builtin_FILE(),
         int line = __builtin_LINE())
      : blocks(blocks), threads(threads), shared_bytes(shared_bytes), file(file), line(line) {}

  // Runs thread(call), of `bytes` bytes, for each thread.
  void run(void (*thread)(const void* call), const void* call, size_t bytes) const;

  template <class... Arguments>
  auto operator()(Arguments... arguments) const;
};

template <class... Arguments>
struct Call {
  Launch launch;
  std::tuple<Arguments...> arguments;
};

template <class... Arguments>
auto Launch::operator()(Arguments... arguments) const {
  return Call<Arguments...>{*this, {arguments...}};
}

template <class... Parameters, class... Arguments>
void operator->*(void (*kernel)(Parameters...), const Call<Arguments...>& call) {
  struct Bound {
    void (*kernel)(Parameters...);
    std::tuple<Parameters...> arguments;
  } const bound{kernel, call.arguments};
  const auto thread = [](const void* pointer) {
    const Bound& b = *static_cast<const Bound*>(pointer);
    std::apply(b.kernel, b.arguments);
  };
  call.launch.run(thread, &bound, sizeof bound);
}

// --- memory (memory.cpp) ------------------------------------------------------------------------------------------------

// What a kernel may touch: elements of buffers, which threads must not race for, and no more than read if not writable; the
// shared memory of its block; its arguments.
void allow(const void* begin, size_t bytes, size_t element_bytes, bool writable);
void allow_shared(const void* begin, size_t bytes);
void allow_arguments(const void* begin, size_t bytes);
// All that was touched before comes before all that follows.
void next_launch();

// The running thread, for memory.cpp.
struct Thread {
  const char *stack, *stack_end;
  // Both count up: between two accesses of one warp, or of one block, is a barrier if the number differs.
  uint32_t warp_barriers, block_barriers;
};
const Thread* running();  // null on the host

void check_atomic(const void* address, size_t bytes);

}  // namespace emulation
