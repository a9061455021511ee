// A device for torch whose memory the host must not touch: what torch asks of a back end in C++. `device.py` says what
// the device does with it, through the callbacks of `Calls`.
//
// Device memory is one file in memory for each device, mapped twice: the addresses of tensors lead to the first mapping,
// which nobody may read or write, and operations run on the second, at a fixed distance.
//
// There are two devices, and a thread begins on the first one, as on CUDA. A process has one of them, and hears of what
// it does on the other.

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>
#include <ATen/EmptyTensor.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <cstring>
#include <map>
#include <mutex>
#include <set>
#include <utility>
#include <vector>

namespace {

constexpr c10::DeviceType kDevice = c10::DeviceType::PrivateUse1;
constexpr c10::DeviceIndex kDevices = 2;
constexpr size_t kBlock = 512;             // bytes; allocations are rounded up to it, as on CUDA
constexpr size_t kPage = 4096;             // bytes
constexpr size_t kTotal = size_t{1} << 33; // bytes of device memory; pages that nobody writes cost nothing
constexpr int kPoison = 0xff;              // NaN in every floating-point format, -1 in every signed integer

struct Calls {
  void (*freed)(uint64_t address, int64_t stream);  // the stream that was current when it was allocated
  void (*strayed)(const char* what);  // it was done on a device that is not that of this process
  void (*recorded)(uint64_t event, int64_t stream);
  void (*blocked)(uint64_t event, int64_t stream);
  void (*waited_for_event)(uint64_t event);
  void (*waited_for_stream)(int64_t stream);  // -1: all of them
  void (*used_in_stream)(uint64_t address, int64_t stream);
  int (*happened)(uint64_t event);
  void (*allocating)();  // in a pool: what was freed before is used again
};

Calls calls{};
std::atomic<bool> listening{false}; // false when Python has ended
c10::DeviceIndex own_device = 0;    // of this process
thread_local c10::DeviceIndex current_device = 0;
thread_local int64_t current_streams[kDevices] = {};

void use(c10::DeviceIndex device, const char* what) {
  if (device != own_device && listening) {
    calls.strayed(what);
  }
}

c10::DeviceIndex index_of(c10::DeviceIndex device) {
  return device < 0 ? current_device : device;
}

c10::DeviceIndex index_of(const c10::Device& device) {
  return index_of(device.index());
}

// Torch calls the default stream of every device 0. For the callbacks, that of the other device is 1.
int64_t number_of(c10::DeviceIndex device, int64_t stream) {
  return stream == 0 && device != own_device ? 1 : stream;
}

int64_t number_of(const c10::Stream& stream) {
  return number_of(stream.device_index(), stream.id());
}

int64_t current_stream() {
  return number_of(current_device, current_streams[current_device]);
}

// memory -------------------------------------------------------------------------------------------------------------

thread_local int64_t current_pool = 0; // 0: none

// What `SimulatedDevice.log` has, in this order, in 64 bits each. A block that is freed has no bytes.
struct Event {
  uint64_t address;
  uint64_t nbytes;
  int64_t stream;
  int64_t pool;
};

// As torch's allocator for CUDA does, each pool takes the lowest free block of a size, and outside of pools nobody can
// tell which one. Blocks of other sizes are not split, and not joined.
class Memory {
 public:
  Memory() {
    const int file = memfd_create("simulated_device", 0);
    TORCH_CHECK(file >= 0 && ftruncate(file, kTotal) == 0, "no memory for the simulated device");
    seen_ = map(file, PROT_NONE);
    used_ = map(file, PROT_READ | PROT_WRITE);
    close(file);
  }

  void* take(size_t nbytes) {
    const std::lock_guard<std::mutex> guard(lock_);
    const size_t size = std::max(kBlock, (nbytes + kBlock - 1) / kBlock * kBlock);
    size_t offset = 0;
    auto& free = free_[{current_pool, size}];
    if (!free.empty()) {
      random_ = random_ * 1103515245 + 12345;
      const auto it = std::next(free.begin(), current_pool == 0 ? (random_ >> 16) % free.size() : 0);
      offset = *it;
      free.erase(it);
    } else {
      TORCH_CHECK(end_ + size <= kTotal, "the simulated device is out of memory");
      offset = end_;
      end_ += size;
    }
    held_[offset] = {size, current_stream(), current_pool};
    log_.push_back({reinterpret_cast<uint64_t>(seen_ + offset), nbytes, current_stream(), current_pool});
    allocated_ += size;
    peak_ = std::max(peak_, allocated_);
    std::memset(used_ + offset, kPoison, size);
    return seen_ + offset;
  }

