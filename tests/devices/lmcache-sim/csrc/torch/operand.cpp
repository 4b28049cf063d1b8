// Tensors as kernels see them, and kernels on streams.
#include "backend.hpp"

#include <ATen/EmptyTensor.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/alias.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <c10/util/Exception.h>

namespace sim_torch {

namespace {

struct Closure {
  std::function<void()> kernel;
};

void run(void* closure) {
  const at::AutoDispatchBelowADInplaceOrView no_autograd;
  static_cast<Closure*>(closure)->kernel();
}

void release(void* closure) { delete static_cast<Closure*>(closure); }

}  // namespace

Operand::Operand(const at::Tensor& tensor)
    : sizes(tensor.sizes().vec()),
      strides(tensor.strides().vec()),
      dtype(tensor.scalar_type()),
      conj(tensor.is_conj()),
      neg(tensor.is_neg()) {
  TORCH_CHECK(tensor.layout() == at::kStrided, "expected a strided tensor, got ", tensor.layout());
  if (tensor.device().type() == kSim) {
    address = reinterpret_cast<uint64_t>(tensor.const_data_ptr());
    return;
  }
  TORCH_CHECK(tensor.device().is_cpu(), "expected a tensor of sim or of the CPU, got one of ", tensor.device());
  const at::AutoDispatchBelowADInplaceOrView no_autograd;
  host = at::alias(tensor);  // its own object: the caller's may be Python's
}

at::Tensor Operand::open() const {
  if (host.defined()) return host;
  const auto options = at::TensorOptions().dtype(dtype).device(at::kCPU);
  at::Tensor opened;
  const size_t bytes = at::detail::computeStorageNbytes(sizes, strides, c10::elementSize(dtype));
  if (bytes == 0) {
    opened = at::empty(sizes, options);
  } else {
    void* memory = lmcache_sim_translate(address, bytes);
    TORCH_CHECK(memory != nullptr, lmcache_sim_last_error());
    opened = at::for_blob(memory, sizes).strides(strides).options(options).make_tensor();
  }
  opened._set_conj(conj);
  opened._set_neg(neg);
  return opened;
}

at::Tensor open_now(const at::Tensor& tensor) {
  const at::AutoDispatchBelowADInplaceOrView no_autograd;
  return Operand(tensor).open();
}

void launch(lmcache_sim_stream stream, std::function<void()> kernel) {
  auto* closure = new Closure{std::move(kernel)};
  const int code = lmcache_sim_launch_owned(stream, &run, closure, &release);
  if (code != LMCACHE_SIM_OK) release(closure);
  check(code);
}

}  // namespace sim_torch
