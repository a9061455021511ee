// A GPU for kernels that the host compiler compiles: the threads of a block are fibers, which run one at a time. Whatever
// CUDA leaves undefined is an error: the launch ends, and `error` in device.cpp holds the first message.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <tuple>
#include <utility>

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

enum class Meeting { kThreads, kWarp, kDown, kUp, kXor, kMatch };

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

struct Launch {
  const char* kernel;
  int64_t blocks, threads;
  size_t shared_bytes;

  // Runs thread(call), of `bytes` bytes, for each thread.
  void run(void (*thread)(const void* call), const void* call, size_t bytes) const;
};

// A kernel as the driver (driver.cpp) knows it: it takes pointers to its arguments.
struct Entry {
  const char* name;
  void (*launch)(const Launch&, void** arguments);
  const Entry* next;

  Entry(const char* name, void (*launch)(const Launch&, void**));
};

template <auto kernel>
struct Kernel;
template <class... Parameters, void (*kernel)(Parameters...)>
struct Kernel<kernel> {
  using Arguments = std::tuple<Parameters...>;

  template <size_t... i>
  static Arguments read(void** arguments, std::index_sequence<i...>) {
    return {*static_cast<const std::tuple_element_t<i, Arguments>*>(arguments[i])...};
  }

  static void launch(const Launch& launch, void** arguments) {
    const Arguments values = read(arguments, std::index_sequence_for<Parameters...>{});
    launch.run([](const void* call) { std::apply(kernel, *static_cast<const Arguments*>(call)); }, &values, sizeof values);
  }
};

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