  // Count the memory as free, but give it to nobody before `give`. Return the stream of its allocation.
  int64_t leave(void* address) {
    const std::lock_guard<std::mutex> guard(lock_);
    const Held& held = held_.at(static_cast<char*>(address) - seen_);
    allocated_ -= held.nbytes;
    log_.push_back({reinterpret_cast<uint64_t>(address), 0, held.stream, held.pool});
    return held.stream;
  }

  void give(void* address) {
    const std::lock_guard<std::mutex> guard(lock_);
    const auto found = held_.find(static_cast<char*>(address) - seen_);
    std::memset(used_ + found->first, kPoison, found->second.nbytes);
    free_[{found->second.pool, found->second.nbytes}].insert(found->first);
    held_.erase(found);
  }

  bool has(const void* address) const {
    return address >= seen_ && address < seen_ + kTotal;
  }

  void* used(void* address) const {
    return static_cast<char*>(address) - seen_ + used_;
  }

  const std::vector<Event>& log() const { return log_; }
  size_t allocated() const { return allocated_; }
  size_t peak() const { return peak_; }
  void reset_peak() { peak_ = allocated_; }

 private:
  static char* map(int file, int protection) {
    void* address = mmap(nullptr, kTotal, protection, MAP_SHARED | MAP_NORESERVE, file, 0);
    TORCH_CHECK(address != MAP_FAILED, "no memory for the simulated device");
    return static_cast<char*>(address);
  }

  struct Held {
    size_t nbytes;
    int64_t stream;
    int64_t pool;
  };

  std::mutex lock_;
  char* seen_ = nullptr;
  char* used_ = nullptr;
  size_t end_ = 0, allocated_ = 0, peak_ = 0;
  uint64_t random_ = 1;
  std::map<std::pair<int64_t, size_t>, std::set<size_t>> free_; // by pool and bytes
  std::map<size_t, Held> held_;
  std::vector<Event> log_;
};

Memory& memory(c10::DeviceIndex device) {
  static Memory* all = new Memory[kDevices]; // never destroyed: tensors may outlive it
  return all[device];
}

c10::DeviceIndex device_of(const void* address) {
  for (c10::DeviceIndex device = 0; device < kDevices; ++device) {
    if (memory(device).has(address)) {
      return device;
    }
  }
  TORCH_CHECK(false, "not memory of the simulated device");
}

void* used(void* address) {
  return address == nullptr ? nullptr : memory(device_of(address)).used(address);
}

void free_device(void* address) {
  if (address == nullptr) {
    return;
  }
  Memory& memory_there = memory(device_of(address));
  const int64_t stream = memory_there.leave(address);
  if (listening) {
    calls.freed(reinterpret_cast<uint64_t>(address), stream);
  } else {
    memory_there.give(address);
  }
}

void use_in_stream(const c10::DataPtr& data, const c10::Stream& stream) {
  if (data.get() != nullptr) {
    TORCH_CHECK(device_of(data.get()) == stream.device_index(), "memory of one device, a stream of another");
    calls.used_in_stream(reinterpret_cast<uint64_t>(data.get()), number_of(stream));
  }
}

struct DeviceAllocator final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t nbytes) override {
    if (current_pool != 0 && listening) {
      calls.allocating();
    }
    if (nbytes > 0) {
      use(current_device, "an allocation");
    }
    void* address = nbytes == 0 ? nullptr : memory(current_device).take(nbytes);
    return {address, address, &free_device, c10::Device(kDevice, current_device)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_device; }
  void copy_data(void* to, const void* from, size_t count) const override {
    std::memcpy(used(to), used(const_cast<void*>(from)), count);
  }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override {}
  void recordStream(const c10::DataPtr& data, c10::Stream stream) override {
    use_in_stream(data, stream);
  }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex device) override {
    c10::CachingDeviceAllocator::DeviceStats stats;
    for (auto* each : {&stats.allocated_bytes, &stats.reserved_bytes}) {
      (*each)[0].current = static_cast<int64_t>(memory(device).allocated());
      (*each)[0].peak = static_cast<int64_t>(memory(device).peak());
    }
    return stats;
  }
  void resetAccumulatedStats(c10::DeviceIndex) override {}
  void resetPeakStats(c10::DeviceIndex device) override { memory(device).reset_peak(); }
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex device) override {
    use(device, "a question for its free memory");
    return {kTotal - memory(device).allocated(), kTotal};
  }
};

