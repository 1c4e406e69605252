// Registers the device with torch: guard, allocators, generator, hooks and graphs.
#include "device.h"

#include <ATen/core/CachingHostAllocator.h>
#include <ATen/core/GraphImplInterface.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <cstring>

namespace queued {
namespace {

const c10::Device DEVICE(c10::kPrivateUse1, 0);

c10::Stream as_stream(int id) { return c10::Stream(c10::Stream::UNSAFE, DEVICE, id); }

struct Guard final : c10::impl::DeviceGuardImplInterface {
  static constexpr c10::DeviceType static_type = c10::kPrivateUse1;
  Guard() = default;
  explicit Guard(c10::DeviceType) {}
  static const EventRef& event_of(void* event) { return *static_cast<EventRef*>(event); }

  c10::DeviceType type() const override { return static_type; }
  c10::Device exchangeDevice(c10::Device) const override { return DEVICE; }
  c10::Device getDevice() const override { return DEVICE; }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }

  c10::Stream getStream(c10::Device) const override { return as_stream(current_stream()); }
  c10::Stream getDefaultStream(c10::Device) const override { return as_stream(0); }
  c10::Stream getNewStream(c10::Device, int) const override { return as_stream(next_stream()); }
  c10::Stream getStreamFromGlobalPool(c10::Device, bool) const override { return as_stream(next_stream()); }
  c10::Stream exchangeStream(c10::Stream stream) const override { return as_stream(exchange_stream(int(stream.id()))); }
  bool queryStream(const c10::Stream& stream) const override { return stream_is_done(int(stream.id())); }
  void synchronizeStream(const c10::Stream& stream) const override { synchronize_stream(int(stream.id())); }
  void synchronizeDevice(c10::DeviceIndex) const override { synchronize_device(); }
  bool isStreamCapturing(const c10::Stream& stream) const override { return bool(capture_of(int(stream.id()))); }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override {
    used_on(data.get(), int(stream.id()));
  }

  void destroyEvent(void* event, c10::DeviceIndex) const noexcept override { delete static_cast<EventRef*>(event); }
  void record(void** event, const c10::Stream& stream, c10::DeviceIndex, c10::EventFlag) const override {
    if (!*event) *event = new EventRef(std::make_shared<Event>());
    queued::record(event_of(*event), int(stream.id()));
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event) wait(event_of(event), int(stream.id()));
  }
  bool queryEvent(void* event) const override { return !event || is_reached(event_of(event)); }
  void synchronizeEvent(void* event) const override {
    if (event) synchronize(event_of(event));
  }
  double elapsedTime(void* start, void* end, c10::DeviceIndex) const override {
    return elapsed_ms(event_of(start), event_of(end));
  }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

struct DeviceMemory final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t bytes) override {
    if (!bytes) return {nullptr, nullptr, &release, DEVICE};
    void* at = queued::allocate(bytes, current_stream());
    if (!at) {
      auto use = memory_use();
      TORCH_CHECK_WITH(OutOfMemoryError, false, "device error: out of memory. Tried to allocate ", bytes, " bytes; ",
                       use.reserved, " of ", use.limit, " are reserved.");
    }
    return {at, at, &release, DEVICE};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    submit([=](const Draws&) { memcpy(bytes_of(to), bytes_of(const_cast<void*>(from)), bytes); });
  }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override { empty_cache(); }
  void recordStream(const c10::DataPtr& data, c10::Stream stream) override { used_on(data.get(), int(stream.id())); }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex) override {
    auto use = memory_use();
    c10::CachingDeviceAllocator::DeviceStats stats;
    stats.allocated_bytes[0].current = stats.active_bytes[0].current = int64_t(use.allocated);
    stats.reserved_bytes[0].current = int64_t(use.reserved);
    stats.allocation[0].current = stats.active[0].current = int64_t(use.blocks);
    stats.segment[0].current = int64_t(use.segments);
    for (auto& [pool, bytes] : use.pools) stats.reserved_bytes_by_private_pools[pool][0].current = int64_t(bytes);
    return stats;
  }
  void resetAccumulatedStats(c10::DeviceIndex) override {}
  void resetPeakStats(c10::DeviceIndex) override {}
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex) override {
    auto use = memory_use();
    return {use.limit - use.reserved, use.limit};
  }
};
DeviceMemory& device_memory = *new DeviceMemory;
static c10::AllocatorRegisterer<c10::kPrivateUse1> registered_memory(&device_memory);

struct HostMemory final : at::HostAllocator {
  at::DataPtr allocate(size_t bytes) override {
    void* at = allocate_pinned(bytes);
    return {at, at, &release_pinned, at::kCPU};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release_pinned; }
  void copy_data(void* to, const void* from, size_t bytes) const override { memcpy(to, from, bytes); }
  bool record_event(void* at, void*, c10::Stream stream) override {
    pinned_used_on(at, int(stream.id()));
    return true;
  }
  void empty_cache() override {}
  at::HostStats get_stats() override { return {}; }
  void reset_accumulated_stats() override {}
  void reset_peak_stats() override {}
};
HostMemory& host_memory = *new HostMemory;
static at::HostAllocatorRegistry<at::kPrivateUse1> registered_host_memory(&host_memory);

// Numbers come of a seed and of how often was drawn, so that a replay can draw from where the generator stands.
struct Random final : c10::GeneratorImpl {
  Draws state{c10::default_rng_seed_val, 0};

