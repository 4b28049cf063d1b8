// Current devices and streams, events, and the hooks through which torch.accelerator finds the device.
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/util/Exception.h>

#include <array>

#include "backend.hpp"

namespace sim_torch {

namespace {

constexpr size_t kMostDevices = 16;
thread_local c10::DeviceIndex current = 0;
thread_local std::array<c10::StreamId, kMostDevices> current_streams{};

c10::DeviceIndex checked(c10::DeviceIndex index) {
  TORCH_CHECK(index >= 0 && index < device_count(), "device sim:", static_cast<int>(index),
              ": this process sees ", device_count(), " simulated devices, counted from 0");
  return index;
}

lmcache_sim_event event_of(void* event) { return static_cast<lmcache_sim_event>(event); }

// 0 or 1; raises what failed.
bool finished(int code) {
  if (code == LMCACHE_SIM_NOT_READY) return false;
  check(code);
  return true;
}

struct SimGuard final : public c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kSim; }

  c10::Device exchangeDevice(c10::Device device) const override {
    const c10::Device before = getDevice();
    setDevice(device);
    return before;
  }
  c10::Device getDevice() const override { return {kSim, current}; }
  void setDevice(c10::Device device) const override { set_current_device(device.index()); }
  void uncheckedSetDevice(c10::Device device) const noexcept override { current = device.index(); }
  c10::DeviceIndex deviceCount() const noexcept override { return static_cast<c10::DeviceIndex>(device_count()); }

  c10::Stream getStream(c10::Device device) const override { return current_stream(index_of(device)); }
  c10::Stream getDefaultStream(c10::Device device) const override {
    return c10::Stream(c10::Stream::DEFAULT, {kSim, index_of(device)});
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool high) const override {
    return getNewStream(device, high ? -1 : 0);
  }
  c10::Stream getNewStream(c10::Device device, int priority) const override {
    const c10::DeviceIndex index = index_of(device);
    lmcache_sim_stream handle = 0;
    check(lmcache_sim_new_stream(index, priority, &handle));
    return c10::Stream(c10::Stream::UNSAFE, {kSim, index}, static_cast<c10::StreamId>(handle & 0xffff));
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    const c10::DeviceIndex index = checked(stream.device_index());
    const c10::Stream before = current_stream(index);
    current_streams[static_cast<size_t>(index)] = stream.id();
    return before;
  }
  void* getStreamNativeHandle(const c10::Stream stream) const override {
    return reinterpret_cast<void*>(handle_of(stream));
  }
  bool queryStream(const c10::Stream& stream) const override {
    return finished(lmcache_sim_stream_query(handle_of(stream)));
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    check(lmcache_sim_stream_synchronize(handle_of(stream)));
  }
  void synchronizeDevice(const c10::DeviceIndex index) const override { check(lmcache_sim_synchronize(index)); }

  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex index,
              const c10::EventFlag) const override {
    TORCH_CHECK(index == -1 || index == stream.device_index(), "an event of sim:", static_cast<int>(index),
                " cannot be recorded on a stream of ", stream.device());
    if (*event == nullptr) {
      lmcache_sim_event made = nullptr;
      check(lmcache_sim_event_create(stream.device_index(), &made));
      *event = made;
    }
    check(lmcache_sim_event_record(event_of(*event), handle_of(stream)));
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event != nullptr) check(lmcache_sim_stream_wait_event(handle_of(stream), event_of(event)));
  }
  bool queryEvent(void* event) const override {
    return event == nullptr || finished(lmcache_sim_event_query(event_of(event)));
  }
  void synchronizeEvent(void* event) const override {
    if (event != nullptr) check(lmcache_sim_event_synchronize(event_of(event)));
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override {
    if (event != nullptr) lmcache_sim_event_destroy(event_of(event));
  }
  double elapsedTime(void* begin, void* end, const c10::DeviceIndex) const override {
    double milliseconds = 0;
    check(lmcache_sim_event_elapsed(event_of(begin), event_of(end), &milliseconds));
    return milliseconds;
  }
};

struct SimHooks final : public at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return device_count() > 0; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return lmcache_sim_used() != 0; }
  void init() const override {}
  c10::DeviceIndex deviceCount() const override { return static_cast<c10::DeviceIndex>(device_count()); }
  void setCurrentDevice(c10::DeviceIndex index) const override { set_current_device(index); }
  c10::DeviceIndex getCurrentDevice() const override { return current; }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex index) const override {
    const c10::DeviceIndex before = current;
    set_current_device(index);
    return before;
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex index) const override {
    return index < 0 ? current : exchangeDevice(index);
  }
  bool isPinnedPtr(const void* data) const override { return lmcache_sim_host_is_registered(data) != 0; }
  c10::Allocator* getPinnedMemoryAllocator() const override { return pinned_allocator(); }
  c10::Device getDeviceFromPtr(void* data) const override {
    lmcache_sim_pointer_info info;
    check(lmcache_sim_get_pointer_info(reinterpret_cast<uint64_t>(data), &info));
    return {kSim, static_cast<c10::DeviceIndex>(info.device)};
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    const c10::DeviceGuard guard(storage.device());
    c10::DataPtr fresh = allocator()->allocate(bytes);
    const size_t kept = std::min(bytes, storage.nbytes());
    if (kept > 0) allocator()->copy_data(fresh.get(), storage.data(), kept);
    storage.set_data_ptr_noswap(std::move(fresh));
    storage.set_nbytes(bytes);
  }
};

}  // namespace

int device_count() { return std::max(lmcache_sim_device_count(), 0); }
c10::DeviceIndex current_device() { return current; }
void set_current_device(c10::DeviceIndex index) { current = checked(index); }
c10::DeviceIndex index_of(c10::Device device) { return device.has_index() ? checked(device.index()) : current; }

lmcache_sim_stream handle_of(const c10::Stream& stream) {
  return (static_cast<uint64_t>(checked(stream.device_index()) + 1) << 16) | static_cast<uint64_t>(stream.id());
}

c10::Stream current_stream(c10::DeviceIndex index) {
  return c10::Stream(c10::Stream::UNSAFE, {kSim, index}, current_streams[static_cast<size_t>(checked(index))]);
}

lmcache_sim_stream current_handle(c10::Device device) { return handle_of(current_stream(index_of(device))); }

void register_guard() {
  static const c10::impl::DeviceGuardImplRegistrar registered(kSim, new SimGuard());
  at::RegisterPrivateUse1HooksInterface(new SimHooks());
}

}  // namespace sim_torch