std::mutex pinned_lock;
std::map<const char*, size_t> pinned; // address -> bytes

// Bytes as of CUDA: torch rounds its own blocks up to a power of two, and keeps those that are freed for others.
size_t pinned_bytes = 0;
size_t pinned_peak = 0;
std::map<size_t, size_t> pinned_kept; // bytes of a block -> free blocks

void count_pinned(size_t nbytes) {
  pinned_bytes += nbytes;
  pinned_peak = std::max(pinned_peak, pinned_bytes);
}

size_t block_of(size_t nbytes) {
  size_t block = 1;
  while (block < nbytes) {
    block *= 2;
  }
  return block;
}

void free_pinned(void* address) {
  {
    const std::lock_guard<std::mutex> guard(pinned_lock);
    auto found = pinned.find(static_cast<const char*>(address));
    ++pinned_kept[block_of(found->second)];
    pinned.erase(found);
  }
  std::free(address);
}

struct PinnedAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t nbytes) override {
    void* address = nullptr;
    TORCH_CHECK(posix_memalign(&address, kPage, std::max(nbytes, size_t{1})) == 0, "no pinned memory");
    std::memset(address, kPoison, nbytes);
    const std::lock_guard<std::mutex> guard(pinned_lock);
    pinned[static_cast<const char*>(address)] = nbytes;
    size_t& kept = pinned_kept[block_of(nbytes)];
    if (kept > 0) {
      --kept;
    } else {
      count_pinned(block_of(nbytes));
    }
    return {address, address, &free_pinned, c10::Device(c10::DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_pinned; }
  void copy_data(void* to, const void* from, size_t count) const override { std::memcpy(to, from, count); }
};

// streams and events -------------------------------------------------------------------------------------------------

std::atomic<int64_t> streams{2};
std::atomic<uint64_t> events{1};

uint64_t number(void* event) {
  return reinterpret_cast<uint64_t>(event);
}

// What torch does around an event on CUDA: it selects the event's device, and then the one before, as `setDevice` does.
// (Around operations it leaves a device alone on which nothing was done.)
class There {
 public:
  explicit There(c10::DeviceIndex device) : before_(std::exchange(current_device, device)) {}
  ~There() {
    if (before_ != current_device) {
      use(before_, "the end of an operation on an event, in a thread that had selected no device,");
    }
    current_device = before_;
  }
  There(const There&) = delete;
  There& operator=(const There&) = delete;

