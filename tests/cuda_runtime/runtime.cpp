// What torch's caching allocator calls of CUDA, for two GPUs that have addresses and no memory. No header of CUDA is
// needed: handles are pointers, enumerations are numbers.

#include <atomic>
#include <cstdint>
#include <cstring>
#include <map>
#include <mutex>

namespace {

constexpr int kSuccess = 0;
constexpr int kOutOfMemory = 2;
constexpr int kNotCapturing = 0;
constexpr size_t kName = 256;     // bytes: of `cudaDeviceProp`, where the name is followed by two identifiers
constexpr size_t kGlobalMemory = 288;
constexpr size_t kProperties = 640; // what is set to 0, less than the structure has in any version
constexpr size_t kPage = size_t{1} << 21;

std::mutex lock;
size_t total = size_t{64} << 30;
size_t used = 0;
uintptr_t next = uintptr_t{1} << 40; // never an address twice, as if others took what is freed
std::map<uintptr_t, size_t> held; // bytes by address
uintptr_t handles = 0;
thread_local int device = 0;
std::atomic<bool> has_context[2] = {};  // made by the first call that does something on a GPU, or selects it

template <typename T>
int make(T* handle) {
  const std::lock_guard<std::mutex> guard(lock);
  *handle = reinterpret_cast<T>(handles += 16);
  return kSuccess;
}

int nothing() {
  return kSuccess;
}

} // namespace

extern "C" {

void stand_in_total(size_t nbytes) {
  total = nbytes;
}

size_t stand_in_used() {
  return used;
}

int stand_in_has_context(int index) {
  return has_context[index];
}

int cudaMalloc(void** address, size_t nbytes) {
  const std::lock_guard<std::mutex> guard(lock);
  if (used + nbytes > total) {
    return kOutOfMemory;
  }
  has_context[device] = true;
  *address = reinterpret_cast<void*>(next);
  held[next] = nbytes;
  used += nbytes;
  next += (nbytes / kPage + 1) * kPage;
  return kSuccess;
}

int cudaFree(void* address) {
  const std::lock_guard<std::mutex> guard(lock);
  const auto found = held.find(reinterpret_cast<uintptr_t>(address));
  if (found != held.end()) {
    used -= found->second;
    held.erase(found);
  }
  return kSuccess;
}

int cudaMemGetInfo(size_t* free, size_t* all) {
  *free = total - used;
  *all = total;
  return kSuccess;
}

int cudaGetDeviceCount(int* count) {
  *count = 2;
  return kSuccess;
}

int cudaGetDevice(int* index) {
  *index = device;
  return kSuccess;
}

int cudaSetDevice(int index) {
  device = index;
  has_context[index] = true;
  return kSuccess;
}

int cudaGetDeviceProperties(char* properties, int) {
  std::memset(properties, 0, kProperties);
  std::strncpy(properties, "stand-in", kName);
  std::memcpy(properties + kGlobalMemory, &total, sizeof(total));
  return kSuccess;
}

int cudaDriverGetVersion(int* version) {
  *version = 13020;
  return kSuccess;
}

int cudaGetDriverEntryPointByVersion(const char*, void** function, unsigned, unsigned long long, int* result) {
  *function = reinterpret_cast<void*>(&nothing);
  *result = 0;
  return kSuccess;
}

int cudaStreamGetCaptureInfo(void*, int* status, ...) {
  *status = kNotCapturing;
  return kSuccess;
}

int cudaStreamIsCapturing(void*, int* status) {
  *status = kNotCapturing;
  return kSuccess;
}

int cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  *least = 0;
  *greatest = -5;
  return kSuccess;
}

int cudaHostRegister(void*, size_t, unsigned) {
  has_context[device] = true;
  return kSuccess;
}

int cudaHostUnregister(void*) {
  has_context[device] = true;
  return kSuccess;
}

int cudaDeviceSynchronize() {
  has_context[device] = true;
  return kSuccess;
}

int cudaStreamCreateWithPriority(void** stream, unsigned, int) {
  has_context[device] = true;
  return make(stream);
}

int cudaEventCreateWithFlags(void** event, unsigned) {
  return make(event);
}

const char* cudaGetErrorString(int) {
  return "an error of the stand-in for CUDA";
}

const char* cudaGetErrorName(int) {
  return "stand-in";
}

int cudaGetLastError() { return kSuccess; }
int cudaPeekAtLastError() { return kSuccess; }
int cudaThreadExchangeStreamCaptureMode(void*) { return kSuccess; }
int cudaStreamSynchronize(void*) { return kSuccess; }
int cudaStreamQuery(void*) { return kSuccess; }
int cudaStreamWaitEvent(void*, void*, unsigned) { return kSuccess; }
int cudaEventRecord(void*, void*) { return kSuccess; }
int cudaEventQuery(void*) { return kSuccess; }
int cudaEventSynchronize(void*) { return kSuccess; }
int cudaEventDestroy(void*) { return kSuccess; }

// Of the driver, which torch opens by itself.
int cuDevicePrimaryCtxGetState(int index, unsigned* flags, int* is_active) {
  *flags = 0;
  *is_active = has_context[index];
  return 0;
}

int cuGetErrorString(int, const char** text) {
  *text = "stand-in";
  return 0;
}
}
