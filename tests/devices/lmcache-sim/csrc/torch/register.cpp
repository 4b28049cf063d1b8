// Puts the device into torch, on demand: a process that another backend has claimed is left as it was.
#include "operators.hpp"

#include <ATen/Context.h>
#include <ATen/native/CPUFallback.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <atomic>

namespace sim_torch {

void register_operators() {
  const auto key = c10::DispatchKey::PrivateUse1;
  auto* everything = new torch::Library(torch::Library::IMPL, "_", key, __FILE__, __LINE__);
  everything->fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>());
  auto* aten = new torch::Library(torch::Library::IMPL, "aten", key, __FILE__, __LINE__);
  add_views(*aten);
  add_copies(*aten);
  add_kernels(*aten);
  add_own(*new torch::Library(torch::Library::DEF, "lmcache_sim", std::nullopt, __FILE__, __LINE__));
}

}  // namespace sim_torch

// Null, or why torch was not touched.
extern "C" __attribute__((visibility("default"))) const char* lmcache_sim_register(void) {
  static std::atomic<bool> registered{false};
  if (registered.exchange(true)) return nullptr;
  const auto slot = static_cast<size_t>(sim_torch::kSim);
  if (at::isPrivateUse1HooksRegistered() || c10::impl::device_guard_impl_registry[slot].load() != nullptr) {
    registered = false;
    return "another backend has claimed torch's PrivateUse1 device in this process, and torch has room for one";
  }
  sim_torch::register_allocator();
  sim_torch::register_guard();
  sim_torch::register_operators();
  at::globalContext().lazyInitDevice(sim_torch::kSim);  // else torch does not ask which host memory is pinned
  return nullptr;
}
