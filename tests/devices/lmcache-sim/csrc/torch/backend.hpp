// What the parts of the torch backend share. Devices are reached through the driver's C functions only.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/core/Stream.h>

#include <functional>
#include <string>
#include <vector>

#include "lmcache_sim.h"

namespace sim_torch {

constexpr auto kSim = c10::DeviceType::PrivateUse1;

// Raises what the driver reports: torch.OutOfMemoryError for a full device, else RuntimeError.
void check(int code);

int device_count();
c10::DeviceIndex current_device();
void set_current_device(c10::DeviceIndex index);
c10::DeviceIndex index_of(c10::Device device);  // the current one if it has no index

lmcache_sim_stream handle_of(const c10::Stream& stream);
c10::Stream current_stream(c10::DeviceIndex index);
lmcache_sim_stream current_handle(c10::Device device);

c10::Allocator* allocator();
c10::Allocator* pinned_allocator();

inline bool on_sim(const at::Tensor& tensor) { return tensor.defined() && tensor.device().type() == kSim; }

// A tensor as a task on a stream needs it: where its elements are, not who owns them. Memory that is freed
// stays in place until the work queued before has ended, so device memory needs no owner here.
struct Operand {
  at::Tensor host;  // a tensor of the host, kept alive; else undefined
  uint64_t address = 0;
  std::vector<int64_t> sizes, strides;
  c10::ScalarType dtype = c10::ScalarType::Byte;
  bool conj = false, neg = false;

  explicit Operand(const at::Tensor& tensor);
  at::Tensor open() const;  // as a CPU tensor over the same memory
};

// Opened on the calling thread; nothing that is queued may touch its memory meanwhile.
at::Tensor open_now(const at::Tensor& tensor);

// Queues `kernel` on the stream. What it throws is raised at the next synchronisation.
void launch(lmcache_sim_stream stream, std::function<void()> kernel);

void register_allocator();
void register_guard();
void register_operators();

}  // namespace sim_torch
