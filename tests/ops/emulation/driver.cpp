// The functions of libcuda.so.1 that launch kernels, for devices that device.cpp emulates. They return the errors that CUDA
// returns: no context in this thread, no such kernel, another device's stream.
#include <string>
#include <vector>

#include "device.h"

namespace emulation {
namespace {

enum Result { kSuccess = 0, kInvalidValue = 1, kNotInitialized = 3, kInvalidContext = 201, kInvalidHandle = 400, kNotFound = 500 };

constexpr uintptr_t kContexts = 0x1000;  // that of a device is this and its number

const Entry* entries = nullptr;
bool initialized = false;
std::vector<uintptr_t> retained;
thread_local std::vector<uintptr_t> current;

struct Module {
  uintptr_t context;
};
struct Function {
  uintptr_t context;
  const Entry* entry;
};

bool is_retained(uintptr_t context) {
  for (const uintptr_t c : retained) {
    if (c == context) return true;
  }
  return false;
}

}  // namespace

Entry::Entry(const char* name, void (*launch)(const Launch&, void**)) : name(name), launch(launch), next(entries) { entries = this; }

}  // namespace emulation

using namespace emulation;

extern "C" {

int cuInit(unsigned flags) {
  initialized = true;
  return flags ? kInvalidValue : kSuccess;
}

int cuDeviceGet(int* device, int ordinal) {
  if (!initialized) return kNotInitialized;
  *device = ordinal;
  return kSuccess;
}

int cuDevicePrimaryCtxGetState(int device, unsigned* flags, int* active) {
  *flags = 0;
  *active = is_retained(kContexts + device);
  return kSuccess;
}

int cuDevicePrimaryCtxRetain(uintptr_t* context, int device) {
  *context = kContexts + device;
  if (!is_retained(*context)) retained.push_back(*context);
  return kSuccess;
}

int cuCtxGetCurrent(uintptr_t* context) {
  *context = current.empty() ? 0 : current.back();
  return kSuccess;
}

int cuCtxPushCurrent_v2(uintptr_t context) {
  if (!is_retained(context)) return kInvalidContext;
  current.push_back(context);
  return kSuccess;
}

int cuCtxPopCurrent_v2(uintptr_t* context) {
  if (current.empty()) return kInvalidContext;
  *context = current.back();
  current.pop_back();
  return kSuccess;
}

int cuModuleLoadData(Module** module, const void* image) {
  if (current.empty()) return kInvalidContext;
  if (std::string(static_cast<const char*>(image)) != "emulated") return kInvalidValue;
  *module = new Module{current.back()};
  return kSuccess;
}

int cuModuleGetFunction(Function** function, const Module* module, const char* name) {
  if (current.empty() || current.back() != module->context) return kInvalidContext;
  for (const Entry* e = entries; e; e = e->next) {
    if (std::string(name) == e->name) {
      *function = new Function{current.back(), e};
      return kSuccess;
    }
  }
  return kNotFound;
}

int cuLaunchKernel(const Function* function, unsigned blocks, unsigned blocks_y, unsigned blocks_z, unsigned threads,
                   unsigned threads_y, unsigned threads_z, unsigned shared_bytes, void* stream, void** arguments, void** extra) {
  if (current.empty()) return kInvalidContext;
  if (function->context != current.back() || stream) return kInvalidHandle;
  if (!blocks || blocks_y != 1 || blocks_z != 1 || threads_y != 1 || threads_z != 1 || extra) return kInvalidValue;
  function->entry->launch({function->entry->name, blocks, threads, shared_bytes}, arguments);
  return kSuccess;
}

int cuGetErrorName(int result, const char** name) {
  *name = result == kInvalidContext ? "CUDA_ERROR_INVALID_CONTEXT" : result == kNotFound ? "CUDA_ERROR_NOT_FOUND" : "CUDA_ERROR";
  return kSuccess;
}

}  // extern "C"
