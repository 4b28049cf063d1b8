// Operators that make tensors or change what they show, without touching elements.
#include "operators.hpp"

#include <ATen/EmptyTensor.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/DeviceGuard.h>

namespace sim_torch {

namespace {

using at::IntArrayRef;
using at::Tensor;

void check_factory(std::optional<at::Layout> layout, std::optional<bool> pin_memory) {
  TORCH_CHECK(!layout || *layout == at::kStrided, "sim: only strided tensors are supported, got ", *layout);
  TORCH_CHECK(!pin_memory.value_or(false), "pin_memory: only memory of the CPU can be pinned");
}

c10::Device target(std::optional<at::Device> device) {
  return {kSim, device ? index_of(*device) : current_device()};
}

const c10::DispatchKeySet kKeys(c10::DispatchKey::PrivateUse1);

Tensor empty(IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout> layout,
             std::optional<at::Device> device, std::optional<bool> pin_memory,
             std::optional<at::MemoryFormat> format) {
  check_factory(layout, pin_memory);
  const c10::DeviceGuard guard(target(device));
  return at::detail::empty_generic(size, allocator(), kKeys, c10::dtype_or_default(dtype), format);
}

Tensor empty_strided(IntArrayRef size, IntArrayRef stride, std::optional<at::ScalarType> dtype,
                     std::optional<at::Layout> layout, std::optional<at::Device> device,
                     std::optional<bool> pin_memory) {
  check_factory(layout, pin_memory);
  const c10::DeviceGuard guard(target(device));
  return at::detail::empty_strided_generic(size, stride, allocator(), kKeys, c10::dtype_or_default(dtype));
}

// Grows the storage, never shrinks it, until the tensor's view fits.
void fit_storage(c10::TensorImpl* tensor, IntArrayRef size, IntArrayRef stride) {
  const size_t needed = at::detail::computeStorageNbytes(size, stride, tensor->dtype().itemsize(),
                                                         static_cast<size_t>(tensor->storage_offset()));
  if (needed <= tensor->storage().nbytes()) return;
  TORCH_CHECK(tensor->storage().resizable(), "this storage cannot be resized: its memory is not torch's");
  at::detail::getPrivateUse1Hooks().resizePrivateUse1Bytes(tensor->storage(), needed);
}

const Tensor& resize_(const Tensor& self, IntArrayRef size, std::optional<at::MemoryFormat> format) {
  if (self.sizes() == size && !format) return self;
  at::detail::check_size_nonnegative(size);
  auto* tensor = self.unsafeGetTensorImpl();
  tensor->set_sizes_contiguous(size);
  if (format && *format != at::MemoryFormat::Preserve) tensor->empty_tensor_restride(*format);
  fit_storage(tensor, size, tensor->strides());
  return self;
}

Tensor& set_view(Tensor& self, at::Storage source, int64_t offset, IntArrayRef size, IntArrayRef stride) {
  at::native::checkSetStorage(self, source, offset, size, stride);
  auto* tensor = self.unsafeGetTensorImpl();
  tensor->set_storage_offset(offset);
  if (stride.data() == nullptr || stride.empty()) {
    tensor->set_sizes_contiguous(size);
  } else {
    tensor->set_sizes_and_strides(size, stride);
  }
  fit_storage(tensor, size, tensor->strides());
  return self;
}

Tensor& set_storage(Tensor& self, at::Storage source) {
  const auto length = static_cast<int64_t>(source.nbytes() / self.dtype().itemsize());
  return set_view(self, std::move(source), 0, {length}, {});
}

Tensor& set_tensor(Tensor& self, const Tensor& source) {
  if (self.is_same(source)) return self;
  return set_view(self, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}

Tensor& set_nothing(Tensor& self) {
  const c10::DeviceGuard guard(self.device());
  at::Storage none(at::Storage::use_byte_size_t(), 0, allocator(), true);
  return set_view(self, std::move(none), 0, {0}, {});
}

Tensor as_strided(const Tensor& self, IntArrayRef size, IntArrayRef stride, std::optional<int64_t> offset) {
  return at::native::as_strided_tensorimpl(self, size, stride, offset);
}

Tensor view(const Tensor& self, IntArrayRef size) { return at::native::view(self, size); }
void record_stream(Tensor&, at::Stream) {}  // freed memory waits for all streams

// Bytes at a device address. With `close`, memory that was opened from another process is closed at the end.
Tensor from_pointer(int64_t address, int64_t bytes, int64_t device, bool close) {
  TORCH_CHECK(bytes >= 0, "from_pointer: ", bytes, " bytes: expected 0 or more");
  const auto start = static_cast<uint64_t>(address);
  lmcache_sim_pointer_info info{};
  check(lmcache_sim_get_pointer_info(start, &info));
  TORCH_CHECK(info.device == device && static_cast<uint64_t>(bytes) <= info.bytes - (start - info.base),
              "from_pointer: ", bytes, " bytes at ", address, " on sim:", device, ": expected a part of the ",
              info.bytes, " bytes at ", info.base, " on sim:", info.device);
  const c10::Device where(kSim, static_cast<c10::DeviceIndex>(device));
  const auto base = info.base;
  return at::from_blob(reinterpret_cast<void*>(start), {bytes},
                       [=](void*) {
                         if (close) lmcache_sim_ipc_close(base);
                       },
                       at::TensorOptions().dtype(at::kByte).device(where), where);
}

}  // namespace

void add_views(torch::Library& aten) {
  aten.impl("empty.memory_format", &empty);
  aten.impl("empty_strided", &empty_strided);
  aten.impl("as_strided", &as_strided);
  aten.impl("view", &view);
  aten.impl("_reshape_alias", TORCH_FN(at::native::_reshape_alias));
  aten.impl("unfold", TORCH_FN(at::native::unfold));
  aten.impl("alias", TORCH_FN(at::native::alias));
  aten.impl("resize_", &resize_);
  aten.impl("set_.source_Storage", &set_storage);
  aten.impl("set_.source_Storage_storage_offset", &set_view);
  aten.impl("set_.source_Tensor", &set_tensor);
  aten.impl("set_", &set_nothing);
  aten.impl("record_stream", &record_stream);
}

void add_own(torch::Library& own) {
  own.def("from_pointer(int address, int nbytes, int device, bool close) -> Tensor", &from_pointer);
}

}  // namespace sim_torch
