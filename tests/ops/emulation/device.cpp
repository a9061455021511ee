// Fibers, barriers and what lanes of a warp tell each other.
#include "device.h"

#include <setjmp.h>
#include <sys/mman.h>
#include <ucontext.h>

#include <algorithm>
#include <cstdarg>
#include <cstdio>
#include <map>
#include <string>
#include <vector>

#include "cuda_runtime.h"

namespace emulation {

Place place;

namespace {

constexpr unsigned kMostThreads = 1024;
constexpr size_t kStackBytes = 64 << 10, kSharedBytes = 48 << 10;

enum class State { kReady, kWaiting, kEnded };

struct Fiber : Thread {
  State state;
  Meeting meeting;
  unsigned mask, argument;
  uint64_t value, result;
  bool started = false;  // its stack holds a frame of `live`
  jmp_buf at;
};

std::string message;
const char* launch_name = "";
Fiber fibers[kMostThreads];
Fiber* current = nullptr;
jmp_buf scheduler;
ucontext_t context;
unsigned order = 0;
void (*body)(const void*);
const void* call;
alignas(16) char shared_bytes[kSharedBytes];
std::map<int, char*> variables;  // in shared_bytes, by line
size_t used;                     // of shared_bytes

const char* name(Meeting m) {
  const char* const names[] = {"__syncthreads", "__syncwarp",      "__shfl_down_sync",
                               "__shfl_up_sync", "__shfl_xor_sync", "__match_any_sync"};
  return names[static_cast<int>(m)];
}

void leave() {
  if (!_setjmp(current->at)) _longjmp(scheduler, 1);
}

void live() {
  for (;;) {
    body(call);
    current->state = State::kEnded;
    leave();
  }
}

void resume(unsigned thread) {
  current = &fibers[thread];
  place.thread.x = thread;
  if (!_setjmp(scheduler)) {
    if (current->started) _longjmp(current->at, 1);
    current->started = true;
    getcontext(&context);
    context.uc_stack.ss_sp = const_cast<char*>(current->stack);
    context.uc_stack.ss_size = kStackBytes;
    context.uc_link = nullptr;
    makecontext(&context, live, 0);
    setcontext(&context);
  }
  current = nullptr;
}

uint64_t outcome(const Fiber* warp, unsigned lane) {
  const Fiber& own = warp[lane];
  const unsigned n = own.argument;
  uint64_t result = 0;
  switch (own.meeting) {
    case Meeting::kDown:
      return warp[lane + n < kWarp ? lane + n : lane].value;
    case Meeting::kUp:
      return warp[lane >= n ? lane - n : lane].value;
    case Meeting::kXor:
      return warp[(lane ^ n) < kWarp ? lane ^ n : lane].value;
    case Meeting::kMatch:
      for (unsigned i = 0; i < kWarp; ++i) result |= uint64_t{warp[i].value == own.value} << i;
      return result;
    default:
      return 0;
  }
}

// Threads [first, last) go on if all of them have come to this meeting.
bool release(unsigned first, unsigned last, Meeting meeting) {
  for (unsigned i = first; i < last; ++i) {
    const Fiber& f = fibers[i];
    if (f.state != State::kWaiting || f.meeting != meeting || f.argument != fibers[first].argument) return false;
  }
  for (unsigned i = first; i < last; ++i) {
    Fiber& f = fibers[i];
    if (meeting >= Meeting::kDown) f.result = outcome(fibers + first, i - first);
    if (meeting <= Meeting::kWarp) ++f.warp_barriers;
    if (meeting == Meeting::kThreads) ++f.block_barriers;
  }
  for (unsigned i = first; i < last; ++i) fibers[i].state = State::kReady;
  return true;
}

// Threads one after the other until each has ended: in ascending order, descending, or another one in every round.
void run_block(unsigned threads) {
  static uint32_t random = 1;
  std::vector<unsigned> turns(threads);
  for (unsigned i = 0; i < threads; ++i) turns[i] = order % 3 == 1 ? threads - 1 - i : i;
  for (unsigned i = 0; i < threads; ++i) {
    Fiber& f = fibers[i];
    f.state = State::kReady;
    f.warp_barriers = f.block_barriers = 0;
  }
  for (;;) {
    if (order % 3 == 2) {
      for (unsigned i = threads - 1; i > 0; --i) {
        random = random * 1664525u + 1013904223u + order;
        std::swap(turns[i], turns[(random >> 8) % (i + 1)]);
      }
    }
    bool progress = false;
    for (const unsigned i : turns) {
      if (fibers[i].state != State::kReady) continue;
      progress = true;
      resume(i);
      if (!message.empty()) return;
    }
    if (progress) continue;
    unsigned waiting = 0, ended = 0;
    for (unsigned i = 0; i < threads; ++i) fibers[i].state == State::kEnded ? ++ended : waiting = i + 1;
    if (ended == threads) return;
    const Fiber& f = fibers[waiting - 1];
    place.thread.x = waiting - 1;
    fail("divergence: it waits in %s, which not all threads reach; %u of %u have ended", name(f.meeting), ended, threads);
    return;
  }
}

void map_stacks() {
  if (fibers[0].stack) return;
  void* const stacks = mmap(nullptr, kMostThreads * kStackBytes, PROT_READ | PROT_WRITE,
                            MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (stacks == MAP_FAILED) return fail("no memory for stacks");
  for (unsigned i = 0; i < kMostThreads; ++i) {
    fibers[i].stack = static_cast<char*>(stacks) + i * kStackBytes;
    fibers[i].stack_end = fibers[i].stack + kStackBytes;
  }
}

}  // namespace

const Thread* running() { return current; }

void fail(const char* format, ...) {
  char text[600];
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(text, sizeof text, format, arguments);
  va_end(arguments);
  if (message.empty()) {
    message = *launch_name ? std::string(launch_name) + ": block " + std::to_string(place.block.x) + ", thread " +
                                 std::to_string(place.thread.x) + ": " + text
                           : std::string("host: ") + text;
  }
  if (current) {
    current->started = false;  // its stack is lost
    leave();
  }
}

uint64_t meet(Meeting meeting, unsigned mask, uint64_t value, unsigned argument) {
  Fiber& f = *current;
  const unsigned self = place.thread.x;
  if (mask != 0xFFFFFFFFu) fail("%s with mask %x: only full warps are emulated", name(meeting), mask);
  f.state = State::kWaiting;
  f.meeting = meeting;
  f.value = value;
  f.argument = argument;
  const unsigned first = meeting == Meeting::kThreads ? 0 : self / kWarp * kWarp;
  const unsigned last = meeting == Meeting::kThreads ? place.threads.x : first + kWarp;
  if (!release(first, last, meeting)) leave();
  return f.result;
}

void* shared_memory(int line, size_t bytes) {
  auto [at, is_new] = variables.try_emplace(line, shared_bytes + used);
  if (is_new) used += (bytes + 15) / 16 * 16;
  if (used > kSharedBytes) fail("more than %zu bytes of shared memory", kSharedBytes);
  allow_shared(shared_bytes, used);
  return at->second;
}

void add(int* to, int value) {
  check_atomic(to, sizeof *to);
  *to += value;
}

void add(double* to, double value) {
  check_atomic(to, sizeof *to);
  *to += value;
}

void Launch::run(void (*thread)(const void*), const void* arguments, size_t bytes) const {
  if (!message.empty()) return;
  launch_name = kernel;
  place = {{0, 0, 0}, {0, 0, 0}, {static_cast<unsigned>(threads), 1, 1}, {static_cast<unsigned>(blocks), 1, 1}};
  map_stacks();
  if (blocks < 1 || blocks > 0x7FFFFFFF) fail("a grid of %lld blocks", static_cast<long long>(blocks));
  if (threads < 1 || threads > kMostThreads || threads % kWarp) fail("a block of %lld threads", static_cast<long long>(threads));
  if (shared_bytes > kSharedBytes) fail("%zu bytes of shared memory", shared_bytes);
  body = thread;
  call = arguments;
  allow_arguments(arguments, bytes);
  next_launch();
  for (int64_t i = 0; i < blocks && message.empty(); ++i) {
    place.block.x = static_cast<unsigned>(order % 3 == 1 ? blocks - 1 - i : i);
    variables.clear();
    variables[0] = emulation::shared_bytes;
    used = (shared_bytes + 15) / 16 * 16;
    std::memset(emulation::shared_bytes, 0xAB, kSharedBytes);
    allow_shared(emulation::shared_bytes, shared_bytes);
    run_block(static_cast<unsigned>(threads));
  }
  if (!message.empty()) {
    for (Fiber& f : fibers) f.started = false;  // some are in the middle of the kernel
  }
  launch_name = "";
}

}  // namespace emulation

extern "C" {

// Threads and blocks run in another order for each remainder of 3.
void emulation_begin(unsigned order) {
  emulation::message.clear();
  emulation::order = order;
}

// Of the first thing that went wrong since then; empty if nothing did.
const char* emulation_error() { return emulation::message.c_str(); }

void __ubsan_handle_type_mismatch_v1(void* data, void* pointer) {
  struct Where {
    const char* file;
    uint32_t line, column;
  };
  const Where& where = *static_cast<const Where*>(data);
  emulation::fail("%s:%u: misaligned access to %p", where.file, where.line, pointer);
}

}  // extern "C"