 private:
  const c10::DeviceIndex before_;
};

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kDevice; }
  c10::Device exchangeDevice(c10::Device device) const override {
    const c10::Device before = getDevice();
    setDevice(device);
    return before;
  }
  c10::Device getDevice() const override { return {kDevice, current_device}; }
  void setDevice(c10::Device device) const override {
    TORCH_CHECK(device.index() >= 0 && device.index() < kDevices, "invalid device ordinal");
    if (device.index() != current_device) { // where CUDA makes a context
      use(device.index(), "a thread that selects it");
    }
    uncheckedSetDevice(device);
  }
  void uncheckedSetDevice(c10::Device device) const noexcept override { current_device = device.index(); }
  c10::DeviceIndex deviceCount() const noexcept override { return kDevices; }
  c10::DeviceCapability getDeviceCapability(c10::Device) const override { return {}; }

  c10::Stream stream_of(c10::Device device, int64_t id) const {
    return c10::Stream(c10::Stream::UNSAFE, {kDevice, index_of(device)}, id);
  }
  c10::Stream new_stream(c10::Device device) const {
    use(index_of(device), "a new stream");
    return stream_of(device, streams++);
  }
  c10::Stream getStream(c10::Device device) const override {
    return stream_of(device, current_streams[index_of(device)]);
  }
  c10::Stream getDefaultStream(c10::Device device) const override { return stream_of(device, 0); }
  c10::Stream getNewStream(c10::Device device, int) const override { return new_stream(device); }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override { return new_stream(device); }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    return stream_of(stream.device(), std::exchange(current_streams[stream.device_index()], stream.id()));
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    use(stream.device_index(), "a wait for a stream");
    calls.waited_for_stream(number_of(stream));
  }
  void synchronizeDevice(c10::DeviceIndex device) const override {
    use(index_of(device), "a wait for all of its work");
    const There there(index_of(device));
    calls.waited_for_stream(-1);
  }
  bool queryStream(const c10::Stream&) const override { return false; }

  void record(void** event, const c10::Stream& stream, c10::DeviceIndex device, c10::EventFlag) const override {
    TORCH_CHECK(device < 0 || device == stream.device_index(), "an event of one device, a stream of another");
    use(stream.device_index(), "a record of an event");
    const There there(stream.device_index());
    if (*event == nullptr) {
      *event = reinterpret_cast<void*>(events++);
    }
    calls.recorded(number(*event), number_of(stream));
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event != nullptr) {
      use(stream.device_index(), "a wait for an event");
      const There there(stream.device_index());
      calls.blocked(number(event), number_of(stream));
    }
  }
  void destroyEvent(void* event, const c10::DeviceIndex device) const noexcept override {
    if (event != nullptr) {
      const There there(device);
    }
  }
  bool queryEvent(void* event) const override { return event == nullptr || calls.happened(number(event)); }
  void synchronizeEvent(void* event) const override {
    if (event != nullptr) {
      calls.waited_for_event(number(event));
    }
  }
  double elapsedTime(void*, void*, c10::DeviceIndex) const override { return 1.0; }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override {
    use_in_stream(data, stream);
  }
};

struct Random final : at::CPUGeneratorImpl {
  explicit Random(c10::DeviceIndex device) {
    device_ = c10::Device(kDevice, device);
    key_set_ = c10::DispatchKeySet(c10::DispatchKey::PrivateUse1);
  }
};

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return kDevices; }
  c10::DeviceIndex getCurrentDevice() const override { return current_device; }
  void setCurrentDevice(c10::DeviceIndex device) const override { Guard().setDevice({kDevice, device}); }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
    return Guard().exchangeDevice({kDevice, device}).index();
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override {
    return std::exchange(current_device, device);
  }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex device) const override {
    static auto* all = new std::vector<at::Generator>{at::make_generator<Random>(0), at::make_generator<Random>(1)};
    return all->at(index_of(device));
  }
  at::Generator getNewGenerator(c10::DeviceIndex device) const override {
    return at::make_generator<Random>(index_of(device));
  }
  at::Device getDeviceFromPtr(void* address) const override {
    return {kDevice, device_of(address)};
  }
  bool isPinnedPtr(const void* address) const override {
    const std::lock_guard<std::mutex> guard(pinned_lock);
    auto found = pinned.upper_bound(static_cast<const char*>(address));
    if (found == pinned.begin()) {
      return false;
    }
    --found;
    return address < found->first + found->second;
  }
  at::Allocator* getPinnedMemoryAllocator() const override {
    static auto* it = new PinnedAllocator();
    return it;
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t nbytes) const override {
    auto* it = storage.unsafeGetStorageImpl();
    const c10::DeviceGuard guard(it->device());
    c10::DataPtr now = it->allocator()->allocate(nbytes);
    const size_t kept = std::min(nbytes, it->nbytes());
    if (kept > 0) {
      std::memcpy(used(now.get()), used(it->data_ptr().get()), kept);
    }
    it->set_data_ptr_noswap(std::move(now));
    it->set_nbytes(nbytes);
  }
};

// operations ---------------------------------------------------------------------------------------------------------

constexpr auto kKeys = c10::DispatchKeySet(c10::DispatchKey::PrivateUse1);

c10::Allocator* device_allocator() {
  return c10::GetAllocator(kDevice);
}

std::optional<c10::Device> indexed(std::optional<c10::Device> device) {
  return device.has_value() && device->has_index() ? device : std::nullopt;
}

