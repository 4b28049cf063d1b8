// Operators that run on the stream without the host waiting: what moving a paged cache with torch alone needs.
#include "operators.hpp"

#include <ATen/WrapDimUtils.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/index_copy.h>
#include <ATen/ops/index_select.h>

namespace sim_torch {

namespace {

using at::Tensor;

void check_same_device(const char* name, const Tensor& self, const Tensor& other) {
  TORCH_CHECK(self.device() == other.device(), name, ": expected all tensors on one device, found ", self.device(),
              " and ", other.device());
}

Tensor& fill(Tensor& self, const at::Scalar& value) {
  if (self.numel() == 0) return self;
  launch(current_handle(self.device()), [to = Operand(self), value] { to.open().fill_(value); });
  return self;
}

Tensor& zero(Tensor& self) { return fill(self, 0); }

Tensor index_select(const Tensor& self, int64_t dim, const Tensor& index) {
  check_same_device("index_select", self, index);
  TORCH_CHECK_INDEX(index.dim() <= 1 && (index.scalar_type() == at::kLong || index.scalar_type() == at::kInt),
                    "index_select: expected a vector of int32 or int64, got ", index.dim(), " dimensions of ",
                    index.scalar_type());
  dim = at::maybe_wrap_dim(dim, self.dim());
  auto size = self.sizes().vec();
  if (!size.empty()) size[static_cast<size_t>(dim)] = index.numel();
  Tensor result = at::empty(size, self.options());
  launch(current_handle(self.device()),
         [to = Operand(result), from = Operand(self), dim, at = Operand(index)] {
           Tensor target = to.open();
           at::index_select_out(target, from.open(), dim, at.open());
         });
  return result;
}

Tensor shape_of(const Tensor& tensor) {
  return at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(at::kMeta));
}

Tensor& index_copy(Tensor& self, int64_t dim, const Tensor& index, const Tensor& source) {
  check_same_device("index_copy_", self, index);
  check_same_device("index_copy_", self, source);
  at::index_copy(shape_of(self), dim, shape_of(index), shape_of(source));  // raises where shapes do not fit
  launch(current_handle(self.device()),
         [to = Operand(self), dim, at = Operand(index), from = Operand(source)] {
           to.open().index_copy_(dim, at.open(), from.open());
         });
  return self;
}

}  // namespace

void add_kernels(torch::Library& aten) {
  aten.impl("fill_.Scalar", &fill);
  aten.impl("zero_", &zero);
  aten.impl("index_select", &index_select);
  aten.impl("index_copy_", &index_copy);
}

}  // namespace sim_torch