  Random() : GeneratorImpl(DEVICE, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)) {}
  static void refuse() {
    TORCH_CHECK(!capture_of(current_stream()), "a generator's state cannot be set during graph capture");
  }
  void set_current_seed(uint64_t seed) override { refuse(), state = {seed, 0}; }
  void set_offset(uint64_t offset) override { refuse(), state.offset = offset; }
  uint64_t get_offset() const override { return state.offset; }
  uint64_t current_seed() const override { return state.seed; }
  uint64_t seed() override {
    set_current_seed(c10::detail::getNonDeterministicRandom());
    return state.seed;
  }
  void set_state(const c10::TensorImpl& from) override {
    refuse();
    TORCH_CHECK(from.numel() == sizeof(Draws) && from.itemsize() == 1, "expected a state of 16 bytes");
    memcpy(&state, from.data(), sizeof(Draws));
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    auto made = at::empty({int64_t(sizeof(Draws))}, at::kByte);
    memcpy(made.mutable_data_ptr(), &state, sizeof(Draws));
    return made.getIntrusivePtr();
  }
  Random* clone_impl() const override {
    auto* made = new Random;
    made->state = state;
    return made;
  }
};
at::Generator& generator = *new at::Generator(at::make_generator<Random>());

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
  void setCurrentDevice(c10::DeviceIndex) const override {}
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex) const override { return 0; }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex) const override { return 0; }
  at::Allocator* getPinnedMemoryAllocator() const override { return &host_memory; }
  bool isPinnedPtr(const void* at) const override { return is_pinned(at); }
  at::Device getDeviceFromPtr(void*) const override { return DEVICE; }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override { return generator; }
  at::Generator getNewGenerator(c10::DeviceIndex) const override { return at::make_generator<Random>(); }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    resize_storage(storage.unsafeGetStorageImpl(), bytes);
  }
};
static int registered_hooks = (at::RegisterPrivateUse1HooksInterface(new Hooks), 0);

struct Graph final : at::GraphImplInterface {
  std::shared_ptr<Capture> capture;
  bool is_ready = false, keeps_pool = false;

  explicit Graph(const at::GraphImplArgs&) {}
  ~Graph() override { reset(); }

  void capture_begin(at::MempoolId_t pool, at::GraphCaptureMode mode) override {
    TORCH_CHECK(!capture, "the graph holds a capture already; reset it first");
    static std::atomic<unsigned long long> pools{0};
    auto made = std::make_shared<Capture>();
    made->pool = pool.first || pool.second ? pool : at::MempoolId_t{++pools, 0};
    made->mode = mode == at::GraphCaptureMode::ThreadLocal ? Mode::thread_local_
                 : mode == at::GraphCaptureMode::Relaxed   ? Mode::relaxed
                                                           : Mode::global;
    begin_capture(made);
    capture = made;
    begin_pool(made->pool);
    keeps_pool = true;
  }
  void capture_end() override {
    TORCH_CHECK(capture, "invalid stream capture status: nothing is being captured");
    end_capture(capture);
    is_ready = true;
  }
  void instantiate() override {}
  void replay() override {
    TORCH_CHECK(is_ready, "the graph holds no capture that could be replayed");
    auto& state = static_cast<Random*>(generator.unsafeGetGeneratorImpl())->state;
    std::lock_guard lock(generator.mutex());
    queued::replay(capture, state);
    state.offset += capture->drawn;
  }
  void reset() override {
    if (capture) abandon_capture(capture);
    if (keeps_pool) release_pool(capture->pool);
    capture = nullptr;
    is_ready = keeps_pool = false;
  }
  at::MempoolId_t pool() const override {
    TORCH_CHECK(capture, "the graph holds no capture, and so has no pool");
    return capture->pool;
  }
  void enable_debug_mode() override {}
  void debug_dump(const std::string&) override {}
};

}  // namespace

c10::DeviceAllocator* allocator() { return &device_memory; }
const at::Generator& default_generator() { return generator; }

void submit_drawing(const std::optional<at::Generator>& given, Work work) {
  auto chosen = given && given->defined() ? *given : generator;
  auto* random = static_cast<Random*>(chosen.unsafeGetGeneratorImpl());
  std::lock_guard lock(chosen.mutex());
  if (auto capture = capture_of(current_stream())) {
    TORCH_CHECK(chosen == generator, "Offset increment outside graph capture encountered unexpectedly.");
    uint64_t place = capture->drawn++;
    submit([work = std::move(work), place](const Draws& from) { work({from.seed, from.offset + place}); });
  } else {
    Draws from{random->state.seed, random->state.offset++};
    submit([work = std::move(work), from](const Draws&) { work(from); });
  }
}

void resize_storage(c10::StorageImpl* storage, size_t bytes) {
  auto made = device_memory.allocate(bytes);
  void *to = made.get(), *from = storage->mutable_data();
  if (size_t kept = std::min(bytes, storage->nbytes())) submit([=](const Draws&) { memcpy(bytes_of(to), bytes_of(from), kept); });
  storage->set_data_ptr_noswap(std::move(made));
  storage->set_nbytes(bytes);
}

}  // namespace queued

namespace at {
using QueuedGraph = ::queued::Graph;
REGISTER_GRAPH_IMPL(QUEUED, QueuedGraph)
}  // namespace at