at::Tensor empty(
    c10::SymIntArrayRef size,
    std::optional<c10::ScalarType> dtype,
    std::optional<c10::Layout>,
    std::optional<c10::Device> device,
    std::optional<bool>,
    std::optional<c10::MemoryFormat> format) {
  const c10::OptionalDeviceGuard guard(indexed(device));
  return at::detail::empty_generic(
      C10_AS_INTARRAYREF_SLOW(size), device_allocator(), kKeys, c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(
    c10::SymIntArrayRef size,
    c10::SymIntArrayRef stride,
    std::optional<c10::ScalarType> dtype,
    std::optional<c10::Layout>,
    std::optional<c10::Device> device,
    std::optional<bool>) {
  const c10::OptionalDeviceGuard guard(indexed(device));
  return at::detail::empty_strided_generic(
      C10_AS_INTARRAYREF_SLOW(size),
      C10_AS_INTARRAYREF_SLOW(stride),
      device_allocator(),
      kKeys,
      c10::dtype_or_default(dtype));
}

at::Tensor as_strided(
    const at::Tensor& self, c10::SymIntArrayRef size, c10::SymIntArrayRef stride, std::optional<c10::SymInt> offset) {
  const auto start = offset.has_value() ? std::optional<int64_t>(offset->expect_int()) : std::nullopt;
  return at::native::as_strided_tensorimpl(
      self, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), start);
}

at::Tensor view(const at::Tensor& self, c10::SymIntArrayRef size) {
  return at::native::view(self, C10_AS_INTARRAYREF_SLOW(size));
}

at::Tensor reshape_alias(const at::Tensor& self, c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
  return at::native::_reshape_alias(self, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride));
}

// The same values as a tensor that operations of the host accept.
at::Tensor values(const at::Tensor& self) {
  auto options = at::TensorOptions().dtype(self.dtype()).device(c10::kCPU);
  if (self.storage().nbytes() == 0) {
    return at::detail::empty_strided_cpu(self.sizes(), self.strides(), options);
  }
  return at::from_blob(used(self.mutable_data_ptr()), self.sizes(), self.strides(), options);
}

TORCH_LIBRARY(simulated_device, m) {
  m.def("values(Tensor self) -> Tensor");
}

} // namespace

TORCH_LIBRARY_IMPL(simulated_device, PrivateUse1, m) {
  m.impl("values", &values);
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("as_strided", &as_strided);
  m.impl("view", &view);
  m.impl("_reshape_alias", &reshape_alias);
  m.impl("unfold", &at::native::unfold);
  m.impl("set_.source_Storage", &at::native::set_);
  m.impl("set_.source_Storage_storage_offset", &at::native::set_storage_cpu_);
}

extern "C" {

void simulated_device_begin(const Calls* given, int own) {
  calls = *given;
  own_device = static_cast<c10::DeviceIndex>(own);
  listening = true;
  static DeviceAllocator allocator;
  static Guard guard;
  static Hooks hooks;
  c10::SetAllocator(kDevice, &allocator);
  static c10::impl::DeviceGuardImplRegistrar registrar(kDevice, &guard);
  at::RegisterPrivateUse1HooksInterface(&hooks);
  at::globalContext().lazyInitDevice(c10::kPrivateUse1); // until then, torch takes no memory for pinned
}

void simulated_device_end() {
  listening = false;
}

// What this thread allocates from now on is in a pool; 0: in none.
void simulated_device_use_pool(int64_t pool) {
  current_pool = pool;
}

// Every allocation and every free on the process's device so far, for one thread at a time.
uint64_t simulated_device_log(const Event** events) {
  *events = memory(own_device).log().data();
  return memory(own_device).log().size();
}

void simulated_device_give(uint64_t address) {
  void* there = reinterpret_cast<void*>(address);
  memory(device_of(there)).give(there);
}

void simulated_device_pin(uint64_t address, uint64_t nbytes) {
  use(current_device, "host memory that is pinned");
  const std::lock_guard<std::mutex> guard(pinned_lock);
  pinned[reinterpret_cast<const char*>(address)] = nbytes;
  count_pinned(nbytes);
}

void simulated_device_unpin(uint64_t address) {
  use(current_device, "host memory that is unpinned");
  const std::lock_guard<std::mutex> guard(pinned_lock);
  auto found = pinned.find(reinterpret_cast<const char*>(address));
  pinned_bytes -= found->second;
  pinned.erase(found);
}

uint64_t simulated_device_pinned_peak() {
  const std::lock_guard<std::mutex> guard(pinned_lock);
  return pinned_peak;
}
}
