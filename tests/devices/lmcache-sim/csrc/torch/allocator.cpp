// Device memory and pinned host memory for torch.
#include <ATen/core/Tensor.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/util/Exception.h>

#include <stdlib.h>

#include "backend.hpp"

namespace sim_torch {

namespace {

uint64_t address_of(const void* pointer) { return reinterpret_cast<uint64_t>(pointer); }

void free_device(void* pointer) { lmcache_sim_free(address_of(pointer)); }

void free_pinned(void* pointer) {
  if (pointer == nullptr) return;
  lmcache_sim_host_unregister(pointer);
  free(pointer);
}

class SimAllocator final : public c10::DeviceAllocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    const c10::Device device(kSim, current_device());
    if (bytes == 0) return {nullptr, nullptr, &free_device, device};
    uint64_t address = 0;
    check(lmcache_sim_malloc(device.index(), bytes, &address));
    void* pointer = reinterpret_cast<void*>(address);
    return {pointer, pointer, &free_device, device};
  }

  c10::DeleterFnPtr raw_deleter() const override { return &free_device; }

  void copy_data(void* to, const void* from, size_t bytes) const override {
    const auto stream = current_handle({kSim, current_device()});
    check(lmcache_sim_memcpy_async(stream, address_of(to), address_of(from), bytes, LMCACHE_SIM_D2D));
  }

  bool initialized() override { return lmcache_sim_used() != 0; }
  void emptyCache(c10::MempoolId_t) override {}  // nothing is kept back
  void recordStream(const c10::DataPtr&, c10::Stream) override {}  // freed memory waits for all streams

  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex device) override {
    const lmcache_sim_memory_info info = read(device);
    c10::CachingDeviceAllocator::DeviceStats stats;
    auto set = [](auto& statistic, uint64_t current, uint64_t peak) {
      statistic[0].current = static_cast<int64_t>(current);
      statistic[0].peak = static_cast<int64_t>(peak);
    };
    set(stats.allocation, info.allocations, info.allocations);
    set(stats.active, info.allocations, info.allocations);
    set(stats.allocated_bytes, info.allocated, info.peak);
    set(stats.active_bytes, info.allocated, info.peak);
    set(stats.requested_bytes, info.allocated, info.peak);
    set(stats.reserved_bytes, info.reserved, info.reserved);
    return stats;
  }

  void resetAccumulatedStats(c10::DeviceIndex) override {}
  void resetPeakStats(c10::DeviceIndex device) override { check(lmcache_sim_reset_peak(device)); }

  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex device) override {
    const lmcache_sim_memory_info info = read(device);
    return {info.capacity - info.reserved, info.capacity};
  }

 private:
  static lmcache_sim_memory_info read(c10::DeviceIndex device) {
    lmcache_sim_memory_info info;
    check(lmcache_sim_get_memory_info(device, &info));
    return info;
  }
};

class PinnedAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    void* memory = nullptr;
    if (bytes > 0) {
      TORCH_CHECK(posix_memalign(&memory, 4096, bytes) == 0, "cannot allocate ", bytes, " bytes of pinned memory");
      check(lmcache_sim_host_register(memory, bytes));
    }
    return {memory, memory, &free_pinned, c10::Device(c10::DeviceType::CPU)};
  }

  c10::DeleterFnPtr raw_deleter() const override { return &free_pinned; }
  void copy_data(void* to, const void* from, size_t bytes) const override { default_copy_data(to, from, bytes); }
};

}  // namespace

void check(int code) {
  if (code == LMCACHE_SIM_OK) return;
  if (code == LMCACHE_SIM_OUT_OF_MEMORY) TORCH_CHECK_WITH(OutOfMemoryError, false, lmcache_sim_last_error());
  TORCH_CHECK(false, lmcache_sim_last_error());
}

c10::Allocator* allocator() {
  static auto* const made = new SimAllocator();
  return made;
}

c10::Allocator* pinned_allocator() {
  static auto* const made = new PinnedAllocator();
  return made;
}

void register_allocator() { c10::SetAllocator(kSim, allocator()); }

}  // namespace sim_torch
